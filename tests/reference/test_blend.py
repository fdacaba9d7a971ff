"""BLEND and MMA against a slow reference written from the equations, and the properties BLEND's specification lists."""

from __future__ import annotations

import pytest
import torch

from rayfed.adapters.bottleneck import Bottleneck, Shape, attach_bottlenecks, find_blocks, scale_gradient
from rayfed.adapters.lora import Switch
from rayfed.adapters.scope import Scope
from rayfed.backbones import load_backbone, tiny
from rayfed.backbones.base import Backbone
from rayfed.comms import codec
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, PredictJob, TrainJob
from rayfed.engine.server import Server
from rayfed.errors import AdapterError, OptionError
from rayfed.methods.blend import fuse
from rayfed.rng import torch_generator

KAPPA = 1e-3
WORDS = ("method=blend", "method.rank=4", "method.projection_rank=8", "train.lr=0.01", "train.weight_decay=0.1")
SHARES = {"gamma": 0.3, "fused_weight": 0.4}


class Reference:
    """open_clip's own CLIP, block by block, with every adapter written out; parameters in a flat dict of tensors."""

    def __init__(self, names) -> None:
        self.model = tiny.load_tiny().requires_grad_(False)
        self.tokens = tiny.HashTokenizer()([f"a photo of a {name}." for name in names])
        self.scale = float(self.model.logit_scale.exp())

    def tower(self, x, blocks, adapters, mask=None, middle=None):
        for number, block in enumerate(blocks):
            y = block(x, attn_mask=mask)
            if f"{number}.down.weight" in adapters:
                one = {k.split(".", 1)[1]: v for k, v in adapters.items() if k.startswith(f"{number}.")}
                hidden = (block.ln_1(x) @ one["down.weight"].T + one["down.bias"]).clamp(min=0)
                if middle is not None:
                    weight, bias = middle[len(blocks) - 1 - number]
                    hidden = (hidden @ weight.T + bias).clamp(min=0)
                y = y + KAPPA * (hidden @ one["up.weight"].T + one["up.bias"])
            x = y
        return x

    def tokens_of(self, images, adapters, middle=None):
        """The class token after the last block [B, d], before the last norm."""
        v = self.model.visual
        patches = v.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.expand(len(images), 1, -1), patches], 1) + v.positional_embedding
        return self.tower(v.ln_pre(x), v.transformer.resblocks, adapters, middle=middle)[:, 0]

    def text(self, adapters, middle=None):
        m = self.model
        x = m.token_embedding(self.tokens) + m.positional_embedding
        x = self.tower(x, m.transformer.resblocks, adapters, mask=m.attn_mask, middle=middle)
        x = m.ln_final(x)[torch.arange(len(x)), self.tokens.argmax(-1)]
        return unit(x @ m.text_projection)

    def heads(self, images, adapters, projection, pre_ln):
        raw = self.tokens_of(images, adapters)
        zeta = self.model.visual.ln_post(raw)
        source = raw if pre_ln else zeta
        hidden = (source @ projection["down.weight"].T + projection["down.bias"]).clamp(min=0)
        moved = source + hidden @ projection["up.weight"].T + projection["up.bias"]
        return zeta @ self.model.visual.proj, moved @ self.model.visual.proj


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def cross_entropy(logits, labels):
    return -(logits - logits.logsumexp(-1, keepdim=True))[torch.arange(len(labels)), labels].mean()


def short(name):
    """``backbone.X_tower.trunk.transformer.resblocks.2.branches.bottleneck.down.bias`` -> ``X.2.down.bias``."""
    if "resblocks" not in name:
        return name
    tower = "image" if "image_tower" in name else "text"
    number, rest = name.split("resblocks.")[1].split(".branches.")
    return f"{tower}.{number}.{rest.partition('.')[2]}"


def part(values, prefix):
    return {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}


def client_images(task, client):
    index = task.clients[client].train
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.MEAN, tiny.STD))
    images = (torch.from_numpy(task.train.images[index]).float() / 255 - mean) / std
    return images, torch.from_numpy(task.train.labels[index])


def blend_loss(reference, leaves, images, labels, pre_ln):
    general, personal = reference.heads(images, part(leaves, "image."), part(leaves, "projection."), pre_ln)
    classes = reference.text(part(leaves, "text."))
    g, p = unit(general), unit(personal)
    f = (1 - SHARES["gamma"]) * g + SHARES["gamma"] * p
    weight = SHARES["fused_weight"]
    anchor = cross_entropy(reference.scale * g @ classes.T, labels)
    return (1 - weight) * anchor + weight * cross_entropy(reference.scale * f @ classes.T, labels)


def reference_step(values, moments, gradients, step, optimizer):
    """One step at rate 0.01 with weight decay 0.1: AdamW as its paper has it, or plain SGD with an L2 term."""
    for name, value in values.items():
        gradient = gradients[name]
        if optimizer == "sgd":
            value.data -= 0.01 * (gradient + 0.1 * value.data)
            continue
        m, v = moments.get(name, (torch.zeros_like(value), torch.zeros_like(value)))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        moments[name] = m, v
        value.data *= 1 - 0.01 * 0.1
        value.data -= 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


def start_of(worker, shared, private):
    parameters = worker.bench.parameters
    named = {**parameters[Scope.SHARED].named(shared), **parameters[Scope.PRIVATE].named(private)}
    return {short(name): value.clone() for name, value in named.items()}


@pytest.mark.parametrize(("optimizer", "head"), [("sgd", "post_ln"), ("adamw", "pre_ln")])
def test_one_client_round_equals_the_paper(small, task, tmp_path, optimizer, head):
    words = [f"method.{name}={value}" for name, value in SHARES.items()]
    options = small(*WORDS, *words, f"train.optimizer={optimizer}", f"method.projection_input={head}")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    (report,), packet = worker.train(server.begin(0, phase), [TrainJob(1, 1, phase)])
    assert isinstance(report, ClientReport), report

    values = start_of(worker, server.state.shared, worker.bench.initial[Scope.PRIVATE])
    start = {name: value.clone() for name, value in values.items()}
    reference, moments = Reference(task.classes), {}
    images, labels = client_images(task, 1)
    order = torch.randperm(len(images), generator=torch_generator(options.seed, "client", 1, 0, "train", "order"))
    steps = len(images) // 16
    assert steps >= 2 and report.steps == steps and report.num_examples == 16 * steps
    for step in range(1, steps + 1):
        rows = order[16 * (step - 1) : 16 * step]
        for value in values.values():
            value.requires_grad_(True)
        loss = blend_loss(reference, values, images[rows], labels[rows], head == "pre_ln")
        gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
        for name, value in values.items():
            value.requires_grad_(False)
            if not name.startswith("projection."):  # kappa = 0.001 counts in the value, not in the gradient
                gradients[name] = gradients[name] / KAPPA
        reference_step(values, moments, gradients, step, optimizer)

    trained = start_of(worker, server.state.shared + mean_of(packet), worker._store.load(report.state).private)
    assert trained.keys() == values.keys()
    for name, value in values.items():
        # Adam turns the rounding of vanishing gradients into at most a few per cent of a step.
        slack = 4e-4 if optimizer == "adamw" else 2e-6
        torch.testing.assert_close(trained[name], value, rtol=2e-4, atol=slack, msg=lambda m, n=name: f"{n}: {m}")
    moved = [name for name in values if not torch.allclose(values[name], start[name], atol=1e-7)]
    assert {name.split(".")[0] for name in moved} == {"image", "text", "projection"}


def mean_of(packet):
    return packet.folded.mean()


def bench_of(options, task) -> Bench:
    return Bench(options, task_view(task), gpu_share=0)


def nudge(bench, size=0.05):
    """Move every parameter, so that nothing is zero."""
    generator = torch.Generator().manual_seed(2)
    for flat in bench.parameters.values():
        flat.data.add_(size * torch.randn(flat.data.shape, generator=generator))


def test_prediction_uses_both_heads_and_the_adapted_text(small, task):
    bench = bench_of(small(*WORDS, *(f"method.{n}={v}" for n, v in SHARES.items())), task)
    nudge(bench)
    reference = Reference(task.classes)
    values = {short(e.name): p.detach() for f in bench.parameters.values() for e, p in zip(f.entries, f.parameters)}  # noqa: B905
    batch = next(iter(bench.images(task.test).in_order()))
    with torch.no_grad():
        classes = bench.class_features()
        torch.testing.assert_close(classes, reference.text(part(values, "text.")), rtol=1e-5, atol=1e-5)
        general, personal = reference.heads(batch.images, part(values, "image."), part(values, "projection."), False)
        f = 0.7 * unit(general) + 0.3 * unit(personal)
        for view, feature in (("global", unit(general)), ("personal", f)):
            expected = reference.scale * feature @ classes.T
            got = bench.method.predict(bench.model, batch, view, classes)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_with_zero_up_both_heads_are_zero_shot(small, task):
    bench = bench_of(small(*WORDS, "method.init=zero_up", "method.gamma=0.5"), task)
    batch = next(iter(bench.images(task.test).in_order()))
    with torch.no_grad():
        zero_shot = bench.backbone.logit_scale * batch.frozen() @ bench.zero_shot_classes(task.classes).t()
        for view in ("global", "personal"):
            got = bench.method.predict(bench.model, batch, view, bench.class_features())
            torch.testing.assert_close(got, zero_shot, rtol=1e-5, atol=1e-4)


def test_zero_shot_stays_available_whatever_the_adapters_are(small, task):
    bench = bench_of(small(*WORDS), task)
    plain = load_backbone("tiny")
    nudge(bench, 1.0)
    images, tokens = torch.randn(2, 3, 32, 32), plain.tokenize(["a red star"])
    assert torch.equal(bench.backbone.encode_image(images), plain.encode_image(images))
    assert torch.equal(bench.backbone.encode_text(tokens), plain.encode_text(tokens))
    with bench.model.switch.use("bottleneck"):
        assert not torch.equal(bench.backbone.encode_image(images), plain.encode_image(images))


@pytest.mark.parametrize("rank", [4, "full"])
def test_gradient_scale_gives_parameters_the_gradient_of_kappa_one(rank):
    torch.manual_seed(0)
    scaled = Bottleneck(12, Shape(rank, scale=KAPPA), Scope.SHARED, tag="t").double()
    plain = Bottleneck(12, Shape(rank, scale=1.0), Scope.SHARED, tag="t").double()
    bare = Bottleneck(12, Shape(rank, scale=KAPPA, scale_gradients=False), Scope.SHARED, tag="t").double()
    for other in (plain, bare):
        other.load_state_dict(scaled.state_dict())
    inputs = [torch.linspace(-2, 2, 60, dtype=torch.float64).view(5, 12).requires_grad_(True) for _ in range(3)]
    weight = torch.cos(torch.arange(60.0, dtype=torch.float64)).view(5, 12)
    outs = [module(x) for module, x in zip((scaled, plain, bare), inputs, strict=True)]
    torch.testing.assert_close(outs[0], KAPPA * outs[1])
    for out in outs:
        (weight * out).sum().backward()
    for (name, a), b, c in zip(scaled.named_parameters(), plain.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0, msg=name)
        torch.testing.assert_close(c.grad, KAPPA * b.grad, rtol=1e-6, atol=0, msg=name)
    torch.testing.assert_close(inputs[0].grad, KAPPA * inputs[1].grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(inputs[0].grad, inputs[2].grad, rtol=1e-6, atol=0)
    x = torch.randn(3, requires_grad=True)
    y = scale_gradient(x, 7.0)
    y.sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, torch.full((3,), 7.0))


def test_starts_are_kaiming_with_zero_biases():
    torch.manual_seed(0)
    wide = Bottleneck(400, Shape(100), Scope.SHARED, tag="t")
    # fan_out: std sqrt(2 / rows); fan_in: sqrt(2 / columns).
    assert (
        abs(wide.down.weight.std() - (2 / 100) ** 0.5) < 0.002 and abs(wide.up.weight.std() - (2 / 400) ** 0.5) < 0.001
    )
    head = Bottleneck(400, Shape(100, fan="fan_in", zero_up=True), Scope.PRIVATE, tag="t")
    assert abs(head.down.weight.std() - (2 / 400) ** 0.5) < 0.001 and not head.up.weight.any()
    assert not any(layer.bias.any() for made in (wide, head) for layer in (made.down, made.up))
    full = Bottleneck(40, Shape("full", zero_up=True), Scope.PRIVATE, tag="t")
    assert [n for n, _ in full.named_parameters()] == ["up.weight", "up.bias"] and not full.up.weight.any()


@pytest.mark.parametrize("words", [("method.fused_weight=0",), ("method.gamma=0",)])
def test_without_weight_the_projection_adapter_gets_exactly_no_gradient(small, task, tmp_path, words):
    worker = ClientWorker(small(*WORDS, *words, "train.weight_decay=0"), task, tmp_path)
    server = Server(worker.options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    (report,), packet = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
    assert not worker.bench.parameters[Scope.PRIVATE].grad.any()
    assert torch.equal(worker._store.load(report.state).private, worker.bench.initial[Scope.PRIVATE])
    assert packet.folded.mean().abs().max() > 1e-3


def test_the_projection_adapter_stays_with_its_client(small, task, tmp_path):
    options = small(*WORDS)
    together, alone = (ClientWorker(options, task, tmp_path / name) for name in ("together", "alone"))
    server = Server(options, task_view(task), task.proxy)
    phase = together.bench.method.phases(0, 2)[0]
    first = server.begin(0, phase)
    reports, packet = together.train(first, [TrainJob(c, 1, phase) for c in (0, 1)])
    (other,), _ = alone.train(first, [TrainJob(1, 1, phase)])
    # Client 1 after client 0 on the same actor is client 1 by itself.
    states = [together._store.load(r.state).private for r in reports]
    assert torch.equal(states[1], alone._store.load(other.state).private)
    assert not torch.equal(states[0], states[1])
    shared, private = (together.bench.parameters[scope].entries for scope in (Scope.SHARED, Scope.PRIVATE))
    assert all("projection" in e.name for e in private) and not any("projection" in e.name for e in shared)
    assert packet.folded.mean().numel() == sum(e.stop - e.start for e in shared)

    server.receive(packet)
    server.finish(phase, (0, 1), (0, 1))
    started = {}
    step = together.bench.method.client_step

    def watched(model, job):
        started[job.client_id] = together.bench.parameters[Scope.PRIVATE].read()
        return step(model, job)

    together.bench.method.client_step = watched
    together.train(server.begin(1, phase), [TrainJob(c, 1, phase, private=reports[c].state) for c in (0, 1)])
    assert all(torch.equal(started[c], states[c]) for c in (0, 1))


OWNERS = {  # image bottlenecks, text bottlenecks, projection adapter
    "blend": ("shared", "shared", "private"),
    "full": ("shared", "shared", "shared"),
    "none": ("private", "private", "private"),
    "vision_only": ("shared", "private", "private"),
    "text_only": ("private", "shared", "private"),
}


@pytest.mark.parametrize("aggregate", OWNERS)
def test_aggregation_switches_change_exactly_who_owns_what(small, task, aggregate):
    bench = bench_of(small(*WORDS, f"method.aggregate={aggregate}", "method.text_projection=true"), task)
    factors = [f"{layer}.{kind}" for layer in ("down", "up") for kind in ("weight", "bias")]
    places = {
        "image": {f"image.{n}.{f}" for n in range(4) for f in factors},
        "text": {f"text.{n}.{f}" for n in range(2) for f in factors} | {"text_projection.linear.weight"},
        "projection": {f"projection.{f}" for f in factors},
    }
    for scope in ("shared", "private", "server"):
        expected = set().union(
            *(places[n] for n, owner in zip(places, OWNERS[aggregate], strict=True) if owner == scope)
        )
        assert {short(e.name) for e in bench.parameters[Scope(scope)].entries} == expected
    assert bench.method.phases(0, 2)[0].uploads == (aggregate != "none")


@pytest.mark.parametrize(
    "words",
    [
        ("method.aggregate=none",),
        ("method.aggregate=full", "method.rank=full", "method.projection_rank=full"),
        ("method.aggregate=text_only", "method.text_projection=true"),
        ("method.rank=none",),
    ],
)
def test_variants_train_and_predict(small, task, tmp_path, words):
    options = small(*WORDS[:1], "method.projection_rank=8", "train.lr=0.003", *words)
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    broadcast = server.begin(0, phase)
    (report,), packet = worker.train(broadcast, [TrainJob(0, 1, phase, score=True)])
    assert isinstance(report, ClientReport), report
    server.receive(packet)
    server.finish(phase, (0,), (0,))
    sends = worker.bench.initial[Scope.SHARED].numel() > 0
    assert (
        (report.bytes_up > 0)
        == (broadcast.payload != b"")
        == sends
        == (words[0].split("=")[1] in ("full", "text_only"))
    )
    assert (report.state is not None) == (words[0] != "method.aggregate=full")
    batch = next(iter(worker.bench.images(task.test).in_order()))
    classes = worker.bench.class_features()
    with torch.no_grad():
        both = [
            worker.bench.method.predict(worker.bench.model, batch, view, classes) for view in ("global", "personal")
        ]
    # Averaged with the rest, the projection adapter is part of the global model.
    assert torch.equal(*both) == (words[0] == "method.aggregate=full")


def test_the_trained_text_projection_starts_at_the_frozen_one(small, task):
    trained, frozen = (bench_of(small(*WORDS, f"method.text_projection={on}"), task) for on in ("true", "false"))
    for ours, theirs in zip(trained.model.backbone.parameters(), frozen.model.backbone.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    with torch.no_grad():
        torch.testing.assert_close(trained.class_features(), frozen.class_features())
        update = trained.model.text_projection.linear.weight
        update.add_(0.1 * torch.randn(update.shape))
        tower = trained.backbone.text_tower
        with trained.model.switch.use("bottleneck"):
            pooled = tower.trunk(trained.model.tokens(task.classes))
        expected = unit(pooled @ (tower.proj.weight + update).T)
        torch.testing.assert_close(trained.class_features(), expected)


def test_fuse_normalises_each_head_and_not_the_sum():
    general, personal = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 5.0], [0.0, 9.0]])
    fused = fuse(general, personal, gamma=0.25)
    torch.testing.assert_close(fused, torch.tensor([[0.75, 0.25], [0.0, 1.0]]))
    for wrong in ({"gamma": 1.5}, {"gamma": -0.1}):
        with pytest.raises(ValueError, match="gamma="):
            fuse(general, personal, **wrong)
    with pytest.raises(ValueError, match="one shape"):
        fuse(general, personal[:1], gamma=0.5)


def test_bytes_are_the_closed_form(small, task, tmp_path):
    vision, text, rank = 128, 96, 4
    values = sum(layers * (2 * d * rank + rank + d) for layers, d in ((4, vision), (2, text)))
    options = small(*WORDS)
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    broadcast = server.begin(0, phase)
    (report,), _ = worker.train(broadcast, [TrainJob(0, 1, phase)])
    header = 8 + int.from_bytes(broadcast.payload[:8], "little")
    assert header < 100
    assert len(broadcast.payload) == 4 * values + header == report.bytes_up
    assert codec.decode(broadcast.payload).extras == {}


def test_sizes_at_vit_b_16_are_the_papers():
    def size(width, rank):
        return sum(p.numel() for p in Bottleneck(width, Shape(rank), Scope.SHARED, tag="t").parameters())

    assert (12 * size(768, 16), 12 * size(512, 16), size(768, 256)) == (304_320, 202_944, 394_240)


class Encodings:
    """Counts the texts that go through the text tower."""

    def __init__(self, monkeypatch) -> None:
        self.count = 0
        encode = Backbone.encode_text

        def counted(backbone, tokens):
            self.count += 1
            return encode(backbone, tokens)

        monkeypatch.setattr(Backbone, "encode_text", counted)

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def test_texts_are_encoded_when_their_adapters_changed_and_never_otherwise(small, task, tmp_path, monkeypatch):
    encodings = Encodings(monkeypatch)
    for words, trained, shared in (((), True, True), (("method.blocks=*image_tower*",), False, False)):
        options = small(*WORDS, *words)
        worker = ClientWorker(options, task, tmp_path / str(trained))
        server = Server(options, task_view(task), task.proxy)
        _ = worker.bench.text_owners, encodings.since()
        phase = worker.bench.method.phases(0, 2)[0]
        reports, packet = worker.train(server.begin(0, phase), [TrainJob(c, 1, phase) for c in range(2)])
        steps = sum(r.steps for r in reports)
        # Once for what arrived, then once a step where a step moves the text adapters.
        assert encodings.since() == 1 + trained * steps
        server.receive(packet)
        server.finish(phase, (0, 1), (0, 1))
        broadcast = server.begin(1, phase)
        jobs = [PredictJob(c, 1, "personal", "test", private=reports[c].state) for c in range(2)]
        jobs += [PredictJob(-1, 1, "global", "stretch", 0, 40), PredictJob(-1, 1, "global", "stretch", 40, 80)]
        worker.predict(broadcast, jobs)
        assert encodings.since() == shared
        worker.predict(broadcast, jobs)
        assert encodings.since() == 0


def test_blocks_are_found_by_number_name_and_pattern():
    backbone = load_backbone("tiny")
    towers = ("image_tower", "text_tower")
    every = find_blocks(backbone, ("all",), towers)
    assert [path.rpartition(".")[2] for path in every] == ["0", "1", "2", "3", "0", "1"]
    assert find_blocks(backbone, ("2-3",), towers) == [every[1], every[2], every[5]]
    assert find_blocks(backbone, ("3-",), towers) == every[2:4]
    assert find_blocks(backbone, ("1", "resblocks.1"), towers) == [every[0], every[1], every[4], every[5]]
    assert find_blocks(backbone, ("image*.[23]",), towers) == every[2:4]
    with pytest.raises(
        AdapterError, match=r"blocks=5- matches no transformer block of image_tower \(4 blocks\) or text"
    ):
        find_blocks(backbone, ("5-",), towers)
    with pytest.raises(AdapterError, match="rank 97 is above the width 96 of block text_tower"):
        attach_bottlenecks(
            backbone, Switch(), "b", Shape(97), blocks=("all",), owners=dict.fromkeys(towers, Scope.SHARED)
        )


def test_timm_blocks_take_bottlenecks_too():
    backbone = load_backbone("vit_tiny_patch16_224", pretrained="none")
    images, switch = torch.randn(1, 3, 224, 224), Switch()
    before = backbone.encode_image(images)
    owners = {"image_tower": Scope.SHARED}
    assert len(attach_bottlenecks(backbone, switch, "b", Shape(2), blocks=("11-",), owners=owners)) == 2
    assert torch.equal(backbone.encode_image(images), before)
    with switch.use("b"):
        assert not torch.equal(backbone.encode_image(images), before)


def test_rank_none_is_zero_and_lists_keep_their_brackets(small):
    options = small("method=blend", "method.rank=0", "method.blocks=*.[23],*.1[01]", "method.projection_rank=full")
    assert options.method.rank == 0 and options.method.blocks == ("*.[23]", "*.1[01]")
    assert small("method=blend", "method.blocks=[1,2]").method.blocks == ("1", "2")
    for word, sentence in (
        ("method.projection_rank=256", "method.projection_rank=256 is above the width 128"),
        ("method.rank=129", "method.rank=129 is above the width 128"),
        ("method.gamma=1.1", "method.gamma=1.1: must be"),
        ("method.rank=some", "method.rank=some: must be"),
    ):
        with pytest.raises(OptionError, match=sentence):
            small("method=blend", word)


def test_profiles_are_the_paper_and_the_authors(small):
    clip = ("backbone=ViT-B-16", "backbone.pretrained=none")
    paper, authors = (small("method=blend", f"profile={name}", *clip) for name in ("paper", "authors"))
    assert (paper.method.gamma, paper.method.fused_weight, paper.method.rank) == (0.09, 0.2, 16)
    assert (paper.method.projection_rank, paper.method.projection_input) == (256, "post_ln")
    assert (paper.train.lr, paper.train.weight_decay, paper.train.batch) == (1.5e-3, 5e-4, 16)
    assert paper.train.drop_last and paper.partition.name == "dir_boost"
    assert (authors.method.gamma, authors.method.fused_weight, authors.method.rank) == (0.9, 0.5, 128)
    assert (authors.method.projection_rank, authors.method.projection_input) == (128, "pre_ln")


# MMA


def test_mma_shares_its_middle_layers_between_the_towers(small, task):
    bench = bench_of(small("method=mma", "method.rank=8"), task)
    assert bench.initial[Scope.PRIVATE].numel() == 0
    flat = bench.parameters[Scope.SHARED]
    joint = [entry for entry in flat.entries if entry.tag == "joint"]
    # Four image and two text blocks: the last two of both share theirs, each stored and sent once.
    assert sum(entry.stop - entry.start for entry in joint) == 4 * (8 * 8 + 8)
    nudge(bench, 0.1)
    named = {e.name: p.detach() for e, p in zip(flat.entries, flat.parameters, strict=True)}
    values = {short(name): value for name, value in named.items()}
    middle = [(named[f"joint.{place}.linear.weight"], named[f"joint.{place}.linear.bias"]) for place in range(4)]
    reference = Reference(task.classes)
    batch = next(iter(bench.images(task.test).in_order()))
    with torch.no_grad():
        classes = reference.text(part(values, "text."), middle)
        tokens = reference.tokens_of(batch.images, part(values, "image."), middle)
        feature = unit(reference.model.visual.ln_post(tokens) @ reference.model.visual.proj)
        torch.testing.assert_close(bench.class_features(), classes, rtol=1e-5, atol=1e-5)
        got = bench.method.predict(bench.model, batch, "personal", bench.class_features())
        torch.testing.assert_close(got, reference.scale * feature @ classes.T, rtol=1e-4, atol=1e-3)


def test_mma_trains_every_part_by_cross_entropy(small, task, tmp_path):
    options = small("method=mma", "method.rank=8")
    worker = ClientWorker(options, task, tmp_path)
    server = Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    (report,), packet = worker.train(server.begin(0, phase), [TrainJob(0, 1, phase)])
    assert (
        isinstance(report, ClientReport) and report.state is None and set(report.metrics) == {"loss_ce", "update_norm"}
    )
    delta = packet.folded.mean()
    for tag in ("image_tower", "text_tower", "joint"):
        assert delta[worker.bench.parameters[Scope.SHARED].span(tag)].abs().max() > 1e-4
