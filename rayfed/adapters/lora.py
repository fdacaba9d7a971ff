"""Low-rank adapters of linear layers, in named branches that are switched on per forward pass.

PEFT's layer is not used for training: its ``set_adapter`` flips ``requires_grad``, and a dual-branch pass would switch
it twice per batch. Files are exchanged in PEFT's format all the same (``rayfed.tracking.export``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.gate import LayerGate
from rayfed.adapters.scope import Scope, Scoped


class Switch:
    """Which branches of a model's adapted layers act; one object shared by all of them."""

    def __init__(self) -> None:
        self.active: tuple[str, ...] = ()
        self.gated = False
        self.drop: Dropout | None = None

    @contextmanager
    def use(self, *branches: str, gated: bool = False, drop: Dropout | None = None) -> Iterator[None]:
        """Let ``branches`` add their updates inside the block.

        ``gated`` weighs the two of them by the layer gate; ``drop`` drops inputs of the branches.
        """
        before = self.active, self.gated, self.drop
        self.active, self.gated, self.drop = branches, gated, drop
        try:
            yield
        finally:
            self.active, self.gated, self.drop = before


@dataclass(frozen=True, slots=True)
class Dropout:
    """Zeroes a share ``rate`` in [0, 1) of a tensor's entries and scales up the rest; draws from a CPU generator."""

    rate: float
    generator: torch.Generator

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` with entries dropped, same shape."""
        kept = torch.rand(x.shape, generator=self.generator) >= self.rate
        return x * kept.to(x.device) / (1 - self.rate)


class LowRank(nn.Module):
    """Delta(x) = scale B A x of factors ``a`` [rank, d_in] and ``b`` [d_out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the update [*, d_out] of ``x`` [*, d_in]."""
        return F.linear(F.linear(x, self.a), self.b) * self.scale

    def added_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return ``y`` [N, d_out] plus the update of ``x`` [N, d_in], in one fused product."""
        return torch.addmm(y, F.linear(x, self.a), self.b.t(), alpha=self.scale)


class HeldBranch(LowRank):
    """A branch whose factors are put in from outside: owned by nobody, never trained, saved or sent."""

    def __init__(self, d_in: int, d_out: int, *, rank: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(rank, d_in), persistent=False)
        self.register_buffer("b", torch.zeros(d_out, rank), persistent=False)
        self.scale = scale

    def hold(self, a: Tensor, b: Tensor) -> None:
        """Copy ``a`` [rank, d_in] and ``b`` [d_out, rank] in."""
        self.a.copy_(a.detach())
        self.b.copy_(b.detach())


class LoRABranch(Scoped, LowRank):
    """Delta(x) = (alpha / rank) B A x with A [rank, d_in] random (std 1/sqrt(rank)) and B [d_out, rank] zero."""

    def __init__(self, d_in: int, d_out: int, *, rank: int, alpha: float, scope: Scope, tag: str = "lora") -> None:
        super().__init__(scope, tag)
        self.a = nn.Parameter(torch.randn(rank, d_in) / math.sqrt(rank))
        self.b = nn.Parameter(torch.zeros(d_out, rank))
        self.scale = alpha / rank


Anchor = Literal["base", "global", "floor", "geomean"]
VANISHING = 0.05
"""RMS(private) / target below which the gradient of an aligned branch stops growing; healthy branches lie above."""


def mix_branches(
    base: Tensor,
    shared: Tensor,
    private: Tensor,
    gate: Tensor | float,
    *,
    align: Anchor | None,
    floor: float = 0.1,
    eps: float = 1e-6,
    detach: bool = True,
) -> Tensor:
    """Return y = b + g + m p' of ``base`` b, ``shared`` g, ``private`` p, all [B, *, d], and ``gate`` m in [0, 1].

    Without ``align`` p' = p. With it p' = p tau / RMS(p), where tau is RMS(b) ("base", the paper's anchor), RMS(g)
    ("global"), max(RMS(g), ``floor`` RMS(b)) ("floor") or the geometric mean of the two ("geomean"), and
    RMS(z) = sqrt(mean z^2 + eps) per sample over every axis but the first. No gradient flows through tau, nor through
    RMS(p) unless ``detach`` is False.

    Source: FedSDG, fl/models/lora.py. Departures: the authors take the mean over the last two axes, which couples the
    samples of a 2-D input; and where RMS(p) < 0.05 tau the gradient factor tau / RMS(p) of p stops at 20 (the value
    does not), so that a vanishing branch neither explodes nor freezes.
    """
    if align is None:
        return base + shared + gate * private
    target = _target(base.detach(), shared.detach(), align, floor, eps)
    scale = target / rms(private.detach() if detach else private, eps)
    bounded = scale.clamp(max=1 / VANISHING)
    aligned = private * bounded + (private * (scale - bounded)).detach()
    return base + shared + gate * aligned


def _target(base: Tensor, shared: Tensor, align: Anchor, floor: float, eps: float) -> Tensor:
    if align == "base":
        return rms(base, eps)
    if align == "global":
        return rms(shared, eps)
    if align == "floor":
        return torch.maximum(rms(shared, eps), floor * rms(base, eps))
    if align == "geomean":
        return (rms(shared, eps) * rms(base, eps)).sqrt()
    raise ValueError(f"align={align!r} is no anchor: use None, 'base', 'global', 'floor' or 'geomean'.")


def rms(z: Tensor, eps: float = 1e-6) -> Tensor:
    """sqrt(mean z^2 + eps) of ``z`` [B, *] over every axis but the first, in at least float32: [B, 1, ...]."""
    wide = z if z.dtype == torch.float64 else z.float()
    each = (wide.flatten(1).square().mean(1) + eps).sqrt()
    return each.view(-1, *([1] * (z.dim() - 1)))


class AdaptedLinear(nn.Module):
    """A frozen linear layer with LoRA branches: y = W x + b + sum of the active branches' updates.

    With a layer gate m(x) in (0, 1) and ``switch.gated``: y = W x + b + m(x) Delta_1(x) + (1 - m(x)) Delta_2(x).
    """

    def __init__(self, base: nn.Linear, switch: Switch) -> None:
        super().__init__()
        self.base = base
        self.branches = nn.ModuleDict()
        self.gate: LayerGate | None = None
        self._switch = switch

    @property
    def weight(self) -> Tensor:
        """The frozen weight [d_out, d_in]; towers ask it for its type."""
        return self.base.weight

    @property
    def in_features(self) -> int:
        """Input width."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Output width."""
        return self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [*, d_in] to [*, d_out]."""
        y: Tensor = self.base(x)
        active = self._switch.active
        if not active:
            return y
        if self._switch.gated and self.gate is not None:
            first, second = (self.branches[name](x) for name in active)
            weight = self.gate(x)
            mixed: Tensor = y + weight * first + (1 - weight) * second
            return mixed
        if self._switch.drop is not None:
            x = self._switch.drop(x)
        shape, y, x = y.shape, y.flatten(0, -2), x.flatten(0, -2)
        for name in active:
            branch = self.branches[name]
            assert isinstance(branch, LowRank)
            y = branch.added_to(y, x)
        return y.view(shape)
