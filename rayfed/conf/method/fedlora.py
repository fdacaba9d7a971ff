"""Options of fedlora: one LoRA, averaged by examples."""

from __future__ import annotations

from typing import Any, Literal

from rayfed.conf.options import LoRAOptions, NonNegative


class Options(LoRAOptions):
    """Shared LoRA (and linear head, for a backbone without a text tower)."""

    name: Literal["fedlora"] = "fedlora"
    logit_adjustment: NonNegative = 0.0
    """Post hoc: take this many times the log share of each class in all training images from the logits (1 usual)."""

    def novel_problems(self) -> list[str]:
        """Novel classes have no training images to adjust for."""
        if self.logit_adjustment == 0:
            return []
        return [
            f"method.logit_adjustment={self.logit_adjustment:g} needs training images of every class but "
            "task.split=base_novel has classes without any: leave one of them out."
        ]


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {"train.lr": 3e-5, "train.epochs": 2, "rounds": 8, "clients.n": 10},
    "paper": {"train.lr": 3e-4, "train.epochs": 3, "rounds": 50, "clients.n": 20},
    "authors": {  # the baseline as FedSDG's authors run it: they clip gradients for their own method only
        "train.optimizer": "adam",
        "train.lr": 1e-3,
        "train.weight_decay": 1e-4,
        "train.epochs": 5,
        "train.batch": 128,
        "train.clip_norm": 0.0,
        "rounds": 100,
        "clients.n": 100,
        "clients.per_round": 10,
        "method.rank": 8,
        "method.alpha": 16.0,
        "method.targets": ("out", "fc2"),
    },
}
