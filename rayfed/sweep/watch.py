"""The driver's eyes: Ray Tune tells of every report and every end, the ledger writes it down, a line is printed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ray import tune

from rayfed.sweep.ledger import Ledger, Trial, ranked
from rayfed.sweep.report import as_shown
from rayfed.sweep.request import Request
from rayfed.sweep.search import ROUND, SCORE


class Interrupts(tune.Stopper):  # type: ignore[misc]
    """Inside, SIGINT and SIGTERM end the sweep between two steps of Tune, which then takes its actors along.

    A second signal ends it at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> Interrupts:
        self._previous = {kind: signal.signal(kind, self._note) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._previous.items():
            signal.signal(kind, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum

    def raise_again(self) -> None:
        """Raise what an interrupted process raises, if there was a signal."""
        if self.received is not None:
            raise KeyboardInterrupt if self.received == signal.SIGINT else SystemExit(128 + self.received)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No single trial is stopped."""
        return False

    def stop_all(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Watch(tune.Callback):  # type: ignore[misc]  # Ray is not typed
    """Keeps the ledger; ``trials`` are those that were begun, by name. What an interrupt ends has not ended."""

    def __init__(
        self, request: Request, ledger: Ledger, total: int, interrupts: Interrupts, say: Callable[[str], None]
    ) -> None:
        self.trials: dict[str, Trial] = {}
        self._interrupts = interrupts
        self._request, self._ledger, self._total, self._say = request, ledger, total, say

    def __getstate__(self) -> dict[str, Any]:
        """Tune saves its callbacks; the ledger is the memory of a sweep."""
        return {}

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        """A round was evaluated."""
        held = self.trials[str(trial)]
        self._take_point(held, trial.config["trial"]["point"])
        if SCORE in result:
            held.add(result[ROUND], result[SCORE])
        self._ledger.save(held)
        if result.get("state") == "running":
            done, rounds = result[ROUND], self._request.base.rounds
            self._say(f"trial {held.index} | round {done}/{rounds} | {self._request.tune.metric} {result[SCORE]:.1%}")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial has ended by itself, or was stopped."""
        last = trial.last_result or {}
        state = last.get("state", "failed")
        if self._interrupts.stop_all() and state in {"running", "failed"}:
            return
        self._end(str(trial), "stopped" if state == "running" else state, last.get("error", ""))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """A trial's process died, again and again."""
        lines = [line for line in str(trial.get_error() or "the process died").splitlines() if line.strip()]
        self._end(str(trial), "failed", lines[-1].strip()[:500])

    def finish(self) -> None:
        """Tune is done: a trial that has not ended by now never will. Raises what an interrupt raises."""
        self._interrupts.raise_again()
        for name, trial in self.trials.items():
            if trial.state == "running":
                self._end(name, "failed", "Ray Tune gave it up before it ended")

    def _take_point(self, held: Trial, point: dict[str, Any]) -> None:
        if point != held.point:
            held.changes.append([held.rounds, dict(point)])
            held.point = dict(point)

    def _end(self, name: str, state: Any, error: str) -> None:
        held = self.trials[name]
        held.state, held.error = state, error
        self._ledger.save(held)
        score = "" if held.score is None else f" {self._request.tune.metric} {held.score:.1%}"
        point = " ".join(f"{n}={as_shown(v)}" for n, v in held.point.items())
        ended = [trial for trial in self.trials.values() if trial.state != "running"]
        best = ranked(ended, self._request.tune.mode)[0]
        so_far = "" if best.score is None else f", best {best.score:.1%} (trial {best.index})"
        self._say(f"trial {held.index} {state} after {held.rounds} rounds{score} | {point}")
        self._say(f"{len(ended)} of {self._total} trials have ended{so_far}")
