"""What the driver asks of a worker, and what it is told."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfed.messages import Phase

Predictions = npt.NDArray[np.int32]
STRETCH = 512
"""Test images per job of a whole-test-set evaluation; fixed, so that batches are the same on any number of actors."""


def stretches(total: int) -> Iterator[tuple[int, int]]:
    """First and last place of the fixed stretches of ``total`` test images."""
    for start in range(0, total, STRETCH):
        yield start, min(start + STRETCH, total)


def pack(things: tuple[Any, ...]) -> bytes:
    """Jobs or what became of them, as bytes for a Ray call: its own pickler asks Python about every single object."""
    return pickle.dumps(things, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> tuple[Any, ...]:
    """What ``pack`` made bytes of."""
    things: tuple[Any, ...] = pickle.loads(data)
    return things


# Named tuples: they come by the thousand, and are made and pickled without Python code of their own.


class StateRef(NamedTuple):
    """Name (relative to the store) and SHA-256 of a saved private state."""

    file: str
    sha256: str


class TrainJob(NamedTuple):
    """Train one client; ``private`` is its saved state, ``score`` asks for its test predictions afterwards."""

    client_id: int
    cost: int
    phase: Phase
    private: StateRef | None = None
    score: bool = False


class PredictJob(NamedTuple):
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


class ClientReport(NamedTuple):
    """What the driver learns of one trained client; its tensors go to the server in a ``Packet``."""

    client_id: int
    num_examples: int
    steps: int
    metrics: dict[str, float]
    bytes_up: int
    state: StateRef | None
    predictions: Predictions | None
    seconds: float


class Prediction(NamedTuple):
    """Predicted class ids of one job; ``own``: among the classes that the client whose image it is has."""

    job: PredictJob
    classes: Predictions
    own: Predictions | None = None
