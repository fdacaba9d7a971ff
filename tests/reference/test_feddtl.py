"""FedDTL against a slow reference written from its equations, and the properties its description lists."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import rayfed
from rayfed.adapters.scope import Scope
from rayfed.aggregation.low_rank import truncated_mean
from rayfed.backbones import tiny
from rayfed.comms import codec
from rayfed.config import parse_options
from rayfed.data import build_task_from_options
from rayfed.engine.bench import Bench, novel_names, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, TrainJob
from rayfed.engine.policy import update_problem
from rayfed.engine.server import Server
from rayfed.errors import BackboneError, OptionError
from rayfed.messages import EVALUATION, Payload, Phase, WireField
from rayfed.methods.feddtl import (
    balanced_subset,
    clipped_gain,
    group_advantages,
    kl_estimate,
    mix_lora,
    prototypes,
    snapped,
)
from rayfed.rng import torch_generator
from rayfed.run import main
from tests.conftest import SMALL
from tests.engine.runs import assert_same_bits
from tests.reference.test_fedglad import adamw

ADAM = ("method=feddtl", "train.optimizer=adam", "train.batch=16", "method.text_batch=16", "task.split=base_novel")
ROWS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class Reference:
    """The paper's model on open_clip's own CLIP: fused attention, weights W + BA put in by hand."""

    def __init__(self, names, template="a photo of a {}."):
        self.model = tiny.load_tiny().requires_grad_(False)
        self.weights = {n: p.detach() for n, p in self.model.state_dict().items()}
        self.tokens = tiny.HashTokenizer()([template.format(name) for name in names])
        self.scale = float(self.model.logit_scale.exp())

    def with_updates(self, updates):
        """Weights with ``updates`` {our layer path: dW} added."""
        weights = dict(self.weights)
        for path, delta in updates.items():
            inner = (
                path.removeprefix("backbone.").replace("image_tower.trunk.", "visual.").replace("text_tower.trunk.", "")
            )
            block, _, part = inner.rpartition(".")
            key, width = f"{block}.in_proj_weight", delta.shape[0]
            before, after = ROWS[part] * width, (2 - ROWS[part]) * width
            weights[key] = weights[key] + F.pad(delta, (0, 0, before, after))
        return weights

    def z(self, images, updates):
        """z_v [B, D], not normalised."""
        weights = self.with_updates(updates)
        visual = {k.removeprefix("visual."): v for k, v in weights.items() if k.startswith("visual.")}
        return functional_call(self.model.visual, visual, (images,))

    def texts(self, updates):
        """Normalised class text features [C, D]."""
        return functional_call(self.model, self.with_updates(updates), (None, self.tokens))[1]

    def log_probs(self, z, texts):
        return F.log_softmax(self.scale * (z / z.norm(dim=-1, keepdim=True)) @ texts.t(), dim=-1)


def updates_of(named):
    """{layer path: B A} of named factors (alpha = rank, so the scale is 1)."""
    layers = {name.rpartition(".branches.")[0] for name in named}
    return {p: named[f"{p}.branches.lora.b"] @ named[f"{p}.branches.lora.a"] for p in sorted(layers)}


@pytest.fixture(scope="module")
def split(small):
    return build_task_from_options(small("method=feddtl", "task.split=base_novel"))


class Pair:
    """A worker and a server that start where both factors act: with B = 0 mistakes in A would not show."""

    def __init__(self, options, task, folder):
        self.worker = ClientWorker(options, task, folder)
        self.server = Server(options, task_view(task), task.proxy, novel_names(task))
        generator = torch.Generator().manual_seed(5)
        state = self.server.state
        moved = [x + 0.05 * torch.randn(x.shape, generator=generator) for x in (state.shared, state.server)]
        self.server.state = state.step(moved[0], server=moved[1])
        self.options, self.task = options, task

    def named(self, scope, values):
        return {name: value.clone() for name, value in self.worker.bench.parameters[scope].named(values).items()}

    def train(self, round_index, clients, *, deliver=True):
        phase = Phase()
        broadcast = self.server.begin(round_index, phase, self.worker.held)
        reports, packet = self.worker.train(broadcast, [TrainJob(c, 1, phase) for c in clients])
        assert all(isinstance(report, ClientReport) for report in reports), reports
        if deliver:
            self.server.receive(packet)
            self.figures = self.server.finish(phase, tuple(clients), tuple(clients))
        return reports, [codec.decode(message) for _, _, message in packet.items]


def images_of(task, client):
    index = task.clients[client].train
    pixels = torch.from_numpy(task.train.images[index]).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.MEAN, tiny.STD))
    return (pixels - mean) / std, torch.from_numpy(task.train.labels[index])


def descend(leaves, loss_of, batches, lr, clip=0.0, after_epoch=lambda: None):
    """Adam on ``leaves`` over epochs of batches (index tensors); ``loss_of(index)``."""
    moments, step = {}, 0
    for epoch in batches:
        for index in epoch:
            step += 1
            gradients = torch.autograd.grad(loss_of(index), list(leaves.values()))
            norm = torch.sqrt(sum((g**2).sum() for g in gradients))
            factor = min(1.0, clip / (float(norm) + 1e-6)) if clip else 1.0
            adamw(leaves, {n: g * factor for n, g in zip(leaves, gradients, strict=True)}, moments, step, lr)
        after_epoch()


def orders(generator, count, size, epochs):
    return [list(torch.randperm(count, generator=generator).split(size)) for _ in range(epochs)]


def assert_close_named(got, expected):
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=2e-4, atol=1e-4, msg=name)


def test_a_supervised_round_equals_the_equations(small, split, tmp_path):
    options = small(*ADAM, "train.epochs=2", "train.lr=0.003", "method.text_lr=0.003")
    pair = Pair(options, split, tmp_path)
    start, text_start = pair.server.state.shared, pair.server.state.server
    _, (payload,) = pair.train(0, [1])

    reference = Reference(split.classes)
    texts = reference.texts(updates_of(pair.named(Scope.SERVER, text_start)))
    leaves = {n: v.requires_grad_(True) for n, v in pair.named(Scope.SHARED, start).items()}
    images, labels = images_of(split, 1)

    def loss(index):
        log_p = reference.log_probs(reference.z(images[index], updates_of(leaves)), texts)
        return -log_p[torch.arange(len(index)), labels[index]].mean()

    order = torch_generator(options.seed, "client", 1, 0, "train", "order")
    descend(leaves, loss, orders(order, len(labels), 16, 2), 0.003)
    assert_close_named(pair.named(Scope.SHARED, start + payload.params), leaves)

    # The upload: unit class-token embeddings of the trained model, of every image (fewer than 16 a class here).
    with torch.no_grad():
        z = F.normalize(reference.z(images, updates_of(leaves)), dim=-1)
    sent = payload.extras["embeddings"]
    assert sent.dtype is torch.float16 and payload.extras["labels"].tolist() == labels.tolist()
    torch.testing.assert_close(sent.float(), z, rtol=0, atol=2e-3)

    # The server: cross-entropy of what was sent against class texts with the text LoRA.
    text = {n: v.requires_grad_(True) for n, v in pair.named(Scope.SERVER, text_start).items()}

    def text_loss(index):
        logits = reference.scale * sent[index].float() @ reference.texts(updates_of(text)).t()
        return -F.log_softmax(logits, -1)[torch.arange(len(index)), labels[index]].mean()

    order = torch_generator(options.seed, "server", 0, "order")
    descend(text, text_loss, orders(order, len(labels), 16, 2), 0.003)
    assert_close_named(pair.named(Scope.SERVER, pair.server.state.server), text)
    # What the next clients get are the texts of the new parameters.
    got = codec.decode(pair.server.begin(1, Phase()).texts).extras
    assert set(got) == {"base"}
    with torch.no_grad():
        torch.testing.assert_close(got["base"], reference.texts(updates_of(text)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["k3", "exact"])
def test_a_round_of_policy_optimisation_equals_the_equations(small, split, tmp_path, kind):
    options = small(*ADAM, "train.epochs=1", "train.lr=0.003", "method.sigma=6", "method.group=4", "method.rl_epochs=2",
                    "method.old_policy=epoch", f"method.kl_estimator={kind}", "rounds=2")  # fmt: skip
    pair = Pair(options, split, tmp_path)
    state = pair.server.state
    sft = state.shared + 0.03 * torch.randn(state.shared.shape, generator=torch.Generator().manual_seed(8))
    pair.server.state = state.step(state.shared, sft=sft)
    start, text_start = pair.server.state.shared, pair.server.state.server
    (report,), (payload,) = pair.train(1, [1], deliver=False)

    reference = Reference(split.classes)
    with torch.no_grad():
        texts = reference.texts(updates_of(pair.named(Scope.SERVER, text_start)))
        anchor, current = (updates_of(pair.named(Scope.SHARED, values)) for values in (sft, start))
        mixed = {path: 0.5 * anchor[path] + 0.5 * current[path] for path in anchor}
        images, labels = images_of(split, 1)
        log_ref = reference.log_probs(reference.z(images, mixed), texts)
    leaves = {n: v.requires_grad_(True) for n, v in pair.named(Scope.SHARED, start).items()}
    old = {path: delta.detach().clone() for path, delta in updates_of(leaves).items()}
    draws = torch_generator(options.seed, "client", 1, 1, "train", "rollout")
    rewards = []

    def loss(index):
        with torch.no_grad():
            z_old = reference.z(images[index], old)
            log_old = reference.log_probs(z_old, texts)
            noise = [6.0 * torch.randn(z_old.shape, generator=draws) for _ in range(4)]
        log_p = reference.log_probs(reference.z(images[index], updates_of(leaves)), texts)
        total = 0.0
        for i, image in enumerate(index.tolist()):
            actions = [int((F.normalize(z_old[i] + e[i], dim=-1) @ texts.t()).argmax()) for e in noise]
            r = [float(a == int(labels[image])) for a in actions]
            rewards.append(sum(r) / 4)
            mean = sum(r) / 4
            std = math.sqrt(sum((x - mean) ** 2 for x in r) / 3)
            for action, reward in zip(actions, r, strict=True):
                advantage = (reward - mean) / (std + 1e-4)
                rho = (log_p[i, action] - log_old[i, action]).exp()
                gain = torch.min(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
                u = (log_ref[image, action] - log_p[i, action]).clamp(-20, 20)
                k3 = (u.exp() - u - 1).clamp(max=10)
                exact = (log_p[i].exp() * (log_p[i] - log_ref[image])).sum()
                total = total - (gain - 0.5 * (k3 if kind == "k3" else exact))
        return total / (4 * len(index))

    def renew():
        old.update({path: delta.detach().clone() for path, delta in updates_of(leaves).items()})

    order = torch_generator(options.seed, "client", 1, 1, "train", "order")
    descend(leaves, loss, orders(order, len(labels), 16, 2), 0.003, clip=1.0, after_epoch=renew)
    assert_close_named(pair.named(Scope.SHARED, start + payload.params), leaves)
    assert report.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
    assert 0.1 < report.metrics["zero_std_share"] < 0.95


def test_without_training_the_model_is_the_frozen_clip(small, split):
    server = Server(small(*ADAM), task_view(split), split.proxy, novel_names(split))
    bench = server.bench
    texts = codec.decode(server.begin(0, Phase()).texts).extras["base"]
    with torch.no_grad():
        torch.testing.assert_close(texts, bench.zero_shot_classes(split.classes), rtol=0, atol=1e-6)
        batch = next(iter(bench.images(split.test).in_order()))
        logits = bench.method.predict(bench.model, batch, "global", texts)
        expected = bench.backbone.logit_scale * batch.frozen() @ bench.zero_shot_classes(split.classes).t()
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


def test_policy_optimisation_starts_at_its_reference(small, split, tmp_path, monkeypatch):
    """Round M + 1: the reference is where training starts, so the KL and its gradient are exactly zero."""
    options = small(*ADAM, "rounds=2", "method.sigma=1e-9", "method.rl_epochs=1")
    pair = Pair(options, split, tmp_path)
    pair.server.state = pair.server.state.step(pair.server.state.shared, sft=pair.server.state.shared.clone())
    (report,), (payload,) = pair.train(1, [0], deliver=False)
    # Every group has one outcome: neither reward nor KL moves anything, though Adam would turn rounding into steps.
    assert report.metrics["zero_std_share"] == 1.0
    assert report.metrics["loss_kl"] == 0.0 and report.metrics["loss_policy"] == 0.0
    assert not payload.params.any()


def test_groups_without_spread_have_no_advantage():
    rewards = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    got = group_advantages(rewards)
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    torch.testing.assert_close(got[:, 2], torch.tensor([2 / 3, -1 / 3, -1 / 3]) / (std + 1e-4))
    assert not got[:, :2].any()
    assert torch.isfinite(group_advantages(rewards.half())).all() and not group_advantages(torch.ones(7, 5)).any()
    with pytest.raises(ValueError, match="2 or more draws"):
        group_advantages(torch.ones(1, 4))


def test_low_precision_stays_finite(small, split, tmp_path):
    pair = Pair(small(*ADAM, "rounds=2", "engine.precision=bf16", "method.rl_epochs=1"), split, tmp_path)
    _, (payload,) = pair.train(1, [0], deliver=False)
    assert torch.isfinite(payload.params).all()
    assert payload.params.dtype == torch.float32 and payload.params.abs().max() > 0
    assert all(flat.data.dtype == torch.float32 for flat in pair.worker.bench.parameters.values())


def test_clipping_by_hand():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    gain = clipped_gain(ratio, advantage, clip=0.2)
    torch.testing.assert_close(gain.detach(), torch.tensor([1.2, -0.8, -1.5, 0.5]))
    (gradient,) = torch.autograd.grad(gain.sum(), ratio)
    assert gradient.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_kl_estimates():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator).double()
    other = (logits + torch.randn(6, generator=generator)).log_softmax(-1)
    p = logits.log_softmax(-1)
    exact = float((p.exp() * (p - other)).sum())
    assert float(kl_estimate(p, other, kind="exact").sum()) == pytest.approx(exact, abs=1e-12)
    actions = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    k3 = kl_estimate(p[actions], other[actions])
    assert bool((k3 >= 0).all()) and float(k3.mean()) == pytest.approx(exact, rel=0.02)
    assert not kl_estimate(p, p).any()
    # Both clamps, and no overflow.
    torch.testing.assert_close(
        kl_estimate(torch.tensor([-60.0, -1.0]), torch.tensor([-1.0, -60.0])), torch.tensor([10.0, 10.0])
    )
    # In expectation over pi: k3 has the gradient of KL(ref || pi), weighted by the ratio that of KL(pi || ref).
    for kind, target in (
        ("k3", lambda q: (other.exp() * (other - q)).sum()),
        ("k3_is", lambda q: (q.exp() * (q - other)).sum()),
    ):
        leaf = logits.clone().requires_grad_(True)
        q = leaf.log_softmax(-1)
        (got,) = torch.autograd.grad((q.detach().exp() * kl_estimate(q, other, kind=kind)).sum(), leaf)
        (expected,) = torch.autograd.grad(target(leaf.log_softmax(-1)), leaf)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="'k4' is unknown"):
        kl_estimate(p, other, kind="k4")
    assert torch.equal(snapped(p + 1e-6, p), p) and torch.equal(snapped(other, p), other)


def test_the_reference_is_the_exact_mixture():
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 10, generator=generator), torch.randn(7, 4, generator=generator)) for _ in range(2)]
    (a1, b1), (a2, b2) = pairs
    a, b = mix_lora(*pairs)
    assert a.shape == (8, 10) and b.shape == (7, 8)
    torch.testing.assert_close(b @ a, 0.5 * b1 @ a1 + 0.5 * b2 @ a2, rtol=1e-6, atol=1e-6)
    a, b = mix_lora(*pairs, weight=0.2)
    torch.testing.assert_close(b @ a, 0.2 * b1 @ a1 + 0.8 * b2 @ a2, rtol=1e-6, atol=1e-6)


def test_mean_of_products_is_the_best_of_its_rank():
    generator = torch.Generator().manual_seed(2)
    made = [(torch.randn(2, 9, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(3)]
    weights = [1, 3, 4]
    mean = sum(w * b.double() @ a.double() for w, (a, b) in zip(weights, made, strict=True)) / 8
    u, s, v = torch.linalg.svd(mean)
    a, b = truncated_mean(made, weights, rank=2)
    torch.testing.assert_close((b @ a).double(), u[:, :2] @ torch.diag(s[:2]) @ v[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a @ a.t(), torch.eye(2), rtol=0, atol=1e-6)
    # Clients that agree are returned as they are; nobody's direction stays open to learning.
    a, b = truncated_mean([made[0], made[0]], [1, 1], rank=2)
    torch.testing.assert_close(b @ a, made[0][1] @ made[0][0], rtol=1e-5, atol=1e-5)
    a, b = truncated_mean([(made[0][0], torch.zeros(6, 2))], [1], rank=2)
    assert not b.any() and bool((a.norm(dim=1) > 0.99).all())
    with pytest.raises(ValueError, match="no update of positive weight"):
        truncated_mean([], [], rank=2)


def test_uploads_are_unit_vectors_of_a_balanced_subset():
    labels = torch.tensor([3] * 10 + [1] * 2 + [7] * 5)
    kept = balanced_subset(labels, 4, torch.Generator().manual_seed(0))
    assert labels[kept].bincount(minlength=8).tolist() == [0, 2, 0, 4, 0, 0, 0, 4] and (kept.diff() > 0).all()
    assert not torch.equal(kept, balanced_subset(labels, 4, torch.Generator().manual_seed(1)))
    z = F.normalize(torch.randn(17, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    means, of = prototypes(z, labels, min_count=5)
    assert of.tolist() == [3, 7]
    torch.testing.assert_close(means[1], F.normalize(z[12:].mean(0), dim=0))
    assert prototypes(z, labels, min_count=11)[0].shape == (0, 5)


@pytest.mark.parametrize(
    "words",
    [
        ("method.per_class=1",),
        ("method.upload=samples",),
        ("method.upload=prototypes", "method.min_count=2", "method.upload_noise=0.1"),
    ],
)
def test_what_leaves_a_client(small, split, tmp_path, words):
    pair = Pair(small(*ADAM, *words), split, tmp_path)
    _, (first,) = pair.train(0, [2], deliver=False)
    own = split.train.labels[split.clients[2].train]
    assert first.extras.keys() == {"embeddings", "labels"} and first.extras["embeddings"].shape[1] == 64
    norms = first.extras["embeddings"].float().norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=2e-3)
    count, classes = len(first.extras["labels"]), len(set(own.tolist()))
    limits = {"method.per_class=1": classes, "method.upload=samples": len(own)}
    assert 0 < count <= limits.get(words[0], classes)
    assert set(first.extras["labels"].tolist()) <= set(own.tolist()) and max(own) < 48


def test_rows_may_vary_but_not_exceed_the_client_or_disagree():
    wire = (WireField("embeddings", "up", ("R", 3), "float16"), WireField("labels", "up", ("R",), "int32"))

    def problem(rows, labels):
        extras = {"embeddings": torch.zeros(rows, 3).half(), "labels": torch.zeros(labels, dtype=torch.int32)}
        return update_problem(Payload(None, extras), wire, params=None, sizes={"R": 4}, share=1.0)

    assert problem(4, 4) is None and problem(0, 0) is None
    assert "labels is" in problem(4, 3) and "embeddings is" in problem(5, 5)


def test_novel_names_reach_the_server_s_texts_at_evaluation_only(small, split, tmp_path):
    pair = Pair(small(*ADAM), split, tmp_path)
    assert pair.server.bench.view.classes == split.classes
    assert set(codec.decode(pair.server.begin(0, Phase()).texts).extras) == {"base"}
    pair.train(0, [0, 1])
    texts = codec.decode(pair.server.begin(0, EVALUATION).texts).extras
    reference = Reference(split.novel.classes)
    with torch.no_grad():
        expected = reference.texts(updates_of(pair.named(Scope.SERVER, pair.server.state.server)))
    torch.testing.assert_close(texts["novel"], expected, rtol=0, atol=1e-5)
    pair.train(1, [0, 1])
    assert max(int(label) for label in pair.worker.task.train.labels) < 48


def test_the_rows_of_the_ablation_table(small, split, tmp_path):
    """Plain LoRA, decoupled, two stages, both: who owns the text LoRA, what is sent, and which objective trains."""
    seen = {}
    for decouple in ("false", "true"):
        for two_stage in ("false", "true"):
            words = (f"method.decouple={decouple}", f"method.two_stage={two_stage}", "rounds=2", "method.sigma=3")
            pair = Pair(small(*ADAM, *words), split, tmp_path)
            pair.train(0, [0, 1])
            reports, _ = pair.train(1, [0, 1])
            shared, server = pair.server.state.shared.numel(), pair.server.state.server.numel()
            seen[decouple, two_stage] = shared, server, sorted(n for n in reports[0].metrics if n.startswith("loss"))
            assert torch.isfinite(pair.server.state.shared).all()
    image, text = 6144, 2 * 3 * 96 * 4
    supervised, rewarded = ["loss_ce"], ["loss_kl", "loss_policy"]
    assert seen == {
        ("false", "false"): (image + text, 0, supervised),
        ("true", "false"): (image, text, supervised),
        ("false", "true"): (image + text, 0, rewarded),
        ("true", "true"): (image, text, rewarded),
    }


@pytest.mark.parametrize(
    "words",
    [
        ("method.noise_at=block_input", "method.sigma=0.5", "method.sigma_relative=true", "method.old_policy=round"),
        ("method.noise_at=embed_post_norm", "method.action=categorical", "method.old_policy=step"),
        ("method.kl_estimator=k3_is", "method.agg=delta", "method.sigma=3"),
    ],
)
def test_variants_train(small, split, tmp_path, words):
    pair = Pair(small(*ADAM, *words, "rounds=2", "method.rl_epochs=2"), split, tmp_path)
    pair.train(0, [0, 1])
    before = pair.server.state.shared
    reports, _ = pair.train(1, [0, 1])
    figures = reports[0].metrics
    assert 0 < figures["reward"] < 1 and figures["zero_std_share"] < 1 and figures["loss_policy"] != 0
    assert not torch.equal(before, pair.server.state.shared) and torch.isfinite(pair.server.state.shared).all()
    if "method.old_policy=step" in words:
        assert figures["clip_share"] == 0


@pytest.mark.parametrize("round_index", [0, 1], ids=["supervised", "policy"])
def test_kept_activations_change_rounding_only(small, split, tmp_path, round_index):
    trained, words = [], (*ADAM, "rounds=2", "train.optimizer=sgd", "train.lr=0.1")
    for cache in ("off", "fp32", "fp16"):
        pair = Pair(small(*words, f"engine.cache={cache}"), split, tmp_path)
        _, (payload,) = pair.train(round_index, [1], deliver=False)
        trained.append(payload.params)
        assert (pair.worker.bench.prefixes.bytes_kept > 0) == (cache != "off")
    assert trained[0].abs().max() > 1e-3
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(trained[2], trained[0], rtol=0, atol=1e-3)


RUN = [*(w for w in SMALL if not w.startswith("rounds")), *ADAM, "rounds=4", "method.sigma=3", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("feddtl") / "run"
    assert main([*RUN, f"out={out}"]) == 0
    return out


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("done", [2, 3])
def test_resuming_around_the_switch_leaves_the_same_bits(finished, tmp_path, capsys, done):
    """Just before policy optimisation begins, and after clients were sent the anchor (which is not counted again)."""
    out = shutil.copytree(finished, tmp_path / "again")
    for later in range(done + 1, 5):  # as a run leaves it that is killed in the round after
        shutil.rmtree(out / "checkpoints" / f"round_{later:05d}")
    (out / "summary.json").unlink()
    shutil.rmtree(out / "adapters")
    assert main([*RUN, f"out={out}", "resume=auto"]) == 0
    assert f"resumed after round {done}" in capsys.readouterr().out
    assert_same_bits(finished, out)


def test_bytes_are_those_of_the_closed_form(finished, split):
    task = split
    shared, classes, dim, held = 6144, len(task.classes), 64, len(task.clients)
    images = sum(len(client.train) for client in task.clients)
    down = held * 4 * (shared + classes * dim)
    up = held * 4 * shared + images * (2 * dim + 4)
    once = held * 4 * shared
    for number, record in enumerate(records(finished)):
        expected = down + (once if number == 2 else 0)  # the first round of policy optimisation brings the anchor
        assert 0 < record["bytes_down"] - expected < held * 500, number
        assert 0 < record["bytes_up"] - up < held * 500


def test_a_lack_of_signal_is_said(tmp_path, capsys):
    words = [w for w in RUN if not w.startswith(("rounds", "method.sigma"))]
    assert main([*words, "rounds=2", "method.sigma=0.001", "eval.every=0", f"out={tmp_path / 'run'}"]) == 0
    first, second = records(tmp_path / "run")
    assert first["notes"] == [] and "method.action=categorical" in second["notes"][0]
    assert "note: round 2: policy optimisation has no signal" in capsys.readouterr().out
    assert "clean_accuracy" in first["clients"] and second["clients"]["zero_std_share"] > 0.95


def test_contradictions_are_refused(small, task):
    for words, message in (
        (["method.sft_rounds=4", "rounds=4"], "leaves none of rounds=4"),
        (["method.sigma=0"], "makes all draws of a group equal"),
        (["method.decouple=false", "method.upload=samples"], "uploads no embeddings"),
        (["method.towers=both"], "leave method.towers at vision"),
        (["backbone=vit_tiny_patch16_224", "backbone.pretrained=none"], "has no text tower"),
    ):
        with pytest.raises(OptionError, match=message):
            parse_options(["method=feddtl", *words])
    with pytest.raises(BackboneError, match="has 4: use at most 4"):
        Bench(small("method=feddtl", "method.vision_blocks=5"), task_view(task), gpu_share=0)


def test_the_loaded_run_has_the_server_s_texts(finished, split):
    summary = json.loads((finished / "summary.json").read_text())
    for part, names, labelled in (("base", None, split.test), ("novel", split.novel.classes, split.novel.test)):
        predicted = rayfed.load_run(finished, classes=names).logits(labelled.images).argmax(-1).numpy()
        assert summary["global"][part] == pytest.approx((predicted == labelled.labels).mean())
