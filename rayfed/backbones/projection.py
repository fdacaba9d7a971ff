"""The towers' output projections as linear layers, so that adapters can wrap them like any other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

PROJECTIONS = ("proj", "text_projection")
"""Names under which open_clip's towers keep a projection matrix [d_in, D] that they apply as ``x @ matrix``."""


class ProjectedTower(nn.Module):
    """A tower without its output projection (``trunk``), and the projection as a linear layer (``proj``)."""

    def __init__(self, trunk: nn.Module, name: str, matrix: Tensor) -> None:
        super().__init__()
        self.trunk = trunk
        self.matrix_name = name
        with torch.device("meta"):
            self.proj = nn.Linear(matrix.shape[0], matrix.shape[1], bias=False)
        self.proj.weight = nn.Parameter(matrix.detach().t().contiguous(), requires_grad=False)

    @property
    def width(self) -> int:
        """Width d of what the projection takes."""
        return int(self.proj.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, D] of what the trunk takes."""
        y: Tensor = self.proj(self.trunk(x))
        return y

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The pooled token of ``images`` [B, 3, S, S] before and after the image tower's last norm, both [B, d]."""
        seen: list[Tensor] = []
        norm = self.trunk.get_submodule("ln_post")
        handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            after: Tensor = self.trunk(images)
        finally:
            handle.remove()
        # The norm acts token by token, so that it makes no difference to pool what went into it.
        pool: Callable[[Tensor], tuple[Tensor, Tensor]] = getattr(self.trunk, "_global_pool")  # noqa: B009
        before = pool(seen[0])[0] if seen[0].dim() == 3 else seen[0]
        return before, after


def expose_projection(tower: nn.Module) -> nn.Module:
    """Return ``tower`` with its projection matrix, if it keeps one, as a layer beside it; same function."""
    for name in PROJECTIONS:
        matrix = getattr(tower, name, None)
        if isinstance(matrix, nn.Parameter):
            setattr(tower, name, None)
            return ProjectedTower(tower, name, matrix)
    return tower


def original_state_dict(tower: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give ``state`` (of ``tower``) back the keys and orientation it had before ``expose_projection``."""
    if not isinstance(tower, ProjectedTower):
        return state
    matrix = state["proj.weight"].t().contiguous()
    trunk = {key.removeprefix("trunk."): value for key, value in state.items() if key.startswith("trunk.")}
    return {tower.matrix_name: matrix, **trunk}
