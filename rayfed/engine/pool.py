"""Where client work runs: in this process, or on Ray actors. Same verbs, same results.

    driver --(broadcast once, lists of clients)--> workers --(report)--> driver
                                                       `--(packet)--> server     (the driver never opens it)

The Ray half is in ``ray_pool``, so that this module works where Ray is not installed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rayfed.conf.options import RunOptions
from rayfed.data.task import Task
from rayfed.engine.bench import novel_names, task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, Prediction, PredictJob, TrainJob
from rayfed.engine.server import Export, Server
from rayfed.errors import RayfedError
from rayfed.messages import Broadcast, ClientFailure, Phase, RoundRef

Job = TrainJob | PredictJob
Outcome = ClientReport | Prediction | ClientFailure
Outcomes = tuple[Outcome, ...]
Verb = Literal["train", "predict"]
Finish = Callable[[], tuple[dict[str, float], bytes]]


class ServerLost(RayfedError):
    """The server process died; the round has to be played again from the last snapshot."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of a broadcast: ``each`` for every client, and of its ``pieces`` what a client does not hold yet."""

    each: int
    pieces: tuple[tuple[str, str, int], ...] = ()

    @classmethod
    def of(cls, broadcast: Broadcast) -> Sent:
        """What ``broadcast`` weighs."""
        return cls(broadcast.size, tuple((p.name, p.version, p.size) for p in broadcast.pieces))

    def news(self, held: dict[str, str]) -> int:
        """Bytes of pieces for a client that holds the versions ``held`` by name, which are brought up to date.

        Counted by client, not by process, so that the figure does not depend on how many clients share an actor.
        """
        news = [(name, version, size) for name, version, size in self.pieces if held.get(name) != version]
        held.update((name, version) for name, version, _ in news)
        return sum(size for _, _, size in news)


class Pool(Protocol):
    """Workers and the server they send to."""

    num_workers: int
    retried: int
    """Jobs tried again so far."""

    def begin(self, round_index: int, phase: Phase) -> tuple[Any, Sent]:
        """Open a phase at the server; return a handle of the broadcast and what it weighs. Raises ServerLost."""

    def run(
        self, verb: Verb, broadcast: Any, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield the outcomes of a few jobs at a time as they come, one per job; no worker's end can lose them any more.

        Jobs not done after ``deadline_s`` become failures named "late". A caller may stop listening early: what has not
        been yielded is then not among the accepted. Raises ServerLost.
        """

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...], *, last: bool) -> Finish:
        """Start the server step; return what waits for its end.

        It gives the step's figures and, after the ``last`` phase of a round, the server's state, or raises ServerLost.
        """

    def snapshot(self) -> bytes:
        """Return the server's state; the driver keeps it, where a dead server or its node cannot take it along."""

    def restore(self, snapshot: bytes) -> None:
        """Give the server (a new one, if it died) a state."""

    def trainable(self) -> list[str]:
        """Return what is trained, one sentence per owner."""

    def export(self) -> Export:
        """Return the trained parameters by name."""

    def close(self) -> None:
        """End every process this pool started."""


class LocalPool:
    """Everything in this process, one client after another."""

    num_workers = 1
    retried = 0

    def __init__(self, options: RunOptions, task: Task, states: Path) -> None:
        self._server = Server(options, task_view(task), task.proxy, novel_names(task))
        self._worker = ClientWorker(options, task, states)

    def begin(self, round_index: int, phase: Phase) -> tuple[Broadcast, Sent]:
        """Open a phase."""
        broadcast = self._server.begin(round_index, phase, self._worker.held)
        return broadcast, Sent.of(broadcast)

    def run(
        self, verb: Verb, broadcast: Broadcast, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield outcomes in the order of the jobs; a job that is running is not cut short by the deadline."""
        end = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
        for job in jobs:
            if time.monotonic() >= end:
                yield (late(job, deadline_s),)
                continue
            outcomes, packet = getattr(self._worker, verb)(broadcast, [job])
            if packet is not None:
                self._server.receive(packet)
            yield outcomes

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...], *, last: bool) -> Finish:
        """Run the server step."""
        done = self._server.end(phase, cohort, accepted, last)
        return lambda: done

    def snapshot(self) -> bytes:
        """The server's state."""
        return self._server.snapshot()

    def restore(self, snapshot: bytes) -> None:
        """Take up a state."""
        self._server.restore(snapshot)

    def trainable(self) -> list[str]:
        """What is trained."""
        return self._server.trainable()

    def export(self) -> Export:
        """Trained parameters by name."""
        return self._server.export()

    def close(self) -> None:
        """Nothing to end."""


def late(job: Job, deadline_s: float | None) -> ClientFailure:
    """The failure of a job that was not done in time."""
    return ClientFailure(RoundRef(-1, "", -1), job.client_id, "late", f"no answer within {deadline_s:g} s")
