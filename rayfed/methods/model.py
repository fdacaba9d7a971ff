"""A frozen backbone with switched adapters and, for a CLIP, class texts: the model most methods build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.attach import Branch, attach_lora
from rayfed.adapters.bottleneck import Rank, Shape
from rayfed.adapters.lora import Dropout, Switch
from rayfed.adapters.scope import Scope, ScopedLinear
from rayfed.backbones.base import Backbone
from rayfed.backbones.text import class_texts
from rayfed.conf.options import BottleneckOptions, LoRAOptions
from rayfed.methods.base import Batch, ClientJob, Objective, TaskView

TOWERS = {"vision": ("image_tower",), "text": ("text_tower",), "both": ("image_tower", "text_tower")}


class AdaptedModel(nn.Module):
    """``backbone`` with LoRA branches attached in place; ``head`` classifies where there is no text tower."""

    def __init__(self, backbone: Backbone, task: TaskView) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes, self.template = task.classes, task.template
        self.head: ScopedLinear | None = None
        self.switch = Switch()
        self._tokens: dict[tuple[str, ...], Tensor] = {}
        if backbone.has_text:
            self.tokens(task.classes)  # names the model cannot take are refused here

    def attach(self, config: LoRAOptions, *branches: Branch, towers: Sequence[str] | None = None) -> None:
        """Attach LoRA ``branches`` to the layers that ``config`` names. Raises AdapterError as ``attach_lora`` does."""
        towers = towers or TOWERS[config.towers]
        attach_lora(self.backbone, self.switch, branches, targets=config.targets, towers=towers)

    def to_device(self, values: Tensor) -> Tensor:
        """``values`` on the device of the model."""
        return values.to(self.backbone.device)

    def tokens(self, names: Sequence[str]) -> Tensor:
        """Token rows [C, T] of the template filled in with the classes ``names``."""
        key = tuple(names)
        if key not in self._tokens:
            texts, _ = class_texts(key, self.template)
            self._tokens[key] = self.backbone.tokenize(texts, key)
        return self._tokens[key].to(self.backbone.device)

    def image_features(
        self, images: Tensor, *branches: str, gated: bool = False, drop: Dropout | None = None
    ) -> Tensor:
        """Features [B, D] of ``images`` [B, 3, S, S] with ``branches`` acting; normalised if class texts classify."""
        with self.switch.use(*branches, gated=gated, drop=drop):
            features = self.backbone.encode_image(images)
        return F.normalize(features, dim=-1) if self.backbone.has_text else features

    def text_features(self, *branches: str, names: Sequence[str] | None = None) -> Tensor:
        """Normalised text features [C, D] of the classes ``names`` (the task's for None) with ``branches`` acting."""
        with self.switch.use(*branches):
            tokens = self.tokens(self.classes if names is None else names)
            return F.normalize(self.backbone.encode_text(tokens), dim=-1)

    def logits(self, features: Tensor, classes: Tensor | None) -> Tensor:
        """Scaled cosine logits [B, C] of ``features`` [B, D], or the head's for a backbone without text tower."""
        if classes is None:
            assert self.head is not None
            head: Tensor = self.head(features)
            return head
        # Class features may have been made under autocast and be used outside it.
        return self.backbone.logit_scale * features @ classes.to(features.dtype).t()


class SingleBranch(AdaptedModel):
    """One branch, ``branch``, that acts in every tower it is attached to."""

    def __init__(self, backbone: Backbone, task: TaskView, branch: str) -> None:
        super().__init__(backbone, task)
        self.branch = branch

    def class_features(self, names: Sequence[str] | None = None) -> Tensor | None:
        """[C, D] of ``names`` (the task's for None) with the branch acting, if it is attached to the text tower."""
        return self.text_features(self.branch, names=names) if self.backbone.has_text else None

    def forward(self, batch: Batch, classes: Tensor | None) -> Tensor:
        """Logits [B, C] with the branch acting."""
        return self.logits(self.image_features(batch.images, self.branch), classes)


class SingleLoRA(SingleBranch):
    """One LoRA branch, shared or private, and a head of the same owner where the backbone has no text tower.

    ``log_prior`` [C] is the log share of each class in all training images (an absent class counts as one image).
    """

    log_prior: Tensor

    def __init__(self, backbone: Backbone, task: TaskView, config: LoRAOptions, scope: Scope) -> None:
        super().__init__(backbone, task, "lora")
        self.attach(config, Branch(self.branch, scope, config.rank, config.alpha))
        if not backbone.has_text:
            self.head = ScopedLinear(backbone.embed_dim, len(task.classes), scope)
        counts = torch.tensor(task.counts or [1] * len(task.classes)).clamp(min=1)
        self.register_buffer("log_prior", (counts / counts.sum()).log(), persistent=False)


def bottleneck_shape(config: BottleneckOptions, rank: Rank) -> Shape:
    """Bottlenecks of width ``rank`` beside transformer blocks, as ``config`` wants them."""
    return Shape(rank, config.scale, config.scale_gradients, zero_up=config.init == "zero_up")


def cross_entropy_objective(job: ClientJob, *, trains_text: bool) -> Objective:
    """Cross-entropy of a ``SingleBranch`` over all class names; text features carry gradient if ``trains_text``."""

    def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(net, SingleBranch)
        classes = net.class_features() if trains_text else job.class_features
        return {"ce": F.cross_entropy(net(batch, classes), batch.labels)}

    return objective


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor [N, D] as items to fit on, with ``labels`` [N] (-1 where there are none)."""

    values: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        """N."""
        return len(self.values)

    def batch(self, index: Tensor) -> Batch:
        """The rows ``index`` [B]."""
        rows = self.values[index]
        labels = torch.full((len(index),), -1) if self.labels is None else self.labels[index]
        return Batch(rows, labels, index, lambda: rows)
