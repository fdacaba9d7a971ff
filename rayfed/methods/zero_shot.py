"""zero_shot: the untouched backbone. Trains and communicates nothing.

It exists so that the floor every method is compared with is a run like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayfed.backbones.base import Backbone
from rayfed.conf.method.zero_shot import Options
from rayfed.errors import RoundError
from rayfed.messages import Phase
from rayfed.methods.base import Batch, ClientJob, ClientResult, Method, TaskView, View
from rayfed.methods.model import AdaptedModel


class ZeroShot(Method[Options]):
    """No training."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """The backbone and the class texts."""
        return AdaptedModel(backbone, task)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """No exchange at all."""
        return ()

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Never called: there are no phases."""
        raise RoundError("zero_shot trains nothing.")

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D] of the untouched text tower."""
        assert isinstance(model, AdaptedModel)
        return model.text_features(names=names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Zero-shot logits [B, C] in both views."""
        assert isinstance(model, AdaptedModel)
        return model.logits(batch.frozen(), classes)
