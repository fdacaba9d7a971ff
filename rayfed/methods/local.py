"""local: every client trains a private LoRA on its own images. Communicates nothing.

The personal model is the client's own; the global model is the untouched backbone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayfed.adapters.scope import Scope
from rayfed.backbones.base import Backbone
from rayfed.conf.method.local import Options
from rayfed.messages import Phase
from rayfed.methods.base import Batch, ClientJob, ClientResult, Group, Method, TaskView, View
from rayfed.methods.model import SingleLoRA, cross_entropy_objective


class Local(Method[Options]):
    """Private LoRA, no exchange."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """One private LoRA branch."""
        return SingleLoRA(backbone, task, self.config, Scope.PRIVATE)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Clients train; nothing is uploaded."""
        return (Phase(uploads=False),)

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Minimise the cross-entropy over all class names."""
        objective = cross_entropy_objective(job, trains_text=self.config.towers != "vision")
        return ClientResult(job.fit(objective, [Group(Scope.PRIVATE)]))

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D] with the client's own text LoRA, if it has one."""
        assert isinstance(model, SingleLoRA)
        return model.class_features(names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C]: with the private LoRA, or of the untouched image tower."""
        assert isinstance(model, SingleLoRA)
        if view == "global":
            return model.logits(batch.frozen() if classes is not None else model.image_features(batch.images), classes)
        logits: Tensor = model(batch, classes)
        return logits
