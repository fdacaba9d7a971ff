"""How evenly a model serves the classes. These are named for what they are; none is the "Balancedness" of a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayfed.metrics.groups import GROUPS, mean_of_group

NAMES = (*GROUPS, "worst_group", "harmonic_mean", "class_spread")


def balance(groups: Sequence[str], per_class_accuracy: Sequence[float | None]) -> dict[str, float | None]:
    """Figures of per-class accuracies [C] in [0, 1]; None stands for a class without test images.

    ``many``, ``medium``, ``few``: mean of the classes in that group (``groups`` [C]); ``worst_group``: the lowest of
    them; ``harmonic_mean`` of the classes, 0 if one is never right; ``class_spread``: population standard deviation.
    None where there is nothing to average. Raises ValueError for unequal lengths.
    """
    means = {name: mean_of_group(groups, per_class_accuracy, name) for name in GROUPS}
    held = [mean for mean in means.values() if not math.isnan(mean)]
    classes = [a for a in per_class_accuracy if a is not None and not math.isnan(a)]
    if not classes:
        return dict.fromkeys(NAMES)
    mean = sum(classes) / len(classes)
    found: dict[str, float | None] = {name: None if math.isnan(value) else value for name, value in means.items()}
    return found | {
        "worst_group": min(held) if held else None,
        "harmonic_mean": len(classes) / sum(1 / a for a in classes) if min(classes) > 0 else 0.0,
        "class_spread": math.sqrt(sum((a - mean) ** 2 for a in classes) / len(classes)),
    }
