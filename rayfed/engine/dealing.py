"""How many jobs a call to an actor carries: few calls, and an even finish."""

from __future__ import annotations

import math
from collections.abc import Sequence

CALL_S, LAST_CALLS = 0.05, 5
"""A call costs milliseconds all round, so jobs known to be quick are put together up to so many seconds.

The last calls may be so many times shorter, for an even finish.
"""


def worth_a_call(seconds: Sequence[float]) -> int:
    """How many jobs like those that took ``seconds`` make up a call that is worth its cost."""
    return math.ceil(CALL_S * len(seconds) / sum(seconds))


def share(left: int, workers: int, worth: int) -> int:
    """Jobs of the next call with ``left`` to be dealt: half of what is fair, or ``worth`` where that is fair."""
    fair = math.ceil(left / workers)
    return max(math.ceil(fair / 2), min(fair, worth), worth // LAST_CALLS)
