"""Options of FedPuReL, with the profiles of the paper's summary and of the authors' scripts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rayfed.conf.options import Auto, Count, LoRAOptions, NonNegative, Positive

Share = Annotated[float, Field(ge=0, le=1)]


class Options(LoRAOptions):
    """Purified global adapter, and a personal one whose logits are added to the global ones."""

    needs_text: ClassVar[bool] = True

    name: Literal["fedpurel"] = "fedpurel"
    kind: Literal["prompt", "lora", "adapter"] = "lora"
    """Adapter, shared and personal alike: text prompt, LoRA in the image tower, or a mask on the image feature."""
    context: Count = 4
    """kind=prompt: number of context vectors."""
    rank: Count = 8
    """kind=lora: rank; not above the width of the narrowest adapted layer."""
    targets: tuple[str, ...] = ("q", "k", "v")
    """kind=lora: adapted layers."""
    scaling: Literal["sqrt_rank", "rank"] = "sqrt_rank"
    """kind=lora: the update is scaled by alpha / sqrt(rank) (the authors') or alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """kind=lora: share of the branches' inputs dropped while training."""
    schedule: Literal["two_stage", "interleaved"] = "two_stage"
    """two_stage: global rounds, then personal ones (paper); interleaved: both in every round (authors)."""
    personal_rounds: Count | Auto = "auto"
    """schedule=two_stage: the last so many of `rounds` are personal; auto: a fifth of them, of two or more one."""
    alignment: Literal["tkl", "kl", "soft_ce"] = "tkl"
    """Distance to zero-shot: temperature-aligned KL, plain KL, or soft cross-entropy (authors, for kind=adapter)."""
    purify: Literal["vector", "tensor", "none"] = "vector"
    """Project the whole gradient (paper), each tensor by itself (authors), or not at all."""
    strength: NonNegative = 1.0
    """Share of the conflicting part that is removed; above 1 it is turned round."""
    weight: Share = 0.9
    """Weight lambda of the personal logits' own loss; 0 leaves the loss of the sum (the authors' for kind=adapter)."""
    personal_lr: Positive | None = None
    """Learning rate of the personal phase (plain SGD); none: train.lr."""
    personal_epochs: Count = 1
    """Local epochs of the personal phase."""
    record: bool = True
    """Send each client's purification record to the server, which keeps and logs it."""

    def problems(self) -> list[str]:
        """Contradictions inside the group."""
        if self.towers == "vision":
            return []
        return [f"method.towers={self.towers}: choose what is adapted by method.kind; leave method.towers at vision."]

    def personal_of(self, rounds: int) -> int:
        """How many of ``rounds`` are personal in the two-stage schedule."""
        if self.personal_rounds != "auto":
            return self.personal_rounds
        return max(rounds // 5, 1) if rounds > 1 else 0

    def run_problems(self, rounds: int) -> list[str]:
        """Contradictions with the run."""
        if self.schedule == "interleaved" or self.personal_rounds == "auto" or self.personal_rounds < rounds:
            return []
        return [
            f"method.personal_rounds={self.personal_rounds} leaves none of rounds={rounds} to global training: "
            "lower it, raise rounds, or set method.schedule=interleaved."
        ]


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
        "train.lr": 0.1,
        "train.epochs": 2,
        "train.clip_norm": 0.0,
        "rounds": 10,
        "clients.n": 10,
        "method.targets": ("fc1", "fc2"),
        "method.scaling": "rank",
        "method.dropout": 0.0,
        "method.purify": "tensor",
    },
    "paper": {
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
        "train.weight_decay": 5e-4,
        "train.lr": 1e-3,
        "train.batch": 32,
        "train.clip_norm": 0.0,
        "rounds": 100,
        "clients.n": 20,
        "clients.per_round": 8,
        "partition.alpha": 1.0,
    },
    # Theirs for prompts and LoRA. For method.kind=adapter their code takes method.alignment=soft_ce and
    # method.weight=0 besides.
    "authors": {
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
        "train.weight_decay": 5e-4,
        "train.lr": 1e-3,
        "train.batch": 32,
        "train.clip_norm": 0.0,
        "train.drop_last": True,
        "rounds": 100,
        "clients.n": 20,
        "clients.per_round": 8,
        "partition.alpha": 1.0,
        "method.schedule": "interleaved",
        "method.purify": "tensor",
        "method.weight": 0.99,
    },
}
