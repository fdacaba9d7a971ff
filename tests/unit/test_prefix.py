"""Towers in two halves equal the whole, and what is kept of the first half depends on nobody else."""

from __future__ import annotations

import os

import numpy as np
import open_clip
import pytest
import torch

from rayfed.backbones import load_backbone
from rayfed.backbones.clip import build_from_config
from rayfed.backbones.prefix import PrefixCache, block_paths, last_blocks, split_tower
from rayfed.backbones.tiny import MEAN, STD
from rayfed.engine.images import ArrayImages
from rayfed.errors import BackboneError

SMALL_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 48,
        "layers": 3,
        "width": 64,
        "head_width": 16,
        "patch_size": 16,
        "ls_init_value": 0.1,
    },
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 3},
}


def backbone(kind):
    if kind == "clip":
        return build_from_config("small", SMALL_CLIP, None, open_clip.get_tokenizer("ViT-B-32"), MEAN, STD)
    return load_backbone(kind, pretrained=None if kind == "tiny" else "none")


@pytest.mark.parametrize("kind", ["tiny", "clip", "vit_tiny_patch16_224"])
def test_two_halves_are_the_whole_to_the_bit(kind):
    model = backbone(kind)
    images = torch.randn(2, 3, model.image_size, model.image_size, generator=torch.Generator().manual_seed(0))
    depth = len(block_paths(model, "image_tower"))
    with torch.no_grad():
        for first in (0, depth - 2):
            split = split_tower(model.image_tower, first)
            assert torch.equal(split.tail(split.head(images), images), model.encode_image(images))
        if model.has_text:
            tokens = model.tokenize(["a red star", "a blue cross of some length"])
            split = split_tower(model.text_tower, 1)
            assert torch.equal(split.tail(split.head(tokens), tokens), model.encode_text(tokens))
    assert last_blocks(model, "image_tower", 2) == block_paths(model, "image_tower")[-2:]
    with pytest.raises(BackboneError, match=f"has {depth}: use at most {depth}"):
        last_blocks(model, "image_tower", depth + 1)


def test_an_unknown_tower_is_not_split():
    assert split_tower(torch.nn.Sequential(torch.nn.Linear(2, 2)), 0) is None


def sets(prefixes, count=3):
    """Three sets of 5 images each on the tiny model, their activations kept in ``prefixes``."""
    model = backbone("tiny")
    model.split = split_tower(model.image_tower, 2)
    pixels = np.random.default_rng(0).integers(0, 256, (5 * count, 3, 32, 32), dtype=np.uint8)
    labels = np.zeros(len(pixels), dtype=np.int64)
    return [
        ArrayImages(
            pixels,
            labels,
            np.arange(5 * k, 5 * k + 5),
            backbone=model,
            device=torch.device("cpu"),
            batch_size=2,
            prefixes=prefixes,
            key=k,
        )
        for k in range(count)
    ]


ROWS = 5 * 17 * 128 * 4
"""Bytes of one set's activations in float32: five images of 16 patches and a class token."""


def visits(prefixes, order):
    made = sets(prefixes)
    return {k: made[k].batch(torch.tensor([3, 0])).prefix() for k in order}


@pytest.mark.parametrize("limit", [ROWS, 2 * ROWS, 10 * ROWS])
def test_order_and_memory_change_no_bit(limit):
    """Whatever has to go to make room: made again in the same batches, the same bits."""
    plain = visits(PrefixCache(dtype=torch.float32, limit=10 * ROWS), [0, 1, 2])
    cache = PrefixCache(dtype=torch.float32, limit=limit)
    again = visits(cache, [2, 0, 1, 2, 0])
    assert all(torch.equal(again[k], plain[k]) for k in plain)
    assert cache.bytes_kept == min(limit // ROWS, 3) * ROWS


def test_a_set_beyond_the_limit_is_made_each_time_or_kept_on_disk(tmp_path):
    kept = visits(PrefixCache(dtype=torch.float32, limit=ROWS), [0, 1, 2])
    alone = PrefixCache(dtype=torch.float32, limit=ROWS - 1)
    made = visits(alone, [0, 1, 2])
    assert alone.bytes_kept == 0
    disk = PrefixCache(dtype=torch.float32, limit=ROWS - 1, folder=tmp_path)
    spilled = visits(disk, [0, 1, 2, 0])
    assert disk.bytes_kept == 0 and not os.listdir(tmp_path)  # its files have no names left to clean up
    for k in kept:
        assert torch.equal(spilled[k], kept[k])
        torch.testing.assert_close(made[k], kept[k], rtol=1e-5, atol=1e-5)
    with pytest.raises(BackboneError, match="takes no file of"):
        visits(PrefixCache(dtype=torch.float32, limit=1, folder=tmp_path / "none"), [0])


def test_half_precision_keeps_features_to_a_thousandth():
    exact, half = (
        visits(PrefixCache(dtype=dtype, limit=10 * ROWS), [0])[0] for dtype in (torch.float32, torch.float16)
    )
    model = backbone("tiny")
    split = split_tower(model.image_tower, 2)
    with torch.no_grad():
        one, other = (split.tail(rows, torch.empty(0)) for rows in (exact, half))
    assert half.dtype is torch.float32
    assert float((one - other).norm() / one.norm()) < 1e-3
