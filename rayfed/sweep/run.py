"""A sweep from request to report: Ray Tune plays the trials, the ledger remembers them, nothing is chosen on test data.

request -> points -> Tune (searcher, scheduler) -> trials in placement groups of their own -> ledger -> best.yaml
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from rayfed.data import build_task_from_options
from rayfed.data.task import Task
from rayfed.engine.resources import Plan
from rayfed.errors import DataError, SweepError
from rayfed.sweep import placement, report, search
from rayfed.sweep.ledger import Ledger, Trial, ranked
from rayfed.sweep.request import Request
from rayfed.sweep.space import as_text
from rayfed.sweep.store import SweepStore
from rayfed.tracking.console import Console
from rayfed.tracking.mlflow import default_uri, saved_uri, view_command
from rayfed.tracking.observers import provenance

log = logging.getLogger("rayfed")
SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # with verbose=0 the silent one
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends a sweep as it ends a run
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial has no figure
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "90",  # a stopped trial closes its actors and its MLflow run first
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's own state is not what a sweep is resumed from
}
DEATHS = 2
"""How often a trial goes on from its checkpoints after its process died."""


def prepare() -> None:
    """Set what Ray Tune reads from the environment; before Ray is started, so that its processes inherit it."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # what it tells of is told here, shorter


class Sweep:
    """The steps of one sweep, in order; ``plan`` is what a trial gets of the cluster's ``nodes``."""

    def __init__(self, request: Request, out: Path, nodes: list[dict[str, float]], plan: Plan) -> None:
        self.request, self.out, self.nodes, self.plan = request, out, nodes, plan
        self.ledger = Ledger(out)
        self.console = Console(request.base.rounds)
        self._store = self._make_store() if request.base.tracking.enabled else None

    def _make_store(self) -> SweepStore:
        base = self.request.base
        uri = base.tracking.uri or saved_uri(self.out) or default_uri(self.out, named=base.out is not None)
        name = base.tracking.run_name or f"sweep-{base.method.name}-{base.data.name}-s{base.seed}"
        return SweepStore(uri, base.tracking.experiment, name, self.ledger)

    def play(self) -> int:
        """Try the points, report; return 0.

        Raises:
            SweepError: no trial has a valid result, or one failed and ``tune.fail=any``.
        """
        task = self._task()
        self.ledger.claim(self.request.definition())
        known = self.ledger.load()
        if self._store is not None:
            self._store.open(self._params(), provenance())
        status = "KILLED"
        trials: list[Trial] = []
        try:
            self._search(task, known)
            trials = ranked(self.ledger.load().values(), self.request.tune.mode)
            best = self._report(trials)
            status = "FAILED" if best is None else "FINISHED"
        finally:
            if self._store is not None:
                trials = trials or list(self.ledger.load().values())
                valid = [trial for trial in trials if trial.score is not None]
                self._store.finish(trials, valid[0] if status == "FINISHED" else None, status)
            shutil.rmtree(self.out / ".tune", ignore_errors=True)
        self._conclude(trials)
        return 0

    def _params(self) -> dict[str, Any]:
        request = self.request
        searched = {f"space.{p.name}": f"{p.kind} {as_text(list(p.values))}" for p in request.space.parameters}
        tune = {f"tune.{name}": value for name, value in request.tune.model_dump(mode="json").items()}
        return {**tune, **searched, **request.fixed}

    def _task(self) -> Task:
        task = build_task_from_options(self.request.base)
        if not any(len(client.val) for client in task.clients):
            raise DataError(
                "no client has a validation image, so no trial can be judged: raise data.val, or leave images over for "
                "it (lower data.shots)."
            )
        for note in [*task.notes, *self.request.notes(), *([self.plan.note] if self.plan.note else [])]:
            self.console.say(f"note: {note}")
        return task

    def _search(self, task: Task, known: dict[int, Trial]) -> None:
        """Play every trial that has not ended."""
        request = self.request
        ended = {index: trial for index, trial in known.items() if trial.ended}
        left = [Trial(t.index, t.point, scores=t.scores, changes=t.changes) for t in known.values() if not t.ended]
        fresh = [Trial(i, point) for i, point in enumerate(request.points()) if i not in known]
        first = sorted([*left, *fresh], key=lambda trial: trial.index)
        total = max(request.samples(), len(known))
        remaining = len(first) if request.tune.searcher != "optuna" else max(total - len(ended), len(first))
        self._announce(remaining, len(ended), len(left))
        if remaining:
            self._tune(task, ended, first, remaining)

    def _announce(self, remaining: int, ended: int, left: int) -> None:
        base = self.request.base
        actors = "in one process each" if base.engine.pool == "local" else f"{self.plan.num_actors} client actors each"
        names = ", ".join(p.name for p in self.request.space.parameters)
        side = self._side_by_side(remaining)
        self.console.say(f"sweep of {base.method.name} over {names}: {remaining} trials, {side} at a time, {actors}")
        if ended or left:
            self.console.say(f"resumed: {ended} trials have ended before, {left} go on from their checkpoints")
        self.console.say(f"results: {self.out}")

    def _side_by_side(self, remaining: int) -> int:
        wanted = placement.bundles(self.request.base, self.plan.num_actors)
        fit = placement.side_by_side(wanted, self.nodes, max(remaining, 1))
        asked = self.request.tune.concurrent
        return fit if asked == "auto" else min(fit, asked)

    def _tune(self, task: Task, ended: dict[int, Trial], first: list[Trial], remaining: int) -> None:
        """Let Ray Tune play: ``first`` in their order, then (model-based) what the searcher proposes."""
        from ray import tune

        from rayfed.sweep.watch import Interrupts, Watch

        interrupts = Interrupts()
        watch = Watch(self.request, self.ledger, remaining, interrupts, self.console.say)

        def begin(trial: Trial) -> dict[str, Any]:
            watch.trials[trial.name] = trial
            return self._begin(trial)

        space, searcher, samples = self._points(ended, first, remaining, begin)
        tuner = tune.Tuner(
            self._trainable(task),
            param_space=space,
            tune_config=self._tune_config(searcher, ended, samples, remaining),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(self.out / ".tune"),
                verbose=0,
                callbacks=[watch],
                stop=interrupts,
                failure_config=tune.FailureConfig(max_failures=DEATHS),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            ),
        )
        with interrupts:
            tuner.fit()
        watch.finish()

    def _begin(self, trial: Trial) -> dict[str, Any]:
        """Write down that ``trial`` is about to start; return the configuration it gets."""
        self.ledger.save(trial)
        if self._store is not None:
            self._store.begin(trial)
        actors = placement.plan_trial(self.request.options(trial.point), self.nodes).num_actors
        return {"index": trial.index, "point": trial.point, "actors": actors}

    def _points(
        self, ended: dict[int, Trial], first: list[Trial], remaining: int, begin: search.Begin
    ) -> tuple[Any, Any, int]:
        """Tune's parameter space, searcher and number of samples."""
        if self.request.tune.searcher != "optuna":
            return search.planned(first, begin), None, 1
        from rayfed.sweep.tpe import Proposals

        return None, Proposals(self.request, ended, first, begin), remaining

    def _trainable(self, task: Task) -> Any:
        from ray import tune

        from rayfed.sweep.trial import Setup, run_trial

        uri = None if self._store is None else self._store.uri
        setup = Setup(self.request, self.out, task, uri, self.request.tune.scheduler == "pbt")
        base = self.request.base
        return tune.with_resources(
            tune.with_parameters(run_trial, setup=setup),
            resources=lambda config: placement.factory(base, config["trial"]["actors"]),
        )

    def _tune_config(self, searcher: Any, ended: dict[int, Trial], samples: int, remaining: int) -> Any:
        from ray import tune

        request = self.request
        # A population advances together: those for which there is no room are paused, not put off to the end.
        together = request.tune.scheduler == "pbt"
        return tune.TuneConfig(
            search_alg=searcher,
            scheduler=search.scheduler(request.tune, request.space, request.base.rounds, ended.values()),
            num_samples=samples,
            max_concurrent_trials=None if together else self._side_by_side(remaining),
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        )

    def _report(self, trials: list[Trial]) -> Trial | None:
        """Write and print what was found; return the best trial, if any is valid."""
        request = self.request
        best = trials[0] if trials and trials[0].score is not None else None
        report.write_trials(self.out, request, trials)
        report.print_table(request, trials)
        if best is None:
            (self.out / "best.yaml").unlink(missing_ok=True)
            return None
        path = report.write_best(self.out, request, best)
        try:
            report.draw_parameters(self.out, request, trials, best)
        except Exception as error:  # looking at a sweep must never end it
            log.warning("plots: %s: %s", type(error).__name__, error)
        weights = report.importances(request, trials)
        if any(weight is not None for weight in weights.values()):
            shown = ", ".join(f"{name} {weight:.2f}" for name, weight in weights.items() if weight is not None)
            self.console.say(f"importance (rank correlation with {request.tune.metric}): {shown}")
        self.console.say(f"best:    trial {best.index}, run it with: python -m rayfed.run config='{path}'")
        return best

    def _conclude(self, trials: list[Trial]) -> None:
        """Say where everything is; an unsuccessful sweep is an error."""
        if self._store is not None:
            self.console.say(f"MLflow:  {view_command(self._store.uri)}")
        self.console.say(f"results: {self.out}")
        valid = [trial for trial in trials if trial.score is not None]
        failed = [trial for trial in trials if trial.state == "failed"]
        if not valid:
            raise SweepError(
                f"no valid trial: 0 of {len(trials)} finished ({len(failed)} failed, "
                f"{len(trials) - len(failed)} diverged); no best options were written."
            )
        if failed and self.request.tune.fail == "any":
            raise SweepError(f"{len(failed)} of {len(trials)} trials failed, and tune.fail=any counts that as failure.")


def _name(trial: Any) -> str:
    """A trial's name in Tune is its number, also where it has taken over another one's configuration."""
    return f"{trial.config['trial']['index']:05d}"
