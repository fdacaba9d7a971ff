"""Options of FedSDG, with the profiles of the paper's summary and of the authors' public defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rayfed.conf.options import Count, LoRAOptions, NonNegative, Positive

Share = Annotated[float, Field(ge=0, le=1)]


class Options(LoRAOptions):
    """Dual LoRA whose private branch is aligned in size and gated per layer."""

    name: Literal["fedsdg"] = "fedsdg"
    rank: Count = 8
    """Rank of the shared branch; not above the width of the narrowest adapted layer."""
    targets: tuple[str, ...] = ("out", "fc2")
    """Adapted layers; the paper's are the attention output and the second MLP layer of every block."""
    private_rank: Count | None = None
    """Rank of the private branch; none: as `rank`. Its update is scaled by alpha / private_rank."""
    align: Literal["none", "base", "global", "floor", "geomean"] = "base"
    """Anchor of the private branch's size: the frozen output (the paper's), the shared branch, or both."""
    floor: NonNegative = 0.1
    """align=floor: the anchor is at least this share of the frozen output's RMS."""
    detach_rms: bool = True
    """Keep gradients out of the private branch's own RMS."""
    gate: Literal["mapping", "block", "one", "fixed"] = "mapping"
    """One learned gate per adapted layer, per block, or for the whole model; or fixed at `gate_value`."""
    gate_init: Annotated[float, Field(allow_inf_nan=False)] = -3.0
    """Initial gate logit a; m = sigmoid(a), 0.047 for -3."""
    gate_value: Share = 0.5
    """gate=fixed: the weight m of the private branch."""
    mixing: Literal["add", "blend"] = "add"
    """add: b + g + m p; blend: b + (1 - m) g + m p (FedDPA's, with gate=fixed and align=none)."""
    gate_lr: Positive = 0.1
    """Learning rate of the gates."""
    gate_penalty: Literal["unilateral", "bilateral"] = "unilateral"
    """Penalty on the gates: the sum of m, or of min(m, 1 - m)."""
    gate_weight: NonNegative = 0.01
    """Weight lambda_1 of the gate penalty."""
    gate_warmup: Annotated[int, Field(ge=0)] = 0
    """Rounds without the gate penalty."""
    private_weight: NonNegative = 0.001
    """Weight lambda_2 of the sum of squares of the private branch."""
    head: Literal["global", "private"] = "global"
    """Who owns the linear head of a backbone without a text tower."""
    head_lr: Positive | None = None
    """Learning rate of the head; none: train.lr."""
    weighting: Literal["examples", "equal"] = "examples"
    """aggregate=mean: clients count by examples, or equally (the authors')."""
    aggregate: Literal["mean", "alignment"] = "mean"
    """Mean of the shared deltas, or weights by how well each agrees with the others."""
    reference: Literal["leave_one_out", "mean"] = "leave_one_out"
    """aggregate=alignment: an update is compared with the mean of the others, or of all."""
    transform: Literal["relu", "softmax"] = "relu"
    """aggregate=alignment: from cosines to weights."""
    temperature: Positive = 0.05
    """transform=softmax: temperature."""
    smoothing: Share = 0.0
    """aggregate=alignment: share of uniform weights mixed in."""

    def problems(self) -> list[str]:
        """Contradictions inside the group."""
        found = []
        if self.towers != "vision":
            found.append(
                f"method.towers={self.towers}: FedSDG keeps the class texts frozen; leave method.towers at vision."
            )
        if self.mixing == "blend" and self.gate != "fixed" and self.gate_init < 0:
            found.append(
                "method.mixing=blend with a gate that starts low would switch the private branch off: "
                "set method.gate=fixed (FedDPA) or method.gate_init=0."
            )
        return found


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {
        "train.lr": 1e-3,
        "train.epochs": 2,
        "rounds": 8,
        "clients.n": 10,
        "train.optimizer": "adam",
        "method.private_weight": 1e-4,
    },
    "paper": {
        "train.optimizer": "adam",
        "train.lr": 1e-3,
        "train.weight_decay": 1e-4,
        "train.epochs": 5,
        "train.batch": 128,
        "train.clip_norm": 1.0,
        "rounds": 80,
        "clients.n": 100,
        "clients.per_round": 10,
    },
    "authors": {
        "train.optimizer": "adam",
        "train.lr": 1e-3,
        "train.weight_decay": 1e-4,
        "train.epochs": 5,
        "train.batch": 128,
        "train.clip_norm": 1.0,
        "rounds": 100,
        "clients.n": 100,
        "clients.per_round": 10,
        "method.gate_init": -2.0,
        "method.align": "none",
        "method.weighting": "equal",
    },
}
