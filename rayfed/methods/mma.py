"""mma: FedAvg of the Multi-Modal Adapter.

(Yang et al., "MMA: Multi-Modal Adapter for Vision-Language Models", CVPR 2024; code of the authors:
github.com/ZjjConan/Multi-Modal-Adapter)

Communicates: the bottlenecks of both towers and their middle layers (values down, deltas up). The personal model is
the global one.

    x_l = Block_l(x) + kappa U_m ReLU(S_l ReLU(D_m LN_l(x))),  m the tower, S_l one for both    -> adapters.bottleneck

Departures: averaged over clients by examples (the paper trains centrally); a constant learning rate. Blocks of two
towers that are equally far from their ends share S_l, which is the authors' rule where the towers are equally deep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from rayfed.adapters.bottleneck import Middle, attach_bottlenecks
from rayfed.adapters.scope import Scope, ScopedLinear
from rayfed.backbones.base import Backbone
from rayfed.conf.method.mma import Options
from rayfed.methods.base import Batch, ClientJob, ClientResult, Group, Method, TaskView, View
from rayfed.methods.model import TOWERS, SingleBranch, bottleneck_shape, cross_entropy_objective


class MultiModal(SingleBranch):
    """CLIP with bottlenecks in both towers; ``joint`` holds the middle layers S by distance from the towers' ends."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task, "mma")
        self.joint = nn.ModuleDict()
        paths = attach_bottlenecks(
            backbone,
            self.switch,
            self.branch,
            bottleneck_shape(config, config.rank),
            blocks=config.blocks,
            owners=dict.fromkeys(TOWERS["both"], Scope.SHARED),
            middle=lambda place: self._middle(str(place), config.rank),
        )
        self.trains_text = any(path.startswith("text_tower") for path in paths)

    def _middle(self, place: str, rank: int) -> Middle:
        if place not in self.joint:
            made = ScopedLinear(rank, rank, Scope.SHARED, tag="joint")
            nn.init.kaiming_normal_(made.linear.weight, mode="fan_out")
            nn.init.zeros_(made.linear.bias)
            self.joint[place] = made
        return functools.partial(self.joint[place])


class MMA(Method[Options]):
    """Shared multi-modal adapter, weighted mean."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Bottlenecks with a middle layer for both towers."""
        return MultiModal(backbone, task, self.config)

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Minimise the cross-entropy over all class names."""
        assert isinstance(model, MultiModal)
        objective = cross_entropy_objective(job, trains_text=model.trains_text)
        return ClientResult(job.fit(objective, [Group(Scope.SHARED)]))

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D] with the text bottlenecks."""
        assert isinstance(model, MultiModal)
        return model.class_features(names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C] with the bottlenecks, in both views."""
        assert isinstance(model, MultiModal)
        logits: Tensor = model(batch, classes)
        return logits
