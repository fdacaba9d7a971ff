"""Long-tailed training sets: class sizes that fall exponentially, and cutting images down to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfed.errors import DataError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LongTail:
    """``factor`` in (0, 1]: smallest over largest class (IF = 100 is 0.01). ``order``: see ``rank_classes``.

    No class falls below ``at_least`` images, as far as it has them.
    """

    factor: float
    order: tuple[str, ...] = ("label",)
    at_least: int = 0


def class_counts(n_max: float, num_classes: int, factor: float, *, at_least: int = 0) -> list[int]:
    """Images of each class from the largest to the smallest: int(n_max factor^(c / (C - 1))), never below ``at_least``.

    ``n_max`` (may be fractional) is the size of the largest class, ``factor`` in (0, 1] smallest over largest. A single
    class keeps ``n_max``. Source: FedPuReL, datasets/long_tail.py. Raises ValueError for values out of range.
    """
    if num_classes < 1 or n_max < 0:
        raise ValueError(f"n_max={n_max} and num_classes={num_classes} must be at least 0 and 1.")
    if not 0 < factor <= 1:
        raise ValueError(f"factor={factor} must lie in (0, 1]: an imbalance of 100 to 1 is 0.01.")
    steps = max(num_classes - 1, 1)
    return [max(int(n_max * (factor ** (c / steps))), at_least) for c in range(num_classes)]


def rank_classes(order: tuple[str, ...], num_classes: int, generator: np.random.Generator) -> list[int]:
    """Classes from the largest to the smallest: ("label",) by number, ("shuffled",) drawn, or every number listed.

    Raises ``DataError`` for anything else.
    """
    if order == ("label",):
        return list(range(num_classes))
    if order == ("shuffled",):
        return [int(c) for c in generator.permutation(num_classes)]
    if sorted(order) == sorted(str(c) for c in range(num_classes)):
        return [int(c) for c in order]
    raise DataError(
        f"partition.long_tail_order={','.join(order)} must be label, shuffled, or all class numbers 0 to "
        f"{num_classes - 1} from the largest class to the smallest."
    )


def cut(labels: Indices, images: Indices, num_classes: int, tail: LongTail, generator: np.random.Generator) -> Indices:
    """Keep of ``images`` (indices into ``labels`` [N]) as many of each class as the tail has; sorted.

    The largest class gets the mean class size of ``images``, as the authors have it. Which images stay is drawn.
    """
    ranked = rank_classes(tail.order, num_classes, generator)
    counts = class_counts(len(images) / num_classes, num_classes, tail.factor, at_least=tail.at_least)
    kept = [np.empty(0, dtype=np.int64)]
    for label, count in zip(ranked, counts, strict=True):
        kept.append(generator.permutation(images[labels[images] == label])[:count])
    return np.sort(np.concatenate(kept))
