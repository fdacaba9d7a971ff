"""fedlora: FedAvg of one LoRA. (McMahan et al., AISTATS 2017, on the adapter of Hu et al., ICLR 2022)

Communicates: the shared LoRA (values down, deltas up), and the shared linear head where there is no text tower.
Factors A and B are averaged separately, weighted by examples. The personal model is the global one.

    logits - tau log(n_c / n) with ``logit_adjustment=tau`` (Menon et al., ICLR 2021, eq. 9)     -> FedLoRA.predict

The adjustment changes predictions only and needs the classes' training counts over all clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayfed.adapters.scope import Scope
from rayfed.backbones.base import Backbone
from rayfed.conf.method.fedlora import Options
from rayfed.methods.base import Batch, ClientJob, ClientResult, Group, Method, TaskView, View
from rayfed.methods.model import SingleLoRA, cross_entropy_objective


class FedLoRA(Method[Options]):
    """Shared LoRA, weighted mean."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """One shared LoRA branch."""
        return SingleLoRA(backbone, task, self.config, Scope.SHARED)

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Minimise the cross-entropy over all class names."""
        objective = cross_entropy_objective(job, trains_text=self.config.towers != "vision")
        return ClientResult(job.fit(objective, [Group(Scope.SHARED)]))

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D] with the shared text LoRA, if there is one."""
        assert isinstance(model, SingleLoRA)
        return model.class_features(names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C] with the shared LoRA, in both views, less what the class sizes favour if asked."""
        assert isinstance(model, SingleLoRA)
        logits: Tensor = model(batch, classes)
        if self.config.logit_adjustment == 0:
            return logits
        return logits - self.config.logit_adjustment * model.log_prior
