"""FedSDG: dual LoRA whose private branch is aligned in size and gated layer by layer.

(Code of the authors: github.com/ahuang0324/fedsdg)

Communicates: the shared LoRA, and the shared linear head where there is no text tower (values down, deltas up). Private
LoRA and gates stay with their client. The global model is b + g alone; a client that never trained predicts with it.

    y = b + g + m p',   m = sigmoid(a),   p' = p RMS(b) / sg[RMS(p)]                          -> adapters.gated
    L_k = CE + lambda_1 sum_l pen(m_l) + lambda_2 sum theta_p^2                               -> FedSDG._objective
    theta_g <- theta_g + sum_k n_k / n delta_k,  or with weights by agreement                 -> FedSDG.server_step

Figures: ``gate/<breadth>/<depth.site>`` is m by layer, of clients by how many classes they effectively hold (narrow,
medium, broad thirds); ``energy_share`` the private share of the adapted layers' energy; ``private_norm`` and
``private_drift`` the length of the private branch and how far it moved.

Departures: clients are weighted by examples (``weighting=equal`` is the authors' mean). Where ``head=private`` the
global view has the initial head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.attach import Branch
from rayfed.adapters.gated import GatedLinear, Mixing, ScalarGates, attach_gated, site, start_private
from rayfed.adapters.lora import LoRABranch
from rayfed.adapters.scope import Scope, ScopedLinear
from rayfed.aggregation.alignment import alignment_weights
from rayfed.backbones.base import Backbone
from rayfed.conf.method.fedsdg import Options
from rayfed.messages import Phase
from rayfed.methods.base import (
    Batch,
    ClientJob,
    ClientResult,
    Group,
    Method,
    Objective,
    ServerContext,
    TaskView,
    Updates,
    View,
)
from rayfed.methods.model import TOWERS, AdaptedModel
from rayfed.state import ServerState

BRANCHES = ("global", "private")


class GatedDual(AdaptedModel):
    """A backbone with a shared branch "global", a private branch "private", gates, and a head without text tower."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task)
        private_rank = config.private_rank or config.rank
        self.layers, self.layer_gates, self.gates = attach_gated(
            backbone,
            self.switch,
            Branch("global", Scope.SHARED, config.rank, config.alpha),
            Branch("private", Scope.PRIVATE, private_rank, config.alpha),
            targets=config.targets,
            towers=TOWERS[config.towers],
            gates=lambda count: ScalarGates(count, init=config.gate_init, fixed=_fixed_gate(config)),
            granularity="one" if config.gate == "fixed" else config.gate,
            mixing=_mixing(config),
        )
        for branch in self.private_branches():
            start_private(branch, aligned=config.align != "none", learned_gate=config.gate != "fixed")
        if not backbone.has_text:
            owner = Scope.SHARED if config.head == "global" else Scope.PRIVATE
            self.head = ScopedLinear(backbone.embed_dim, len(task.classes), owner)

    def private_branches(self) -> Iterator[LoRABranch]:
        """The private branch of every adapted layer, in module order."""
        for module in self.backbone.modules():
            if isinstance(module, LoRABranch) and module.scope is Scope.PRIVATE:
                yield module

    def private_values(self) -> Iterator[Tensor]:
        """A_p and B_p of every adapted layer: theta_p."""
        return (parameter for branch in self.private_branches() for parameter in (branch.a, branch.b))

    def features(self, batch: Batch, view: View) -> Tensor:
        """Image features [B, D]: "global" b + g in every layer, "personal" with the gated private branch."""
        if view == "global":
            return self.image_features(batch.images, "global")
        return self.image_features(batch.images, *BRANCHES, gated=True)

    @torch.no_grad()
    def energy_share(self, images: Tensor) -> float:
        """Mean over layers of the private share of the energy: mean (m p')^2 / (b^2 + g^2 + (m p')^2)."""
        shares: list[Tensor] = []

        def watch(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            assert isinstance(layer, GatedLinear)
            energy = layer.energy(inputs[0], BRANCHES)
            shares.append(energy[2] / energy.sum())

        watched = [m.register_forward_hook(watch) for m in self.backbone.modules() if isinstance(m, GatedLinear)]
        self.image_features(images, *BRANCHES, gated=True)
        for handle in watched:
            handle.remove()
        return float(torch.stack(shares).mean())


def _fixed_gate(config: Options) -> float | None:
    return config.gate_value if config.gate == "fixed" else None


def _mixing(config: Options) -> Mixing:
    anchor = None if config.align == "none" else config.align
    return Mixing(anchor, config.floor, config.detach_rms, blend=config.mixing == "blend")


ENERGY_IMAGES = 16
"""A client's first images on which the share of the energy is measured; all of them would cost a third of a fit."""


class FedSDG(Method[Options]):
    """Dual LoRA, aligned and gated private branch."""

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Both branches, the gates and, without a text tower, the head."""
        return GatedDual(backbone, task, self.config)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Train; weights by agreement need every update by itself."""
        return (Phase(weight=self.config.weighting, needs_all=self.config.aggregate == "alignment"),)

    # Client half

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train theta_g, theta_p, the gates and the head jointly on L_k."""
        assert isinstance(model, GatedDual)
        before = [value.detach().clone() for value in model.private_values()]
        report = job.fit(self._objective(job), self._groups(model))
        return ClientResult(report, metrics=self._figures(model, job, before))

    def _groups(self, model: GatedDual) -> list[Group]:
        """Weight decay acts on what is shared and on the head; the private branch has lambda_2 and gates have none."""
        groups = [Group(Scope.SHARED, "lora"), Group(Scope.PRIVATE, "lora", weight_decay=0.0)]
        if model.gates.learned:
            groups.append(Group(Scope.PRIVATE, "gate", lr=self.config.gate_lr, weight_decay=0.0))
        if model.head is not None:
            groups.append(Group(model.head.scope, "head", lr=self.config.head_lr))
        return groups

    def _objective(self, job: ClientJob) -> Objective:
        config = self.config
        gate_weight = config.gate_weight if job.round_index >= config.gate_warmup and config.gate != "fixed" else 0.0

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, GatedDual)
            logits = net.logits(net.features(batch, "personal"), job.class_features)
            terms = {"ce": F.cross_entropy(logits, batch.labels)}
            if gate_weight > 0:
                terms["gate"] = gate_weight * gate_penalty(net.gates(), config.gate_penalty)
            if config.private_weight > 0:
                terms["private"] = config.private_weight * sum_of_squares(net.private_values())
            return terms

        return objective

    @torch.no_grad()
    def _figures(self, model: GatedDual, job: ClientJob, before: list[Tensor]) -> dict[str, float]:
        values = list(model.private_values())
        moved = [after - start for after, start in zip(values, before, strict=True)]
        figures = {
            "private_norm": float(sum_of_squares(values).sqrt()),
            "private_drift": float(sum_of_squares(moved).sqrt()),
        }
        batches = list(job.train.in_order())
        if not batches:
            return figures
        figures["energy_share"] = model.energy_share(batches[0].images[:ENERGY_IMAGES])
        weights = model.gates()
        figures["gate_mean"] = float(weights.mean())
        if model.gates.learned:
            group = breadth(torch.cat([batch.labels for batch in batches]), len(job.task.classes))
            layers = zip(model.layers, model.layer_gates, strict=True)
            figures |= {f"gate/{group}/{site(name)}": float(weights[index]) for name, index in layers}
        return figures

    # Server half

    def server_step(self, model: nn.Module, state: ServerState, updates: Updates, ctx: ServerContext) -> ServerState:
        """Add the mean delta, or the deltas weighted by the agreement of their LoRA parts (the head follows along)."""
        if self.config.aggregate == "mean":
            return state.step(state.shared + updates.mean_delta())
        config = self.config
        params = [update.payload.params for update in updates.items]
        deltas = torch.stack([delta for delta in params if delta is not None])
        weights = alignment_weights(
            deltas[:, ctx.parameters[Scope.SHARED].span("lora")],
            reference=config.reference,
            transform=config.transform,
            temperature=config.temperature,
            smoothing=config.smoothing,
        )
        ctx.log("effective_clients", float(1 / weights.square().sum()))
        ctx.log("largest_weight", float(weights.max()))
        return state.step(state.shared + (weights.double() @ deltas.double()).float())

    # Prediction

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D] of the frozen text tower; None without one."""
        assert isinstance(model, GatedDual)
        return model.text_features(names=names) if model.backbone.has_text else None

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C]. Global: b + g. Personal: with the client's gated private branch."""
        assert isinstance(model, GatedDual)
        return model.logits(model.features(batch, view), classes)


def gate_penalty(gates: Tensor, kind: str) -> Tensor:
    """Sum over the gates m [G] of m ("unilateral") or of min(m, 1 - m) ("bilateral"): a scalar."""
    return (gates if kind == "unilateral" else torch.minimum(gates, 1 - gates)).sum()


def sum_of_squares(values: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all entries of ``values``: a scalar."""
    return torch.stack([value.square().sum() for value in values]).sum()


def breadth(labels: Tensor, num_classes: int) -> str:
    """How evenly a client's images spread over classes: the third in which its effective number of classes lies.

    That is exp(H(labels [N])), between 1 and what so few images allow, min(N, ``num_classes``).
    """
    shares = torch.bincount(labels.cpu()).float() / len(labels)
    effective = float(torch.special.entr(shares).sum().exp())
    most = min(len(labels), num_classes)
    return ("narrow", "medium", "broad")[min(2, int(3 * (effective - 1e-6) / most))]
