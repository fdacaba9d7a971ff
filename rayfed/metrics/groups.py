"""Accuracy by how many training images a class has."""

from __future__ import annotations

import math
from collections.abc import Sequence

GROUPS = ("many", "medium", "few")


def many_medium_few(
    counts: Sequence[int], per_class_accuracy: Sequence[float | None], *, many: int = 100, few: int = 20
) -> tuple[float, float, float]:
    """Mean accuracy of classes with more than ``many`` training images, of those up to it, and up to ``few``.

    ``counts`` [C] are training images over all clients, ``per_class_accuracy`` [C]; a class never right counts as 0,
    one without test images (None or NaN) not at all. NaN for an empty group. Raises ValueError for unequal lengths.
    """
    groups = fixed_groups(counts, many=many, few=few)
    one, two, three = (mean_of_group(groups, per_class_accuracy, name) for name in GROUPS)
    return one, two, three


def mean_of_group(groups: Sequence[str], per_class_accuracy: Sequence[float | None], name: str) -> float:
    """Mean accuracy of the classes in group ``name``; NaN if none has test images. ValueError for unequal lengths."""
    pairs = zip(groups, per_class_accuracy, strict=True)
    held = [accuracy for group, accuracy in pairs if group == name and accuracy is not None]
    held = [accuracy for accuracy in held if not math.isnan(accuracy)]
    return sum(held) / len(held) if held else math.nan


def fixed_groups(counts: Sequence[int], *, many: int = 100, few: int = 20) -> tuple[str, ...]:
    """Group of each class: "many" above ``many`` training images, "few" up to ``few``, "medium" between."""
    return tuple("many" if n > many else "few" if n <= few else "medium" for n in counts)


def class_groups(counts: Sequence[int], *, many: int = 100, few: int = 20) -> tuple[str, ...]:
    """Group of each class by the fixed thresholds, or by thirds of the classes where those leave a group empty.

    Thirds go by falling count; equal counts stay together in the larger group.
    """
    groups = fixed_groups(counts, many=many, few=few)
    if set(groups) == set(GROUPS) or len(counts) < len(GROUPS):
        return groups
    order = sorted(counts, reverse=True)
    third = len(order) / 3
    upper, lower = order[round(third) - 1], order[round(2 * third) - 1]
    return tuple("many" if n >= upper else "medium" if n >= lower else "few" for n in counts)
