"""FedDTL: the text tower learns at the server, the image tower at the clients, first supervised, then by reward.

(Ma, Cheng, Xu, "FedDTL", ICML 2026, arXiv:2605.27900; written from a summary of the paper)

Communicates: the image LoRA (values down, deltas up); class text features down (made by the engine where the text LoRA
lives); image embeddings of unit length with labels up; from round M + 1 on, the adapter after round M, once (sticky).

    z_v(x; D) class token after the projection, z its unit vector, z_t class text features, s logit scale
    pi_D(c | x) = softmax_c(s z z_t^T)                                                    -> Policies.log_probs
    rounds 1..M:  L = CE(pi_D, y) over all classes                                        -> FedDTL._supervised
    rounds M+1..: a_j = argmax_c (z_v(x; D_old) + eps_j) z_t^c, j = 1..G;  r_j = [a_j = y]    -> FedDTL._rollout
        A_j = (r_j - mean r) / (std r + 1e-4)                                             -> group_advantages
        rho = pi_D(a) / pi_old(a);  L_p = min(rho A, clip(rho, 1 -+ e) A)                 -> clipped_gain
        k3 = exp(u) - u - 1, u = log pi_ref(a) - log pi_D(a)                              -> kl_estimate
        L = - mean (L_p - beta k3)                                                        -> FedDTL._policy
        reference: D_ref = 1/2 D_sft + 1/2 D_g, exactly, as rank 2r                       -> mix_lora
    server:  D_g <- D_g + sum p_k delta_k (agg=delta: of the products B A)                -> FedDTL._aggregate
        min over D_text of CE(s z z_t(D_text)^T, y) over the union of the uploads         -> FedDTL._train_text

``decouple=false`` trains the text LoRA at the clients and averages it; ``two_stage=false`` has supervised rounds only.

Figures: ``clean_accuracy`` without noise, ``reward`` = accuracy with noise, ``zero_std_share`` of groups that teach
nothing, ``clip_share`` of ratios outside the clip, ``kl``, ``embed_norm`` = mean |z_v|; at the server ``text_ce`` and
``pool`` (embeddings it trained on).

Departures: policies whose log-probabilities differ by less than 1e-4 count as equal in the KL, since Adam would turn
rounding into full steps where no group has a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rayfed.adapters.attach import Branch
from rayfed.adapters.lora import AdaptedLinear, HeldBranch, LoRABranch
from rayfed.adapters.scope import Scope, in_flat_order
from rayfed.aggregation.low_rank import Factors, mix_factors, truncated_mean
from rayfed.backbones.base import Backbone
from rayfed.backbones.prefix import last_blocks, split_tower
from rayfed.conf.method.feddtl import Options
from rayfed.errors import AdapterError
from rayfed.messages import Payload, Phase, WireField
from rayfed.methods.base import (
    Batch,
    ClientJob,
    ClientResult,
    FitReport,
    Group,
    Method,
    Objective,
    ServerContext,
    TaskView,
    Updates,
    View,
)
from rayfed.methods.model import AdaptedModel, Rows
from rayfed.state import ServerState

CURRENT, OLD, REFERENCE = "lora", "old", "reference"
SAME = 1e-4
"""Difference of two log-probabilities in float32 that is rounding, at a logit scale of 100."""
NO_SIGNAL = 0.95
LOG_RATIO_LIMIT, KL_LIMIT = 20.0, 10.0
"""verl's clamps of its low-variance KL (core_algos.py)."""


class Decoupled(AdaptedModel):
    """CLIP with a shared LoRA in the last image blocks, one in the last text blocks, and room for frozen policies."""

    def __init__(self, backbone: Backbone, task: TaskView, config: Options) -> None:
        super().__init__(backbone, task)
        lora = Branch(CURRENT, Scope.SHARED, config.rank, config.alpha, init="kaiming")
        image_blocks = last_blocks(backbone, "image_tower", config.vision_blocks)
        self.attach(config, lora, towers=image_blocks)
        owner = Scope.SERVER if config.decouple else Scope.SHARED
        text = Branch(CURRENT, owner, config.rank, config.alpha, "text", "kaiming")
        text_blocks = last_blocks(backbone, "text_tower", config.text_blocks)
        self.attach(config, text, towers=text_blocks)
        backbone.split = split_tower(backbone.image_tower, _number(image_blocks[0]))
        self._text_split = (
            None if backbone.text_tower is None else split_tower(backbone.text_tower, _number(text_blocks[0]))
        )
        self._text_heads: dict[tuple[str, ...], Tensor] = {}
        if config.two_stage:
            for name, rank in ((OLD, config.rank), (REFERENCE, 2 * config.rank)):
                self._make_room(name, rank)

    def _make_room(self, name: str, rank: int) -> None:
        """Give every layer with a shared branch a frozen one called ``name``."""
        for layer in self.shared_layers():
            scale = layer.branches[CURRENT].scale
            assert isinstance(scale, float)
            layer.branches[name] = HeldBranch(layer.in_features, layer.out_features, rank=rank, scale=scale)

    def shared_layers(self) -> list[AdaptedLinear]:
        """Layers whose LoRA is shared, in the order of the flat tensor: image tower, then text tower."""
        found = [m for m in self.backbone.modules() if isinstance(m, AdaptedLinear)]
        branches = [(layer, layer.branches[CURRENT]) for layer in found]
        shared = [(layer, b.tag) for layer, b in branches if isinstance(b, LoRABranch) and b.scope is Scope.SHARED]
        return [layer for layer, _ in sorted(shared, key=lambda item: item[1])]

    def factors(self, values: Tensor | None = None) -> list[Factors]:
        """(A, B) of every shared layer: the present ones, or those of a flat tensor ``values`` [P]."""
        parameters = [parameter for _, _, parameter in in_flat_order(self, Scope.SHARED)]
        tensors: Sequence[Tensor] = parameters
        if values is not None:
            pieces = values.to(self.backbone.device).split([p.numel() for p in parameters])
            tensors = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        return list(zip(tensors[::2], tensors[1::2], strict=True))

    def hold(self, name: str, factors: Sequence[Factors]) -> None:
        """Make policy ``name`` that of ``factors``."""
        for layer, (a, b) in zip(self.shared_layers(), factors, strict=True):
            branch = layer.branches[name]
            assert isinstance(branch, HeldBranch)
            branch.hold(a, b)

    def embed(self, batch: Batch, policy: str, noise: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """z_v [B, D], not normalised, of a policy; ``noise`` is added to the input [B, T, W] of its first block."""
        split = self.backbone.split
        with self.switch.use(policy):
            if split is None:
                assert noise is None
                return self.backbone.encode_image(batch.images)
            prefix = batch.prefix()
            return split.tail(prefix if noise is None else prefix + noise(prefix), batch.images)

    def text_features(self, *branches: str, names: Sequence[str] | None = None) -> Tensor:
        """As of ``AdaptedModel``; only the adapted text blocks are run anew."""
        if self._text_split is None:
            return super().text_features(*branches, names=names)
        key = self.classes if names is None else tuple(names)
        tokens = self.tokens(key)
        if key not in self._text_heads:
            self._text_heads[key] = self._text_split.head(tokens)
        with self.switch.use(*branches):
            return F.normalize(self._text_split.tail(self._text_heads[key], tokens), dim=-1)


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


class FedDTL(Method[Options]):
    """Decoupled towers; supervised fine-tuning, then group-relative policy optimisation."""

    def wire(self, task: TaskView) -> tuple[WireField, ...]:
        """Embeddings and labels up, of as many images as the client sends; the supervised adapter down, once."""
        up = (
            WireField("embeddings", "up", ("R", "D"), "float16"),
            WireField("labels", "up", ("R",), "int32"),
        )
        down = (WireField("sft", "down", ("S",), sticky=True),)
        return (up if self.config.decouple else ()) + (down if self.config.two_stage else ())

    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Both LoRAs and the frozen policies."""
        model = Decoupled(backbone, task, self.config)
        if self.config.noise_at == "block_input" and backbone.split is None:
            raise AdapterError(
                f"method.noise_at=block_input needs an image tower that can be cut, which {backbone.name!r} has not: "
                "use method.noise_at=embed_pre_norm."
            )
        return model

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """Train; the server sees every update where it averages products."""
        return (Phase(needs_all=self.config.agg == "delta"),)

    def broadcast(self, state: ServerState, phase: Phase) -> Payload:
        """D_g and, once there is one, the adapter after the last supervised round."""
        return Payload(state.shared, {name: state.extras[name] for name in ("sft",) if name in state.extras})

    # Client half

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train D by supervision or by reward, then embed images with it for the server."""
        assert isinstance(model, Decoupled)
        health = Health()
        if job.round_index < self.config.sft_of(job.rounds):
            report = job.fit(self._supervised(job, health), [Group(Scope.SHARED)])
        else:
            report = self._reinforce(model, job, health)
        return ClientResult(report, upload=self._upload(model, job), metrics=health.figures())

    def _supervised(self, job: ClientJob, health: Health) -> Objective:
        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Decoupled)
            classes = job.class_features if self.config.decouple else net.text_features(CURRENT)
            z = net.embed(batch, CURRENT)
            logits = net.logits(F.normalize(z, dim=-1), classes)
            health.add(clean_accuracy=_hits(logits, batch.labels), embed_norm=z.detach().norm(dim=-1))
            return {"ce": F.cross_entropy(logits, batch.labels)}

        return objective

    def _reinforce(self, model: Decoupled, job: ClientJob, health: Health) -> FitReport:
        """Policy optimisation with the old policy renewed as asked for and the reference fixed for the round."""
        config = self.config
        start = model.factors()
        model.hold(OLD, start)
        anchor = job.received.extras.get("sft")
        reference = start if anchor is None else model.factors(anchor)
        mixed = [mix_lora(a, b, weight=config.ref_mix) for a, b in zip(reference, start, strict=True)]
        model.hold(REFERENCE, mixed)
        policies = Policies(model, job, decoupled=config.decouple)

        def renew(epoch: int) -> None:
            if config.old_policy == "epoch":
                model.hold(OLD, model.factors())
                policies.renew()

        options = job.options.model_copy(update={"epochs": config.rl_epochs, "clip_norm": config.rl_clip_norm})
        objective = self._policy(job, policies, health)
        return job.fit(objective, [Group(Scope.SHARED, lr=config.rl_lr)], options=options, on_epoch=renew)

    def _policy(self, job: ClientJob, policies: Policies, health: Health) -> Objective:
        config, draws = self.config, job.generator("rollout")

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Decoupled)
            z = net.embed(batch, CURRENT)
            log_p = policies.log_probs(z, CURRENT)
            drawing = CURRENT if config.old_policy == "step" else OLD
            with torch.no_grad():
                z_old = z.detach() if drawing == CURRENT else net.embed(batch, OLD)
                log_old = policies.log_probs(z_old, drawing)
                actions = self._rollout(net, batch, policies, (z_old, drawing), draws)
                rewards = (actions == batch.labels).float()
                advantages = group_advantages(rewards, eps=config.adv_eps)
            log_ref = snapped(policies.reference(batch), log_p.detach())
            lp, lp_old, lp_ref = (taken(every, actions) for every in (log_p, log_old, log_ref))
            ratio = (lp - lp_old).exp()
            gain = clipped_gain(ratio, advantages, clip=config.clip)
            kl = self._kl(log_p, log_ref, (lp, lp_ref, lp_old))
            health.add(
                clean_accuracy=_hits(log_p, batch.labels),
                embed_norm=z.detach().norm(dim=-1),
                reward=rewards.mean(0),
                zero_std_share=(rewards == rewards[:1]).all(0).float(),
                clip_share=((ratio.detach() - 1).abs() > config.clip).float().mean(0),
                kl=kl.detach().view(-1, len(batch.labels)).mean(0),
            )
            return {"policy": -gain.mean(), "kl": config.beta * kl.mean()}

        return objective

    def _kl(self, log_p: Tensor, log_ref: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """KL terms: [B] summed over all classes, or [G, B] of the drawn ones (log p, log p_ref, log p_old)."""
        if self.config.kl_estimator == "exact":
            return kl_estimate(log_p, log_ref, kind="exact").sum(-1)
        lp, lp_ref, lp_old = drawn
        return kl_estimate(lp, lp_ref, kind=self.config.kl_estimator, logp_old=lp_old)

    def _rollout(
        self, net: Decoupled, batch: Batch, policies: Policies, old: tuple[Tensor, str], draws: Generator
    ) -> Tensor:
        """Actions [G, B] of the noisy old policy, whose embedding without noise and name are ``old``."""
        z_old, name = old
        noisy = torch.stack([self._noisy(net, batch, z_old, name, draws) for _ in range(self.config.group)])
        logits = policies.log_probs(noisy, name)
        if self.config.action == "categorical":
            uniform = torch.rand(logits.shape, generator=draws).clamp(min=1e-20).to(logits.device)
            logits = logits - (-uniform.log()).log()  # the largest of these is distributed as softmax(logits)
        return logits.argmax(-1)

    def _noisy(self, net: Decoupled, batch: Batch, z_old: Tensor, name: str, draws: Generator) -> Tensor:
        """z_v [B, D] with latent noise, not normalised."""

        def noise(like: Tensor) -> Tensor:
            drawn = self.config.sigma * torch.randn(like.shape, generator=draws).to(like.device, like.dtype)
            if not self.config.sigma_relative:
                return drawn
            size = like.detach().float().flatten(1).square().mean(1).sqrt().to(like.dtype)
            return drawn * size.view(-1, *([1] * (like.dim() - 1)))

        if self.config.noise_at == "block_input":
            return net.embed(batch, name, noise)
        base = F.normalize(z_old, dim=-1) if self.config.noise_at == "embed_post_norm" else z_old
        return base + noise(base)

    @torch.no_grad()
    def _upload(self, model: Decoupled, job: ClientJob) -> dict[str, Tensor]:
        """E_k: embeddings of unit length [R, D] by the trained D, without augmentation or noise, and labels [R]."""
        if not self.config.decouple:
            return {}
        z, labels = [torch.zeros(0, model.backbone.embed_dim)], [torch.zeros(0, dtype=torch.int64)]
        for batch in job.train.in_order():
            z.append(F.normalize(model.embed(batch, CURRENT).float(), dim=-1).cpu())
            labels.append(batch.labels.cpu())
        chosen, of = torch.cat(z), torch.cat(labels)
        if self.config.upload == "subset":
            kept = balanced_subset(of, self.config.per_class, job.generator("subset"))
            chosen, of = chosen[kept], of[kept]
        elif self.config.upload == "prototypes":
            chosen, of = prototypes(chosen, of, min_count=self.config.min_count)
        if self.config.upload_noise > 0:
            noise = torch.randn(chosen.shape, generator=job.generator("privacy"))
            chosen = F.normalize(chosen + self.config.upload_noise * noise, dim=-1)
        return {"embeddings": chosen.half(), "labels": of.int()}

    # Server half

    def server_step(self, model: nn.Module, state: ServerState, updates: Updates, ctx: ServerContext) -> ServerState:
        """Average D, train the text LoRA on all embeddings, and keep D after round M as the anchor."""
        assert isinstance(model, Decoupled)
        shared = self._aggregate(model, state, updates)
        server = self._train_text(state, updates, ctx) if self.config.decouple else state.server
        ends = self.config.two_stage and ctx.round_index + 1 >= self.config.sft_of(ctx.rounds)
        anchor = {"sft": shared.clone()} if ends and "sft" not in state.extras else {}
        return state.step(shared, server=server, **anchor)

    def _aggregate(self, model: Decoupled, state: ServerState, updates: Updates) -> Tensor:
        if self.config.agg == "factor":
            return state.shared + updates.mean_delta()
        deltas = (update.payload.params for update in updates.items)
        clients = [
            model.factors((state.shared + delta).to(model.backbone.device)) for delta in deltas if delta is not None
        ]
        layers = [truncated_mean(layer, updates.weights, rank=self.config.rank) for layer in zip(*clients, strict=True)]
        return torch.cat([factor.flatten().cpu() for layer in layers for factor in layer])

    def _train_text(self, state: ServerState, updates: Updates, ctx: ServerContext) -> Tensor:
        """min over D_text of the cross-entropy of the uploaded embeddings; returns its parameters [S]."""
        sent = [update.payload.extras for update in updates.items]
        rows = Rows(torch.cat([e["embeddings"] for e in sent]).float(), torch.cat([e["labels"] for e in sent]).long())
        ctx.log("pool", len(rows))
        if not len(rows):
            return state.server
        flat = ctx.parameters[Scope.SERVER]
        flat.write(state.server)

        def objective(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert isinstance(net, Decoupled)
            logits = net.logits(net.to_device(batch.images), net.text_features(CURRENT))
            return {"ce": F.cross_entropy(logits, net.to_device(batch.labels))}

        config = self.config
        groups = [Group(Scope.SERVER)]
        report = ctx.fit(rows, objective, groups, lr=config.text_lr, epochs=config.text_epochs, batch=config.text_batch)
        ctx.log("text_ce", report.terms["ce"])
        return flat.read()

    # Prediction

    def notes(self, figures: Mapping[str, float]) -> list[str]:
        """Whether a round of policy optimisation had anything to learn from."""
        if figures.get("zero_std_share", 0.0) <= NO_SIGNAL:
            return []
        return [
            "policy optimisation has no signal: in more than 95 % of the groups all draws are right or all are wrong, "
            "so that the round followed the KL alone; raise method.sigma, or set method.action=categorical."
        ]

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """z_t [C, D] of ``names`` with the text LoRA."""
        assert isinstance(model, Decoupled)
        return model.text_features(CURRENT, names=names)

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """s z z_t^T [B, C] in both views."""
        assert isinstance(model, Decoupled)
        return model.logits(model.image_features(batch.images, CURRENT), classes)


class Policies:
    """Log-probabilities of a round's policies.

    All use the class features the round began with (decoupled), or each those of its own text LoRA.
    """

    def __init__(self, model: Decoupled, job: ClientJob, *, decoupled: bool) -> None:
        self._model, self._job, self._decoupled = model, job, decoupled
        self._texts: dict[str, Tensor] = {}
        self._reference: Tensor | None = None

    def renew(self) -> None:
        """Forget what was made with the old policy that has just been replaced."""
        self._texts.pop(OLD, None)

    def log_probs(self, z: Tensor, policy: str) -> Tensor:
        """log pi(c | x) [*, B, C] in float32 of embeddings ``z`` [*, B, D], not normalised."""
        logits = self._model.logits(F.normalize(z, dim=-1), self._classes(policy))
        return F.log_softmax(logits.float(), dim=-1)

    def _classes(self, policy: str) -> Tensor:
        if self._decoupled:
            assert self._job.class_features is not None
            return self._job.class_features
        if policy == CURRENT:
            return self._model.text_features(policy)
        if policy not in self._texts:
            with torch.no_grad():
                self._texts[policy] = self._model.text_features(policy)
        return self._texts[policy]

    @torch.no_grad()
    def reference(self, batch: Batch) -> Tensor:
        """log pi_ref [B, C]; computed once an image and round where images are not augmented."""
        train = self._job.train
        if train.is_augmented:
            return self.log_probs(self._model.embed(batch, REFERENCE), REFERENCE)
        if self._reference is None:
            batches = train.in_order()
            self._reference = torch.cat([self.log_probs(self._model.embed(b, REFERENCE), REFERENCE) for b in batches])
        return self._reference[batch.index.to(self._reference.device)]


class Health:
    """Means over a fit's images and epochs of figures that are tensors until the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, **each: Tensor) -> None:
        """Add a batch: [B] for every figure."""
        for name, values in each.items():
            total = values.float().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(next(iter(each.values())))

    def figures(self) -> dict[str, float]:
        """The means."""
        return {name: float(total) / self._count for name, total in self._sums.items()}


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == labels).float()


# Policy optimisation


def group_advantages(rewards: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + ``eps``) of ``rewards`` [G, B] over each group of G draws; std with Bessel's correction.

    Exactly 0 where all draws of a group have the same reward (TRL keeps such groups too). Raises ValueError for G < 2,
    which has no spread, and for another number of axes.
    """
    if rewards.dim() != 2 or len(rewards) < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)} must be [G, B] with G of 2 or more draws.")
    centred = rewards - rewards.mean(0)
    scaled = centred / (rewards.std(0) + eps)
    return torch.where((rewards == rewards[:1]).all(0), torch.zeros_like(scaled), scaled)


def clipped_gain(ratio: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """min(rho A, clip(rho, 1 - e, 1 + e) A), elementwise, of ``ratio`` rho and ``advantages`` A (PPO)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


Kind = Literal["k3", "k3_is", "exact"]


def kl_estimate(logp: Tensor, logp_ref: Tensor, *, kind: Kind = "k3", logp_old: Tensor | None = None) -> Tensor:
    """Elementwise terms of KL(pi || pi_ref) from log-probabilities ``logp`` and ``logp_ref`` of one shape.

    "k3": exp(u) - u - 1 of drawn actions, u = logp_ref - logp, with u clamped to +-20 and the term to 10 (verl); its
    mean over actions of pi is the KL. "k3_is": that times the ratio exp(logp - logp_old), whose gradient is the KL's;
    without ``logp_old`` the actions are taken to be pi's own. "exact": pi (logp - logp_ref) of all classes, to be
    summed over them. Raises ValueError for an unknown kind.
    """
    if kind == "exact":
        return logp.exp() * (logp - logp_ref)
    if kind not in ("k3", "k3_is"):
        raise ValueError(f"kind={kind!r} is unknown: use 'k3', 'k3_is' or 'exact'.")
    u = (logp_ref - logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (u.exp() - u - 1).clamp(max=KL_LIMIT)
    if kind == "k3":
        return k3
    return (logp - (logp if logp_old is None else logp_old).detach()).exp() * k3


def mix_lora(a: Factors, b: Factors, *, weight: float = 0.5) -> Factors:
    """Return factors of ``weight`` * (update of ``a``) + (1 - ``weight``) * (update of ``b``), exactly.

    ``a`` and ``b`` are pairs (A [r, d_in], B [d_out, r]) that stand for B A. The mixture has rank 2r:
    ([A_a; A_b], [w B_a, (1 - w) B_b]). Averaging the factors themselves would be another update.
    """
    return mix_factors([a, b], [weight, 1 - weight])


def snapped(log_ref: Tensor, log_p: Tensor) -> Tensor:
    """``log_ref`` with ``log_p`` in its place where the two differ by rounding alone."""
    return torch.where((log_ref - log_p).abs() < SAME, log_p, log_ref)


def taken(log_probs: Tensor, actions: Tensor) -> Tensor:
    """[G, B] entries of ``log_probs`` [B, C] at ``actions`` [G, B]."""
    return log_probs.gather(1, actions.t()).t()


# Uploads


def balanced_subset(labels: Tensor, per_class: int, generator: Generator) -> Tensor:
    """Sorted places of up to ``per_class`` images of each class in ``labels`` [N], drawn at random."""
    order = torch.randperm(len(labels), generator=generator)
    chosen = [order[labels[order] == label][:per_class] for label in labels.unique().tolist()]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *chosen]).sort().values


def prototypes(embeddings: Tensor, labels: Tensor, *, min_count: int) -> tuple[Tensor, Tensor]:
    """Mean embeddings of unit length [R, D] of the classes with ``min_count`` images or more, and their labels [R]."""
    held, counts = labels.unique(return_counts=True)
    held = held[counts >= min_count]
    means = [embeddings[labels == label].mean(0) for label in held.tolist()]
    stacked = torch.stack(means) if means else embeddings.new_zeros(0, embeddings.shape[1])
    return F.normalize(stacked, dim=-1), held
