"""Options of FedGLAD, with the profiles of the paper's summary and of the authors' scripts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rayfed.conf.options import Count, LoRAOptions, NonNegative, Positive


class Options(LoRAOptions):
    """Dual LoRA, instance gate, distillation at the server."""

    needs_text: ClassVar[bool] = True

    name: Literal["fedglad"] = "fedglad"
    branches: Literal["both", "local_only", "global_only"] = "both"
    """Ablations: local_only has z = h_l and sends nothing; global_only has z = h_g."""
    gate: Literal["feature", "layer", "fixed"] = "feature"
    """Instance gate on the frozen image feature, per token in every adapted layer, or fixed at sigmoid(gate_init)."""
    gate_init: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Initial gate logit of `feature` and `fixed` (positive prefers the global branch)."""
    gate_width: Count = 64
    """Hidden width of the `layer` gate."""
    global_weight: NonNegative = 0.5
    """Weight a_g of the global branch's own cross-entropy."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the rounds over which the learning rate rises linearly."""
    distill: Literal["proxy_server", "proxy_client", "class_mean", "class_mean_server", "none"] = "proxy_server"
    """A: proxy images at the server; B: clients' logits on them; C(ii): class means at clients; C(i): at the server."""
    temperature: Positive = 2.0
    """Distillation temperature tau."""
    teacher_weight: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Weight mu of the averaged teacher in the targets."""
    teacher_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay m of the teacher's running average."""
    student_start: Literal["mean", "previous"] = "mean"
    """Where the distilled student starts: the averaged LoRA, or the last round's student."""
    average: Literal["probs", "logits"] = "probs"
    """Mean of the clients' softened probabilities, or softmax of their mean logits."""
    proxy_logits: Literal["gated", "global"] = "gated"
    """B: logits of the personal (gated) model, or of the global branch alone."""
    proxy_dtype: Literal["fp16", "fp32"] = "fp16"
    """B: number format of the uploaded logits."""
    sharpen: Positive | None = None
    """B: temperature of DS-FL's entropy reduction of the averaged targets; none leaves them as they are."""
    distill_lr: Positive = 5e-5
    """Learning rate of the server's AdamW."""
    distill_epochs: Count = 1
    """Passes over the proxy images per round."""
    distill_batch: Count = 32
    """Batch size at the server."""
    distill_weight: NonNegative = 1.0
    """C(ii): weight of the distillation term at the clients."""
    min_count: Count = 5
    """C: class means of fewer images than this are not sent."""
    clip_logits: Positive | None = None
    """C: clip each logit vector to this L2 norm before averaging."""
    noise: NonNegative = 0.0
    """C: Gaussian noise of standard deviation noise * clip_logits / count on every class mean sent."""

    def problems(self) -> list[str]:
        """Contradictions inside the group."""
        found = []
        if self.distill == "class_mean_server" and self.towers == "vision":
            found.append(
                "method.distill=class_mean_server trains the text adapters at the server but method.towers is vision: "
                "set method.towers=both."
            )
        if self.towers == "text" and self.branches != "global_only":
            found.append("method.towers=text leaves no image LoRA to gate: use method.towers=vision or both.")
        if self.noise > 0 and self.clip_logits is None:
            found.append("method.noise needs a bound on what one image adds: set method.clip_logits too.")
        if self.noise > 0 and self.distill == "class_mean_server":
            found.append(
                "method.noise covers mean logits only but method.distill=class_mean_server sends mean features too: "
                "use method.distill=class_mean."
            )
        return found

    def uses_proxy(self) -> bool:
        """Whether the server needs proxy images."""
        return self.distill.startswith("proxy") and self.branches != "local_only"


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {"train.lr": 1e-4, "train.epochs": 2, "rounds": 8, "clients.n": 10},
    "paper": {"train.lr": 3e-4, "train.epochs": 3, "rounds": 50, "clients.n": 20},
    "authors": {
        "train.lr": 1e-5,
        "train.epochs": 1,
        "rounds": 100,
        "clients.n": 20,
        "method.rank": 2,
        "method.alpha": 16.0,
        "method.gate": "layer",
        "method.global_weight": 0.0,
        "method.temperature": 3.0,
        "method.teacher_weight": 0.0,
        "method.student_start": "previous",
        "method.warmup": 0.0,
    },
}
