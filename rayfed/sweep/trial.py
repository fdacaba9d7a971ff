"""One trial, in its own process: a run like any other, which reports every evaluated round to Ray Tune."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rayfed.conf.options import RunOptions
from rayfed.data.task import Task
from rayfed.engine import actors
from rayfed.engine.resources import Plan
from rayfed.errors import DivergedError, NonFiniteError, kind_and_line
from rayfed.sweep.request import Request
from rayfed.sweep.search import ROUND, SCORE, WORST

if TYPE_CHECKING:
    from rayfed.engine.run import RoundRecord

log = logging.getLogger("rayfed")
LOG = "log.txt"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all trials share. ``exchanges``: report checkpoints, which other trials may take over."""

    request: Request
    out: Path
    task: Task
    tracking_uri: str | None
    exchanges: bool


def run_trial(config: Mapping[str, Any], *, setup: Setup) -> None:
    """What Ray Tune calls in the trial's process; how the trial ended is its last report."""
    from ray import tune

    if not (setup.out / "sweep.json").is_file():
        where = f"out={setup.out} is not there on node {socket.gethostname()}"
        tune.report({ROUND: 0, "state": "failed", "error": f"{where}: set out= to storage that every node sees"})
        return
    actors.keep()  # for the next trial in this process, which has the same placement group
    trial = _Trial(config["trial"], setup, setup.out / "trials" / str(tune.get_context().get_trial_name()))
    last = trial.play()
    if last is None:
        raise SystemExit(0)  # as Tune itself ends a trial it has stopped: nothing more may be reported
    tune.report(last)


class _Trial:
    """A run in the trial's folder, resumed from the checkpoints that lie there."""

    def __init__(self, given: Mapping[str, Any], setup: Setup, folder: Path) -> None:
        self.given, self.setup, self.folder = given, setup, folder
        self.rounds, self.score = 0, math.nan
        folder.mkdir(parents=True, exist_ok=True)

    def play(self) -> dict[str, Any] | None:
        """Play it; return the last report, or None if Tune has stopped the trial."""
        with _logging_to(self.folder / LOG) as file:
            try:
                return self._report("finished") if self._run(file) else None
            except (DivergedError, NonFiniteError) as error:
                self.score = WORST[self.setup.request.tune.mode]
                self.rounds += 1
                return self._report("diverged", kind_and_line(error))
            except Exception as error:
                traceback.print_exc(file=file)
                return {ROUND: self.rounds, "state": "failed", "error": kind_and_line(error)}

    def _run(self, file: TextIO) -> bool:
        from rayfed.experiment import Experiment
        from rayfed.tracking.console import Console

        self._take_over()
        options, plan = self._options(), Plan(self.given["actors"])
        with Console(options.rounds, file=file) as console:
            experiment = Experiment(
                options,
                self.folder,
                self._task(options),
                console,
                lambda: plan,
                started=time.perf_counter(),
                on_round=self._round_done,
                may_change=self.setup.request.space.mutable,
            )
            self._experiment = experiment
            finished = experiment.play()
        if finished:
            self._keep(len(experiment.history), experiment.history[-1]["evaluation"])
        return finished

    def _options(self) -> RunOptions:
        chosen = self.setup.request.options(self.given["point"])
        tracking = chosen.tracking
        if self.setup.tracking_uri is not None:
            tracking = tracking.model_copy(update={"uri": self.setup.tracking_uri})
        return chosen.model_copy(update={"out": str(self.folder), "resume": "auto", "tracking": tracking})

    def _task(self, options: RunOptions) -> Task:
        """The sweep's task, unless this trial has other data than a run without a sweep."""
        from rayfed.data import build_task_from_options

        same = _data_of(options) == _data_of(self.setup.request.base)
        return self.setup.task if same else build_task_from_options(options)

    def _take_over(self) -> None:
        """Go on from another trial's state where Tune says so: its checkpoints replace those in this trial's folder."""
        from ray import tune

        checkpoint = tune.get_checkpoint() if self.setup.exchanges else None
        if checkpoint is None:
            return
        aside, place = self.folder / ".checkpoints", self.folder / "checkpoints"
        shutil.rmtree(aside, ignore_errors=True)
        with checkpoint.as_directory() as source:
            shutil.copytree(source, aside)
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)

    def _round_done(self, record: RoundRecord) -> None:
        """Report an evaluated round, except the last one, which is reported once its results are written."""
        from rayfed.experiment import StopRun

        rounds = record.round + 1
        if record.evaluation is None or rounds == self.setup.request.base.rounds:
            return
        from ray import tune

        self._keep(rounds, record.evaluation)
        self._experiment.observers.flush()
        checkpoint = None
        if self.setup.exchanges:
            checkpoint = tune.Checkpoint.from_directory(str(self.folder / "checkpoints"))
        try:
            tune.report(self._report("running"), checkpoint=checkpoint)
        except SystemExit as stop:
            raise StopRun from stop

    def _keep(self, rounds: int, evaluation: Mapping[str, Any]) -> None:
        area, _, name = self.setup.request.tune.metric.partition("/")
        value = evaluation[area][name]
        if value is None or not math.isfinite(value):
            raise NonFiniteError(f"{self.setup.request.tune.metric} is {value} in round {rounds}.")
        self.rounds, self.score = rounds, float(value)

    def _report(self, state: str, error: str = "") -> dict[str, Any]:
        return {ROUND: self.rounds, SCORE: self.score, "state": state, "error": error}


def _data_of(options: RunOptions) -> tuple[Any, ...]:
    """What a task is made from."""
    parts = options.data, options.task, options.partition, options.backbone.name
    return *parts, options.clients.n, options.seed, options.method.uses_proxy()


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[TextIO]:
    """Warnings of this trial go to its own file, as its console does."""
    with path.open("a", encoding="utf-8", buffering=1) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log.addHandler(handler)
        try:
            yield file
        finally:
            log.removeHandler(handler)
