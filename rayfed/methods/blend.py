"""BLEND: shared adapters in both towers, and a private one in front of the visual projection.

(arXiv:2610.12907; code of the authors: github.com/payamsiabd/BLEND)

Communicates: the bottlenecks of both towers (values down, deltas up): 2 d r + r + d numbers for every block of width d
and rank r, 507,264 for ViT-B/16. The projection adapter stays with its client.

    x_l = Block_l(x) + delta_l(LN_l(x)),  delta(u) = kappa (B ReLU(A u + a) + b)        -> adapters.bottleneck
    R_Gen = zeta pi,  R_Per = (zeta' + delta_Proj(zeta')) pi                            -> TwoHeads.heads
    g = R_Gen / |R_Gen|,  p = R_Per / |R_Per|,  f = (1 - gamma) g + gamma p             -> fuse
    L_n = (1 - lambda) CE(s g W^T, y) + lambda CE(s f W^T, y)                           -> Blend._objective
    P <- P + sum_n d_n / d delta_n,  P the bottlenecks                                  -> Method.server_step
    global model s g W^T, personal model s f W^T                                        -> Blend.predict

zeta is the class token after the image tower's last norm, pi its projection, W [C, D] the class texts through the
adapted text tower, s the frozen logit scale. zeta' is zeta (``projection_input=post_ln``) or the token before that norm
(``pre_ln``, the authors'). f is not normalised again.

Figure: ``head_cosine`` is the mean cosine of g and p on a client's first 16 training images.

Departures: Adam's moments live for one client and round (the authors' one optimiser serves all); a client that was
not drawn is not averaged. Where ``aggregate`` makes bottlenecks private, the global view has their initial values; with
``full`` the projection adapter is part of the global model, which then predicts by f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.bottleneck import Bottleneck, Shape, attach_bottlenecks, check_rank
from rayfed.adapters.scope import Scope, ScopedLinear
from rayfed.backbones.base import Backbone
from rayfed.backbones.projection import ProjectedTower
from rayfed.conf.method.blend import Options
from rayfed.errors import AdapterError
from rayfed.messages import Phase
from rayfed.methods.base import Batch, ClientJob, ClientResult, Group, Method, Objective, TaskView, View
from rayfed.methods.model import AdaptedModel, bottleneck_shape

BRANCH = "bottleneck"


class Owners(NamedTuple):
    """Who owns the bottlenecks of each tower and the projection adapter."""

    vision: Scope
    text: Scope
    projection: Scope


OWNERS = {
    "blend": Owners(Scope.SHARED, Scope.SHARED, Scope.PRIVATE),
    "full": Owners(Scope.SHARED, Scope.SHARED, Scope.SHARED),
    "none": Owners(Scope.PRIVATE, Scope.PRIVATE, Scope.PRIVATE),
    "vision_only": Owners(Scope.SHARED, Scope.PRIVATE, Scope.PRIVATE),
    "text_only": Owners(Scope.PRIVATE, Scope.SHARED, Scope.PRIVATE),
}


class TwoHeads(AdaptedModel):
    """CLIP with bottlenecks in both towers, and a projection adapter for the second of two visual heads."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task)
        self.config = config
        self.owners = OWNERS[config.aggregate]
        self.trains_text = config.text_projection
        if config.width is not None:
            towers = {"image_tower": self.owners.vision, "text_tower": self.owners.text}
            paths = attach_bottlenecks(
                backbone,
                self.switch,
                BRANCH,
                bottleneck_shape(config, config.width),
                blocks=config.blocks,
                owners=towers,
            )
            self.trains_text |= any(path.startswith("text_tower") for path in paths)
        width = _projected(backbone.image_tower, "image").width
        check_rank(config.projection_rank, width, "the image tower")
        start = Shape(config.projection_rank, scale=1.0, scale_gradients=False, fan="fan_in", zero_up=True)
        self.projection = Bottleneck(width, start, self.owners.projection, tag="projection")
        self.text_projection: ScopedLinear | None = None
        if config.text_projection:
            self.text_projection = self._text_projection(backbone)

    def _text_projection(self, backbone: Backbone) -> ScopedLinear:
        """What training adds to the text tower's projection: zero at the start."""
        width = _projected(backbone.text_tower, "text").width
        made = ScopedLinear(width, backbone.embed_dim, self.owners.text, tag="text_projection", bias=False)
        nn.init.zeros_(made.linear.weight)
        return made

    def general(self, images: Tensor) -> Tensor:
        """R_Gen [B, D] of ``images`` [B, 3, S, S]."""
        with self.switch.use(BRANCH):
            return self.backbone.encode_image(images)

    def heads(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """R_Gen and R_Per of ``images`` [B, 3, S, S], both [B, D] and not normalised."""
        tower = _projected(self.backbone.image_tower, "image")
        with self.switch.use(BRANCH):
            before, after = tower.class_tokens(images)
        zeta = after if self.config.projection_input == "post_ln" else before
        return tower.proj(after), tower.proj(zeta + self.projection(zeta))

    def class_features(self, names: Sequence[str] | None = None) -> Tensor:
        """W [C, D] of the classes ``names``, the task's for None."""
        if self.text_projection is None:
            return self.text_features(BRANCH, names=names)
        tower = _projected(self.backbone.text_tower, "text")
        with self.switch.use(BRANCH):
            pooled = tower.trunk(self.tokens(self.classes if names is None else names))
        return F.normalize(tower.proj(pooled) + self.text_projection(pooled), dim=-1)

    def fused(self, images: Tensor) -> Tensor:
        """The fused feature f [B, D] of ``images`` [B, 3, S, S]."""
        return fuse(*self.heads(images), gamma=self.config.gamma)


def _projected(tower: nn.Module | None, which: str) -> ProjectedTower:
    if not isinstance(tower, ProjectedTower):
        raise AdapterError(
            f"the {which} tower keeps no projection matrix of its own behind its last norm: "
            "use an open_clip model with open_clip's own transformers (such as ViT-B-16)."
        )
    return tower


def fuse(general: Tensor, personal: Tensor, *, gamma: float) -> Tensor:
    """(1 - gamma) g + gamma p of the heads R_Gen and R_Per [B, D], each normalised first; the sum is not.

    Raises:
        ValueError: the shapes differ, or ``gamma`` is outside [0, 1].
    """
    if general.shape != personal.shape or not 0 <= gamma <= 1:
        raise ValueError(
            f"general {tuple(general.shape)} and personal {tuple(personal.shape)} must have one shape and "
            f"gamma={gamma} must lie in [0, 1]."
        )
    return (1 - gamma) * F.normalize(general, dim=-1) + gamma * F.normalize(personal, dim=-1)


class Blend(Method[Options]):
    """Shared two-tower bottlenecks, private projection adapter."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Bottlenecks and the projection adapter."""
        return TwoHeads(backbone, task, self.config)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Train; nothing is uploaded where nothing is averaged."""
        return (Phase(uploads=self.config.aggregate != "none"),)

    # Client half

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train the bottlenecks and the projection adapter jointly on L_n."""
        assert isinstance(model, TwoHeads)
        report = job.fit(self._objective(job, model.trains_text), [Group(Scope.SHARED), Group(Scope.PRIVATE)])
        return ClientResult(report, metrics=self._figures(model, job))

    def _objective(self, job: ClientJob, trains_text: bool) -> Objective:
        weight, gamma = self.config.fused_weight, self.config.gamma

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, TwoHeads)
            classes = net.class_features() if trains_text else job.class_features
            general, personal = net.heads(batch.images)
            anchor = net.logits(F.normalize(general, dim=-1), classes)
            fused = net.logits(fuse(general, personal, gamma=gamma), classes)
            return {
                "anchor": (1 - weight) * F.cross_entropy(anchor, batch.labels),
                "fused": weight * F.cross_entropy(fused, batch.labels),
            }

        return objective

    @torch.no_grad()
    def _figures(self, model: TwoHeads, job: ClientJob) -> dict[str, float]:
        for batch in job.train.in_order():
            return {"head_cosine": float(F.cosine_similarity(*model.heads(batch.images[:16])).mean())}
        return {}

    # Prediction

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """W [C, D]."""
        assert isinstance(model, TwoHeads)
        return model.class_features(names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C]: global s g W^T, personal s f W^T."""
        assert isinstance(model, TwoHeads)
        if view == "personal" or model.owners.projection is Scope.SHARED:
            return model.logits(model.fused(batch.images), classes)
        return model.logits(F.normalize(model.general(batch.images), dim=-1), classes)
