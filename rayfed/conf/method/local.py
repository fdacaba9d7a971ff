"""Options of local: every client trains a LoRA of its own and shares nothing."""

from __future__ import annotations

from typing import Any, Literal

from rayfed.conf.method import fedlora
from rayfed.conf.options import LoRAOptions


class Options(LoRAOptions):
    """Private LoRA (and linear head, for a backbone without a text tower)."""

    name: Literal["local"] = "local"


PROFILES: dict[str, dict[str, Any]] = {
    **fedlora.PROFILES,  # trained as the shared LoRA is
    "embedded": {"train.lr": 3e-5, "train.epochs": 2, "rounds": 8, "clients.n": 10},
}
