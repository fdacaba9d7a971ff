"""Accuracies over clients; a client without test images is left out, never counted as 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


def over_clients(correct: Mapping[int, BoolArray]) -> dict[str, float | None]:
    """Return the spread of the clients' accuracies, in [0, 1], given which test images each got right.

    ``acc_weighted`` counts by test images; ``acc_macro``, ``acc_std`` and ``acc_worst`` are the mean over clients, its
    population standard deviation and the lowest; then percentiles. None where no client has test images.
    """
    held = [hits for _, hits in sorted(correct.items()) if len(hits)]
    if not held:
        return dict.fromkeys(("acc_weighted", "acc_macro", "acc_std", "acc_worst", "p10", "p50", "p90"))
    weighted = sum(int(hits.sum()) for hits in held) / sum(len(hits) for hits in held)
    over = spread(np.array([hits.mean() for hits in held]))
    named = {"acc_macro": over["mean"], "acc_std": over["std"], "acc_worst": over["min"]}
    return {"acc_weighted": weighted, **named, **{name: over[name] for name in ("p10", "p50", "p90")}}


def spread(each: npt.NDArray[np.float64]) -> dict[str, float]:
    """How the clients' figures ``each`` [N], N > 0, lie: mean, population standard deviation (``std``), min, max.

    ``p10 p50 p90``: percentiles over clients (linear interpolation).
    """
    p10, p50, p90 = (float(value) for value in np.percentile(each, (10, 50, 90)))
    found = {"mean": float(each.mean()), "std": float(each.std()), "min": float(each.min()), "max": float(each.max())}
    return {**found, "p10": p10, "p50": p50, "p90": p90}


def per_class(labels: npt.NDArray[np.int64], hits: BoolArray, num_classes: int) -> list[float | None]:
    """Return the accuracy of each class [C]; a class without test images is None, one never right is 0."""
    totals = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels, weights=hits, minlength=num_classes)
    return [float(r / n) if n else None for r, n in zip(right, totals, strict=True)]
