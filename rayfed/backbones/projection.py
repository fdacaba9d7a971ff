"""The towers' output projections as linear layers, so that adapters can wrap them like any other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PROJECTIONS = ("proj", "text_projection")
"""Names under which open_clip's towers keep a projection matrix that they apply as ``x @ matrix``."""


class Projection(nn.Linear):
    """A bias-free linear layer that stands where a tower expects a matrix [d_in, d_out]."""

    @classmethod
    def from_matrix(cls, matrix: Tensor) -> Projection:
        """The layer x -> x @ ``matrix``."""
        with torch.device("meta"):
            layer = cls(matrix.shape[0], matrix.shape[1], bias=False)
        layer.weight = nn.Parameter(matrix.detach().t().contiguous(), requires_grad=False)
        return layer

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """``x @ self``."""
        out: Tensor = self(x)
        return out


def expose_projections(tower: nn.Module) -> None:
    """Replace the projection matrices kept directly in ``tower`` by ``Projection`` layers of the same function."""
    for name in PROJECTIONS:
        matrix = getattr(tower, name, None)
        if isinstance(matrix, nn.Parameter):
            delattr(tower, name)
            setattr(tower, name, Projection.from_matrix(matrix))


def matrix_state_dict(tower: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the projections in ``state`` (of ``tower``) back the keys and orientation they had in the original."""
    for name in PROJECTIONS:
        if isinstance(getattr(tower, name, None), Projection):
            state[name] = state.pop(f"{name}.weight").t().contiguous()
    return state
