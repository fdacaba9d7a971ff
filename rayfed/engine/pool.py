"""Where client work runs: in this process, or on Ray actors. Same verbs, same results.

    driver --(broadcast once, lists of clients)--> workers --(report)--> driver
                                                       `--(packet)--> server     (never through the driver)

Each actor has a queue of its own clients, longest first; an idle actor steals from the longest queue. A dead actor is
replaced and its jobs are tried again one by one, a bounded number of times; jobs are safe to repeat.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rayfed.conf.options import RunOptions
from rayfed.data.task import ImageSet, Task
from rayfed.engine.bench import task_view
from rayfed.engine.client import ClientReport, ClientWorker, Packet, Prediction, PredictJob, TrainJob
from rayfed.engine.server import Export, Server
from rayfed.errors import RayfedError
from rayfed.messages import Broadcast, ClientFailure, Phase, RoundRef

log = logging.getLogger("rayfed")
Job = TrainJob | PredictJob
Outcome = ClientReport | Prediction | ClientFailure
Outcomes = tuple[Outcome, ...]
Verb = Literal["train", "predict"]
CALLS_IN_FLIGHT = 2
"""Calls queued at an actor, so that it never waits for the driver."""


class ServerLost(RayfedError):
    """The server process died; the round has to be played again from the last snapshot."""


class Pool(Protocol):
    """Workers and the server they send to."""

    num_workers: int
    retried: int
    """Jobs tried again so far."""

    def begin(self, round_index: int, phase: Phase) -> tuple[Any, int]:
        """Open a phase at the server; return a handle of the broadcast and its bytes. Raises ServerLost."""

    def run(
        self, verb: Verb, broadcast: Any, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield the outcomes of a few jobs at a time as they come, one per job; their packet has reached the server.

        Jobs not done after ``deadline_s`` become failures named "late". A caller may stop listening early: what has not
        been yielded is then not among the accepted. Raises ServerLost.
        """

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, float]:
        """Run the server step; return its figures. Raises ServerLost."""

    def snapshot(self) -> Any:
        """Return a handle of the server's state, kept where a dead server does not take it along."""

    def fetch(self, snapshot: Any) -> bytes:
        """Return the bytes of a snapshot."""

    def restore(self, snapshot: Any) -> None:
        """Give the server (a new one, if it died) the state of ``snapshot``: a handle or bytes."""

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
        self._server = Server(options, task_view(task), task.proxy)
        self._worker = ClientWorker(options, task, states)

    def begin(self, round_index: int, phase: Phase) -> tuple[Broadcast, int]:
        """Open a phase."""
        broadcast = self._server.begin(round_index, phase)
        return broadcast, len(broadcast.payload)

    def run(
        self, verb: Verb, broadcast: Broadcast, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield outcomes in the order of the jobs; a job that is running is not cut short by the deadline."""
        end = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
        for job in jobs:
            if time.monotonic() >= end:
                yield (_late(job, deadline_s),)
                continue
            outcomes, packet = getattr(self._worker, verb)(broadcast, [job])
            if packet is not None:
                self._server.receive(packet)
            yield outcomes

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, float]:
        """Run the server step."""
        return self._server.finish(phase, cohort, accepted)

    def snapshot(self) -> bytes:
        """The server's state."""
        return self._server.snapshot()

    def fetch(self, snapshot: bytes) -> bytes:
        """The snapshot itself."""
        return snapshot

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


class _WorkerShell:
    """The Ray actor around a ``ClientWorker``; data arrives by a call, so that a replacement can be set up the same."""

    def setup(self, options: RunOptions, task: Task, states: Path) -> str:
        """Build the worker; return the node it runs on."""
        import socket

        self._worker = ClientWorker(options, task, states)
        return socket.gethostname()

    def train(self, broadcast: Broadcast, jobs: Sequence[TrainJob]) -> Any:
        """See ``ClientWorker.train``."""
        return self._worker.train(broadcast, jobs)

    def predict(self, broadcast: Broadcast, jobs: Sequence[PredictJob]) -> Any:
        """See ``ClientWorker.predict``."""
        return self._worker.predict(broadcast, jobs)


class _ServerShell:
    """The Ray actor around the ``Server``."""

    def setup(self, options: RunOptions, view: Any, proxy: ImageSet) -> None:
        """Build the server."""
        self._server = Server(options, view, proxy)

    def call(self, verb: str, *args: Any) -> Any:
        """Run a method of the server."""
        return getattr(self._server, verb)(*args)

    def ping(self) -> bool:
        """Answer, if alive."""
        return True


@dataclass(slots=True)
class _Slot:
    """One worker actor and the jobs that call it home."""

    actor: Any
    queue: deque[Job] = field(default_factory=deque)
    busy: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in flight: at a worker (``packet`` is its second result), or the delivery of its packet."""

    slot: _Slot
    actor: Any
    jobs: tuple[Job, ...]
    packet: Any
    outcomes: Outcomes = ()


T = TypeVar("T")


class RayPool:
    """Client actors and a server actor on a Ray cluster."""

    def __init__(self, options: RunOptions, task: Task, states: Path, num_workers: int) -> None:
        import ray

        self._ray = ray
        self._options, self._states = options, states
        self.num_workers, self.retried = num_workers, 0
        self._side_by_side = num_workers
        self._task = ray.put(task)
        self._proxy = ray.put(task.proxy)
        self._view = task_view(task)
        self._attempts: dict[tuple[str, int, int], int] = {}
        self._server, ready = self._start_server()
        self._slots = [_Slot(None) for _ in range(num_workers)]
        starting = [ready, *(self._start_worker(slot) for slot in self._slots)]
        self._errors_as_ours(lambda: ray.get(starting))

    # Actors

    def _start_server(self) -> tuple[Any, Any]:
        share = self._options.server
        actor = self._ray.remote(_ServerShell).options(num_cpus=share.cpu, num_gpus=share.gpu, max_restarts=0).remote()
        return actor, actor.setup.remote(self._options, self._view, self._proxy)

    def _start_worker(self, slot: _Slot) -> Any:
        share = self._options.clients
        slot.actor = (
            self._ray.remote(_WorkerShell).options(num_cpus=share.cpu, num_gpus=share.gpu, max_restarts=0).remote()
        )
        slot.busy = 0
        return slot.actor.setup.remote(self._options, self._task, self._states)

    def _errors_as_ours(self, work: Callable[[], T]) -> T:
        """Turn Ray's wrapper back into the error a worker raised on purpose."""
        try:
            return work()
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RayfedError):
                raise error.cause from None
            raise

    # Server

    def _ask(self, verb: str, *args: Any) -> tuple[Any, Any]:
        """Return the reference and the value of a server call. Raises ServerLost."""
        reference = self._server.call.remote(verb, *args)
        try:
            return reference, self._errors_as_ours(lambda: self._ray.get(reference))
        except self._ray.exceptions.RayActorError as error:
            raise ServerLost(f"the server actor died ({_first_line(error)})") from error

    def begin(self, round_index: int, phase: Phase) -> tuple[Any, int]:
        """Open a phase; workers read the broadcast from the object store, once per node."""
        reference, broadcast = self._ask("begin", round_index, phase)
        return reference, len(broadcast.payload)

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, float]:
        """Run the server step."""
        figures: dict[str, float] = self._ask("finish", phase, cohort, accepted)[1]
        return figures

    def snapshot(self) -> Any:
        """A reference to the state in the object store."""
        return self._ask("snapshot")[0]

    def fetch(self, snapshot: Any) -> bytes:
        """Bytes of the state."""
        data: bytes = snapshot if isinstance(snapshot, bytes) else self._ray.get(snapshot)
        return data

    def restore(self, snapshot: Any) -> None:
        """Restore the state, in a new server actor if the old one is dead."""
        try:
            self._ask("restore", snapshot)
        except ServerLost:
            self._server, ready = self._start_server()
            self._errors_as_ours(lambda: self._ray.get(ready))
            self._ask("restore", snapshot)

    def trainable(self) -> list[str]:
        """What is trained."""
        sentences: list[str] = self._ask("trainable")[1]
        return sentences

    def export(self) -> Export:
        """Trained parameters by name."""
        export: Export = self._ask("export")[1]
        return export

    # Work

    def run(
        self, verb: Verb, broadcast: Any, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield outcomes as they come."""
        self._attempts = {}
        end = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
        waiting: dict[Any, _Call] = {}
        singles: deque[Job] = deque()
        self._deal(jobs)
        try:
            while True:
                self._send(verb, broadcast, waiting, singles)
                if not waiting:
                    return
                left = None if deadline_s is None else max(0.0, end - time.monotonic())
                done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=left)
                if not done:
                    yield self._give_up(waiting, singles, deadline_s)
                    return
                if outcomes := self._collect(done[0], waiting, singles):
                    yield outcomes
        finally:
            for slot in self._slots:
                slot.queue.clear()
                slot.busy = 0

    def _give_up(self, waiting: dict[Any, _Call], singles: deque[Job], deadline_s: float | None) -> Outcomes:
        """The deadline: name every client that has not answered, and replace the actors that are still at work."""
        late = [job for slot in self._slots for job in slot.queue] + list(singles)
        for call in waiting.values():
            late += call.jobs
            if not call.outcomes and call.slot.actor is call.actor:
                self._replace(call.slot)
        return tuple(_late(job, deadline_s) for job in late)

    def _deal(self, jobs: Sequence[Job]) -> None:
        for job in sorted(jobs, key=lambda job: -job.cost):
            self._slots[
                (job.client_id if job.client_id >= 0 else job.cost + _start(job)) % self.num_workers
            ].queue.append(job)

    def _send(self, verb: Verb, broadcast: Any, waiting: dict[Any, _Call], singles: deque[Job]) -> None:
        for slot in self._slots[: self._side_by_side]:
            while slot.busy < CALLS_IN_FLIGHT and (jobs := self._next_jobs(slot, singles)):
                report, packet = getattr(slot.actor, verb).options(num_returns=2).remote(broadcast, jobs)
                waiting[report] = _Call(slot, slot.actor, tuple(jobs), packet)
                slot.busy += 1

    def _next_jobs(self, slot: _Slot, singles: deque[Job]) -> list[Job]:
        """A shrinking share of what is left: few calls at first, an even finish. Jobs that were in a crash go alone."""
        if singles:
            return [singles.popleft()]
        source = slot if slot.queue else max(self._slots, key=lambda other: len(other.queue))
        left = sum(len(other.queue) for other in self._slots)
        share = min(len(source.queue), math.ceil(left / (2 * self.num_workers)))
        take = source.queue.popleft if source is slot else source.queue.pop
        return [take() for _ in range(share)]

    def _collect(self, done: Any, waiting: dict[Any, _Call], singles: deque[Job]) -> Outcomes:
        call = waiting.pop(done)
        try:
            result = self._ray.get(done)
        except self._ray.exceptions.RayError as error:
            return self._recover(call, error, singles)
        if call.outcomes:
            return call.outcomes
        if call.slot.actor is call.actor:
            call.slot.busy -= 1
        result = self._spare_memory(call, result, singles)
        if call.jobs and isinstance(call.jobs[0], TrainJob):
            delivery = self._server.call.remote("receive", call.packet)
            waiting[delivery] = _Call(call.slot, call.actor, call.jobs, None, result)
            return ()
        return tuple(result)

    def _spare_memory(self, call: _Call, outcomes: Outcomes, singles: deque[Job]) -> Outcomes:
        """Where clients ran out of memory beside each other, go on with one actor fewer and try them again."""
        short = {o.client_id for o in outcomes if isinstance(o, ClientFailure) and "OutOfMemory" in o.error_type}
        again = (
            [job for job in call.jobs if job.client_id in short and self._may_retry(job)]
            if self._side_by_side > 1
            else []
        )
        if not again:
            return outcomes
        self._side_by_side -= 1
        log.warning(
            "client %s ran out of memory: going on with %d side by side (raise clients.gpu or lower train.batch)",
            ", ".join(str(job.client_id) for job in again),
            self._side_by_side,
        )
        singles.extend(again)
        retried = {job.client_id for job in again}
        return tuple(o for o in outcomes if not (isinstance(o, ClientFailure) and o.client_id in retried))

    def _may_retry(self, job: Job) -> bool:
        key = (type(job).__name__, job.client_id, _start(job))
        self._attempts[key] = self._attempts.get(key, 0) + 1
        allowed = self._attempts[key] <= self._options.engine.retries
        self.retried += int(allowed)
        return allowed

    def _recover(self, call: _Call, error: Exception, singles: deque[Job]) -> Outcomes:
        """A worker died, its packet was lost, or the server died."""
        delivering = bool(call.outcomes)
        if delivering and isinstance(error, self._ray.exceptions.RayActorError) and self._server_is_dead():
            raise ServerLost(f"the server actor died ({_first_line(error)})") from error
        if isinstance(error, self._ray.exceptions.RayTaskError):
            raise error
        if not delivering and call.slot.actor is call.actor:  # its other calls in flight fail too: replace it once
            self._replace(call.slot)
        again = [job for job in call.jobs if self._may_retry(job)]
        singles.extend(again)
        lost = [job for job in call.jobs if job not in again]
        what = _reason(self._ray, error), _first_line(error), self._options.engine.retries + 1
        return tuple(ClientFailure(RoundRef(-1, "", -1), job.client_id, *what) for job in lost)

    def _server_is_dead(self) -> bool:
        try:
            self._ray.get(self._server.ping.remote())
        except self._ray.exceptions.RayActorError:
            return True
        return False

    def _replace(self, slot: _Slot) -> None:
        self._ray.kill(slot.actor, no_restart=True)
        ready = self._start_worker(slot)
        self._errors_as_ours(lambda: self._ray.get(ready))

    def close(self) -> None:
        """Kill the actors."""
        for actor in (self._server, *(slot.actor for slot in self._slots)):
            if actor is not None:
                self._ray.kill(actor, no_restart=True)


def _late(job: Job, deadline_s: float | None) -> ClientFailure:
    return ClientFailure(RoundRef(-1, "", -1), job.client_id, "late", f"no answer within {deadline_s:g} s")


def _start(job: Job) -> int:
    return job.start if isinstance(job, PredictJob) else 0


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _reason(ray: Any, error: Exception) -> str:
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "killed for memory"
    return "crashed" if isinstance(error, ray.exceptions.RayActorError) else "reply lost"


__all__ = ["LocalPool", "Packet", "Pool", "RayPool", "ServerLost"]
