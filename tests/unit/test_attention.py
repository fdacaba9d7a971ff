"""Split attention computes what torch's fused layer computes, in both CLIP towers."""

from __future__ import annotations

import copy

import pytest
import torch
from open_clip.model import CLIP
from torch import nn

from rayfed.backbones.attention import SplitAttention, fused_state_dict, split_attention
from rayfed.errors import BackboneError

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 512, "width": 32, "heads": 4, "layers": 2},
}


@pytest.fixture
def clip() -> CLIP:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return CLIP(**copy.deepcopy(CONFIG)).eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("mask_kind", ["none", "causal", "bool", "per_head"])
def test_split_layer_equals_fused_layer(mask_kind: str) -> None:
    fused = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    nn.init.normal_(fused.in_proj_bias)
    nn.init.normal_(fused.out_proj.bias)
    causal = torch.full((7, 7), float("-inf")).triu(1)
    mask = {
        "none": None,
        "causal": causal,
        "bool": causal.isinf(),
        "per_head": causal.expand(12, 7, 7) + draw(12, 7, 7),
    }[mask_kind]
    x = draw(3, 7, 32)
    expected = fused(x, x, x, need_weights=False, attn_mask=mask)[0]
    found = SplitAttention.from_fused(fused)(x, x, x, need_weights=False, attn_mask=mask)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_split_towers_equal_the_original_ones(clip: CLIP) -> None:
    original = copy.deepcopy(clip)
    assert split_attention(clip) == 4
    assert not any(isinstance(module, nn.MultiheadAttention) for module in clip.modules())
    tokens = torch.randint(1, 510, (5, 16), generator=torch.Generator().manual_seed(1))
    tokens[:, 9] = 511
    with torch.no_grad():
        torch.testing.assert_close(clip.encode_text(tokens), original.encode_text(tokens), rtol=0, atol=1e-6)
        images = draw(4, 3, 32, 32)
        torch.testing.assert_close(clip.encode_image(images), original.encode_image(images), rtol=0, atol=1e-6)


def test_half_precision_autocast_works_in_both_towers(clip: CLIP) -> None:
    split_attention(clip)
    tokens = torch.full((2, 16), 511)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        text, image = clip.encode_text(tokens), clip.encode_image(draw(2, 3, 32, 32))
    torch.testing.assert_close(text.float(), clip.encode_text(tokens).detach(), rtol=0.05, atol=0.05)
    assert image.isfinite().all()


def test_text_tower_stays_causal(clip: CLIP) -> None:
    split_attention(clip)
    layer = clip.transformer.resblocks[0]
    x = draw(1, 16, 32)
    changed = x.clone()
    changed[:, 10:] += 1
    with torch.no_grad():
        before, after = layer(x, attn_mask=clip.attn_mask), layer(changed, attn_mask=clip.attn_mask)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)


def test_state_dicts_of_both_forms_load_and_come_back(clip: CLIP) -> None:
    original = clip.state_dict()
    other = CLIP(**copy.deepcopy(CONFIG))
    split_attention(other)
    other.load_state_dict(original)
    fused = fused_state_dict(other)
    assert set(fused) == set(original)
    assert all(torch.equal(fused[key], original[key]) for key in original)
    split_attention(clip)
    clip.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in clip.state_dict().items())


def test_loading_stays_strict_about_missing_fused_keys(clip: CLIP) -> None:
    state = clip.state_dict()
    del state["visual.transformer.resblocks.0.attn.in_proj_bias"]
    split_attention(clip)
    with pytest.raises(RuntimeError, match=r"q_proj\.bias"):
        clip.load_state_dict(state)


def test_gradients_reach_every_projection(clip: CLIP) -> None:
    split_attention(clip.visual)
    clip.encode_image(draw(2, 3, 32, 32)).square().sum().backward()
    attention = clip.visual.transformer.resblocks[0].attn
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        gradient = getattr(attention, name).weight.grad
        assert gradient is not None
        assert gradient.abs().sum() > 0


def test_gradients_equal_those_of_the_fused_layer() -> None:
    fused = nn.MultiheadAttention(16, 2, batch_first=True)
    split = SplitAttention.from_fused(fused)
    x = draw(2, 5, 16)
    weight = draw(2, 5, 16)
    (fused(x, x, x, need_weights=False)[0] * weight).sum().backward()
    (split(x, x, x)[0] * weight).sum().backward()
    assert fused.in_proj_weight.grad is not None
    parts = torch.cat([split.q_proj.weight.grad, split.k_proj.weight.grad, split.v_proj.weight.grad])
    torch.testing.assert_close(parts, fused.in_proj_weight.grad, rtol=1e-5, atol=1e-5)


def test_splitting_draws_no_random_numbers(clip: CLIP) -> None:
    before = torch.random.get_rng_state()
    split_attention(clip)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("options", [{"batch_first": False}, {"batch_first": True, "kdim": 8, "vdim": 8}])
def test_other_kinds_of_attention_are_refused(options: dict[str, int | bool]) -> None:
    with pytest.raises(BackboneError, match="batch-first self-attention"):
        SplitAttention.from_fused(nn.MultiheadAttention(16, 2, **options))


def test_asking_for_attention_weights_is_refused() -> None:
    layer = SplitAttention(16, 2)
    with pytest.raises(BackboneError, match="need_weights=False"):
        layer(draw(1, 3, 16), draw(1, 3, 16), draw(1, 3, 16), need_weights=True)
