"""What the driver asks of a worker, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rayfed.engine.store import StateRef
from rayfed.messages import Phase

Predictions = npt.NDArray[np.int32]
STRETCH = 512
"""Test images per job of a whole-test-set evaluation; fixed, so that batches are the same on any number of actors."""


def stretches(total: int) -> Iterator[tuple[int, int]]:
    """First and last place of the fixed stretches of ``total`` test images."""
    for start in range(0, total, STRETCH):
        yield start, min(start + STRETCH, total)


# No slots in what crosses by the thousand: a frozen class with them pickles through slow Python code.


@dataclass(frozen=True)
class TrainJob:
    """Train one client; ``private`` is its saved state, ``score`` asks for its test predictions afterwards."""

    client_id: int
    cost: int
    phase: Phase
    private: StateRef | None = None
    score: bool = False


@dataclass(frozen=True)
class PredictJob:
    """Predict ``part`` of the task: one client's test or validation images, or a stretch of the whole test set.

    "novel" is a stretch of the test images of novel classes, with those as candidates.
    """

    client_id: int
    cost: int
    view: Literal["zero_shot", "global", "personal"]
    part: Literal["stretch", "test", "val", "novel"]
    start: int = 0
    stop: int = 0
    private: StateRef | None = None


@dataclass(frozen=True)
class ClientReport:
    """What the driver learns of one trained client; its tensors go to the server in a ``Packet``."""

    client_id: int
    num_examples: int
    steps: int
    metrics: dict[str, float]
    bytes_up: int
    state: StateRef | None
    predictions: Predictions | None
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Predicted class ids of one job; ``own``: among the classes that the client whose image it is has."""

    job: PredictJob
    classes: Predictions
    own: Predictions | None = None
