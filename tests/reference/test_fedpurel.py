"""FedPuReL against a slow reference written from the method's equations, and the properties its specification lists."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from rayfed.adapters.lora import Dropout
from rayfed.adapters.scope import Scope
from rayfed.backbones import tiny
from rayfed.comms import codec
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, TrainJob
from rayfed.engine.server import Server
from rayfed.errors import OptionError
from rayfed.methods.fedpurel import (
    RECORD,
    Purifier,
    purify,
    residual_loss,
    solve_temperatures,
    temperature_aligned_kl,
)
from rayfed.rng import torch_generator

KINDS = ("prompt", "lora", "adapter")


class Reference:
    """open_clip's own model with weights W + (alpha / r) B A put in by hand, and prompts written into the text."""

    def __init__(self, names) -> None:
        self.model = tiny.load_tiny().requires_grad_(False)
        self.names = names
        tokenizer = tiny.HashTokenizer()
        with torch.no_grad():
            texts = tokenizer([f"a photo of a {name}." for name in names])
            self.classes = F.normalize(self.model.encode_text(texts), dim=-1)
        self.tokens = tokenizer([f"{name}." for name in names])
        self.scale = self.model.logit_scale.exp()

    def image(self, images, lora=None, scale=1.0):
        weights = {k.removeprefix("visual."): v for k, v in self.model.state_dict().items() if k.startswith("visual.")}
        for layer in {name[:-2] for name in lora or {}}:
            key = f"transformer.resblocks.{layer}.weight"
            weights[key] = weights[key] + scale * lora[f"{layer}.b"] @ lora[f"{layer}.a"]
        return F.normalize(functional_call(self.model.visual, weights, (images,)), dim=-1)

    def text(self, context):
        """Text features of "[context] {name}.", the transformer's blocks run by hand on longer rows."""
        model, n = self.model, len(context)
        x = model.token_embedding(self.tokens)
        x = torch.cat([x[:, :1], context.expand(len(x), -1, -1), x[:, 1:]], 1)[:, : self.tokens.shape[1]]
        x = model.transformer(x + model.positional_embedding, attn_mask=model.attn_mask)
        ends = self.tokens.argmax(-1) + n
        pooled = model.ln_final(x)[torch.arange(len(x)), ends]
        return F.normalize(pooled @ model.text_projection, dim=-1)


def entropy(p):
    return -sum(float(v) * math.log(float(v)) for v in p if float(v) > 0)


def slow_tau(logits, target):
    """Temperature by trying: entropy rises with it."""
    low, high = 0.05, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if entropy(torch.softmax(logits.double() / middle, -1)) > target:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def slow_tkl(student, teacher):
    rows = []
    for s, z in zip(student, teacher, strict=True):
        target = (entropy(torch.softmax(s.detach().double(), -1)) + entropy(torch.softmax(z.double(), -1))) / 2
        p = torch.softmax(z / slow_tau(z, target), -1)
        q = torch.softmax(s / slow_tau(s.detach(), target), -1)
        rows.append((p * (p.clamp(min=1e-12).log() - q.clamp(min=1e-12).log())).sum())
    return torch.stack(rows).mean()


def slow_purify(task, align, *, per_tensor):
    """The projection written out, on lists of tensors."""
    groups = [[i] for i in range(len(task))] if per_tensor else [list(range(len(task)))]
    out = list(task)
    for group in groups:
        dot = sum(float((task[i] * align[i]).sum()) for i in group)
        length = sum(float((align[i] ** 2).sum()) for i in group)
        if dot < 0:
            for i in group:
                out[i] = task[i] - dot / length * align[i]
    return out


WORDS = ("method=fedpurel", "train.batch=16", "train.epochs=2", "train.lr=0.05", "train.weight_decay=0.01", "rounds=4")


def client_images(task, client):
    index = task.clients[client].train
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.MEAN, tiny.STD))
    images = (torch.from_numpy(task.train.images[index]).float() / 255 - mean) / std
    return images, torch.from_numpy(task.train.labels[index])


def trained(options, task, folder, phase_index, client=1, start=None):
    """One client's job in the given phase: worker, start values, report and packet."""
    worker = ClientWorker(options, task, folder)
    server = Server(options, task_view(task), task.proxy)
    if start is not None:
        server.state = server.state.step(start(server.state.shared))
    round_index, place = phase_index
    phase = worker.bench.method.phases(round_index, options.rounds)[place]
    (report,), packet = worker.train(server.begin(round_index, phase), [TrainJob(client, 1, phase)])
    assert isinstance(report, ClientReport), report
    return worker, server, report, packet


def nudged(shared):
    return shared + 0.02 * torch.randn(shared.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("granularity", ["tensor", "vector"])
def test_one_purified_step_equals_the_paper(small, task, tmp_path, granularity):
    options = small(*WORDS, f"method.purify={granularity}", "train.epochs=1", "method.record=false")
    worker, server, report, packet = trained(options, task, tmp_path, (0, 0), start=nudged)
    shared = server.state.shared
    flat = worker.bench.parameters[Scope.SHARED]
    lora = {short(n): v.clone() for n, v in flat.named(shared).items()}
    reference = Reference(task.classes)
    images, labels = client_images(task, 1)
    with torch.no_grad():
        zero_shot = reference.scale * reference.image(images) @ reference.classes.T
    order = torch.randperm(len(images), generator=torch_generator(options.seed, "client", 1, 0, "purify", "order"))
    momentum = {name: torch.zeros_like(v) for name, v in lora.items()}
    conflicts = []
    for rows in order.split(16):
        leaves = {n: v.requires_grad_(True) for n, v in lora.items()}
        logits = reference.scale * reference.image(images[rows], leaves, 16 / 8) @ reference.classes.T
        task_grad = torch.autograd.grad(F.cross_entropy(logits, labels[rows]), list(leaves.values()), retain_graph=True)
        align_grad = torch.autograd.grad(slow_tkl(logits, zero_shot[rows]), list(leaves.values()))
        merged = slow_purify(list(task_grad), list(align_grad), per_tensor=granularity == "tensor")
        conflicts.append(any(not torch.equal(a, b) for a, b in zip(merged, task_grad, strict=True)))
        for (name, value), gradient in zip(lora.items(), merged, strict=True):
            value.requires_grad_(False)
            momentum[name] = 0.9 * momentum[name] + gradient + 0.01 * value
            value.sub_(0.05 * momentum[name])
    assert any(conflicts)
    for name, value in flat.named(shared + packet.folded.mean()).items():
        torch.testing.assert_close(value, lora[short(name)], rtol=1e-3, atol=3e-5, msg=name)
    assert report.state is None
    assert 0 < report.metrics["conflict_share"] <= 1 and 0 < report.metrics["removed_share"] < 1


def short(name):
    """``backbone.image_tower...resblocks.2.mlp.c_fc.branches.global.a`` -> ``2.mlp.c_fc.a``."""
    parts = name.partition("resblocks.")[2].split(".")
    return ".".join([*parts[:3], parts[-1]])


def test_one_personal_step_equals_the_paper(small, task, tmp_path):
    options = small(*WORDS, "method.kind=prompt", "train.lr=0.5", "method.weight=0.7", "method.personal_rounds=1")
    worker, server, report, packet = trained(options, task, tmp_path, (3, 0), start=nudged)
    assert packet.folded.weight == 0 and report.bytes_up == 0
    reference = Reference(task.classes)
    images, labels = client_images(task, 1)
    own = worker.bench.initial[Scope.PRIVATE].view(4, -1).clone()
    with torch.no_grad():
        features = reference.image(images)
        global_logits = reference.scale * features @ reference.text(server.state.shared.view(4, -1)).T
    order = torch.randperm(len(images), generator=torch_generator(options.seed, "client", 1, 3, "personalize", "order"))
    for rows in order.split(16):
        own.requires_grad_(True)
        personal = reference.scale * features[rows] @ reference.text(own).T
        loss = 0.3 * F.cross_entropy(global_logits[rows] + personal, labels[rows])
        loss = loss + 0.7 * F.cross_entropy(personal, labels[rows])
        (gradient,) = torch.autograd.grad(loss, own)
        own = own.detach() - 0.5 * gradient
    saved = worker._store.load(report.state).private
    torch.testing.assert_close(saved.view(4, -1), own, rtol=1e-3, atol=2e-5)


def test_server_averages_by_examples_and_keeps_the_books(small, task, tmp_path):
    options = small(*WORDS, "train.epochs=1")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    (phase,) = worker.bench.method.phases(0, 4)
    start = server.state.shared
    reports, packet = worker.train(server.begin(0, phase), [TrainJob(c, 1, phase) for c in range(3)])
    payloads = [codec.decode(message) for _, _, message in packet.items]
    counts = [count for _, count, _ in packet.items]
    server.receive(packet)
    figures = server.finish(phase, (0, 1, 2), (0, 1, 2))
    want = start + sum(n / sum(counts) * p.params for n, p in zip(counts, payloads, strict=True))
    torch.testing.assert_close(server.state.shared, want, rtol=1e-5, atol=1e-7)
    assert all(set(p.extras) == {"record"} for p in payloads)
    rows = server.state.extras["purification"]
    assert rows.shape == (3, 2 + len(RECORD)) and rows[:, 1].tolist() == [0, 1, 2]
    torch.testing.assert_close(rows[:, 2:], torch.stack([p.extras["record"] for p in payloads]))
    for place, name in enumerate(RECORD):
        assert math.isclose(figures[f"{name}_max"], float(rows[:, 2 + place].max()), rel_tol=1e-6)
        torch.testing.assert_close(reports[1].metrics[name], float(rows[1, 2 + place]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_both_phases_and_predicts(small, task, tmp_path, kind):
    words = [f"method.kind={kind}", "method.schedule=interleaved", "train.epochs=1", "method.dropout=0.2"]
    options = small(*WORDS, *words)
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phases = worker.bench.method.phases(0, 4)
    assert [p.name for p in phases] == ["purify", "personalize"] and phases[1].cohort == "same"
    before = server.state.shared
    for phase in phases:
        reports, packet = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
        assert isinstance(reports[0], ClientReport), reports
        server.receive(packet)
        server.finish(phase, (0,), (0,))
    assert not torch.equal(server.state.shared, before)
    assert any(name.startswith("residual_share_") for name in reports[0].metrics)
    bench = worker.bench
    batch = next(iter(bench.images(task.test).in_order()))
    with torch.no_grad():
        classes = bench.class_features()
        l_g, l_p = (bench.model.branch(name, batch) for name in ("global", "personal"))
        torch.testing.assert_close(bench.method.predict(bench.model, batch, "global", classes), l_g)
        torch.testing.assert_close(bench.method.predict(bench.model, batch, "personal", classes), l_g + l_p)
    assert bench.initial[Scope.SHARED].numel() == bench.initial[Scope.PRIVATE].numel() > 0


def test_bfloat16_backbone(small, task, tmp_path):
    words = ("method.kind=adapter", "method.schedule=interleaved", "train.epochs=1", "engine.precision=bf16")
    for place in (0, 1):
        _, _, report, _ = trained(small(*WORDS, *words), task, tmp_path / str(place), (0, place))
        assert all(math.isfinite(value) for value in report.metrics.values())


def test_global_rounds_leave_no_private_state(small, task, tmp_path):
    _, _, report, _ = trained(small(*WORDS, "train.epochs=1"), task, tmp_path, (0, 0))
    assert report.state is None and not list(tmp_path.rglob("*.safetensors"))


def test_schedules(small):
    from rayfed.methods.fedpurel import FedPuReL

    method = FedPuReL(small("method=fedpurel", "rounds=5", "method.personal_rounds=2").method)
    names = [[phase.name for phase in method.phases(index, 5)] for index in range(5)]
    assert names == [["purify"]] * 3 + [["personalize"]] * 2
    shares = {rounds: small("method=fedpurel").method.personal_of(rounds) for rounds in (1, 2, 9, 10, 100)}
    assert shares == {1: 0, 2: 1, 9: 1, 10: 2, 100: 20}
    with pytest.raises(OptionError, match=r"personal_rounds=4 leaves none of rounds=4"):
        small("method=fedpurel", "rounds=4", "method.personal_rounds=4")
    small("method=fedpurel", "rounds=4", "method.personal_rounds=4", "method.schedule=interleaved")


@pytest.mark.parametrize("kind", ["prompt", "lora"])
def test_where_the_students_start(small, task, kind):
    bench = Bench(small("method=fedpurel", f"method.kind={kind}"), task_view(task), gpu_share=0)
    batch = next(iter(bench.images(task.test).in_order()))
    with torch.no_grad():
        same = torch.allclose(bench.model.branch("global", batch), bench.model.zero_shot(batch), atol=1e-4)
    assert same is (kind == "lora")  # a random prompt does not start at zero-shot


# Properties of the temperature-aligned KL

GENERATOR = torch.Generator().manual_seed(3)


def random_logits(rows, classes, size=3.0):
    return size * torch.randn(rows, classes, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_both_entropies_meet(classes):
    student, teacher = random_logits(6, classes), random_logits(6, classes, 1.0)
    tau = solve_temperatures(student, teacher)
    for logits, temperatures in ((student, tau.student), (teacher, tau.teacher)):
        got = [entropy(torch.softmax(row / t, -1)) for row, t in zip(logits, temperatures, strict=True)]
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), tau.target, rtol=1e-6, atol=1e-7)
    assert not bool(tau.saturated.any())
    each = temperature_aligned_kl(student, teacher, reduction="none")
    assert each.shape == (6,) and bool((each > -1e-12).all())
    want = [slow_tkl(s[None], z[None]) for s, z in zip(student, teacher, strict=True)]
    torch.testing.assert_close(each, torch.stack(want), rtol=1e-6, atol=1e-9)


def test_zero_for_equal_and_scaled_logits_and_shift_invariant():
    logits = random_logits(5, 7)
    for other in (logits, 0.3 * logits, logits + 5):
        each = temperature_aligned_kl(other, logits, reduction="none")
        torch.testing.assert_close(each, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9)
    assert float((solve_temperatures(logits, logits).student - 1).abs().max()) < 1e-8


def test_gradient_treats_temperatures_as_constants():
    student, teacher = random_logits(4, 6).requires_grad_(True), random_logits(4, 6).requires_grad_(True)
    temperature_aligned_kl(student, teacher).backward()
    tau = solve_temperatures(student, teacher)
    p = torch.softmax(teacher / tau.teacher[:, None], -1)
    q = torch.softmax(student / tau.student[:, None], -1)
    torch.testing.assert_close(student.grad, ((q - p) / (4 * tau.student[:, None])).detach())
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ([100.0, -100.0], [0.0, 0.0]),
        ([100.0, -100.0], [-100.0, 100.0]),
        ([0.0, 0.0, 0.0], [50.0, 0.0, 0.0]),
        ([5.0, 5.0, 0.0], [1.0, 0.0, 0.0]),
        ([1e4, 0.0, 0.0], [0.0, 1e4, 0.0]),
        ([0.0] * 1000, [100.0] + [-100.0] * 999),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_logits_stay_finite(student, teacher, dtype):
    s = torch.tensor([student], dtype=dtype, requires_grad=True)
    value = temperature_aligned_kl(s, torch.tensor([teacher], dtype=dtype))
    value.backward()
    assert bool(torch.isfinite(value)) and 0 <= value.item() <= 27.64
    assert bool(torch.isfinite(s.grad).all())


def test_unreachable_targets_are_reported():
    tau = solve_temperatures(torch.tensor([[100.0, -100.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 2.0]]))
    assert tau.saturated.tolist() == [[True, False], [True, False]]
    assert math.isclose(float(tau.student[0]), 20.0, rel_tol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_and_broken_logits_are_refused(bad):
    good, broken = torch.zeros(2, 3), torch.tensor([[0.0, bad, 0.0]] * 2)
    for pair, name in (((broken, good), "student"), ((good, broken), "teacher")):
        with pytest.raises(ValueError, match=f"{name} logits are not all finite"):
            temperature_aligned_kl(*pair)
    with pytest.raises(ValueError, match="C > 1"):
        temperature_aligned_kl(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="reduction"):
        temperature_aligned_kl(good, good, reduction="sum")


# Properties of purification


def gradients(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("per_tensor", [True, False])
def test_nothing_opposes_afterwards_and_agreement_is_untouched(per_tensor):
    shapes = ((3, 4), (5,), (2, 2, 2))
    for seed in range(6):
        task, align = gradients(*shapes, seed=seed), gradients(*shapes, seed=100 + seed)
        got = purify(task, align, per_tensor=per_tensor)
        for mine, slow in zip(got, slow_purify(task, align, per_tensor=per_tensor), strict=True):
            torch.testing.assert_close(mine, slow, rtol=1e-5, atol=1e-6)
        dots = [float((g.double() * b.double()).sum()) for g, b in zip(got, align, strict=True)]
        assert min(dots if per_tensor else [sum(dots)]) > -1e-6
        agreeing = purify(task, task, per_tensor=per_tensor)
        assert all(torch.equal(a, b) for a, b in zip(agreeing, task, strict=True))
        again = purify(got, align, per_tensor=per_tensor)
        for a, b in zip(again, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_strength_scales_what_is_removed():
    task, align = [torch.tensor([1.0, 0.0])], [torch.tensor([-1.0, 1.0])]
    for strength, want in ((0.0, [1.0, 0.0]), (0.5, [0.75, 0.25]), (1.0, [0.5, 0.5]), (2.0, [0.0, 1.0])):
        torch.testing.assert_close(purify(task, align, strength=strength)[0], torch.tensor(want))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, (1e-38, 1e-25, 1.0, 1e30, 3e38)),
        (torch.float64, (1e-300, 1e-160, 1.0, 1e160, 1e300)),
        (torch.float16, (6e-8, 1e-3, 1.0, 6e4)),
    ],
)
def test_purification_is_safe_at_any_size(dtype, sizes):
    for a, b in itertools.product(sizes, sizes):
        task, align = torch.tensor([a, a], dtype=dtype), torch.tensor([-b, 0], dtype=dtype)
        (got,) = purify([task], [align])
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.tensor([0, a], dtype=dtype))
    for pair in (([0.0, 0.0], [-1.0, 1.0]), ([1.0, -1.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0])):
        task, align = (torch.tensor(values, dtype=dtype) for values in pair)
        assert torch.equal(purify([task], [align])[0], task)


def test_shapes_must_match():
    with pytest.raises(ValueError, match="same shapes"):
        purify([torch.zeros(2)], [torch.zeros(3)])
    assert purify([], []) == []


def test_record_of_a_fit():
    purifier = Purifier([2, 1], 1.0, per_tensor=False)
    assert purifier.figures() == {"conflict_share": 0.0, "angle": 0.0, "removed_share": 0.0}
    merged = purifier({"ce": torch.tensor([1.0, 0.0, 0.0]), "align": torch.tensor([-1.0, 1.0, 0.0])})
    torch.testing.assert_close(merged, torch.tensor([0.5, 0.5, 0.0]))
    purifier({"ce": torch.tensor([1.0, 0.0, 0.0]), "align": torch.tensor([0.0, 1.0, 0.0])})
    figures = purifier.figures()
    assert math.isclose(figures["conflict_share"], 0.5)
    assert math.isclose(figures["angle"], (135 + 90) / 2, rel_tol=1e-6)
    assert math.isclose(figures["removed_share"], math.sqrt(0.5) / 2, rel_tol=1e-6)


# Personalisation


def test_no_gradient_reaches_the_global_model():
    l_g, l_p = (random_logits(4, 5).requires_grad_(True) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 3])
    residual_loss(l_g, l_p, labels).backward()
    assert l_g.grad is None and float(l_p.grad.abs().max()) > 0
    ends = [residual_loss(l_g, l_p, labels, weight=w) for w in (0.0, 1.0)]
    torch.testing.assert_close(ends[0], F.cross_entropy(l_g + l_p, labels))
    torch.testing.assert_close(ends[1], F.cross_entropy(l_p, labels))
    with pytest.raises(ValueError, match="weight"):
        residual_loss(l_g, l_p, labels, weight=1.1)


def test_dropout_follows_its_generator():
    x = torch.ones(2000)
    first, second = (Dropout(0.25, torch.Generator().manual_seed(1))(x) for _ in range(2))
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.03
