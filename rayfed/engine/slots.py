"""What the Ray pool knows of its client actors, and of what it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rayfed.engine import actors
from rayfed.engine.pool import Job, Outcomes


@dataclass(slots=True)
class Slot:
    """One worker actor and the jobs that call it home; ``usable`` once it is set up, ``retired`` for good.

    ``held``: the sticky fields (name, version) that were sent to this actor. ``pace``: ``trained`` clients in so many
    ``seconds`` of the phase at hand, or before that of the last one; 0 where none is known.
    """

    actor: Any = None
    node: str = ""
    cards: str = ""
    held: set[tuple[str, str]] = field(default_factory=set)
    queue: deque[Job] = field(default_factory=deque)
    busy: int = 0
    pace: float = 0.0
    trained: int = 0
    seconds: float = 0.0
    usable: bool = False
    retired: bool = False
    failed_starts: int = 0

    def retire(self) -> None:
        """End its actor for good."""
        self.retired, self.usable = True, False
        actors.kill(self.actor)

    def worked(self, seconds: Sequence[float]) -> None:
        """Its actor trained clients, which took so many ``seconds`` each."""
        self.trained, self.seconds = self.trained + len(seconds), self.seconds + sum(seconds)
        self.pace = self.trained / self.seconds


@dataclass(frozen=True, slots=True)
class Call:
    """Something in flight: an actor's setup, work at it (``packet``: its second result), or a packet's delivery.

    ``weight`` is how much of the actor's room for calls it takes.
    """

    kind: Literal["setup", "work", "delivery"]
    generation: int
    slot: Slot
    actor: Any
    node: str = ""
    jobs: tuple[Job, ...] = ()
    packet: Any = None
    weight: int = 1
    outcomes: Outcomes = ()
