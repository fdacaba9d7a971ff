"""Options of fedlora: one LoRA, averaged by examples."""

from __future__ import annotations

from typing import Any, Literal

from rayfed.conf.options import LoRAOptions


class Options(LoRAOptions):
    """Shared LoRA (and linear head, for a backbone without a text tower)."""

    name: Literal["fedlora"] = "fedlora"


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {"train.lr": 3e-3, "train.epochs": 2, "rounds": 8, "clients.n": 10},
    "paper": {"train.lr": 3e-4, "train.epochs": 3, "rounds": 50, "clients.n": 20},
}
