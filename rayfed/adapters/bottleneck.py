"""Bottleneck adapters beside whole transformer blocks, and of a single feature vector.

x_l = Block_l(x) + delta_l(LN_l(x)),  delta(u) = kappa (B ReLU(A u + a) + b),  LN_l the block's own frozen first norm.

(MMA, Yang et al., CVPR 2024, github.com/ZjjConan/Multi-Modal-Adapter, clip/model.py; BLEND has the same without the
middle layer.)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rayfed.adapters.lora import Switch
from rayfed.adapters.scope import Scope, Scoped
from rayfed.errors import AdapterError

Rank = int | Literal["full"]
Fan = Literal["fan_in", "fan_out"]
Middle = Callable[[Tensor], Tensor]

FIRST_NORMS = ("ln_1", "norm1")
"""What open_clip and timm call the first layer norm of a block."""


class _GradientScale(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return ``x`` unchanged; its gradient is multiplied by ``scale`` on the way back."""
    scaled: Tensor = _GradientScale.apply(x, scale)
    return scaled


@dataclass(frozen=True, slots=True)
class Shape:
    """Size and start of a bottleneck: width ``rank`` ("full": one linear layer without a non-linearity).

    ``scale`` is kappa. With ``scale_gradients`` the parameters get the gradient they would have with kappa = 1. A (and
    B, unless ``zero_up``) start Kaiming normal by ``fan``, biases at zero.
    """

    rank: Rank
    scale: float = 1e-3
    scale_gradients: bool = True
    fan: Fan = "fan_out"
    zero_up: bool = False


class Bottleneck(Scoped):
    """delta(u) = kappa (B ReLU(A u + a) + b) of ``u`` [*, d]; with a middle layer B ReLU(S ReLU(A u + a)) + b."""

    def __init__(self, width: int, shape: Shape, scope: Scope, *, tag: str, middle: Middle | None = None) -> None:
        super().__init__(scope, tag)
        self.shape = shape
        self.down = nn.Linear(width, shape.rank) if isinstance(shape.rank, int) else None
        self.up = nn.Linear(shape.rank if isinstance(shape.rank, int) else width, width)
        # A function, not a child: layers may share one, whoever owns it.
        self._middle = middle
        self._start(shape)

    def _start(self, shape: Shape) -> None:
        for layer in (self.down, self.up):
            if layer is not None:
                nn.init.kaiming_normal_(layer.weight, mode=shape.fan)
                nn.init.zeros_(layer.bias)
        if shape.zero_up:
            nn.init.zeros_(self.up.weight)

    def forward(self, u: Tensor) -> Tensor:
        """Return delta(u) [*, d]."""
        kappa = self.shape.scale
        if not self.shape.scale_gradients:
            return kappa * self._branch(u)
        return scale_gradient(kappa * self._branch(scale_gradient(u, kappa)), 1 / kappa)

    def _branch(self, u: Tensor) -> Tensor:
        if self.down is not None:
            u = torch.relu(self.down(u))
            if self._middle is not None:
                u = torch.relu(self._middle(u))
        y: Tensor = self.up(u)
        return y


class AdaptedBlock(nn.Module):
    """A frozen transformer block with bottlenecks beside it: Block(x) + the active ones' delta(LN(x))."""

    def __init__(self, base: nn.Module, switch: Switch) -> None:
        super().__init__()
        self.base = base
        self.branches = nn.ModuleDict()
        self._switch = switch

    @property
    def norm(self) -> nn.Module:
        """The block's own first layer norm."""
        return _first_norm(self.base)

    @property
    def width(self) -> int:
        """Width d of its tokens."""
        return _width(self.base)

    def get_weight_dtype(self) -> torch.dtype:
        """Type of the block's weights; open_clip's towers ask for it."""
        return next(self.base.parameters()).dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map tokens ``x`` [B, T, d] to [B, T, d]; further arguments (masks) are the block's."""
        y: Tensor = self.base(x, *args, **kwargs)
        active = [name for name in self._switch.active if name in self.branches]
        if active:
            u = self.norm(x)
            for name in active:
                y = y + self.branches[name](u)
        return y


def _first_norm(block: nn.Module) -> nn.Module:
    found = next(name for name in FIRST_NORMS if hasattr(block, name))
    norm: nn.Module = getattr(block, found)
    return norm


def _width(block: nn.Module) -> int:
    return int(_first_norm(block).get_parameter("weight").shape[0])


def attach_bottlenecks(
    backbone: nn.Module,
    switch: Switch,
    name: str,
    shape: Shape,
    *,
    blocks: Sequence[str],
    owners: Mapping[str, Scope],
    middle: Callable[[int], Middle] | None = None,
) -> list[str]:
    """Put a bottleneck ``name`` beside the ``blocks`` of each tower in ``owners`` (child name: owner); return paths.

    The tag of its parameters is the tower's name. ``middle(place)`` gives the middle layer of the block that is the
    ``place``-th from the end of its tower (from 0): blocks of two towers at one place share it.

    Raises:
        AdapterError: a name in ``blocks`` matches no block, or the rank is above a block's width.
    """
    chosen = find_blocks(backbone, blocks, tuple(owners))
    for tower, owner in owners.items():
        for place, path in enumerate(reversed(_blocks(backbone, tower))):
            if path in chosen:
                adapted = _adapted_block(backbone, path, switch)
                check_rank(shape.rank, adapted.width, f"block {path}")
                made = middle(place) if middle is not None else None
                adapted.branches[name] = Bottleneck(adapted.width, shape, owner, tag=tower, middle=made)
    return chosen


def _adapted_block(backbone: nn.Module, path: str, switch: Switch) -> AdaptedBlock:
    """The block at ``path``, replaced by an adapted one unless it is one."""
    block = backbone.get_submodule(path)
    if isinstance(block, AdaptedBlock):
        return block
    parent, _, leaf = path.rpartition(".")
    adapted = AdaptedBlock(block, switch)
    setattr(backbone.get_submodule(parent), leaf, adapted)
    return adapted


def check_rank(rank: Rank, width: int, what: str) -> None:
    """Raise AdapterError if ``rank`` is above the ``width`` of ``what``."""
    if isinstance(rank, int) and rank > width:
        raise AdapterError(f"rank {rank} is above the width {width} of {what}: use at most {width}, or full.")


def find_blocks(backbone: nn.Module, names: Sequence[str], towers: Sequence[str]) -> list[str]:
    """Return the paths of the transformer blocks that ``names`` mean in ``towers``, in module order.

    A name is all, a block's number or numbers counted from 1 in each tower (5, 5-12, 5-), the end of a module path, or
    a pattern with ``*``.

    Raises:
        AdapterError: a name matches no block.
    """
    known = {path: number for tower in towers for number, path in enumerate(_blocks(backbone, tower), 1)}
    chosen: set[str] = set()
    for name in names:
        hits = [path for path, number in known.items() if _matches(name, number, path)]
        if not hits:
            counts = " or ".join(f"{tower} ({len(_blocks(backbone, tower))} blocks)" for tower in towers)
            raise AdapterError(
                f"blocks={name} matches no transformer block of {counts}: use all, numbers from 1 such as 3 or 2-4, or "
                "the end of a module path."
            )
        chosen.update(hits)
    return [path for path in known if path in chosen]


def _matches(name: str, number: int, path: str) -> bool:
    if name == "all":
        return True
    if numbers := re.fullmatch(r"(\d+)(-(\d*))?", name):
        first, dash, last = numbers.groups()
        stop = int(first) if dash is None else int(last) if last else number
        return int(first) <= number <= stop
    return fnmatch.fnmatchcase(path, name) or path.endswith(f".{name}")


def _blocks(backbone: nn.Module, tower: str) -> list[str]:
    """Paths of the blocks of ``tower``, adapted or not."""
    found = []
    for path, module in getattr(backbone, tower).named_modules(prefix=tower):
        inside = path.rpartition(".")[2] == "base"
        if not inside and (isinstance(module, AdaptedBlock) or _is_block(module)):
            found.append(path)
    return found


def _is_block(module: nn.Module) -> bool:
    return hasattr(module, "attn") and any(hasattr(module, name) for name in FIRST_NORMS)
