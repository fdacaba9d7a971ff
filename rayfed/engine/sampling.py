"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed import rng


def draw_cohort(seed: int, round_index: int, eligible: Sequence[int], size: int) -> tuple[int, ...]:
    """Return ``size`` of the ``eligible`` clients without replacement (all of them if fewer), sorted by id.

    Depends on the seed and the round only: evaluation, resuming and the number of actors do not change it.
    """
    if size >= len(eligible):
        return tuple(sorted(eligible))
    generator = rng.numpy_generator(seed, "cohort", round_index)
    return tuple(sorted(int(c) for c in generator.choice(sorted(eligible), size=size, replace=False)))
