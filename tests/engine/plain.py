"""A backbone from outside the package: one linear layer on flattened pixels, no text tower."""

from __future__ import annotations

import torch
from torch import nn

from rayfed.backbones.base import Backbone, Preprocessing


def backbone(*, pretrained: str | None, checkpoint: str | None) -> Backbone:
    """Features [B, 16]; the same values every time."""
    del pretrained, checkpoint
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16))
    size = Preprocessing(image_size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return Backbone("plain", tower, embed_dim=16, preprocessing=size, settings={})


backbone.image_size = 8  # type: ignore[attr-defined]  # what the options need to know of it
