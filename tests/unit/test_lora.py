"""LoRA computes W + scale B A, exactly the named parameters train, and targets mean what they say."""

from __future__ import annotations

import pytest
import torch

from rayfed.adapters.attach import Branch, attach_lora, find_targets
from rayfed.adapters.lora import AdaptedLinear, Switch
from rayfed.adapters.scope import Scope, flatten_scopes
from rayfed.backbones import load_backbone
from rayfed.conf.options import TrainOptions
from rayfed.engine.fit import Fit
from rayfed.errors import AdapterError
from rayfed.methods.base import Batch, Group

TOWERS = ("image_tower", "text_tower")


def adapted(rank=2, branches=("global", "local"), towers=TOWERS, dtype=torch.float32):
    backbone = load_backbone("tiny").to(dtype)
    switch = Switch()
    scopes = {"global": Scope.SHARED, "local": Scope.PRIVATE}
    chosen = [Branch(b, scopes[b], rank, 4.0) for b in branches]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attach_lora(backbone, switch, chosen, targets=["all"], towers=towers)
    backbone.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for module in backbone.modules():
        if isinstance(module, AdaptedLinear):
            for branch in module.branches.values():
                branch.b.data = 0.1 * torch.randn(branch.b.shape, generator=generator).to(dtype)
    return backbone, switch


def merged(backbone, names):
    """A plain copy whose weights are set by hand to W + scale B A."""
    plain = load_backbone("tiny").to(next(backbone.parameters()).dtype)
    for path, module in backbone.named_modules():
        if isinstance(module, AdaptedLinear):
            layer = plain.get_submodule(path)
            for name in names:
                branch = module.branches[name]
                layer.weight.data += branch.scale * branch.b @ branch.a
    return plain


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_forward_equals_merged_weights_in_both_towers(dtype, tolerance):
    backbone, switch = adapted(dtype=dtype)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = backbone.tokenize(["a photo of a red star.", "a photo of a boat."])
    for names in (("global",), ("local",), ("global", "local")):
        plain = merged(backbone, names)
        with switch.use(*names), torch.no_grad():
            image, text = backbone.encode_image(images), backbone.encode_text(tokens)
        with torch.no_grad():
            torch.testing.assert_close(image, plain.encode_image(images), rtol=tolerance, atol=tolerance * 10)
            torch.testing.assert_close(text, plain.encode_text(tokens), rtol=tolerance, atol=tolerance * 10)


def test_gradient_equals_finite_differences():
    backbone, switch = adapted(branches=("global",), dtype=torch.float64)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    probe = torch.randn(2, backbone.embed_dim, generator=torch.Generator().manual_seed(2)).double()

    def value():
        with switch.use("global"):
            return (backbone.encode_image(images) * probe).sum()

    block = "image_tower.trunk.transformer.resblocks"
    for path in (f"{block}.1.attn.out_proj", f"{block}.0.attn.k_proj", "image_tower.proj"):
        branch = backbone.get_submodule(path).branches["global"]
        for parameter in (branch.a, branch.b):
            parameter.requires_grad_(True)
            (gradient,) = torch.autograd.grad(value(), parameter)
            step = 1e-6
            with torch.no_grad():
                parameter[0, 0] += step
                high = value()
                parameter[0, 0] -= 2 * step
                low = value()
                parameter[0, 0] += step
            parameter.requires_grad_(False)
            assert float((high - low) / (2 * step)) == pytest.approx(float(gradient[0, 0]), rel=1e-5, abs=1e-7)


class Six:
    """Six random images as items."""

    def __init__(self, frozen):
        self.images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))
        self.frozen = frozen

    def __len__(self):
        return 6

    def batch(self, index):
        return Batch(self.images[index], torch.zeros(len(index), dtype=torch.long), index, self.frozen)


@pytest.mark.parametrize("scope", [Scope.SHARED, Scope.PRIVATE])
def test_exactly_the_named_parameters_change(scope):
    backbone, switch = adapted()
    parameters = flatten_scopes(backbone)
    before = {n: p.detach().clone() for n, p in backbone.named_parameters()}

    def objective(net, batch):
        with switch.use("global", "local"):
            return {"size": net.encode_image(batch.images).square().mean()}

    fit = Fit(backbone, parameters, TrainOptions(lr=1e-2, epochs=1, batch=3))
    report = fit.run(Six(lambda: None), objective, [Group(scope)], generator=torch.Generator().manual_seed(0))
    assert report.steps == 2 and report.examples == 6
    names = {entry.name for entry in parameters[scope].entries if "image_tower" in entry.name}
    for name, parameter in backbone.named_parameters():
        changed = not torch.equal(parameter, before[name])
        assert changed == (name in names), name
    other = Scope.PRIVATE if scope is Scope.SHARED else Scope.SHARED
    assert not parameters[other].grad.any()


def test_targets_by_short_name_ending_and_pattern():
    backbone = load_backbone("tiny")
    vision = ("image_tower",)
    assert len(find_targets(backbone, ["q", "v"], vision)) == 8
    assert len(find_targets(backbone, ["q_proj"], TOWERS)) == 6
    assert find_targets(backbone, ["*.resblocks.3.mlp.*"], vision) == [
        "image_tower.trunk.transformer.resblocks.3.mlp.c_fc",
        "image_tower.trunk.transformer.resblocks.3.mlp.c_proj",
    ]
    assert find_targets(backbone, ["proj"], TOWERS) == ["image_tower.proj", "text_tower.proj"]
    assert len(find_targets(backbone, ["all"], vision)) == 4 * 6 + 1


def test_a_target_that_matches_nothing_is_an_error_with_near_names():
    with pytest.raises(
        AdapterError, match=r"target 'qproj' matches no linear layer of image_tower; near names: .*q_proj"
    ):
        find_targets(load_backbone("tiny"), ["c_fc", "qproj"], ("image_tower",))


def test_a_rank_above_a_layers_width_is_refused():
    with pytest.raises(
        AdapterError, match=r"rank 100 is above the width 64 of layer image_tower\.proj: use at most 64"
    ):
        attach_lora(
            load_backbone("tiny"), Switch(), [Branch("x", Scope.SHARED, 100, 1.0)], targets=["all"], towers=TOWERS
        )


def test_flat_parameters_are_views_in_both_directions():
    backbone, _ = adapted()
    flat = flatten_scopes(backbone)[Scope.SHARED]
    flat.write(torch.arange(flat.data.numel(), dtype=torch.float32))
    named = dict(backbone.named_parameters())
    assert all(torch.equal(named[n], v) for n, v in flat.named(flat.read()).items())
    assert torch.equal(flat.flatten(flat.named(flat.read())), flat.read())
    assert sum(e.stop - e.start for e in flat.entries) == flat.data.numel()
