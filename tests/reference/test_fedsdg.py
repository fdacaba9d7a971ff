"""FedSDG against a slow reference written from the method's equations, and the properties its specification lists."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rayfed.adapters.gated import GatedLinear, Mixing, ScalarGates, gate_groups, gated_dual_lora, site
from rayfed.adapters.lora import VANISHING, mix_branches, rms
from rayfed.adapters.scope import Scope
from rayfed.aggregation.alignment import alignment_cosines, alignment_weights
from rayfed.aggregation.exact import ExactSum
from rayfed.backbones import tiny
from rayfed.comms import codec
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import TrainJob
from rayfed.engine.server import Server
from rayfed.messages import ClientUpdate, Payload, RoundRef
from rayfed.methods.base import Updates
from rayfed.methods.fedsdg import FedSDG, breadth, gate_penalty
from rayfed.rng import torch_generator

DEPTH = 4


# One client step: the image tower written out by hand, with the paper's layer in place of W_o and the second MLP layer.


class Reference:
    """open_clip's own model; its blocks are run by hand."""

    def __init__(self, names) -> None:
        self.model = tiny.load_tiny().requires_grad_(False)
        tokens = tiny.HashTokenizer()([f"a photo of a {name}." for name in names])
        with torch.no_grad():
            self.classes = F.normalize(self.model.encode_text(tokens), dim=-1)
        self.logit_scale = self.model.logit_scale.exp()

    def features(self, images, leaves, scale):
        visual = self.model.visual
        x = visual.conv1(images).flatten(2).transpose(1, 2)
        cls = visual.class_embedding.expand(len(x), 1, -1)
        x = visual.ln_pre(torch.cat([cls, x], 1) + visual.positional_embedding)
        for depth, block in enumerate(visual.transformer.resblocks):
            x = x + self.attention(block, block.ln_1(x), leaves, depth, scale)
            hidden = block.mlp.gelu(block.mlp.c_fc(block.ln_2(x)))
            x = x + sdg_layer(block.mlp.c_proj, hidden, leaves, f"{depth}.mlp", scale)
        return F.normalize(visual.ln_post(x[:, 0]) @ visual.proj, dim=-1)

    def attention(self, block, x, leaves, depth, scale):
        attn = block.attn
        heads = attn.num_heads
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in F.linear(x, attn.in_proj_weight, attn.in_proj_bias).chunk(3, -1)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return sdg_layer(attn.out_proj, mixed, leaves, f"{depth}.attn", scale)


def sdg_layer(linear, x, leaves, name, scale):
    """y = b + g + m p RMS(b) / sg[RMS(p)], sample by sample."""
    rows = []
    m = 1 / (1 + torch.exp(-leaves[f"{name}.gate"]))
    for sample in x:
        b = sample @ linear.weight.T + linear.bias
        g = scale * sample @ leaves[f"{name}.global.a"].T @ leaves[f"{name}.global.b"].T
        p = scale * sample @ leaves[f"{name}.private.a"].T @ leaves[f"{name}.private.b"].T
        rms_b, rms_p = (math.sqrt(float((z.detach() ** 2).mean()) + 1e-6) for z in (b, p))
        rows.append(b + g + m * p * (rms_b / rms_p))
    return torch.stack(rows)


def short(name: str) -> str:
    """``backbone.image_tower.transformer.resblocks.2.attn.out_proj.branches.global.a`` -> ``2.attn.global.a``."""
    parts = name.split(".")
    place = parts.index("resblocks")
    return ".".join([parts[place + 1], parts[place + 2], parts[-2], parts[-1]])


def adam(leaves, gradients, moments, step, rates, decay):
    for name, value in leaves.items():
        gradient = gradients[name] + decay.get(name, 0.0) * value
        m, v = moments.setdefault(name, (torch.zeros_like(value), torch.zeros_like(value)))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        moments[name] = (m, v)
        value.data -= rates(name) * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


WORDS = (
    "method=fedsdg",
    "train.batch=16",
    "train.epochs=2",
    "train.optimizer=adam",
    "train.weight_decay=0.01",
    "train.lr=0.002",
    "method.gate_lr=0.05",
    "method.gate_weight=0.1",
    "method.private_weight=0.01",
)


def test_one_client_step_equals_the_paper(small, task, tmp_path):
    options = small(*WORDS)
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    generator = torch.Generator().manual_seed(5)
    shared = server.state.shared + 0.02 * torch.randn(server.state.shared.shape, generator=generator)
    server.state = server.state.step(shared)
    (phase,) = worker.bench.method.phases(0, 2)
    (report,), packet = worker.train(server.begin(0, phase), [TrainJob(1, 1, phase)])
    expected = reference_client(options, task, worker, shared)
    delta = packet.folded.mean()
    for name, value in worker.bench.parameters[Scope.SHARED].named(shared + delta).items():
        near(value, expected[short(name)], name)
    saved = worker.bench.parameters[Scope.PRIVATE].named(worker._store.load(report.state).private)
    gates = saved.pop("gates.logits")
    want = torch.stack([expected[f"{d}.{s}.gate"] for d in range(DEPTH) for s in ("attn", "mlp")])
    torch.testing.assert_close(gates, want, rtol=2e-4, atol=3e-5)
    for name, value in saved.items():
        near(value, expected[short(name)], name)
    assert len(saved) == 4 * DEPTH


def near(got, want, name):
    """Equal, but for the few entries whose gradient is rounding noise, which Adam makes a step of full size."""
    off = (got - want).abs() > 3e-5 + 2e-4 * want.abs()
    assert float(off.float().mean()) < 0.005, (name, int(off.sum()), off.numel())
    torch.testing.assert_close(got, want, rtol=0, atol=0.002, msg=name)


def reference_client(options, task, worker, shared):
    start = worker.bench.parameters[Scope.SHARED].named(shared)
    start |= worker.bench.parameters[Scope.PRIVATE].named(worker.bench.initial[Scope.PRIVATE])
    del start["gates.logits"]
    leaves = {short(n): v.clone() for n, v in start.items()}
    leaves |= {f"{d}.{s}.gate": torch.tensor(-3.0) for d in range(DEPTH) for s in ("attn", "mlp")}
    reference = Reference(task.classes)
    index = task.clients[1].train
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.MEAN, tiny.STD))
    images = (torch.from_numpy(task.train.images[index]).float() / 255 - mean) / std
    labels = torch.from_numpy(task.train.labels[index])
    order = torch_generator(options.seed, "client", 1, 0, "train", "order")
    decay = {name: 0.01 for name in leaves if ".global." in name}
    moments: dict = {}
    step = 0
    for _ in range(2):
        for rows in torch.randperm(len(images), generator=order).split(16):
            step += 1
            for leaf in leaves.values():
                leaf.requires_grad_(True)
            features = reference.features(images[rows], leaves, 16.0 / 8)
            loss = F.cross_entropy(reference.logit_scale * features @ reference.classes.T, labels[rows])
            loss = loss + 0.1 * sum(torch.sigmoid(v) for n, v in leaves.items() if n.endswith("gate"))
            loss = loss + 0.01 * sum((v**2).sum() for n, v in leaves.items() if ".private." in n)
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
            grads = {n: g * min(1.0, 1.0 / (norm + 1e-6)) for n, g in grads.items()}
            for leaf in leaves.values():
                leaf.requires_grad_(False)
            adam(leaves, grads, moments, step, lambda n: 0.05 if n.endswith("gate") else 0.002, decay)
    return leaves


# Server step


def run_server(options, task, deltas, counts):
    server = Server(options, task_view(task), task.proxy)
    method = server.bench.method
    (phase,) = method.phases(0, 2)
    start = server.state.shared
    folded = ExactSum.zeros(start.numel())
    items = ()
    if phase.needs_all:
        items = tuple(
            ClientUpdate(RoundRef(0, "train", 0), i, n, Payload(d))
            for i, (d, n) in enumerate(zip(deltas, counts, strict=True))
        )
    else:
        for delta, count in zip(deltas, counts, strict=True):
            folded.add(delta.unsqueeze(0), [count if phase.weight == "examples" else 1])
    context = server._context(0, tuple(range(len(deltas))))
    updates = Updates(folded, items, equal=phase.weight == "equal")
    return start, method.server_step(server.bench.model, server.state, updates, context).shared, context.figures


def random_deltas(options, task, count):
    size = Bench(options, task_view(task), gpu_share=0).initial[Scope.SHARED].numel()
    common = torch.randn(size, generator=torch.Generator().manual_seed(9))
    return [0.01 * (common + torch.randn(size, generator=torch.Generator().manual_seed(i))) for i in range(count)]


@pytest.mark.parametrize(("weighting", "shares"), [("examples", (0.1, 0.3, 0.6)), ("equal", (1 / 3,) * 3)])
def test_server_mean(small, task, weighting, shares):
    options = small("method=fedsdg", f"method.weighting={weighting}")
    deltas = random_deltas(options, task, 3)
    start, new, _ = run_server(options, task, deltas, [10, 30, 60])
    want = start.double() + sum(w * d.double() for w, d in zip(shares, deltas, strict=True))
    torch.testing.assert_close(new, want.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reference", ["leave_one_out", "mean"])
@pytest.mark.parametrize("transform", ["relu", "softmax"])
def test_server_weights_by_agreement(small, task, reference, transform):
    words = [f"method.reference={reference}", f"method.transform={transform}", "method.smoothing=0.2"]
    options = small("method=fedsdg", "method.aggregate=alignment", "method.temperature=0.3", *words)
    deltas = random_deltas(options, task, 4)
    deltas[3] = -deltas[0]
    start, new, figures = run_server(options, task, deltas, [5, 1, 9, 90])
    cosines = []
    for k, delta in enumerate(deltas):
        others = [d for j, d in enumerate(deltas) if j != k or reference == "mean"]
        ref = sum(others) / len(others)
        cosines.append(float(delta @ ref / (delta.norm() * ref.norm())))
    raw = [max(c, 0.0) if transform == "relu" else math.exp(c / 0.3) for c in cosines]
    weights = [0.8 * r / sum(raw) + 0.05 for r in raw]
    want = start + sum(w * d for w, d in zip(weights, deltas, strict=True))
    torch.testing.assert_close(new, want, rtol=1e-5, atol=1e-6)
    assert math.isclose(figures["effective_clients"], 1 / sum(w * w for w in weights), rel_tol=1e-4)


def test_agreement_is_robust():
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(4, 50, generator=generator) + 1
    usual = {"reference": "leave_one_out", "transform": "relu", "temperature": 1.0, "smoothing": 0.0}
    weights = alignment_weights(deltas, **usual)
    assert math.isclose(float(weights.sum()), 1, rel_tol=1e-6)
    for size in (1e-30, 1e30):
        torch.testing.assert_close(alignment_weights(deltas * size, **usual), weights, rtol=1e-5, atol=1e-6)
    bad = torch.cat([deltas, torch.full((1, 50), float("nan"))])
    torch.testing.assert_close(alignment_weights(bad, **usual), torch.cat([weights, torch.zeros(1)]))
    for transform in ("relu", "softmax"):
        for reference in ("leave_one_out", "mean"):
            words = {**usual, "transform": transform, "reference": reference}
            zero = alignment_weights(torch.zeros(3, 5), **words)
            torch.testing.assert_close(zero, torch.full((3,), 1 / 3))
            assert alignment_weights(deltas[:1], **words).tolist() == [1.0]
        opposed = torch.stack([deltas[0], -deltas[0]])
        even = alignment_weights(opposed, **{**usual, "transform": transform, "reference": "mean"})
        torch.testing.assert_close(even, torch.full((2,), 0.5))
    assert alignment_cosines(torch.zeros(2, 3), reference="mean").tolist() == [0.0, 0.0]
    for wrong in ({"temperature": 0.0}, {"smoothing": 1.5}, {"reference": "x"}, {"transform": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            alignment_weights(deltas, **{**usual, **wrong})
    with pytest.raises(ValueError, match="none of the 1 updates is finite"):
        alignment_weights(bad[-1:], **usual)


# Properties of the layer


def parts(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("align", [None, "base", "global", "floor", "geomean"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 2, 5, 6)])
def test_samples_are_never_coupled(align, shape):
    b, g, p = parts(*shape)
    whole = mix_branches(b, g, p, 0.3, align=align)
    each = torch.cat([mix_branches(b[i : i + 1], g[i : i + 1], p[i : i + 1], 0.3, align=align) for i in range(4)])
    torch.testing.assert_close(whole, each)
    b2, g2, p2 = (torch.cat([z[:1], 100 * z[1:]]) for z in (b, g, p))
    torch.testing.assert_close(mix_branches(b2, g2, p2, 0.3, align=align)[:1], whole[:1])


def test_alignment_gives_the_anchor_size_and_is_its_own_ablation():
    b, g, p = parts(3, 5, 6)
    out = mix_branches(b, g, p, 1.0, align="base") - b - g
    torch.testing.assert_close(rms(out, 0.0), rms(b, 0.0), rtol=1e-5, atol=0)
    out = mix_branches(b, g, p, 1.0, align="global") - b - g
    torch.testing.assert_close(rms(out, 0.0), rms(g, 0.0), rtol=1e-5, atol=0)
    for align in (None, "base", "global", "floor", "geomean"):
        torch.testing.assert_close(mix_branches(b, g, p, 0.0, align=align), b + g)
    torch.testing.assert_close(mix_branches(b, g, p, 0.4, align=None), b + g + 0.4 * p)
    blended = gated_dual_lora(b, g, p, 0.4, Mixing(None, blend=True))
    torch.testing.assert_close(blended, b + 0.6 * g + 0.4 * p)
    with pytest.raises(ValueError, match="no anchor"):
        mix_branches(b, g, p, 0.4, align="bsae")


@pytest.mark.parametrize("align", ["base", "global", "floor", "geomean"])
def test_no_gradient_flows_through_sizes(align):
    b, g, p = (z.requires_grad_(True) for z in parts(3, 5, 6))
    cotangent = parts(3, 5, 6, seed=1)[0]
    m = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    (mix_branches(b, g, p, m, align=align) * cotangent).sum().backward()
    torch.testing.assert_close(b.grad, cotangent)
    torch.testing.assert_close(g.grad, cotangent)
    with torch.no_grad():
        factor = (mix_branches(b, g, p, 1.0, align=align) - b - g) / p
    torch.testing.assert_close(p.grad, 0.2 * factor * cotangent)
    torch.testing.assert_close(m.grad, (factor * p * cotangent).sum())


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e-4])
@pytest.mark.parametrize("detach", [True, False])
def test_a_vanishing_private_branch_neither_explodes_nor_freezes(size, detach):
    b, g, p = parts(3, 5, 6)
    p = (size * p).requires_grad_(True)
    (mix_branches(b, g, p, 0.5, align="base", detach=detach) * b).sum().backward()
    bound = 0.5 / VANISHING * float(b.abs().max())
    assert 0 < float(p.grad.abs().max()) <= bound
    torch.testing.assert_close(p.grad, 0.5 / VANISHING * b)


def test_gradient_is_untouched_where_the_branch_is_healthy():
    b, g, p = parts(3, 5, 6)
    for ratio, same in ((0.06, True), (0.04, False)):
        small = (ratio * p * rms(b, 0.0) / rms(p, 0.0)).requires_grad_(True)
        mix_branches(b, g, small, 1.0, align="base").sum().backward()
        want = torch.full((3,), 1 / ratio if same else 20.0, dtype=torch.float64)
        torch.testing.assert_close(small.grad[:, 0, 0], want, rtol=1e-3, atol=0)


def test_gates_are_grouped():
    names = [f"image_tower.blocks.{i}.{leaf}" for i in (0, 1, 11) for leaf in ("attn.proj", "mlp.fc2")]
    assert gate_groups(names, "mapping") == [0, 1, 2, 3, 4, 5]
    assert gate_groups(names, "block") == [0, 0, 1, 1, 2, 2]
    assert gate_groups(names, "one") == [0] * 6
    assert [site(n) for n in names] == ["00.attn", "00.mlp", "01.attn", "01.mlp", "11.attn", "11.mlp"]
    assert site("image_tower.proj") == "proj"
    fixed = ScalarGates(2, init=-3.0, fixed=0.5)
    assert fixed().tolist() == [0.5, 0.5] and not list(fixed.parameters())


@pytest.mark.parametrize(("gate", "count"), [("mapping", 8), ("block", 4), ("one", 1), ("fixed", 0)])
def test_every_granularity_trains_its_gates(small, task, tmp_path, gate, count):
    options = small("method=fedsdg", f"method.gate={gate}", "data.shots=1")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    (phase,) = worker.bench.method.phases(0, 2)
    (report,), _ = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
    saved = worker.bench.parameters[Scope.PRIVATE].named(worker._store.load(report.state).private)
    if count:
        assert saved["gates.logits"].shape == (count,)
        assert bool((saved["gates.logits"] != -3.0).all())
        assert len([n for n in report.metrics if n.startswith("gate/")]) == 8
    else:
        assert "gates.logits" not in saved and "loss_gate" not in report.metrics
    assert 0 < report.metrics["energy_share"] < 1


def test_upload_is_the_shared_branch_alone(small, task, tmp_path):
    options = small("method=fedsdg", "method.aggregate=alignment")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    (phase,) = worker.bench.method.phases(0, 2)
    _, packet = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
    payload = codec.decode(packet.items[0][2])
    assert not payload.extras and payload.params.shape == worker.bench.initial[Scope.SHARED].shape
    assert all(".global." in e.name for e in worker.bench.parameters[Scope.SHARED].entries)
    private = worker.bench.parameters[Scope.PRIVATE].entries
    assert all(".private." in e.name or e.name.startswith("gates") for e in private)


def test_views(small, task):
    bench = Bench(small("method=fedsdg"), task_view(task), gpu_share=0)
    batch = next(iter(bench.images(task.test).in_order()))
    classes = bench.class_features()
    with torch.no_grad():
        start = bench.model.logits(batch.frozen(), classes)
        torch.testing.assert_close(bench.method.predict(bench.model, batch, "global", classes), start)
        assert not torch.allclose(bench.method.predict(bench.model, batch, "personal", classes), start, atol=1e-2)
        bench.model.gates.logits.fill_(-100.0)
        torch.testing.assert_close(bench.method.predict(bench.model, batch, "personal", classes), start)
    assert sum(isinstance(m, GatedLinear) for m in bench.model.modules()) == 2 * DEPTH


def test_gate_penalties_and_warmup(small):
    gates = torch.tensor([0.1, 0.5, 0.8])
    assert math.isclose(float(gate_penalty(gates, "unilateral")), 1.4, rel_tol=1e-6)
    assert math.isclose(float(gate_penalty(gates, "bilateral")), 0.8, rel_tol=1e-6)
    method = FedSDG(small("method=fedsdg", "method.gate_warmup=2").method)
    task = SimpleNamespace(classes=("a", "b"))
    for index, active in ((0, False), (1, False), (2, True)):
        job = SimpleNamespace(round_index=index, class_features=None, task=task)
        weight = method._objective(job).__closure__
        values = [cell.cell_contents for cell in weight if isinstance(cell.cell_contents, float)]
        assert values == [0.01 if active else 0.0]


def test_private_rank_is_independent(small, task):
    bench = Bench(small("method=fedsdg", "method.private_rank=2"), task_view(task), gpu_share=0)
    ranks = {branch.a.shape[0] for branch in bench.model.private_branches()}
    scales = {branch.scale for branch in bench.model.private_branches()}
    assert ranks == {2} and scales == {8.0}


def test_breadth_of_a_client():
    assert breadth(torch.tensor([3, 3, 3]), 9) == "narrow"
    assert breadth(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4]), 9) == "medium"
    assert breadth(torch.arange(9), 9) == "broad"
    assert breadth(torch.arange(5), 90) == "broad", "five images cannot show more than five classes"
