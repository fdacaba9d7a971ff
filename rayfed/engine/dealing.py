"""How many jobs a call to an actor carries: few calls, and an even finish."""

from __future__ import annotations

import math
from collections.abc import Sequence

WHOLE_S, LEAST_S = 0.5, 0.01
"""A call costs five milliseconds all round, as much as the actors of so short a phase come out uneven: a due that takes
less is not divided, and no call is made for less."""
QUICK, SLOW = 7 / 8, 1 / 2
"""What part of its due an actor gets in one call; many quick jobs come out even, a few slow ones may not."""

ALIKE = 1.25
"""Actors whose paces differ by less get equal shares: so much is chance."""


def share(left: int, pace: float, paces: Sequence[float]) -> int:
    """Jobs of the next call to an actor that does ``pace`` jobs a second, with ``left`` to be dealt among all of them.

    ``paces`` are those of all actors, 0 where it is not known. Quick jobs are dealt in proportion to them.
    """
    least = math.floor(LEAST_S * pace)
    if least < 1 or min(paces) <= 0:
        return math.ceil(math.ceil(left / len(paces)) * SLOW)
    part = pace / sum(paces) if max(paces) > ALIKE * min(paces) else 1 / len(paces)
    due = math.ceil(left * part)
    return max(due if due <= WHOLE_S * pace else math.ceil(due * QUICK), least)
