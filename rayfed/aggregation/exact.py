"""Weighted sums with the same bits in any order and grouping, by fixed-point integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FRACTION_BITS = 40
"""Resolution 2**-40 (9e-13) per coordinate: below a float32 ulp of any delta above 1e-5."""

LIMIT = float(2 ** (62 - FRACTION_BITS))
"""Largest |delta| * weight that a sum may hold, in total (4.2 million)."""


@dataclass(slots=True)
class ExactSum:
    """Sum over clients of ``weight * delta`` in int64 fixed point [P].

    Integer addition is associative, so neither arrival order nor grouping over actors changes a bit.
    """

    total: Tensor
    weight: int = 0
    bound: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        """As an array: torch pickles a tensor as a file inside the file, and copies it three times."""
        return _exact_sum, (self.total.numpy(), self.weight, self.bound)

    @classmethod
    def zeros(cls, size: int) -> ExactSum:
        """Empty sum of ``size`` coordinates."""
        return cls(torch.zeros(size, dtype=torch.int64))

    def add(self, deltas: Tensor, weights: Sequence[int]) -> None:
        """Add the ``deltas`` [K, P] float32, each times its weight (>= 0); several at once cost less than one by one.

        Raises:
            OverflowError: the sum could leave its range; nothing has been added then.
        """
        sizes = deltas.abs().amax(1) if deltas.numel() else torch.zeros(len(weights))
        self._reserve(sum(size * weight for size, weight in zip(sizes.tolist(), weights, strict=True)))
        # Exact in float32: the factor is a power of two, and whatever then has a fraction is below 2**23.
        fixed = (deltas * 2.0**FRACTION_BITS).round_().long()
        if len(set(weights)) == 1:
            self.total.add_(fixed.sum(0), alpha=weights[0])
        else:
            self.total += fixed.mul_(torch.tensor(weights, dtype=torch.int64).unsqueeze(1)).sum(0)
        self.weight += sum(weights)

    def merge(self, other: ExactSum) -> None:
        """Add another sum. Raises OverflowError as ``add`` does."""
        self._reserve(other.bound)
        self.total += other.total
        self.weight += other.weight

    def mean(self) -> Tensor:
        """Return the weighted mean [P] in float32; zeros where nothing weighed anything."""
        if self.weight == 0:
            return torch.zeros_like(self.total, dtype=torch.float32)
        return (self.total.double() / (self.weight * 2.0**FRACTION_BITS)).float()

    def _reserve(self, amount: float) -> None:
        if not self.bound + amount < LIMIT:
            raise OverflowError(f"delta x weight adds up to {self.bound + amount:.3g}, above {LIMIT:.3g}")
        self.bound += amount


def _exact_sum(total: npt.NDArray[np.int64], weight: int, bound: float) -> ExactSum:
    return ExactSum(torch.from_numpy(total.copy()), weight, bound)


def largest(delta: Tensor) -> float:
    """Largest magnitude in ``delta``; not finite if anything in it is not."""
    return float(delta.abs().max()) if delta.numel() else 0.0  # four times quicker than the infinity norm


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return sum(w_k delta_k) / sum(w_k) [P] in float32, with the same bits in any order of the clients."""
    total = ExactSum.zeros(deltas[0].numel() if deltas else 0)
    for delta, weight in zip(deltas, weights, strict=True):
        total.add(delta.unsqueeze(0), [weight])
    return total.mean()
