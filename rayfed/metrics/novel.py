"""Base and novel accuracy as one figure."""

from __future__ import annotations

from collections.abc import Iterable


def harmonic_mean(base: float, novel: float) -> float:
    """2 b n / (b + n) of two accuracies in [0, 1]; 0 where both are 0."""
    return 2 * base * novel / (base + novel) if base + novel > 0 else 0.0


def mean_harmonic_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean over data sets of each one's harmonic mean of (base, novel), as papers report it.

    It is not the harmonic mean of the means. Raises ValueError for no data set at all.
    """
    each = [harmonic_mean(base, novel) for base, novel in pairs]
    if not each:
        raise ValueError("no data set to average over: give at least one pair (base, novel).")
    return sum(each) / len(each)
