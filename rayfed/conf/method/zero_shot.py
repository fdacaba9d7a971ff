"""Options of zero_shot: the untouched backbone."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rayfed.conf.options import MethodOptions


class Options(MethodOptions):
    """Nothing to set: class texts and images go through the untouched backbone."""

    needs_text: ClassVar[bool] = True

    name: Literal["zero_shot"] = "zero_shot"


PROFILES: dict[str, dict[str, Any]] = {"embedded": {"rounds": 1}, "paper": {"rounds": 1}}
