"""Adapters of the image feature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.adapters.scope import Scope, Scoped


class FeatureMask(Scoped):
    """f -> m * f with m = softmax(W2 tanh(W1 f + b1) + b2), W1 and W2 [D, D] (FedPuReL, trainers/purelGPAdapter.py).

    At the start m is nearly uniform, so that the direction of f nearly stays.
    """

    def __init__(self, dim: int, scope: Scope, *, tag: str = "adapter") -> None:
        super().__init__(scope, tag)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, f: Tensor) -> Tensor:
        """Weigh the encoder's features ``f`` [B, D], not normalised; returns [B, D]."""
        weights = torch.softmax(self.second(torch.tanh(self.first(f))), -1)
        return weights * f
