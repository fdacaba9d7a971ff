"""The round loop.

    draw cohort -> server: begin(phase) --broadcast--> workers: client_step --packets--> server: receive
                                                           |reports                         |
                                                        driver <----------figures---- server: finish (server_step)
    every k rounds: predictions of the global and the personal models -> figures; save; tell the observers

The driver holds no tensors: which private state of a client counts, the figures so far, and the bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rayfed.conf.options import RunOptions
from rayfed.data.task import Task
from rayfed.engine import evaluate
from rayfed.engine.checkpoint import Checkpoints
from rayfed.engine.jobs import ClientReport, Prediction, StateRef, TrainJob
from rayfed.engine.pool import Pool, ServerLost
from rayfed.engine.sampling import draw_cohort
from rayfed.errors import CheckpointError, DivergedError, NonFiniteError, RoundError
from rayfed.messages import EVALUATION, ClientFailure, Phase
from rayfed.methods.base import AnyMethod
from rayfed.metrics.accuracy import spread

log = logging.getLogger("rayfed")
SERVER_RESTARTS = 3
"""How often one round is played again because the server died."""


@dataclass
class RoundRecord:
    """What happened in a round: reproducible figures only (``seconds`` and ``retried`` go to timing.json)."""

    round: int
    cohort: tuple[int, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    clients: dict[str, float] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    """Each figure of the clients over those that have it: mean, std, min, max, p10, p50, p90, unweighted."""
    server: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None


class Observer(Protocol):
    """Someone who is told how the run goes (console, files, MLflow)."""

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` clients (or evaluation jobs) of a round are through."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """A round is finished and, where due, saved."""


@dataclass(slots=True)
class Federation:
    """One run: plays the rounds that are left."""

    options: RunOptions
    task: Task
    method: AnyMethod
    pool: Pool
    checkpoints: Checkpoints
    observer: Observer
    has_zero_shot: bool = True
    private: dict[int, StateRef] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    scores: evaluate.Scores = field(default_factory=evaluate.Scores)
    seconds: list[float] = field(default_factory=list)
    held: dict[int, dict[str, str]] = field(default_factory=dict)
    """Which version of each sticky field every client was sent last."""
    _snapshot: bytes = b""

    def resume(self) -> str | None:
        """Take up the newest whole save; return a sentence about it, None if there is none."""
        saved = self.checkpoints.load_newest()
        if saved is None:
            return None
        if saved.rounds_done > self.options.rounds:
            raise CheckpointError(
                f"rounds={self.options.rounds} is below the {saved.rounds_done} rounds already played: raise it."
            )
        self.private, self.history = dict(saved.private), list(saved.figures["history"])
        self.held = {int(client): dict(versions) for client, versions in saved.figures.get("held", {}).items()}
        self.pool.restore(saved.server)
        planned = saved.figures["rounds"]
        longer = f"; planned for {planned} rounds, now {self.options.rounds}: schedules over rounds differ from one go"
        skipped = f"; passed over {', '.join(saved.passed_over)}" if saved.passed_over else ""
        changed = longer if planned != self.options.rounds else ""
        return f"resumed after round {saved.rounds_done}{skipped}{changed}"

    def play(self) -> None:
        """Play every round that is left.

        Raises:
            RoundError: too few good updates, or the server died again and again; the last save is whole.
        """
        self._snapshot = self.pool.snapshot()
        first = len(self.history)
        if first >= self.options.rounds:
            # Predictions of clients as their step left them exist only in the round itself: those figures are kept.
            before = {k: v for k, v in (self.history[-1]["evaluation"] or {}).items() if k == "personal_trained"}
            self.history[-1]["evaluation"] = self._evaluate(self.options.rounds - 1) | before
        for index in range(first, self.options.rounds):
            started = time.perf_counter()
            record = self._surviving(lambda index=index: self._round(index))  # type: ignore[misc]
            self.seconds.append(time.perf_counter() - started)
            self.history.append(dict(vars(record)))
            self._save(index)
            self.observer.round_done(record, self.seconds[-1])

    def _surviving(self, play: Callable[[], tuple[RoundRecord, bytes]]) -> RoundRecord:
        """Play a round; if the server dies, give a new one the last snapshot and play it again from the start."""
        before, held = dict(self.private), dict(self.held)
        for _ in range(SERVER_RESTARTS):
            try:
                record, self._snapshot = play()
                return record
            except ServerLost as error:
                log.warning("%s; playing the round again", error)
                self.private, self.held = dict(before), dict(held)
                self.pool.restore(self._snapshot)
        raise RoundError(
            f"the server died {SERVER_RESTARTS} times in one round; go on with resume=auto once it is stable."
        )

    def _round(self, index: int) -> tuple[RoundRecord, bytes]:
        """Play a round; return what happened, and the server's state after it."""
        record, state = RoundRecord(index), self._snapshot
        cohort: tuple[int, ...] = ()
        due = self._evaluation_due(index)
        phases = self.method.phases(index, self.options.rounds)
        for position, phase in enumerate(phases):
            cohort = self._cohort(phase, index, cohort)
            last = position == len(phases) - 1
            state = self._phase(phase, cohort, record, score=due and last, last=last)
        record.cohort = cohort
        record.notes = self.method.notes({**record.clients, **record.server})
        if due:
            record.evaluation = self._evaluate(index)
        return record, state

    def _cohort(self, phase: Phase, index: int, first: tuple[int, ...]) -> tuple[int, ...]:
        eligible = [c for c, client in enumerate(self.task.clients) if len(client.train)]
        if phase.cohort == "all":
            return tuple(eligible)
        if phase.cohort == "same" and first:
            return first
        wanted = math.ceil(self.options.cohort_size * (1 + self.options.clients.over_select))
        return draw_cohort(self.options.seed, index, eligible, wanted)

    def _phase(self, phase: Phase, cohort: Sequence[int], record: RoundRecord, *, score: bool, last: bool) -> bytes:
        broadcast, sent = self.pool.begin(record.round, phase)
        record.bytes_down += sent.each * len(cohort)
        for client in cohort if sent.pieces else ():
            held = dict(self.held.get(client, {}))
            record.bytes_down += sent.news(held)
            self.held[client] = held
        jobs = [TrainJob(c, len(self.task.clients[c].train), phase, self.private.get(c), score) for c in cohort]
        reports, failures = self._train(record.round, broadcast, jobs)
        if len(reports) < self.options.clients.min_updates:
            reasons = "; ".join(f"client {f.client_id}: {f.error_type}: {f.message}" for f in failures[:5])
            ran_away = bool(failures) and all(f.error_type == NonFiniteError.__name__ for f in failures)
            raise (DivergedError if ran_away else RoundError)(
                f"round {record.round + 1} has {len(reports)} good updates of {len(cohort)}, below "
                f"clients.min_updates={self.options.clients.min_updates} ({reasons}); the last good state is saved."
            )
        accepted = tuple(report.client_id for report in reports)
        step = self.pool.finish(phase, tuple(sorted(cohort)), accepted, last=last)
        self._commit(reports, failures, record)  # while the server works
        figures, state = step()
        record.server |= figures
        return state

    def _train(
        self, index: int, broadcast: Any, jobs: Sequence[TrainJob]
    ) -> tuple[list[ClientReport], list[ClientFailure]]:
        reports: list[ClientReport] = []
        failures: list[ClientFailure] = []
        clients = self.options.clients
        enough = self.options.cohort_size if clients.over_select else len(jobs)
        for outcomes in self.pool.run("train", broadcast, jobs, deadline_s=clients.deadline_s):
            reports += [outcome for outcome in outcomes if isinstance(outcome, ClientReport)]
            failures += [self._warned(index, outcome) for outcome in outcomes if isinstance(outcome, ClientFailure)]
            self.observer.progress(index, "train", len(reports) + len(failures), len(jobs))
            if len(reports) >= enough:
                break
        return sorted(reports, key=lambda r: r.client_id), sorted(failures, key=lambda f: f.client_id)

    def _warned(self, index: int, lost: ClientFailure) -> ClientFailure:
        log.warning("round %d: client %d left out: %s: %s", index + 1, lost.client_id, lost.error_type, lost.message)
        return lost

    def _commit(self, reports: Sequence[ClientReport], failures: Sequence[ClientFailure], record: RoundRecord) -> None:
        self.private |= {r.client_id: r.state for r in reports if r.state is not None}
        record.bytes_up += sum(r.bytes_up for r in reports)
        record.failures += [{"client": f.client_id, "error": f.error_type, "message": f.message} for f in failures]
        for name, held in _by_name(reports).items():
            record.clients[name] = _weighted_mean(held)
            record.spread[name] = spread(np.array([value for value, _ in held]))
        trained = {r.client_id: r.predictions for r in reports if r.predictions is not None}
        self.scores.trained = trained or self.scores.trained

    def _evaluation_due(self, index: int) -> bool:
        every = self.options.eval.every
        return index + 1 == self.options.rounds or (every > 0 and (index + 1) % every == 0)

    def _evaluate(self, index: int) -> dict[str, Any]:
        broadcast, _ = self.pool.begin(index, EVALUATION)
        zero_shot = self.has_zero_shot and self.scores.zero_shot is None
        last = index + 1 == self.options.rounds
        jobs = evaluate.jobs(self.task, self.private, zero_shot=zero_shot, last=last)
        found: list[Prediction] = []
        for outcomes in self.pool.run("predict", broadcast, jobs):
            for outcome in outcomes:
                if isinstance(outcome, ClientFailure):
                    raise RoundError(
                        f"evaluation of round {index + 1} failed: {outcome.error_type}: {outcome.message}."
                    )
            found += [outcome for outcome in outcomes if isinstance(outcome, Prediction)]
            self.observer.progress(index, "evaluate", len(found), len(jobs))
        self.scores.next(self.private)
        return evaluate.figures(self.task, evaluate.collect(self.task, found, self.scores))

    def _save(self, index: int) -> None:
        every = self.options.checkpoint.every
        if index + 1 == self.options.rounds or (index + 1) % every == 0:
            figures = {"history": self.history, "rounds": self.options.rounds, "held": self.held}
            self.checkpoints.save(index + 1, self._snapshot, self.private, figures)


def _by_name(reports: Sequence[ClientReport]) -> dict[str, list[tuple[float, int]]]:
    """Each figure of the clients with their examples; a client that made no step does not count."""
    trained = [report for report in reports if report.num_examples]
    names = sorted({name for report in trained for name in report.metrics})
    return {name: [(r.metrics[name], r.num_examples) for r in trained if name in r.metrics] for name in names}


def _weighted_mean(held: Sequence[tuple[float, int]]) -> float:
    return sum(value * n for value, n in held) / sum(n for _, n in held)


def summary(options: RunOptions, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last round and the totals: the content of ``summary.json``."""
    last = history[-1]["evaluation"]
    return {
        "method": options.method.name,
        "data": options.data.name,
        "backbone": options.backbone.name,
        "seed": options.seed,
        "rounds": len(history),
        **last,
        "bytes_up": sum(record["bytes_up"] for record in history),
        "bytes_down": sum(record["bytes_down"] for record in history),
        "failures": sum(len(record["failures"]) for record in history),
    }


def state_folder(out: Path) -> Path:
    """Where private client states of a run lie."""
    return out / "checkpoints" / "clients"
