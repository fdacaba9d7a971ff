"""Client work on Ray actors.

Each actor has a queue of its own clients, longest first; an idle actor steals from the longest queue. A dead actor is
replaced in the background and its jobs are tried again one by one, a bounded number of times; jobs are safe to repeat.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rayfed.conf.options import RunOptions
from rayfed.data.task import Task
from rayfed.engine import actors, cards, dealing
from rayfed.engine.bench import novel_names, task_view
from rayfed.engine.jobs import ClientReport, PredictJob, TrainJob, pack, unpack
from rayfed.engine.pool import Finish, Job, Outcomes, Sent, ServerLost, Verb, late
from rayfed.engine.resources import Plan
from rayfed.engine.server import Export
from rayfed.engine.shells import ClientActor, ServerActor
from rayfed.engine.slots import Call, Slot
from rayfed.errors import RayfedError, ResourceError, first_line
from rayfed.messages import ClientFailure, Phase, RoundRef

log = logging.getLogger("rayfed")
CALLS_IN_FLIGHT = 2
"""Calls queued at an actor, so that it never waits for the driver."""
NOTICE_S = 30.0
"""How long the driver waits in silence for actors that the cluster has no room for."""
PAUSE_S = 2.0
"""Between two tries to start a server actor elsewhere."""
SMALL, SMALL_IN_ALL = 2**16, 2**21
"""Bytes of a packet, and of those of a phase, that wait here for the server step and go along with its call.

Ray keeps what is below 100 KiB in the driver's own memory, where no lost node can take it along.
"""
T = TypeVar("T")


class RayPool:
    """Client actors and a server actor on a Ray cluster.

    ``plan`` says how many client actors there may be: at the start, and again whenever more could have become possible.
    """

    def __init__(self, options: RunOptions, task: Task, states: Path, plan: Callable[[], Plan]) -> None:
        import ray

        self._ray = ray
        self._options, self._states = options, states
        self._plan = plan
        self.num_workers, self.retried = plan().num_actors, 0
        self._task, self._proxy = ray.put(task), ray.put(task.proxy)
        self._view, self._novel = task_view(task), novel_names(task)
        self._attempts: dict[Job, int] = {}
        self._moves: dict[Job, int] = {}
        self._waiting: dict[Any, Call] = {}
        self._singles: deque[Job] = deque()
        self._suspects: set[Job] = set()
        self._generation, self._room = 0, CALLS_IN_FLIGHT
        self._fitted, self._phase = options.clients.gpu <= 0, ""
        self._pieces: dict[tuple[str, str], Any] = {}
        self._packets: dict[Any, int] = {}  # those that wait for the server step, and their bytes
        self._current: tuple[tuple[str, str], ...] = ()
        self._started = False
        self._server, ready = self._start_server()
        self._slots = [Slot() for _ in range(self.num_workers)]
        try:
            for slot in self._slots:
                self._start_worker(slot)
            self._errors_as_ours(lambda: self._ray.get(ready))
            self._first_workers()
        except BaseException:
            self.close()
            raise
        self._started = True

    @property
    def _ended(self) -> tuple[type[Exception], ...]:
        """What Ray raises where an actor's process is gone, whatever ended it."""
        return self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError

    # Actors

    def _start_server(self) -> tuple[Any, Any]:
        share = self._options.server
        actor = actors.start(ServerActor, share.cpu, share.gpu)
        return actor, actor.setup.remote(self._options, self._view, self._proxy, self._novel)

    def _replacement(self) -> Any:
        """Return a new server actor that is set up: Ray goes on offering a lost node until it misses its heartbeats."""
        tries = self._options.engine.retries
        while True:
            actor, ready = self._start_server()
            try:
                self._errors_as_ours(functools.partial(self._ray.get, ready))
                return actor
            except ResourceError as error:
                if tries == 0 or not isinstance(error.__cause__, self._ended):
                    raise
            tries -= 1
            time.sleep(PAUSE_S)

    def _start_worker(self, slot: Slot) -> None:
        """Start (or replace) a slot's actor; it is used once its setup is through."""
        share = self._options.clients
        actor = actors.start(ClientActor, share.cpu, share.gpu)
        slot.actor, slot.busy, slot.pace, slot.usable, slot.held = actor, 0, 0.0, False, set()
        ready = slot.actor.setup.remote(self._options, self._task, self._states)
        self._waiting[ready] = Call("setup", self._generation, slot, slot.actor)

    def _grow(self) -> None:
        """Start further actors where the cluster has room for more than at the start: a node was added."""
        try:
            wanted = self._plan().num_actors
        except ResourceError:  # less room than at the start: what is here goes on
            return
        for _ in range(wanted - self.num_workers):
            self._slots.append(Slot())
            self._start_worker(self._slots[-1])
        self.num_workers = len(self._slots)

    def _first_workers(self) -> None:
        """Wait for all workers for a while, then go on with those that are there: the cluster may be busy."""
        started = time.monotonic()
        while any(call.kind == "setup" for call in self._waiting.values()):
            enough = any(slot.usable for slot in self._slots) and time.monotonic() - started > NOTICE_S
            done, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=NOTICE_S)
            if not done:
                usable = sum(slot.usable for slot in self._slots)
                log.warning(
                    "%d of %d client actors have started; the cluster has no room yet", usable, self.num_workers
                )
            for reference in done:
                self._collect(reference)
            if enough:
                return

    def _errors_as_ours(self, work: Callable[[], T]) -> T:
        """Turn Ray's wrapper back into the error an actor raised on purpose."""
        try:
            return work()
        except self._ray.exceptions.RayTaskError as error:
            raise _raised(error) from None
        except self._ended as error:
            raise ResourceError(f"the server actor died while starting ({first_line(error)}).") from error

    # Server

    def _ask(self, verb: str, *args: Any) -> Any:
        """Return what a method of the server does. Raises ServerLost."""
        return self._answer(self._server.call.remote(verb, *args))

    def _answer(self, reference: Any) -> Any:
        """Return the value of a server call. Raises ServerLost."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _raised(error) from None
        except self._ended as error:
            raise ServerLost(f"the server actor died ({first_line(error)})") from error

    def begin(self, round_index: int, phase: Phase) -> tuple[Any, Sent]:
        """Open a phase; workers read the broadcast from the object store, once per node.

        Sticky fields lie there as objects of their own and go only to actors that do not hold them.
        """
        reference = self._server.call.remote("begin", round_index, phase, frozenset(self._pieces))
        broadcast = self._answer(reference)
        self._packets = {}
        self._current = tuple((piece.name, piece.version) for piece in broadcast.pieces)
        fresh = {(piece.name, piece.version): self._ray.put(piece) for piece in broadcast.pieces if piece.data}
        self._pieces = {key: value for key, value in self._pieces.items() if key in self._current} | fresh
        return reference, Sent.of(broadcast)

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...], *, last: bool) -> Finish:
        """Start the server step."""
        done = self._server.call.remote("end", phase, cohort, accepted, last, *self._packets)
        return functools.partial(self._answer, done)

    def snapshot(self) -> bytes:
        """The server's state."""
        state: bytes = self._ask("snapshot")
        return state

    def restore(self, snapshot: bytes) -> None:
        """Restore the state, in a new server actor if the old one is dead."""
        try:
            self._ask("restore", snapshot)
        except ServerLost:
            self._server = self._replacement()
            self._ask("restore", snapshot)

    def trainable(self) -> list[str]:
        """What is trained."""
        sentences: list[str] = self._ask("trainable")
        return sentences

    def export(self) -> Export:
        """Trained parameters by name."""
        export: Export = self._ask("export")
        return export

    # Work

    def run(
        self, verb: Verb, broadcast: Any, jobs: Sequence[Job], *, deadline_s: float | None = None
    ) -> Iterator[Outcomes]:
        """Yield outcomes as they come. What an earlier run left unfinished keeps its actor busy and is thrown away."""
        self._generation += 1
        self._attempts, self._moves, self._suspects = {}, {}, set()
        end = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
        # Where someone may be slow, nobody waits behind anybody.
        clients = self._options.clients
        self._room = 1 if deadline_s is not None or clients.over_select > 0 else CALLS_IN_FLIGHT
        if verb == "train" and jobs:
            self._fit_to_cards(broadcast, jobs)
            self._forget_paces(jobs[0])
        usable = [slot for slot in self._slots if slot.usable]
        if usable and all(self._has_straggler(slot) for slot in usable):
            self._replace(usable[0])
        self._deal(jobs)
        try:
            self._send(verb, broadcast)
            self._grow()  # once everyone has work: it asks the cluster
            while self._send(verb, broadcast) or self._unfinished():
                left = max(0.0, end - time.monotonic())
                done, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=min(left, NOTICE_S))
                if not done and left <= NOTICE_S:
                    yield self._give_up(deadline_s)
                    return
                if not done and not any(slot.usable for slot in self._slots):
                    log.warning("no client actor is left and the cluster has no room for one; waiting")
                for reference in done:
                    if outcomes := self._collect(reference):
                        yield outcomes
        finally:
            self._singles.clear()
            for slot in self._slots:
                slot.queue.clear()

    def _fit_to_cards(self, broadcast: Any, jobs: Sequence[Job]) -> None:
        """Before the first client of a run: on every card, end the actors that would not fit beside each other.

        One actor a card trains one batch of the largest client for it. Raises ResourceError if not even one fits.
        """
        if self._fitted:
            return
        self._fitted = True
        largest = max(jobs, key=lambda job: job.cost)
        sharing = cards.sharing(self._slots)
        asked = [slots[0].actor.rehearse.remote(broadcast, largest, *self._news(slots[0])) for slots in sharing]
        for slots, answer in zip(sharing, asked, strict=True):
            try:
                need = self._ray.get(answer)
            except self._ray.exceptions.RayTaskError as error:
                raise _raised(error) from None
            except self._ray.exceptions.RayError:
                continue  # what became of the actor is found out as it is given work
            if need is not None:
                cards.spare(slots, need)

    def _forget_paces(self, job: Job) -> None:
        """Start to measure anew; what another phase than that of ``job`` took says nothing about it."""
        assert isinstance(job, TrainJob)
        for slot in self._slots:
            slot.trained, slot.seconds = 0, 0.0
            slot.pace = slot.pace if job.phase.name == self._phase else 0.0
        self._phase = job.phase.name

    def _has_straggler(self, slot: Slot) -> bool:
        """Whether the slot's actor is still at work for an earlier run."""
        calls = (c for c in self._waiting.values() if c.kind == "work" and c.generation != self._generation)
        return any(call.slot is slot and call.actor is slot.actor for call in calls)

    def _deal(self, jobs: Sequence[Job]) -> None:
        for job in sorted(jobs, key=lambda job: -job.cost):
            home = job.client_id if job.client_id >= 0 else job.cost + _start(job)
            self._slots[home % self.num_workers].queue.append(job)

    def _unfinished(self) -> bool:
        mine = any(c.kind != "setup" and c.generation == self._generation for c in self._waiting.values())
        return mine or bool(self._singles) or any(slot.queue for slot in self._slots)

    def _send(self, verb: Verb, broadcast: Any) -> bool:
        """Keep every usable actor supplied; return whether anything was sent."""
        sent = False
        free = [slot for slot in self._slots if slot.usable and not self._has_straggler(slot)]
        for calls in range(self._room):  # everyone gets a first call before anyone gets a second
            left = sum(len(slot.queue) for slot in self._slots)
            for slot in free:
                if slot.busy <= calls and (jobs := tuple(self._next_jobs(slot, verb, left))):
                    self._call(slot, verb, broadcast, jobs)
                    sent = True
        return sent

    def _call(self, slot: Slot, verb: Verb, broadcast: Any, jobs: tuple[Job, ...]) -> None:
        call = slot.actor.work.options(num_returns=2)
        report, packet = call.remote(verb, broadcast, pack(jobs), *self._news(slot))
        weight = self._room if jobs[0] in self._suspects else 1
        self._waiting[report] = Call("work", self._generation, slot, slot.actor, slot.node, jobs, packet, weight)
        slot.busy += weight

    def _news(self, slot: Slot) -> list[Any]:
        """The broadcast's sticky fields that the slot's actor does not hold; it does from now on."""
        news = [key for key in self._current if key not in slot.held]
        slot.held.update(news)
        return [self._pieces[key] for key in news]

    def _next_jobs(self, slot: Slot, verb: Verb, left: int) -> list[Job]:
        """The slot's share of the ``left`` jobs: its own first, then from the end of the longest queue.

        A job that was in a crash gets an idle actor to itself, so that it can take nobody along if it was the cause.
        """
        if self._singles and slot.busy == 0:
            self._suspects.add(self._singles[0])
            return [self._singles.popleft()]
        paces = [other.pace if verb == "train" else 0.0 for other in self._slots if not other.retired]
        count = dealing.share(left, slot.pace, paces) if self._room > 1 else 1
        jobs: list[Job] = []
        while len(jobs) < count and (source := slot if slot.queue else self._longest()).queue:
            jobs.append(source.queue.popleft() if source is slot else source.queue.pop())
        return jobs

    def _longest(self) -> Slot:
        return max(self._slots, key=lambda slot: len(slot.queue))

    def _collect(self, reference: Any) -> Outcomes:
        """Take in something that is done; return the outcomes that are now complete."""
        call = self._waiting.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, self._ray.exceptions.ObjectLostError):  # what it was to read died with a node
                return self._recover(call, error, input_lost=True)
            raise _raised(error) from None
        except self._ray.exceptions.RayError as error:
            return self._recover(call, error)
        if call.kind == "setup":
            if call.slot.actor is call.actor:
                call.slot.usable = not call.slot.retired
                call.slot.node, call.slot.cards = result
            return ()
        if call.kind == "delivery":
            return call.outcomes
        if call.slot.actor is call.actor:
            call.slot.busy -= call.weight
        return self._worked(call, *result) if call.generation == self._generation else ()

    def _worked(self, call: Call, packed: bytes, size: int) -> Outcomes:
        """Keep a packet of a small ``size`` for the server step, send another on; outcomes count once it is there."""
        outcomes: Outcomes = unpack(packed)
        if seconds := [outcome.seconds for outcome in outcomes if isinstance(outcome, ClientReport)]:
            call.slot.worked(seconds)
        outcomes = self._spare_memory(call, outcomes)
        if not isinstance(call.jobs[0], TrainJob) or not outcomes:
            return outcomes
        if size <= min(SMALL, SMALL_IN_ALL - sum(self._packets.values())):
            self._packets[call.packet] = size
            return outcomes
        delivery = self._server.call.remote("receive", call.packet)
        self._waiting[delivery] = Call(
            "delivery", call.generation, call.slot, call.actor, call.node, call.jobs, outcomes=outcomes
        )
        return ()

    # Trouble

    def _give_up(self, deadline_s: float | None) -> Outcomes:
        """The deadline: name every client that has not answered, and replace the actors that are still at work."""
        missing = [job for slot in self._slots for job in slot.queue] + list(self._singles)
        for reference, call in list(self._waiting.items()):
            if call.kind == "setup":
                continue
            del self._waiting[reference]
            if call.generation == self._generation:
                missing += call.jobs
            if call.kind == "work" and call.slot.actor is call.actor:
                self._replace(call.slot)
        return tuple(late(job, deadline_s) for job in missing)

    def _spare_memory(self, call: Call, outcomes: Outcomes) -> Outcomes:
        """Where clients ran out of memory beside each other, end that actor; try them again, a bounded number of times.

        Also where one actor is left: an ended one gives its memory back only a moment later.
        """
        short = {o.client_id for o in outcomes if isinstance(o, ClientFailure) and "OutOfMemory" in o.error_type}
        running = [slot for slot in self._slots if not slot.retired]
        again = [job for job in call.jobs if job.client_id in short and self._may_retry(job)]
        if not again:
            return outcomes
        self._singles.extend(again)
        if len(running) > 1 and call.slot in running and call.slot.actor is call.actor:
            call.slot.retire()  # gives its memory back
            log.warning(
                "client %s ran out of memory: going on with %d side by side (raise clients.gpu or lower train.batch)",
                ", ".join(str(job.client_id) for job in again),
                len(running) - 1,
            )
        retried = {job.client_id for job in again}
        return tuple(o for o in outcomes if not (isinstance(o, ClientFailure) and o.client_id in retried))

    def _may_retry(self, job: Job, *, moved: bool = False) -> bool:
        """Whether to try again: a bounded number of times; to move off lost nodes, at most once per actor."""
        tries = self._moves if moved else self._attempts
        tries[job] = tries.get(job, 0) + 1
        allowed = tries[job] <= (self.num_workers if moved else self._options.engine.retries)
        self.retried += int(allowed)
        return allowed

    def _node_is_lost(self, call: Call, error: Exception) -> bool:
        """Whether the actor went with its node (gone, or out of reach), which is no fault of its jobs."""
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return True
        return call.node not in {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}

    def _recover(self, call: Call, error: Exception, *, input_lost: bool = False) -> Outcomes:
        """A worker died (in its setup or at work), a packet or the broadcast was lost, or the server died."""
        if (call.kind == "delivery" or input_lost) and self._server_is_dead():
            raise ServerLost(f"the server actor died ({first_line(error)})") from error
        if call.kind == "setup":
            self._count_failed_start(call.slot, error)
        if call.kind != "delivery" and call.slot.actor is call.actor and not call.slot.retired:
            self._replace(call.slot)  # its other calls in flight fail too: they find another actor here
        if call.generation != self._generation:
            return ()
        moved = bool(call.node) and self._node_is_lost(call, error)
        again = [job for job in call.jobs if self._may_retry(job, moved=moved)]
        self._singles.extend(again)
        lost = [job for job in call.jobs if job not in again]
        what = _reason(self._ray, error), first_line(error), self._options.engine.retries + 1
        return tuple(ClientFailure(RoundRef(-1, "", -1), job.client_id, *what) for job in lost)

    def _count_failed_start(self, slot: Slot, error: Exception) -> None:
        slot.failed_starts += 1
        if slot.failed_starts > self._options.engine.retries:
            slot.retired = True
            if all(other.retired for other in self._slots):
                raise ResourceError(
                    f"no client actor can be started ({_reason(self._ray, error)}: {first_line(error)})."
                )

    def _server_is_dead(self) -> bool:
        try:
            self._ray.get(self._server.ping.remote())
        except self._ended:
            return True
        return False

    def _replace(self, slot: Slot) -> None:
        actors.kill(slot.actor)
        self._start_worker(slot)

    def close(self) -> None:
        """End the actors."""
        client, server = self._options.clients, self._options.server
        calls = {id(call.actor) for call in self._waiting.values()}
        for slot in (slot for slot in self._slots if slot.actor is not None):
            idle = slot.usable and id(slot.actor) not in calls
            actors.end(slot.actor, ClientActor, client.cpu, client.gpu, idle=idle)
        actors.end(self._server, ServerActor, server.cpu, server.gpu, idle=self._started)


def _start(job: Job) -> int:
    return job.start if isinstance(job, PredictJob) else 0


def _raised(error: Any) -> Exception:
    """What an actor raised on purpose, out of Ray's wrapper; else the wrapper."""
    found: Exception = error.cause if isinstance(error.cause, RayfedError) else error
    return found


def _reason(ray: Any, error: Exception) -> str:
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "killed for memory"
    return "crashed" if isinstance(error, ray.exceptions.RayActorError) else "reply lost"
