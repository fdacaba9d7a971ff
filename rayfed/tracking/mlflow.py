"""MLflow, from a thread of its own: a slow or broken store costs a warning, never a round."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayfed.engine.run import RoundRecord

log = logging.getLogger("rayfed")
LONGEST_PARAM = 500
PATIENCE_S = 60.0
"""How long the end of a run waits for what is still to be written."""


class MlflowSink:
    """An observer that logs to an MLflow store.

    ``uri``: sqlite:///file or a server. A run that was begun before (``run_id``) is taken up again.
    """

    def __init__(
        self, uri: str, experiment: str, run_name: str, *, run_id: str | None, note_run: Callable[[str], None]
    ) -> None:
        self.uri = uri
        self._experiment, self._name, self._run_id, self._note_run = experiment, run_name, run_id, note_run
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._client: Any = None
        self._broken = False
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Open the run in the background and log the options; long values stay whole in config.yaml."""
        self._thread.start()
        self._queue.put(lambda: self._open(params, tags))

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """Nothing to log."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Log the round's figures with the round as step."""
        figures = metrics(record) | {"time/round_s": seconds}
        stamp = int(time.time() * 1000)
        self._queue.put(lambda: self._log_metrics(figures, record.round + 1, stamp))

    def finish(self, status: str, folder: Path | None) -> None:
        """Log ``folder``'s pictures, tables and adapters and close the run as FINISHED, FAILED or KILLED."""
        if not self._thread.is_alive():
            return
        self._last = lambda: self._close(status, folder)
        self._queue.put(self._last)
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("MLflow at %s did not answer within %.0f s; the local files are complete", self.uri, PATIENCE_S)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._broken and task is not self._last:
                continue
            try:
                task()
            except Exception as error:  # whatever a tracking store raises must not end training
                if self._broken:
                    continue
                self._broken = True
                log.warning(
                    "MLflow at %s failed (%s); the run goes on, local files are kept", self.uri, _first_line(error)
                )

    def _open(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # its table-making is of no interest to the user
        logging.getLogger("alembic").setLevel(logging.ERROR)
        from mlflow.tracking import MlflowClient

        with _prepared(self.uri):
            self._client = MlflowClient(tracking_uri=self.uri)
            experiment = self._experiment_id()
        if self._run_id is None:
            run = self._client.create_run(experiment, run_name=self._name, tags=dict(tags))
            self._run_id = str(run.info.run_id)
            self._note_run(self._run_id)
            for name, value in params.items():
                self._client.log_param(self._run_id, name, str(value)[:LONGEST_PARAM])
        else:
            self._client.update_run(self._run_id, status="RUNNING")

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(self._experiment)
        if known is not None:
            return str(known.experiment_id)
        database = _database(self.uri)
        place = None if database is None else (database.parent / "mlartifacts").as_uri()
        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=place))
        except MlflowException:  # another process was faster
            return str(self._client.get_experiment_by_name(self._experiment).experiment_id)

    def _log_metrics(self, figures: Mapping[str, float], step: int, stamp: int) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(
            self._run_id, metrics=[Metric(name, value, stamp, step) for name, value in figures.items()]
        )

    def _close(self, status: str, folder: Path | None) -> None:
        """Status first: a store that fails on a picture must not leave the run RUNNING."""
        self._client.set_terminated(self._run_id, status=status)
        if folder is None or status == "KILLED":
            return
        for name in ("plots", "adapters/peft"):
            if (folder / name).is_dir():
                self._client.log_artifacts(self._run_id, str(folder / name), artifact_path=name)
        # Clients' own adapters never go to a store: what is private stays in the results folder.
        adapters = [folder / "adapters" / f"{name}.safetensors" for name in ("shared", "server")]
        for path in (*sorted(folder.iterdir()), *adapters):
            if path.is_file() and path.suffix in {".yaml", ".json", ".jsonl", ".csv", ".safetensors"}:
                place = str(path.parent.relative_to(folder)).removeprefix(".")
                self._client.log_artifact(self._run_id, str(path), artifact_path=place or None)


def metrics(record: RoundRecord) -> dict[str, float]:
    """The figures of a round by MLflow name (``personal/acc_macro``, ``clients/loss_ce``, ``comms/bytes_up``)."""
    found: dict[str, float] = {"comms/bytes_up": record.bytes_up, "comms/bytes_down": record.bytes_down}
    found["clients/failures"], found["clients/notes"] = len(record.failures), len(record.notes)
    for group, values in (("clients", record.clients), ("server", record.server)):
        found |= {f"{group}/{name}": value for name, value in values.items()}
    for view, values in (record.evaluation or {}).items():
        found |= {f"{view}/{name}": value for name, value in values.items() if value is not None}
    return found


def default_uri(out: Path, *, named: bool) -> str:
    """A database file: in ``out`` if the user named it, else beside all runs of the folder it lies in."""
    return f"sqlite:///{(out if named else out.parent).as_posix()}/mlflow.db"


def view_command(uri: str) -> str:
    """The command that shows the runs."""
    return f"mlflow ui --host 127.0.0.1 --backend-store-uri '{uri}'" if uri.startswith("sqlite") else f"open {uri}"


def saved_run(out: Path, uri: str) -> str | None:
    """The id of the run logged before from ``out`` to ``uri``, if any."""
    content = _saved(out)
    return content["run_id"] if content.get("uri") == uri else None


def saved_uri(out: Path) -> str | None:
    """The store a run was logged to before from ``out``, if any."""
    return _saved(out).get("uri")


def _saved(out: Path) -> dict[str, str]:
    try:
        content: dict[str, str] = json.loads((out / "tracking.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def _database(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _prepared(uri: str) -> Any:
    """A lock around the first use of a database file: processes that create its tables together destroy each other."""
    import contextlib

    from filelock import FileLock

    database = _database(uri)
    if database is None:
        return contextlib.nullcontext()
    database.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{database}.lock")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
