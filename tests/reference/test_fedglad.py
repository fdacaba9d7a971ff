"""FedGLAD against a slow reference written from the method's equations, and the properties its specification lists."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from rayfed.adapters.scope import Scope
from rayfed.aggregation.exact import ExactSum
from rayfed.backbones import tiny
from rayfed.comms import codec
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, TrainJob
from rayfed.engine.server import Server
from rayfed.messages import ClientUpdate, Payload, Phase, RoundRef
from rayfed.methods.base import Batch, Updates
from rayfed.methods.fedglad import ClassSums, Dual, consensus, merged_class_means, softened_kl
from rayfed.rng import torch_generator

LAYERS = {"attn.q_proj": 0, "attn.k_proj": 1, "attn.v_proj": 2}


class Reference:
    """The paper's client on open_clip's own model: fused attention, weights W + (alpha / r) B A put in by hand."""

    def __init__(self, names: list[str], rank: int, alpha: float) -> None:
        self.model = tiny.load_tiny().requires_grad_(False)
        self.weights = {n: p.detach() for n, p in self.model.state_dict().items()}
        self.scale = alpha / rank
        tokens = tiny.HashTokenizer()([f"a photo of a {name}." for name in names])
        with torch.no_grad():
            self.classes = F.normalize(self.model.encode_text(tokens), dim=-1)
        self.logit_scale = self.model.logit_scale.exp()

    def features(self, images: torch.Tensor, lora: dict[str, torch.Tensor]) -> torch.Tensor:
        """Normalised features with ``lora`` = {layer.a: A, layer.b: B}."""
        weights = dict(self.weights)
        for layer in {name[:-2] for name in lora}:
            delta = self.scale * lora[f"{layer}.b"] @ lora[f"{layer}.a"]
            self._add(weights, layer, delta)
        visual = {k.removeprefix("visual."): v for k, v in weights.items() if k.startswith("visual.")}
        return F.normalize(functional_call(self.model.visual, visual, (images,)), dim=-1)

    def _add(self, weights: dict[str, torch.Tensor], layer: str, delta: torch.Tensor) -> None:
        if layer == "proj":
            weights["visual.proj"] = weights["visual.proj"] + delta.t()
            return
        block, _, part = layer.rpartition(".attn.") if ".attn." in layer else layer.rpartition(".mlp.")
        if f"attn.{part}" in LAYERS:
            key = f"visual.{block}.attn.in_proj_weight"
            rows = torch.zeros_like(weights[key])
            width = delta.shape[0]
            start = LAYERS[f"attn.{part}"] * width
            weights[key] = weights[key] + F.pad(delta, (0, 0, start, rows.shape[0] - start - width))
        else:
            key = f"visual.{layer}.weight"
            weights[key] = weights[key] + delta


def adamw(
    parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], moments: dict, step: int, lr: float
) -> None:
    """AdamW without weight decay, as its paper writes it (beta 0.9, 0.999, eps 1e-8)."""
    for name, value in parameters.items():
        m, v = moments.setdefault(name, (torch.zeros_like(value), torch.zeros_like(value)))
        m = 0.9 * m + 0.1 * gradients[name]
        v = 0.999 * v + 0.001 * gradients[name] ** 2
        moments[name] = (m, v)
        value.data -= lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


def short(name: str) -> str:
    """``backbone.image_tower.trunk.X.branches.global.a`` -> ``X.a`` in open_clip's names."""
    inner = name.removeprefix("backbone.image_tower.").removeprefix("trunk.")
    layer, _, factor = inner.rpartition(".")
    return f"{layer.rpartition('.branches.')[0]}.{factor}"


@pytest.fixture(scope="module")
def options(small):
    return small("method=fedglad", "train.batch=16", "train.epochs=2", "method.warmup=0", "train.lr=0.003")


def test_one_client_step_equals_the_paper(options, task, tmp_path):
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    # Start from a state where both branches act: B = 0 would hide mistakes in A.
    generator = torch.Generator().manual_seed(5)
    shared = server.state.shared + 0.02 * torch.randn(server.state.shared.shape, generator=generator)
    server.state = server.state.step(shared)
    phase = worker.bench.method.phases(0, 2)[0]
    broadcast = server.begin(0, phase)
    (report,), packet = worker.train(broadcast, [TrainJob(1, 1, phase)])
    # Parameters move by about 0.02; Adam turns rounding of vanishing gradients into at most a few per cent of a step.
    delta = server_payload(packet)

    expected_global, expected_local, expected_gate = reference_client(options, task, worker, shared)
    named = worker.bench.parameters[Scope.SHARED].named(shared + delta)
    for name, value in named.items():
        torch.testing.assert_close(value, expected_global[short(name)].detach(), rtol=2e-4, atol=1e-4, msg=name)
    private = worker.bench.parameters[Scope.PRIVATE].named(worker._store.load(report.state).private)
    for name, value in private.items():
        if name.startswith("gate"):
            torch.testing.assert_close(value, expected_gate[name.partition(".")[2]].detach(), rtol=2e-4, atol=1e-4)
        else:
            torch.testing.assert_close(value, expected_local[short(name)].detach(), rtol=2e-4, atol=1e-4, msg=name)
    assert report.num_examples == len(task.clients[1].train)


def server_payload(packet) -> torch.Tensor:
    ((_, _, message),) = packet.items
    payload = codec.decode(message)
    assert payload.extras == {}
    return payload.params


def reference_client(options, task, worker, shared):
    initial = worker.bench.initial[Scope.PRIVATE]
    start_g = {short(n): v.clone() for n, v in worker.bench.parameters[Scope.SHARED].named(shared).items()}
    private = worker.bench.parameters[Scope.PRIVATE].named(initial)
    start_l = {short(n): v.clone() for n, v in private.items() if not n.startswith("gate")}
    gate = {"weight": torch.zeros_like(private["gate.weight"]), "bias": torch.tensor([1.0])}
    reference = Reference(list(task.classes), options.method.rank, options.method.alpha)
    index = task.clients[1].train
    pixels = torch.from_numpy(task.train.images[index]).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.MEAN, tiny.STD))
    images, labels = (pixels - mean) / std, torch.from_numpy(task.train.labels[index])
    with torch.no_grad():
        frozen = reference.features(images, {})
    leaves = {f"g.{k}": v for k, v in start_g.items()} | {f"l.{k}": v for k, v in start_l.items()}
    leaves |= {f"gate.{k}": v for k, v in gate.items()}
    moments: dict = {}
    order = torch_generator(options.seed, "client", 1, 0, "train", "order")
    step = 0
    for _ in range(2):
        shuffled = torch.randperm(len(images), generator=order)
        for rows in shuffled.split(16):
            step += 1
            for leaf in leaves.values():
                leaf.requires_grad_(True)
            loss = reference_loss(reference, images[rows], frozen[rows], labels[rows], leaves)
            grads = torch.autograd.grad(loss, list(leaves.values()))
            norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
            scale = min(1.0, 1.0 / (norm + 1e-6))
            for leaf in leaves.values():
                leaf.requires_grad_(False)
            adamw(leaves, {n: g * scale for n, g in zip(leaves, grads, strict=True)}, moments, step, 0.003)
    split = {p: {k[len(p) + 1 :]: v for k, v in leaves.items() if k.startswith(p + ".")} for p in ("g", "l", "gate")}
    return split["g"], split["l"], split["gate"]


def reference_loss(reference, images, frozen, labels, leaves):
    h_g = reference.features(images, {k[2:]: v for k, v in leaves.items() if k.startswith("g.")})
    h_l = reference.features(images, {k[2:]: v for k, v in leaves.items() if k.startswith("l.")})
    g = torch.sigmoid((frozen * leaves["gate.weight"]).sum(-1, keepdim=True) + leaves["gate.bias"])
    z = F.normalize(g * h_g + (1 - g) * h_l, dim=-1)
    s, classes = reference.logit_scale, reference.classes
    return F.cross_entropy(s * z @ classes.T, labels) + 0.5 * F.cross_entropy(s * h_g @ classes.T, labels)


def test_server_distillation_equals_the_paper(small, task):
    options = small("method=fedglad", "method.distill_batch=16", "method.distill_lr=0.001")
    server = Server(options, task_view(task), task.proxy)
    generator = torch.Generator().manual_seed(1)
    deltas = [0.02 * torch.randn(server.state.shared.shape, generator=generator) for _ in range(3)]
    counts = [5, 20, 40]
    start = server.state.shared.clone()
    teacher = start + 0.01 * torch.randn(start.shape, generator=generator)
    server.state = server.state.step(start, teacher=teacher)
    run_server(server, deltas, counts)

    reference = Reference(list(task.classes), options.method.rank, options.method.alpha)
    split = server.bench.parameters[Scope.SHARED].named
    images = server.bench.backbone.normalise(torch.from_numpy(task.proxy.images))

    def logits(flat):
        lora = {short(n): v for n, v in split(flat).items()}
        return reference.logit_scale * reference.features(images, lora) @ reference.classes.T

    tau = 2.0
    with torch.no_grad():
        p = [n / 65 for n in counts]
        q = sum(w * torch.softmax(logits(start + d) / tau, -1) for w, d in zip(p, deltas, strict=True))
        q = 0.8 * q + 0.2 * torch.softmax(logits(teacher) / tau, -1)
    student = start + sum(w * d for w, d in zip(p, deltas, strict=True))
    student.requires_grad_(True)
    order = torch.randperm(16, generator=torch_generator(options.seed, "server", 0, "order"))
    log_student = torch.log_softmax(logits(student)[order] / tau, -1)
    loss = tau**2 * (q[order] * (q[order].log() - log_student)).sum(-1).mean()
    (gradient,) = torch.autograd.grad(loss, student)
    expected = {"s": student.detach().clone()}
    adamw(expected, {"s": gradient}, {}, 1, 0.001)
    torch.testing.assert_close(server.state.shared, expected["s"], rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(server.state.extras["teacher"], 0.9 * teacher + 0.1 * server.state.shared)


def run_server(server: Server, deltas, counts, extras=None):
    method = server.bench.method
    phase = method.phases(0, 2)[0]
    ref = RoundRef(0, phase.name, server.state.version)
    extras = extras or [{} for _ in deltas]
    items = tuple(
        ClientUpdate(ref, i, n, Payload(d, e)) for i, (d, n, e) in enumerate(zip(deltas, counts, extras, strict=True))
    )
    updates = Updates(ExactSum.zeros(server.state.shared.numel()), items)
    server.state = method.server_step(
        server.bench.model, server.state, updates, server._context(0, tuple(range(len(deltas))))
    )


def bench_of(options, task) -> Bench:
    return Bench(options, task_view(task), gpu_share=0)


def batch_of(bench, task, count=12) -> Batch:
    return next(iter(bench.images(task.test, np.arange(count)).in_order()))


@pytest.mark.parametrize("gate", ["feature", "layer", "fixed"])
def test_with_b_zero_every_view_is_the_frozen_model(small, task, gate):
    bench = bench_of(small("method=fedglad", f"method.gate={gate}"), task)
    batch = batch_of(bench, task)
    if gate == "feature":
        with torch.no_grad():
            bench.model.gate.weight.copy_(torch.randn(bench.backbone.embed_dim))
    with torch.no_grad():
        z, _, _ = bench.model.views(batch)
        torch.testing.assert_close(z, batch.frozen(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bench.model.global_features(batch.images), batch.frozen(), rtol=1e-5, atol=1e-5)


def test_a_equals_b_with_global_logits_in_fp32(small, task, tmp_path):
    results = {}
    for name, words in {
        "A": ["method.distill=proxy_server"],
        "B": ["method.distill=proxy_client", "method.proxy_logits=global", "method.proxy_dtype=fp32"],
    }.items():
        options = small("method=fedglad", *words)
        worker = ClientWorker(options, task, tmp_path / name)
        server = Server(options, task_view(task), task.proxy)
        phase = worker.bench.method.phases(0, 2)[0]
        outcomes, packet = worker.train(server.begin(0, phase), [TrainJob(c, 1, phase) for c in range(3)])
        assert len(outcomes) == 3
        server.receive(packet)
        server.finish(phase, (0, 1, 2), (0, 1, 2))
        results[name] = server.state.shared
    torch.testing.assert_close(results["A"], results["B"], rtol=0, atol=2e-6)


def test_upload_holds_the_global_lora_and_nothing_private(small, task, tmp_path):
    for distill, keys in {
        "proxy_server": set(),
        "proxy_client": {"proxy_logits"},
        "class_mean": {"class_logits", "class_counts"},
        "none": set(),
    }.items():
        options = small("method=fedglad", f"method.distill={distill}")
        worker = ClientWorker(options, task, tmp_path / distill)
        server = Server(options, task_view(task), task.proxy)
        phase = Phase(needs_all=True)
        _, packet = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
        payload = codec.decode(packet.items[0][2])
        assert set(payload.extras) == keys
        assert payload.params.shape == worker.bench.initial[Scope.SHARED].shape
        assert all("global" in e.name and "local" not in e.name for e in worker.bench.parameters[Scope.SHARED].entries)
        assert all("local" in e.name or "gate" in e.name for e in worker.bench.parameters[Scope.PRIVATE].entries)


def test_local_only_sends_nothing_and_global_only_keeps_nothing(small, task, tmp_path):
    options = small("method=fedglad", "method.branches=local_only")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    broadcast = server.begin(0, phase)
    (report,), packet = worker.train(broadcast, [TrainJob(0, 1, phase)])
    assert broadcast.payload == b"" and report.bytes_up == 0 and packet.items == ()
    assert bench_of(small("method=fedglad", "method.branches=global_only"), task).initial[Scope.PRIVATE].numel() == 0


def test_broadcast_is_the_distilled_student_never_the_teacher(small, task):
    options = small("method=fedglad", "method.distill_lr=0.01")
    server = Server(options, task_view(task), task.proxy)
    before = server.state.shared.clone()
    delta = 0.02 * torch.randn(before.shape, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        run_server(server, [delta], [10])
    sent = codec.decode(server.begin(1, Phase()).payload)
    assert torch.equal(sent.params, server.state.shared) and not sent.extras
    assert not torch.equal(sent.params, server.state.extras["teacher"])
    assert not torch.allclose(sent.params, before + 2 * delta, atol=1e-5)


def test_student_kl_falls_and_one_client_is_its_own_optimum(small, task):
    options = small(
        "method=fedglad",
        "method.teacher_weight=0",
        "method.student_start=previous",
        "method.distill_lr=0.0003",
        "method.distill_epochs=1",
        "method.distill_batch=16",
    )
    server = Server(options, task_view(task), task.proxy)
    delta = 0.02 * torch.randn(server.state.shared.shape, generator=torch.Generator().manual_seed(3))
    target = server.state.shared + delta
    seen = []
    for _ in range(6):
        context = server._context(0, (0,))
        items = (ClientUpdate(RoundRef(0, "train", 0), 0, 10, Payload(target - server.state.shared)),)
        updates = Updates(ExactSum.zeros(target.numel()), items)
        server.state = server.bench.method.server_step(server.bench.model, server.state, updates, context)
        seen.append(context.figures["distill_kl"])
    assert all(later < earlier for earlier, later in itertools.pairwise(seen)), seen
    # Starting at the client itself, the consensus is the student: no gradient, no movement.
    optimum = small("method=fedglad", "method.teacher_weight=0", "method.distill_batch=16")
    server = Server(optimum, task_view(task), task.proxy)
    before = server.state.shared
    context = server._context(0, (0,))
    updates = Updates(ExactSum.zeros(target.numel()), (ClientUpdate(RoundRef(0, "train", 0), 0, 10, Payload(delta)),))
    server.bench.method.server_step(server.bench.model, server.state, updates, context)
    assert abs(context.figures["distill_kl"]) < 1e-5, before


@pytest.mark.parametrize(("logit", "weight", "untouched"), [(60.0, 0.5, Scope.PRIVATE), (-60.0, 0.0, Scope.SHARED)])
def test_a_closed_gate_gives_no_gradient(small, task, logit, weight, untouched):
    options = small("method=fedglad", f"method.gate_init={logit}", f"method.global_weight={weight}")
    bench = bench_of(options, task)
    with torch.no_grad():
        for flat in bench.parameters.values():
            for entry, parameter in zip(flat.entries, flat.parameters, strict=True):
                if entry.tag == "lora":
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    for flat in bench.parameters.values():
        for parameter in flat.parameters:
            parameter.requires_grad_(True)
    batch = batch_of(bench, task)
    classes = bench.class_features()
    z, h_global, _ = bench.model.views(batch)
    loss = F.cross_entropy(bench.model.logits(z, classes), batch.labels)
    loss = loss + weight * F.cross_entropy(bench.model.logits(h_global, classes), batch.labels)
    loss.backward()
    lora = bench.parameters[untouched].span("lora")
    assert float(bench.parameters[untouched].grad[lora].abs().max()) < 1e-20
    other = Scope.SHARED if untouched is Scope.PRIVATE else Scope.PRIVATE
    assert float(bench.parameters[other].grad.abs().max()) > 1e-6


def test_class_means_withhold_rare_classes_and_survive_absent_ones():
    sums = ClassSums(4, 3, None)
    labels = torch.tensor([0] * 6 + [1] * 4)
    logits = torch.arange(40.0).view(10, 4)
    sums.add(labels, logits, torch.ones(10, 3))
    sent = sums.means(5)
    assert sent["class_counts"].tolist() == [6, 0, 0, 0]
    torch.testing.assert_close(sent["class_logits"][0], logits[:6].mean(0))
    assert not sent["class_logits"][1:].any() and not sent["class_features"][1:].any()
    other = ClassSums(4, 3, None)
    other.add(torch.tensor([0] * 12), torch.ones(12, 4), torch.ones(12, 3))
    merged = merged_class_means(
        [
            ClientUpdate(RoundRef(0, "train", 0), i, 10, Payload(None, means))
            for i, means in enumerate((sent, other.means(5)))
        ]
    )
    assert merged["class_seen"].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(merged["class_targets"][0], (6 * logits[:6].mean(0) + 12 * torch.ones(4)) / 18)
    assert all(torch.isfinite(value).all() for value in merged.values())


def test_clipped_logits_have_at_most_the_norm():
    sums = ClassSums(3, 2, 1.0)
    sums.add(torch.tensor([0, 0]), torch.tensor([[30.0, 40.0, 0.0], [0.3, 0.4, 0.0]]), torch.ones(2, 2))
    torch.testing.assert_close(sums.means(1)["class_logits"][0], torch.tensor([(0.6 + 0.3) / 2, (0.8 + 0.4) / 2, 0.0]))


@pytest.mark.parametrize("distill", ["class_mean", "class_mean_server"])
def test_data_free_distillation_trains(small, task, tmp_path, distill):
    words = ["method.towers=both"] if distill == "class_mean_server" else []
    options = small(
        "method=fedglad", f"method.distill={distill}", "method.min_count=1", "method.distill_lr=0.01", *words
    )
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    for index in range(2):
        outcomes, packet = worker.train(server.begin(index, phase), [TrainJob(c, 1, phase) for c in range(3)])
        assert all(isinstance(o, ClientReport) for o in outcomes), outcomes
        items, before = packet.items, server.state.shared
        server.receive(packet)
        figures = server.finish(phase, (0, 1, 2), (0, 1, 2))
    if distill == "class_mean":
        assert outcomes[0].metrics["loss_distill"] > 0
    else:
        assert figures["distill_kl"] > 0
        text = server.bench.parameters[Scope.SHARED].span("text")
        image = server.bench.parameters[Scope.SHARED].span("lora")
        mean = before + mean_update(items)
        # Only the text factors move beyond the average.
        torch.testing.assert_close(server.state.shared[image], mean[image])
        assert not torch.allclose(server.state.shared[text], mean[text], atol=1e-4)


def mean_update(items) -> torch.Tensor:
    total = sum(count for _, count, _ in items)
    return sum(count * codec.decode(message).params for _, count, message in items) / total


def test_tau_squared_keeps_the_gradient_size():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (0.1 * torch.randn(8, 20, generator=generator) for _ in range(2))
    norms = []
    for tau in (1.0, 2.0, 4.0):
        leaf = student.clone().requires_grad_(True)
        softened_kl(teacher, leaf, tau).mean().backward()
        norms.append(float(leaf.grad.norm()))
    assert max(norms) / min(norms) < 1.1


def test_mean_of_probabilities_is_not_softmax_of_mean_logits():
    logits = [torch.tensor([[4.0, 0.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.0]])]
    probs = consensus(logits, [1, 3], 2.0, average="probs")
    expected = 0.25 * torch.softmax(logits[0] / 2, -1) + 0.75 * torch.softmax(logits[1] / 2, -1)
    torch.testing.assert_close(probs, expected)
    other = consensus(logits, [1, 3], 2.0, average="logits")
    torch.testing.assert_close(other, torch.softmax((0.25 * logits[0] + 0.75 * logits[1]) / 2, -1))
    assert not torch.allclose(probs, other, atol=0.01)


def test_warmup_follows_the_rounds(small):
    from types import SimpleNamespace

    from rayfed.methods.fedglad import FedGLAD

    method = FedGLAD(small("method=fedglad", "method.warmup=0.1").method)
    scale = [method._warmup(SimpleNamespace(round_index=t, rounds=50)) for t in range(7)]
    assert scale == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]


def test_personal_prediction_uses_gate_and_both_branches(small, task):
    bench = bench_of(small("method=fedglad"), task)
    assert isinstance(bench.model, Dual)
    with torch.no_grad():
        for flat in bench.parameters.values():
            flat.data.add_(0.05 * torch.randn(flat.data.shape, generator=torch.Generator().manual_seed(2)))
        batch, classes = batch_of(bench, task), bench.class_features()
        got = bench.method.predict(bench.model, batch, "personal", classes)
        h_g, h_l = (bench.model.image_features(batch.images, name) for name in ("global", "local"))
        g = torch.sigmoid(batch.frozen() @ bench.model.gate.weight[:, None] + bench.model.gate.bias)
        z = F.normalize(g * h_g + (1 - g) * h_l, dim=-1)
        torch.testing.assert_close(got, bench.backbone.logit_scale * z @ classes.T)
        glob = bench.method.predict(bench.model, batch, "global", classes)
        torch.testing.assert_close(glob, bench.backbone.logit_scale * h_g @ classes.T)
