"""The mean of low-rank updates as one low-rank update: of the products B A, not of the factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]
"""(A [rank, d_in], B [d_out, rank]) of an update B A."""


def mix_factors(updates: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return factors of sum_k w_k B_k A_k, exactly, by stacking: A [sum of ranks, d_in], B [d_out, sum of ranks]."""
    a = torch.cat([one for one, _ in updates], 0)
    b = torch.cat([weight * one for weight, (_, one) in zip(weights, updates, strict=True)], 1)
    return a, b


def truncated_mean(updates: Sequence[Factors], weights: Sequence[float], *, rank: int) -> Factors:
    """Return the best factors of ``rank`` (in the Frobenius norm) of sum_k w_k B_k A_k / sum_k w_k, in float32.

    The stacked factors are cut by a singular value decomposition in float64 that never forms the product. A has
    orthonormal rows and B carries the singular values, so that a direction nobody uses yet (B = 0) can still be
    learned; the sign of each pair makes the largest entry of its B column positive.

    Raises:
        ValueError: no update, a rank above the stacked ranks, or weights that add up to 0.
    """
    total = float(sum(weights))
    if not updates or total <= 0:
        raise ValueError("there is no update of positive weight to average.")
    a, b = mix_factors([(a.double(), b.double()) for a, b in updates], [weight / total for weight in weights])
    if rank > min(a.shape[0], a.shape[1], b.shape[0]):
        raise ValueError(f"rank {rank} is above what {tuple(b.shape)} x {tuple(a.shape)} can have: lower it.")
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.t())
    u, s, vt = torch.linalg.svd(r_b @ r_a.t())
    left, right = q_b @ u[:, :rank], vt[:rank] @ q_a.t()
    peak = left.abs().argmax(0)
    sign = torch.where(left.gather(0, peak.unsqueeze(0)) < 0, -1.0, 1.0)
    return (right * sign.t()).float(), (left * sign * s[:rank]).float()
