"""Gates: input-dependent mixing weights in (0, 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.adapters.scope import Scope, Scoped


class FeatureGate(Scoped):
    """g = sigmoid(w . h + b) on a frozen image feature; w starts at zero, b at ``init`` (FedGLAD, eq. of the gate)."""

    def __init__(self, d_in: int, *, init: float, scope: Scope = Scope.PRIVATE) -> None:
        super().__init__(scope, "gate")
        self.weight = nn.Parameter(torch.zeros(d_in))
        self.bias = nn.Parameter(torch.tensor([init]))

    def forward(self, h: Tensor) -> Tensor:
        """Return the gate [B, 1] of features ``h`` [B, D]."""
        return torch.sigmoid(h @ self.weight.unsqueeze(1) + self.bias)


class LayerGate(Scoped):
    """g = sigmoid(MLP(x)) per token, MLP: d_in -> width -> 1 with ReLU; the last bias starts at ``init``."""

    def __init__(self, d_in: int, *, width: int, init: float, scope: Scope = Scope.PRIVATE) -> None:
        super().__init__(scope, "gate")
        self.hidden = nn.Linear(d_in, width)
        self.out = nn.Linear(width, 1)
        nn.init.constant_(self.out.bias, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gate [*, 1] of ``x`` [*, d_in]."""
        return torch.sigmoid(self.out(torch.relu(self.hidden(x))))
