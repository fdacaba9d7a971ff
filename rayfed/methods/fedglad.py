"""FedGLAD: dual LoRA, an instance gate, and distillation at the server.

(Nguyen, Wang, Jannesari, "Adaptive Federated Distillation with Dual-LoRA for Personalized Representation Learning",
ACM/IEEE SEC 2025, doi 10.1145/3769102.3770624)

Communicates: the global LoRA (values down, deltas up); with ``distill=proxy_client`` also logits on the public proxy
images, with ``class_mean`` per-class mean logits (both ways) and with ``class_mean_server`` mean features.

    h = f(x; W0)   h_g = f(x; W0 + D_g)   h_l = f(x; W0 + D_l)   (normalised)             -> Dual.views
    g = sigmoid(w . h + b)   z = g h_g + (1 - g) h_l   logits = s z/|z| W^T                -> Dual.views
    L_k = CE(z) + a_g CE(h_g)                                                             -> FedGLAD.client_step
    q(x) = sum_k p_k softmax(l_glob(x; D_g,k) / tau)                                      -> consensus
    q~ = (1 - mu) q + mu softmax(l_glob(x; teacher) / tau)                                -> FedGLAD._distill
    min over D_g (from the averaged D_g):  tau^2 mean_x KL(q~ || softmax(l_glob(x) / tau))  -> FedGLAD._distill
    teacher <- m teacher + (1 - m) D_g;   broadcast D_g (the student, never the teacher)   -> FedGLAD.server_step

Departures: a_g = 0.5 trains the global branch to stand alone, since the server and the global model use it alone
(a_g = 0 with ``profile=authors``); cross-entropy over all class names instead of an in-batch contrastive loss. A
vision-only global LoRA cannot be distilled at the server without images: ``class_mean_server`` needs text adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.attach import Branch, attach_layer_gates
from rayfed.adapters.gate import FeatureGate
from rayfed.adapters.scope import Scope
from rayfed.backbones.base import Backbone
from rayfed.conf.method.fedglad import Options
from rayfed.messages import ClientUpdate, Payload, Phase, WireField
from rayfed.methods.base import (
    Batch,
    ClientJob,
    ClientResult,
    FitReport,
    Group,
    Items,
    Method,
    Objective,
    ServerContext,
    TaskView,
    Updates,
    View,
)
from rayfed.methods.model import TOWERS, AdaptedModel, Rows
from rayfed.state import ServerState


class Dual(AdaptedModel):
    """CLIP with a shared branch "global", a private branch "local" and a private gate."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task)
        self.config = config
        towers = TOWERS[config.towers]
        if config.branches != "local_only":
            self._attach(config, Branch("global", Scope.SHARED, config.rank, config.alpha), towers)
        if config.branches != "global_only":
            self._attach(config, Branch("local", Scope.PRIVATE, config.rank, config.alpha), ("image_tower",))
        if config.branches == "both" and config.gate == "feature":
            self.gate = FeatureGate(backbone.embed_dim, init=config.gate_init)
        if config.branches == "both" and config.gate == "layer":
            attach_layer_gates(backbone, width=config.gate_width, init=config.gate_init)

    def _attach(self, config: Options, branch: Branch, towers: Sequence[str]) -> None:
        """Text adapters are tagged "text": the server may train them by themselves."""
        for tower in towers:
            tag = "text" if tower == "text_tower" else "lora"
            self.attach(config, Branch(branch.name, branch.scope, branch.rank, branch.alpha, tag), towers=(tower,))

    def class_features(self, names: Sequence[str] | None = None) -> Tensor:
        """[C, D] of ``names`` (the task's for None); the global branch acts where it is attached to the text tower."""
        return self.text_features(*(() if self.config.branches == "local_only" else ("global",)), names=names)

    def global_features(self, images: Tensor) -> Tensor:
        """h_g [B, D]; without a global branch, the frozen feature."""
        return self.image_features(images, *(() if self.config.branches == "local_only" else ("global",)))

    def views(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return z [B, D] normalised, h_g [B, D] where z needed it, and the gate [B, 1] where there is one."""
        if self.config.branches == "local_only":
            return self.image_features(batch.images, "local"), None, None
        if self.config.branches == "both" and self.config.gate == "layer":
            return self.image_features(batch.images, "global", "local", gated=True), None, None
        h_global = self.image_features(batch.images, "global")
        if self.config.branches == "global_only":
            return h_global, h_global, None
        h_local = self.image_features(batch.images, "local")
        gate = self._gate(batch, h_global)
        return F.normalize(gate * h_global + (1 - gate) * h_local, dim=-1), h_global, gate

    def _gate(self, batch: Batch, like: Tensor) -> Tensor:
        if self.config.gate == "fixed":
            return torch.sigmoid(like.new_full((len(like), 1), self.config.gate_init))
        gate: Tensor = self.gate(batch.frozen())
        return gate


class FedGLAD(Method[Options]):
    """Dual LoRA, instance gate, federated distillation."""

    def wire(self, task: TaskView) -> tuple[WireField, ...]:
        """Logits (B) or class means (C) besides the global LoRA."""
        classes = len(task.classes)
        if self.config.branches == "local_only":
            return ()
        if self.config.distill == "proxy_client":
            dtype = "float16" if self.config.proxy_dtype == "fp16" else "float32"
            return (WireField("proxy_logits", "up", (task.num_proxy, classes), dtype),)
        if self.config.distill.startswith("class_mean"):
            means = (WireField("class_logits", "up", (classes, classes)), WireField("class_counts", "up", (classes,)))
            if self.config.distill == "class_mean_server":
                return (*means, WireField("class_features", "up", (classes, "D")))
            down = WireField("class_targets", "down", (classes, classes)), WireField("class_seen", "down", (classes,))
            return (*means, *down)
        return ()

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Both branches and the gate."""
        return Dual(backbone, task, self.config)

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Train; the server sees every update unless plain averaging is all it does."""
        shares = self.config.branches != "local_only"
        return (Phase(uploads=shares, needs_all=shares and self.config.distill != "none"),)

    def broadcast(self, state: ServerState, phase: Phase) -> Payload:
        """The distilled global LoRA; C(ii) adds the class targets once there are any."""
        sent: tuple[str, ...] = ("class_targets", "class_seen")
        extras = {name: state.extras[name] for name in sent if name in state.extras}
        return Payload(state.shared if state.shared.numel() else None, extras)

    # Client half

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train D_g, D_l and the gate jointly on L_k = CE(z) + a_g CE(h_g), plus C(ii)'s distillation term."""
        assert isinstance(model, Dual)
        groups = [Group(scope) for scope in self._trained()]
        report = job.fit(self._objective(job), groups, lr=job.options.lr * self._warmup(job))
        return ClientResult(report, upload=self._upload(model, job), metrics=self._gate_figures(model, job))

    def _trained(self) -> list[Scope]:
        owners = {"both": [Scope.SHARED, Scope.PRIVATE], "local_only": [Scope.PRIVATE], "global_only": [Scope.SHARED]}
        return owners[self.config.branches]

    def _warmup(self, job: ClientJob) -> float:
        """min(1, t / T_w) over rounds t = 1.., T_w = max(1, round(share * T)); optimisers live for one round only."""
        return min(1.0, (job.round_index + 1) / max(1, round(self.config.warmup * job.rounds)))

    def _objective(self, job: ClientJob) -> Objective:
        text_trained = self.config.towers != "vision" and self.config.branches != "local_only"

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Dual)
            classes = net.class_features() if text_trained else job.class_features
            z, h_global, _ = net.views(batch)
            terms = {"ce": F.cross_entropy(net.logits(z, classes), batch.labels)}
            targets = job.received.extras.get("class_targets")
            if self.config.branches != "local_only" and (self.config.global_weight > 0 or targets is not None):
                h_global = net.global_features(batch.images) if h_global is None else h_global
                logits = net.logits(h_global, classes)
                terms["global_ce"] = self.config.global_weight * F.cross_entropy(logits, batch.labels)
                if targets is not None:
                    terms["distill"] = self._client_distillation(logits, batch.labels, job.received)
            return terms

        return objective

    def _client_distillation(self, logits: Tensor, labels: Tensor, received: Payload) -> Tensor:
        """C(ii): lambda tau^2 KL(softmax(target[y] / tau) || softmax(l_glob / tau)) where class y has a target."""
        targets = received.extras["class_targets"].to(logits.device)[labels]
        seen = received.extras["class_seen"].to(logits.device)[labels]
        per_sample = softened_kl(targets, logits, self.config.temperature)
        return self.config.distill_weight * (per_sample * seen).sum() / len(labels)

    @torch.no_grad()
    def _upload(self, model: Dual, job: ClientJob) -> dict[str, Tensor]:
        if self.config.branches == "local_only":
            return {}
        if self.config.distill == "proxy_client":
            view: View = "personal" if self.config.proxy_logits == "gated" else "global"
            classes = model.class_features()
            logits = torch.cat([self.predict(model, batch, view, classes) for batch in job.proxy.in_order()])
            return {"proxy_logits": logits.half() if self.config.proxy_dtype == "fp16" else logits}
        if self.config.distill.startswith("class_mean"):
            return self._class_means(model, job)
        return {}

    def _class_means(self, model: Dual, job: ClientJob) -> dict[str, Tensor]:
        """C: counts [C], mean logits [C, C] and, for C(i), mean features [C, D]; rows of rare classes are withheld."""
        classes = model.class_features()
        sums = ClassSums(len(classes), model.backbone.embed_dim, self.config.clip_logits)
        for batch in job.train.in_order():
            features = model.global_features(batch.images)
            sums.add(batch.labels, model.logits(features, classes), features)
        sent = sums.means(self.config.min_count)
        if self.config.noise > 0 and self.config.clip_logits is not None:
            scale = self.config.noise * self.config.clip_logits / sent["class_counts"].clamp(min=1)
            noise = torch.randn(sent["class_logits"].shape, generator=job.generator("privacy"))
            kept = (sent["class_counts"] > 0).unsqueeze(1)
            sent["class_logits"] = sent["class_logits"] + noise * scale.unsqueeze(1) * kept
        if self.config.distill == "class_mean":
            del sent["class_features"]
        return sent

    @torch.no_grad()
    def _gate_figures(self, model: Dual, job: ClientJob) -> dict[str, float]:
        if self.config.branches != "both" or self.config.gate != "feature":
            return {}
        gates = torch.cat([model.gate(batch.frozen()) for batch in job.train.in_order()])
        return {"gate_mean": float(gates.mean()), "gate_std": float(gates.std(unbiased=False))}

    # Server half

    def server_step(self, model: nn.Module, state: ServerState, updates: Updates, ctx: ServerContext) -> ServerState:
        """Average, distil into the global LoRA, move the teacher; the student is what the next broadcast carries."""
        assert isinstance(model, Dual)
        if self.config.branches == "local_only":
            return state.step(state.shared)
        mean = state.shared + updates.mean_delta()
        if self.config.distill == "class_mean":
            return state.step(mean, **merged_class_means(updates.items))
        if self.config.distill == "class_mean_server":
            return state.step(self._distill_text(model, mean, updates, ctx))
        if self.config.distill == "none":
            return state.step(mean)
        consensus_probs = self._consensus(model, state, updates, ctx)
        student = self._distill(model, state, mean, consensus_probs, ctx)
        teacher = state.extras.get("teacher", student)
        decay = self.config.teacher_decay
        return state.step(student, teacher=decay * teacher + (1 - decay) * student)

    @torch.no_grad()
    def _consensus(self, model: Dual, state: ServerState, updates: Updates, ctx: ServerContext) -> Tensor:
        """q [P, C]: from every client's global LoRA on the proxy images (A), or from its uploaded logits (B)."""
        if self.config.distill == "proxy_client":
            logits: Iterable[Tensor] = (update.payload.extras["proxy_logits"].float() for update in updates.items)
        else:
            deltas = (update.payload.params for update in updates.items)
            logits = (self._proxy_logits(model, state.shared + d, ctx) for d in deltas if d is not None)
        q = consensus(logits, updates.weights, self.config.temperature, average=self.config.average)
        if self.config.distill == "proxy_client" and self.config.sharpen is not None:
            q = F.softmax(torch.log(q.clamp(min=1e-12)) / self.config.sharpen, dim=-1)
        return q

    def _proxy_logits(self, model: Dual, shared: Tensor, ctx: ServerContext) -> Tensor:
        ctx.parameters[Scope.SHARED].write(shared)
        classes = model.class_features()
        batches = ctx.proxy.in_order()
        return torch.cat([model.logits(model.global_features(b.images), classes) for b in batches]).cpu()

    def _distill(self, model: Dual, state: ServerState, mean: Tensor, q: Tensor, ctx: ServerContext) -> Tensor:
        """tau^2 mean KL of the teacher-mixed consensus against the student; returns the student's parameters [P]."""
        weight = self.config.teacher_weight if "teacher" in state.extras else 0.0
        if weight > 0:
            with torch.no_grad():
                teacher = self._proxy_logits(model, state.extras["teacher"], ctx)
            q = (1 - weight) * q + weight * F.softmax(teacher / self.config.temperature, dim=-1)
        ctx.parameters[Scope.SHARED].write(state.shared if self.config.student_start == "previous" else mean)
        text_trained = self.config.towers != "vision"
        frozen = None if text_trained else model.class_features().detach()

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Dual)
            classes = net.class_features() if frozen is None else frozen
            logits = net.logits(net.global_features(batch.images), classes)
            targets = q[batch.index.cpu()].to(logits.device)
            return {"kl": self._scaled_kl(targets, logits)}

        report = self._fit(ctx, ctx.proxy, objective, Group(Scope.SHARED))
        ctx.log("distill_kl", report.terms["kl"])
        return ctx.parameters[Scope.SHARED].read()

    def _scaled_kl(self, target_probs: Tensor, logits: Tensor) -> Tensor:
        tau = self.config.temperature
        return tau**2 * F.kl_div(F.log_softmax(logits / tau, dim=-1), target_probs, reduction="batchmean")

    def _fit(self, ctx: ServerContext, items: Items, objective: Objective, group: Group) -> FitReport:
        config = self.config
        return ctx.fit(
            items, objective, [group], lr=config.distill_lr, epochs=config.distill_epochs, batch=config.distill_batch
        )

    def _distill_text(self, model: Dual, mean: Tensor, updates: Updates, ctx: ServerContext) -> Tensor:
        """C(i): tau^2 mean_c KL(softmax(mean logits[c] / tau) || softmax(s feature[c] W(text LoRA)^T / tau)).

        Only the text factors move; the image factors stay averaged.
        """
        merged = merged_class_means(updates.items)
        ctx.parameters[Scope.SHARED].write(mean)
        seen = merged["class_seen"].bool()
        if not bool(seen.any()):
            return mean
        probs = F.softmax(merged["class_targets"][seen] / self.config.temperature, dim=-1)
        features = F.normalize(merged["class_features"][seen], dim=-1)

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Dual)
            logits = net.logits(net.to_device(batch.images), net.class_features())
            return {"kl": self._scaled_kl(probs[batch.index].to(logits.device), logits)}

        report = self._fit(ctx, Rows(features), objective, Group(Scope.SHARED, tag="text"))
        ctx.log("distill_kl", report.terms["kl"])
        return ctx.parameters[Scope.SHARED].read()

    # Prediction

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """[C, D]."""
        assert isinstance(model, Dual)
        return model.class_features(names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Global: s h_g W^T. Personal: s z W^T with the client's local branch and gate."""
        assert isinstance(model, Dual)
        features = model.global_features(batch.images) if view == "global" else model.views(batch)[0]
        return model.logits(features, classes)


def softened_kl(target_logits: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """tau^2 KL(softmax(target / tau) || softmax(logits / tau)) per row [B]."""
    target = F.log_softmax(target_logits / temperature, dim=-1)
    student = F.log_softmax(logits / temperature, dim=-1)
    return temperature**2 * (target.exp() * (target - student)).sum(-1)


def consensus(logits: Iterable[Tensor], weights: Sequence[int], temperature: float, *, average: str) -> Tensor:
    """Weighted consensus q [P, C] of the clients' ``logits`` [P, C] each, in their order.

    ``average="probs"``: sum_k p_k softmax(l_k / tau); ``"logits"``: softmax(sum_k p_k l_k / tau).
    """
    share = [weight / sum(weights) for weight in weights]
    soft = (F.softmax(one / temperature, dim=-1) if average == "probs" else one / temperature for one in logits)
    total = sum(p * one for p, one in zip(share, soft, strict=True))
    assert isinstance(total, Tensor)
    return total if average == "probs" else F.softmax(total, dim=-1)


class ClassSums:
    """Per-class sums of logits and features over a client's images."""

    def __init__(self, num_classes: int, dim: int, clip: float | None) -> None:
        self.counts = torch.zeros(num_classes)
        self.logits = torch.zeros(num_classes, num_classes)
        self.features = torch.zeros(num_classes, dim)
        self.clip = clip

    def add(self, labels: Tensor, logits: Tensor, features: Tensor) -> None:
        """Add a batch: labels [B], logits [B, C] (clipped to an L2 norm if asked), features [B, D]."""
        labels, logits = labels.cpu(), logits.float().cpu()
        if self.clip is not None:
            logits = logits * (self.clip / logits.norm(dim=-1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
        self.counts.index_add_(0, labels, torch.ones(len(labels)))
        self.logits.index_add_(0, labels, logits)
        self.features.index_add_(0, labels, features.float().cpu())

    def means(self, min_count: int) -> dict[str, Tensor]:
        """Return counts [C] and means; a class with fewer than ``min_count`` images has count 0 and zero rows."""
        kept = torch.where(self.counts >= min_count, self.counts, 0.0)
        divisor = kept.clamp(min=1).unsqueeze(1)
        shown = (kept > 0).unsqueeze(1)
        logits, features = self.logits / divisor * shown, self.features / divisor * shown
        return {"class_counts": kept, "class_logits": logits, "class_features": features}


def merged_class_means(updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
    """Count-weighted means over clients: targets [C, C], features [C, D] where sent, classes seen [C]."""
    counts = torch.stack([u.payload.extras["class_counts"] for u in updates])
    total = counts.sum(0)
    merged = {"class_seen": (total > 0).float()}
    for source, target in (("class_logits", "class_targets"), ("class_features", "class_features")):
        if source in updates[0].payload.extras:
            rows = torch.stack([u.payload.extras[source] for u in updates])
            merged[target] = (counts.unsqueeze(-1) * rows).sum(0) / total.clamp(min=1).unsqueeze(-1)
    return merged
