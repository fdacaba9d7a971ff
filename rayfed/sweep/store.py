"""The sweep in MLflow: one parent run, a child for every trial, made by the driver before the trials start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rayfed.errors import kind_and_line
from rayfed.sweep.ledger import Ledger, Trial
from rayfed.sweep.space import as_text
from rayfed.tracking.mlflow import connect, log_params, note_run, saved_run

log = logging.getLogger("rayfed")
PARENT = "mlflow.parentRunId"
STATUS = {"failed": "FAILED", "running": "KILLED"}
"""MLflow's status of a trial that did not end as it should; the others are FINISHED."""


class SweepStore:
    """Parent and child runs; trouble with the store never ends a sweep."""

    def __init__(self, uri: str, experiment: str, name: str, ledger: Ledger) -> None:
        self.uri, self._experiment, self._name, self._ledger = uri, experiment, name, ledger
        self._client: Any = None
        self._id, self._parent = "", ""
        self._warned = False

    def open(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Make the store ready, once and before anyone else uses it, and begin (or take up again) the parent run."""
        self._harmless(lambda: self._open(params, tags))

    def _open(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self._client, self._id = connect(self.uri, self._experiment)
        out = self._ledger.out
        known = saved_run(out, self.uri)
        if known is None:
            run = self._client.create_run(self._id, run_name=self._name, tags={"rayfed.kind": "sweep"})
            known = str(run.info.run_id)
            note_run(out, self.uri, known)
        else:
            self._client.update_run(known, status="RUNNING")
        self._parent = known
        log_params(self._client, known, params, tags)

    def begin(self, trial: Trial) -> None:
        """Make the trial's run and write its id where the trial looks for it."""
        self._harmless(lambda: self._begin(trial))

    def _begin(self, trial: Trial) -> None:
        folder = self._ledger.folder(trial.index)
        if not self._parent or saved_run(folder, self.uri) is not None:
            return
        tags = {PARENT: self._parent, "rayfed.kind": "trial", "rayfed.trial": trial.name}
        run = self._client.create_run(self._id, run_name=f"trial {trial.name}", tags=tags)
        self._client.update_run(run.info.run_id, status="SCHEDULED")
        note_run(folder, self.uri, str(run.info.run_id))

    def finish(self, trials: Iterable[Trial], best: Trial | None, status: str) -> None:
        """Say how every trial ended, attach what was found to the parent, and close all of them."""
        for trial in trials:
            self._harmless(lambda trial=trial: self._end(trial))
        self._harmless(lambda: self._finish(best, status))

    def _end(self, trial: Trial) -> None:
        run_id = saved_run(self._ledger.folder(trial.index), self.uri)
        if run_id is None:
            return
        tags = {"rayfed.state": trial.state, "rayfed.rounds": str(trial.rounds)}
        tags |= {f"rayfed.point.{name}": as_text(value) for name, value in trial.point.items()}
        if trial.error:
            tags["rayfed.error"] = trial.error
        for name, value in tags.items():
            self._client.set_tag(run_id, name, value)
        closed = self._client.get_run(run_id).info.status in {"FINISHED", "FAILED"}
        if not closed or trial.state in {"diverged", "running"}:
            self._client.set_terminated(run_id, status=STATUS.get(trial.state, "FINISHED"))

    def _finish(self, best: Trial | None, status: str) -> None:
        if not self._parent:
            return
        self._client.set_terminated(self._parent, status=status)
        if best is not None and best.score is not None:
            self._client.log_metric(self._parent, "best/score", best.score)
            self._client.set_tag(self._parent, "rayfed.best_trial", best.name)
        out = self._ledger.out
        for name in ("best.yaml", "trials.csv", "sweep.json", "plots/parameters.png"):
            if (out / name).exists():
                place = str(Path(name).parent).removeprefix(".")
                self._client.log_artifact(self._parent, str(out / name), artifact_path=place or None)

    def _harmless(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # whatever a tracking store raises must not end a sweep
            if not self._warned:
                self._warned = True
                log.warning("MLflow at %s failed (%s); the sweep goes on", self.uri, kind_and_line(error, 200))
