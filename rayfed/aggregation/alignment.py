"""Weights of client updates by how far they point the same way (FedSDG, fl/algorithms/aggregation.py)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reference = Literal["leave_one_out", "mean"]
Transform = Literal["relu", "softmax"]
CANCELLED = 1e-6
"""A reference shorter than this share of the updates it is made of is rounding noise and has no direction."""


def alignment_cosines(deltas: Tensor, *, reference: Reference) -> Tensor:
    """Cosine [M] of each update in ``deltas`` [M, P] with the mean of the others or of all, float64.

    A zero update has cosine 0, as has one whose reference cancels out (the authors' is decided by rounding then).
    """
    wide = deltas.double()
    wide = wide / wide.abs().max().clamp(min=1e-300)  # squares of huge or tiny updates stay in range
    total, count = wide.sum(0), len(wide)
    references = (total - wide) / (count - 1) if reference == "leave_one_out" else (total / count).expand_as(wide)
    lengths, reference_lengths = (torch.linalg.vector_norm(v, dim=1) for v in (wide, references))
    sound = (lengths > 0) & (reference_lengths > CANCELLED * lengths.mean())
    product = (wide * references).sum(1) / (lengths * reference_lengths).clamp(min=1e-300)
    return torch.where(sound, product, 0.0)


def alignment_weights(
    deltas: Tensor, *, reference: Reference, transform: Transform, temperature: float, smoothing: float
) -> Tensor:
    """Weights [M], summing to 1, of the updates ``deltas`` [M, P]; float32.

    relu: w = max(c, 0) / sum max(c, 0), uniform where no cosine is positive; softmax: w = softmax(c / ``temperature``).
    Then w <- (1 - ``smoothing``) w + ``smoothing`` / M, except after the uniform fallback. An update that is not
    finite weighs 0. Lengths do not count, and neither do examples (as the authors have it).

    Raises:
        ValueError: no update at all or none that is finite, a temperature not above 0, smoothing outside [0, 1], or an
            unknown reference or transform.
    """
    _check(deltas, reference, transform, temperature, smoothing)
    finite = torch.isfinite(deltas).all(1)
    weights = torch.zeros(len(deltas))
    weights[finite] = _weights(deltas[finite], reference, transform, temperature, smoothing).float()
    return weights


def _weights(
    deltas: Tensor, reference: Reference, transform: Transform, temperature: float, smoothing: float
) -> Tensor:
    count = len(deltas)
    if count == 1:
        return torch.ones(1)
    cosines = alignment_cosines(deltas, reference=reference)
    if transform == "softmax":
        weights = torch.softmax(cosines / temperature, 0)
    else:
        positive = cosines.clamp(min=0)
        if float(positive.sum()) < 1e-6:
            return torch.full((count,), 1 / count)
        weights = positive / positive.sum()
    return (1 - smoothing) * weights + smoothing / count


def _check(deltas: Tensor, reference: str, transform: str, temperature: float, smoothing: float) -> None:
    if reference not in ("leave_one_out", "mean"):
        raise ValueError(f"reference={reference!r} is unknown: use 'leave_one_out' or 'mean'.")
    if transform not in ("relu", "softmax"):
        raise ValueError(f"transform={transform!r} is unknown: use 'relu' or 'softmax'.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; near 0 the best aligned update takes all.")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing={smoothing} must lie in [0, 1]; 1 is the plain mean.")
    if not len(deltas) or not bool(torch.isfinite(deltas).all(1).any()):
        raise ValueError(f"none of the {len(deltas)} updates is finite: there is nothing to weigh.")
