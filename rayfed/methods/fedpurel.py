"""FedPuReL: purified global gradients, and a personal residual on top of the frozen global model.

(Code of the authors: github.com/shihaohou/FedPuReL)

Communicates: the shared adapter (values down, deltas up) and, with ``record``, five numbers on the purification. The
personal adapter, of the same kind, stays with its client.

    L_task = CE(l_G, y),  L_align = TKL(zero-shot || l_G)                          -> temperature_aligned_kl
    g = g_task - strength (g_task . u) u  where  g_task . g_align < 0,  u = g_align / |g_align|         -> purify
    phi_G <- phi_G + sum_k n_k / n delta_k                                         -> FedPuReL.server_step
    L_P = (1 - lambda) CE(l_G + l_P, y) + lambda CE(l_P, y)                        -> residual_loss
    global model l_G, personal model l_G + l_P                                     -> FedPuReL.predict

The alignment gradient is never added; it only removes opposition. Momentum and weight decay act after it, within one
client and round (the authors let momentum cross clients and rounds).

Figures: ``conflict_share`` of steps (or tensors) whose gradients oppose, ``angle`` between them in degrees,
``removed_share`` of the gradient's length, ``tkl_drift`` = TKL(l_G || zero-shot) and ``tkl_saturated`` after training;
``residual_share_many`` (medium, few) the personal part |l_P| / (|l_G| + |l_P|) of the logits by class group. The server
logs the extremes over the cohort and keeps every client's record by round in ``extras["purification"]``.

Departures: ``rounds`` includes the personal rounds; every round draws ``clients.per_round`` (the authors' first one
takes all); parameters and losses are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.attach import Branch
from rayfed.adapters.feature import FeatureMask
from rayfed.adapters.lora import Dropout
from rayfed.adapters.prompt import attach_prompts, prompt_tokens
from rayfed.adapters.scope import Scope, named_scoped
from rayfed.backbones.base import Backbone
from rayfed.conf.method.fedpurel import Options
from rayfed.messages import Phase, WireField
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
from rayfed.methods.model import AdaptedModel
from rayfed.state import ServerState

OWNERS = {"global": Scope.SHARED, "personal": Scope.PRIVATE}
RECORD = ("conflict_share", "angle", "removed_share", "tkl_drift", "tkl_saturated")
TAU_LOW, TAU_HIGH = 0.05, 20.0
LEAST_PROBABILITY = 1e-12


class Residual(AdaptedModel):
    """CLIP with a shared and a private adapter of one kind, each making logits of its own."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task)
        self.kind, self.context = config.kind, config.context
        self._zero_shot: Tensor | None = None
        if config.kind == "prompt":
            attach_prompts(backbone.text_tower, self.switch, OWNERS, length=config.context)
            self._prompt_tokens: dict[tuple[str, ...], Tensor] = {}
            self.prompt_tokens(task.classes)
        elif config.kind == "lora":
            alpha = config.alpha * (config.rank**0.5 if config.scaling == "sqrt_rank" else 1.0)
            self.attach(config, *(Branch(n, o, config.rank, alpha, init="kaiming") for n, o in OWNERS.items()))
        else:
            self.masks = nn.ModuleDict({n: FeatureMask(backbone.embed_dim, o) for n, o in OWNERS.items()})

    @torch.no_grad()
    def zero_shot_classes(self) -> Tensor:
        """[C, D] of the untouched text tower with the task's template, computed once."""
        if self._zero_shot is None:
            self._zero_shot = self.text_features()
        return self._zero_shot

    def zero_shot(self, batch: Batch) -> Tensor:
        """Zero-shot logits [B, C], from image features that are computed once per image."""
        return self.logits(batch.frozen(), self.zero_shot_classes())

    def prompt_tokens(self, names: Sequence[str]) -> Tensor:
        """Token rows [C, T] of the classes ``names`` with places for a prompt."""
        key = tuple(names)
        if key not in self._prompt_tokens:
            self._prompt_tokens[key] = prompt_tokens(self.backbone.tokenize, key, self.context)
        return self.to_device(self._prompt_tokens[key])

    def class_features(self, name: str, names: Sequence[str] | None = None) -> Tensor:
        """[C, D] of ``names`` (the task's for None) with adapter ``name``: of its own prompt, or the untouched ones."""
        if self.kind != "prompt":
            return self.zero_shot_classes() if names in (None, self.classes) else self.text_features(names=names)
        with self.switch.use(name):
            tokens = self.prompt_tokens(self.classes if names is None else names)
            return F.normalize(self.backbone.encode_text(tokens), dim=-1)

    def branch(self, name: str, batch: Batch, classes: Tensor | None = None, drop: Dropout | None = None) -> Tensor:
        """Logits [B, C] of adapter ``name``; ``classes`` [C, D] are its class features, computed here if None."""
        classes = self.class_features(name) if classes is None else classes
        if self.kind == "prompt":
            features = batch.frozen()
        elif self.kind == "lora":
            features = self.image_features(batch.images, name, drop=drop)
        else:
            features = F.normalize(self.masks[name](batch.encoded()), dim=-1)
        return self.logits(features, classes)


class FedPuReL(Method[Options]):
    """Purified global adapter and a personal residual."""

    def wire(self, task: TaskView) -> tuple[WireField, ...]:
        """The purification record of a client's round."""
        return (WireField("record", "up", (len(RECORD),), phase="purify"),) if self.config.record else ()

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Both adapters."""
        return Residual(backbone, task, self.config)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Global and personal training: one after the other over the run, or both in every round."""
        purify_phase = Phase("purify", private=False)
        if self.config.schedule == "interleaved":
            return (purify_phase, Phase("personalize", cohort="same", uploads=False))
        if round_index < rounds - self.config.personal_of(rounds):
            return (purify_phase,)
        return (Phase("personalize", uploads=False),)

    # Client half

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train phi_G on purified gradients, or the personal adapter beside the frozen global model."""
        assert isinstance(model, Residual)
        return self._purify(model, job) if job.phase == "purify" else self._personalize(model, job)

    def _purify(self, model: Residual, job: ClientJob) -> ClientResult:
        sizes = [parameter.numel() for _, _, parameter in named_scoped(model, Scope.SHARED)]
        purifier = Purifier(sizes, self.config.strength, per_tensor=self.config.purify == "tensor")
        rule = None if self.config.purify == "none" else purifier
        report = job.fit(self._task_and_align(job), [Group(Scope.SHARED)], gradient_rule=rule)
        figures = {**purifier.figures(), **self._drift(model, job)}
        record = torch.tensor([figures[name] for name in RECORD])
        shown = figures if rule is not None else {n: v for n, v in figures.items() if n.startswith("tkl")}
        return ClientResult(report, upload={"record": record} if self.config.record else {}, metrics=shown)

    def _task_and_align(self, job: ClientJob) -> Objective:
        distance, drop = DISTANCES[self.config.alignment], self._dropout(job)

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Residual)
            logits = net.branch("global", batch, drop=drop)
            terms = {"ce": F.cross_entropy(logits, batch.labels)}
            if self.config.purify != "none":
                terms["align"] = distance(logits, net.zero_shot(batch))
            return terms

        return objective

    def _dropout(self, job: ClientJob) -> Dropout | None:
        if self.config.kind != "lora" or self.config.dropout == 0:
            return None
        return Dropout(self.config.dropout, job.generator("dropout"))

    @torch.no_grad()
    def _drift(self, model: Residual, job: ClientJob) -> dict[str, float]:
        """TKL(l_G || zero-shot) on the client's first images, in the direction the paper reports."""
        for batch in job.train.in_order():
            logits, teacher = model.branch("global", batch), model.zero_shot(batch)
            saturated = solve_temperatures(teacher, logits).saturated
            drift = float(aligned_kl(teacher, logits).mean())
            return {"tkl_drift": drift, "tkl_saturated": float(saturated.any(0).float().mean())}
        return {"tkl_drift": 0.0, "tkl_saturated": 0.0}

    def _personalize(self, model: Residual, job: ClientJob) -> ClientResult:
        """Plain SGD without momentum or decay, as the authors do; every other train.* option stays."""
        changes = {"optimizer": "sgd", "momentum": 0.0, "epochs": self.config.personal_epochs}
        options = job.options.model_copy(update=changes)
        group = Group(Scope.PRIVATE, lr=self.config.personal_lr, weight_decay=0.0)
        report = job.fit(self._residual(job), [group], options=options)
        return ClientResult(report, metrics=self._shares(model, job))

    def _residual(self, job: ClientJob) -> Objective:
        global_classes = _one(job.class_features, 0)
        drop = self._dropout(job)

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Residual)
            with torch.no_grad():
                global_logits = net.branch("global", batch, global_classes)
            personal_logits = net.branch("personal", batch, drop=drop)
            loss = residual_loss(global_logits, personal_logits, batch.labels, weight=self.config.weight)
            return {"residual": loss}

        return objective

    @torch.no_grad()
    def _shares(self, model: Residual, job: ClientJob) -> dict[str, float]:
        """|l_P| / (|l_G| + |l_P|) of the centred logits, mean over the client's first images by class group."""
        for batch in job.train.in_order():
            parts = [model.branch(name, batch) for name in OWNERS]
            sizes = [(part - part.mean(-1, keepdim=True)).norm(dim=-1) for part in parts]
            share = (sizes[1] / (sizes[0] + sizes[1]).clamp(min=1e-12)).cpu()
            groups = [job.task.groups[label] for label in batch.labels.tolist()]
            places = {name: [i for i, g in enumerate(groups) if g == name] for name in sorted(set(groups))}
            return {f"residual_share_{name}": float(share[where].mean()) for name, where in places.items()}
        return {}

    # Server half

    def server_step(self, model: nn.Module, state: ServerState, updates: Updates, ctx: ServerContext) -> ServerState:
        """Add the weighted mean delta and keep the books; a personal phase changes nothing."""
        if not updates.items and updates.folded.weight == 0:
            return state
        shared = state.shared + updates.mean_delta()
        records = {u.client_id: u.payload.extras["record"] for u in updates.items if "record" in u.payload.extras}
        if not records:
            return state.step(shared)
        rows = torch.stack(list(records.values())).float()
        for name, values in zip(RECORD, rows.t(), strict=True):
            if self.config.purify != "none" or name.startswith("tkl"):
                ctx.log(f"{name}_min", float(values.min()))
                ctx.log(f"{name}_max", float(values.max()))
        places = torch.tensor([[ctx.round_index, client_id] for client_id in records]).float()
        before = state.extras.get("purification", torch.zeros(0, 2 + len(RECORD)))
        return state.step(shared, purification=torch.cat([before, torch.cat([places, rows], 1)]))

    # Prediction

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[2, C, D] of the global and the personal adapter for prompts; [C, D] of the untouched text tower else."""
        assert isinstance(model, Residual)
        if model.kind != "prompt":
            return model.class_features("global", names)
        return torch.stack([model.class_features(name, names) for name in OWNERS])

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C]: l_G, or l_G + l_P."""
        assert isinstance(model, Residual)
        logits = model.branch("global", batch, _one(classes, 0))
        return logits if view == "global" else logits + model.branch("personal", batch, _one(classes, 1))


def _one(classes: Tensor | None, place: int) -> Tensor:
    """Class features [C, D] of one adapter out of what ``class_features`` returned."""
    assert classes is not None
    return classes[place] if classes.dim() == 3 else classes


# Temperature-aligned KL


def temperature_aligned_kl(student: Tensor, teacher: Tensor, *, reduction: str = "mean") -> Tensor:
    """TKL(teacher || student) of logits [B, C]: KL of softmax(teacher / tau_t) against softmax(student / tau_s).

    The temperatures bring both entropies to their mean (``solve_temperatures``) and carry no gradient, nor does the
    teacher. Probabilities below 1e-12 count as 1e-12, which caps the value at 27.63 and, as with the authors, lets no
    gradient through there. ``reduction`` is "mean" over the batch or "none", which gives [B]. Source:
    trainers/purelPromptGP.py.

    Raises:
        ValueError: shapes differ or are not [B, C] with C > 1, or a logit is not finite (a masked class: leave it out
            of both); an unknown reduction.
    """
    if student.shape != teacher.shape or student.dim() != 2 or student.shape[1] < 2:
        raise ValueError(
            f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} must both be [B, C] with C > 1."
        )
    for name, logits in (("student", student), ("teacher", teacher)):
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(f"{name} logits are not all finite: leave masked (-inf) classes out of both tensors.")
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown: use 'mean' or 'none'.")
    each = aligned_kl(student, teacher)
    return each.mean() if reduction == "mean" else each


def aligned_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """``temperature_aligned_kl`` per row [B], without checks: no branch on data, for objectives."""
    student, teacher = _at_least_float32(student), _at_least_float32(teacher.detach())
    tau = solve_temperatures(student, teacher)
    p = F.softmax(teacher / tau.teacher.to(teacher.dtype).unsqueeze(1), dim=-1)
    q = F.softmax(student / tau.student.to(student.dtype).unsqueeze(1), dim=-1)
    log_p, log_q = p.clamp(min=LEAST_PROBABILITY).log(), q.clamp(min=LEAST_PROBABILITY).log()
    return (p * (log_p - log_q)).sum(-1)


class Temperatures(NamedTuple):
    """``teacher`` and ``student`` temperatures [B], entropy ``target`` [B] in nats, and ``saturated`` [2, B].

    Saturated: the target lies outside what temperatures in [0.05, 20] reach (teacher, student), so tau is at a bound.
    """

    teacher: Tensor
    student: Tensor
    target: Tensor
    saturated: Tensor


@torch.no_grad()
def solve_temperatures(student: Tensor, teacher: Tensor) -> Temperatures:
    """Solve H(softmax(x / tau)) = (H(teacher) + H(student)) / 2 for both logits [B, C], in float64.

    Bisection on log tau in [0.05, 20] (H rises with tau): 32 halvings leave tau exact to 2e-9 of itself. Where a row's
    entropy does not depend on tau (all equal, or one-hot beyond float64), any tau is right.
    """
    logits = torch.stack([teacher, student]).double()
    target = _entropy(logits, torch.ones_like(logits[..., 0])).mean(0)
    low, high = (torch.full_like(logits[..., 0], bound) for bound in (TAU_LOW, TAU_HIGH))
    below, above = _entropy(logits, low) > target + 1e-9, _entropy(logits, high) < target - 1e-9
    for _ in range(32):
        middle = (low * high).sqrt()
        too_flat = _entropy(logits, middle) > target
        low, high = torch.where(too_flat, low, middle), torch.where(too_flat, middle, high)
    tau = (low * high).sqrt()
    return Temperatures(tau[0], tau[1], target, below | above)


def _entropy(logits: Tensor, tau: Tensor) -> Tensor:
    """Entropy in nats over the last axis of softmax(``logits`` / ``tau``)."""
    log_p = F.log_softmax(logits / tau.unsqueeze(-1), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def _mean_aligned_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return aligned_kl(student, teacher).mean()


def plain_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Ablation: mean KL(softmax(teacher) || softmax(student)) of logits [B, C], at temperature 1."""
    target = F.log_softmax(_at_least_float32(teacher.detach()), dim=-1)
    return F.kl_div(F.log_softmax(_at_least_float32(student), dim=-1), target, reduction="batchmean", log_target=True)


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """-T^2 mean sum_c softmax(teacher / T) ln softmax(student / T) of logits [B, C] (trainers/purelGPAdapter.py)."""
    target = F.softmax(_at_least_float32(teacher.detach()) / temperature, dim=-1)
    log_q = F.log_softmax(_at_least_float32(student) / temperature, dim=-1)
    return -(temperature**2) * (target * log_q).sum(-1).mean()


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


DISTANCES = {"tkl": _mean_aligned_kl, "kl": plain_kl, "soft_ce": soft_cross_entropy}


# Purification


def purify(
    task: Sequence[Tensor], align: Sequence[Tensor], *, strength: float = 1.0, per_tensor: bool = False
) -> list[Tensor]:
    """Take from the gradients ``task`` what opposes the gradients ``align`` (same shapes); returns the task's shapes.

    a - ``strength`` (a . u) u with u = b / |b| where a . b < 0, else a: over all tensors as one vector (paper), or each
    tensor by itself (authors, Dassl/dassl/engine/trainer.py). Computed in float64 on scaled values, so that zero, tiny
    and huge gradients are safe. Raises ValueError if the shapes differ.
    """
    if [t.shape for t in task] != [t.shape for t in align]:
        raise ValueError("task and align gradients must have the same shapes, tensor by tensor.")
    if per_tensor or len(task) < 2:
        pairs = zip(task, align, strict=True)
        return [_without_opposition(a.flatten(), b.flatten(), strength).view(a.shape).to(a.dtype) for a, b in pairs]
    whole_task, whole_align = (torch.cat([t.flatten().double() for t in part]) for part in (task, align))
    merged = _without_opposition(whole_task, whole_align, strength)
    parts = merged.split([t.numel() for t in task])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, task, strict=True)]


def _without_opposition(task: Tensor, align: Tensor, strength: float) -> Tensor:
    """The projection of one flat pair [G], in float64; bit-equal to ``task`` where nothing opposes."""
    if not task.numel():
        return task.double()
    a, size = _scaled(task)
    b, _ = _scaled(align)
    length = torch.linalg.vector_norm(b)
    unit = b / torch.where(length > 0, length, 1.0)
    along = (a * unit).sum()
    projected = size * (a - strength * along * unit)
    return torch.where(along < 0, projected, task.double())


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` in float64 divided by its largest absolute value, and that value; zeros stay zeros."""
    wide = x.double()
    largest = wide.abs().max()
    return wide / torch.where(largest > 0, largest, 1.0), largest


class Purifier:
    """Gradient rule of one client's fit: purifies, and keeps sums for the record (no value leaves the device)."""

    def __init__(self, sizes: Sequence[int], strength: float, *, per_tensor: bool) -> None:
        self.sizes, self.strength, self.per_tensor = list(sizes), strength, per_tensor
        self.steps = 0
        self.sums: Tensor | None = None

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Merge the flat gradients of the terms "ce" and "align" [G]."""
        task, align = gradients["ce"], gradients["align"]
        split = (task.split(self.sizes), align.split(self.sizes))
        merged = torch.cat(purify(*split, strength=self.strength, per_tensor=self.per_tensor))
        self._note(task, align, merged)
        return merged

    def _note(self, task: Tensor, align: Tensor, merged: Tensor) -> None:
        cosine = _cosine(task, align)
        conflict = (cosine < 0).double()
        if self.per_tensor:
            pairs = zip(task.split(self.sizes), align.split(self.sizes), strict=True)
            conflict = torch.stack([(_cosine(a, b) < 0).double() for a, b in pairs]).mean()
        removed = (task - merged).double().norm() / task.double().norm().clamp(min=1e-300)
        noted = torch.stack([conflict, torch.rad2deg(torch.arccos(cosine)), removed])
        self.sums = noted if self.sums is None else self.sums + noted
        self.steps += 1

    def figures(self) -> dict[str, float]:
        """Means over the steps: conflict_share, angle, removed_share."""
        means = [0.0] * 3 if self.sums is None else (self.sums / self.steps).tolist()
        return dict(zip(RECORD, means, strict=False))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of two flat tensors in float64; 0 where one is zero."""
    (a, _), (b, _) = _scaled(a), _scaled(b)
    lengths = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return ((a * b).sum() / torch.where(lengths > 0, lengths, 1.0)).clamp(-1, 1)


# Personalisation


def residual_loss(global_logits: Tensor, personal_logits: Tensor, labels: Tensor, *, weight: float = 0.9) -> Tensor:
    """(1 - w) CE(l_G + l_P, y) + w CE(l_P, y) of logits [B, C] and ``labels`` [B]; no gradient reaches l_G.

    Source: federated_main.py, compute_stage2_loss (w = 0.99 there; w = 0 is its loss for feature adapters). Raises
    ValueError for a weight outside [0, 1].
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight} must lie in [0, 1].")
    fused = F.cross_entropy(global_logits.detach() + personal_logits, labels)
    return (1 - weight) * fused + weight * F.cross_entropy(personal_logits, labels)
