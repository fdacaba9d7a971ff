"""MLflow, from a thread of its own: a slow or broken store costs a warning, never a round.

What the store misses while it is away is made up when it answers again; what is still missing at the end lies in
``tracking-missed.jsonl`` beside the results, and a resumed run makes it up first.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rayfed.engine.run import RoundRecord
from rayfed.engine.store import write_whole
from rayfed.errors import kind_and_line
from rayfed.tracking.names import NameTable

log = logging.getLogger("rayfed")
LONGEST_PARAM = 500
PATIENCE_S = 60.0
"""How long the end of a run waits for what is still to be written."""
RETRY_S = 3.0
"""Seconds between attempts at a store that does not answer; also how long the end of a run waits for it to return."""
BATCH = 1000
"""Metrics MLflow takes at once."""
MISSED = "tracking-missed.jsonl"
T = TypeVar("T")
RESULTS = frozenset({".yaml", ".json", ".jsonl", ".csv", ".safetensors"})


@dataclass(frozen=True, slots=True)
class _Write:
    """Something to be written, and what of it is kept in a file if it cannot be."""

    work: Callable[[], None]
    kept: Mapping[str, Any] = field(default_factory=dict)


class MlflowSink:
    """An observer that logs to an MLflow store.

    ``uri``: sqlite:///file or a server. A run that was begun before (``run_id``) is taken up again. ``out`` is the
    results folder of the run; ``after`` is called with the run's id and the client once its files are there.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        out: Path,
        *,
        run_id: str | None,
        note_run: Callable[[str], None],
        after: Callable[[Any, str], None] | None = None,
    ) -> None:
        self.uri = uri
        self._experiment, self._name, self._out, self._after = experiment, run_name, out, after
        self._run_id, self._note_run = run_id, note_run
        self._queue: queue.Queue[_Write | None] = queue.Queue()
        self._pending: deque[_Write] = deque()
        self._names = NameTable()
        self._client: Any = None
        self._failed_at: float | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Open the run in the background and log the options; long values stay whole in config.yaml."""
        self._thread.start()
        self._queue.put(_Write(lambda: self._open(params, tags)))
        for kept in _missed(self._out):
            self._log(kept["metrics"], kept["step"], kept["timestamp"])
        (self._out / MISSED).unlink(missing_ok=True)

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """Nothing to log."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Log the round's figures with the round as step."""
        self.log(metrics(record) | {"time/round_s": seconds}, record.round + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log ``figures`` under names the store takes."""
        self._log(self._names.safe(figures), step, int(time.time() * 1000))

    def _log(self, figures: Mapping[str, float], step: int, stamp: int) -> None:
        kept = {"metrics": dict(figures), "step": step, "timestamp": stamp}
        self._queue.put(_Write(lambda: self._log_metrics(figures, step, stamp), kept))

    def flush(self) -> None:
        """Wait a moment until what was logged so far is in the store."""
        if self._thread.is_alive() and self._failed_at is None:
            written = threading.Event()
            self._queue.put(_Write(written.set))
            written.wait(RETRY_S)

    def finish(self, status: str) -> None:
        """Log pictures, tables and adapters of the results and close the run as FINISHED, FAILED or KILLED."""
        if not self._thread.is_alive():
            return
        self._names.write(self._out)
        self._queue.put(_Write(lambda: self._close(status)))
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("MLflow at %s did not answer within %.0f s; the local files are complete", self.uri, PATIENCE_S)

    # The thread

    def _work(self) -> None:
        while (write := self._next()) is not None:
            self._pending.append(write)
            if self._failed_at is None or time.monotonic() - self._failed_at > RETRY_S:
                self._catch_up()
        end = time.monotonic() + RETRY_S
        while not self._catch_up() and time.monotonic() < end:
            time.sleep(0.5)
        if self._pending:
            self._keep()

    def _next(self) -> _Write | None:
        """The next write; while the store is away, nothing new is no reason to wait on."""
        while True:
            try:
                return self._queue.get(timeout=None if self._failed_at is None else RETRY_S)
            except queue.Empty:
                self._catch_up()

    def _catch_up(self) -> bool:
        """Write what is waiting, in order; return whether all of it is in the store."""
        while self._pending:
            try:
                self._pending[0].work()
            except Exception as error:  # whatever a tracking store raises must not end training
                self._failed_at = time.monotonic()
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "MLflow at %s failed (%s); the run goes on, local files are kept",
                        self.uri,
                        kind_and_line(error, 200),
                    )
                return False
            self._pending.popleft()
            if self._failed_at is not None:
                self._failed_at, self._warned = None, False
                log.warning("MLflow at %s answers again; what it missed is being made up", self.uri)
        return True

    def _keep(self) -> None:
        lines = [json.dumps(write.kept) for write in self._pending if write.kept]
        try:
            write_whole(self._out / MISSED, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            log.warning("what the tracking store missed cannot be kept either (%s)", error)
            return
        log.warning("what the tracking store missed is kept in %s; resume=auto makes it up", self._out / MISSED)

    # What is written

    def _open(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self._client, experiment = connect(self.uri, self._experiment)
        if self._run_id is None:
            run = self._client.create_run(experiment, run_name=self._name, tags=dict(tags))
            self._run_id = str(run.info.run_id)
            self._note_run(self._run_id)
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        log_params(self._client, self._run_id, params, tags)

    def _log_metrics(self, figures: Mapping[str, float], step: int, stamp: int) -> None:
        from mlflow.entities import Metric

        for part in _parts(figures.items(), BATCH):
            self._client.log_batch(self._run_id, metrics=[Metric(name, value, stamp, step) for name, value in part])

    def _close(self, status: str) -> None:
        """Status first: a store that fails on a picture must not leave the run RUNNING."""
        self._client.set_terminated(self._run_id, status=status)
        if status == "KILLED":
            return
        for name in ("plots", "adapters/peft"):
            if (self._out / name).is_dir():
                self._client.log_artifacts(self._run_id, str(self._out / name), artifact_path=name)
        for path in result_files(self._out):
            place = str(path.parent.relative_to(self._out)).removeprefix(".")
            self._client.log_artifact(self._run_id, str(path), artifact_path=place or None)
        if self._after is not None and status == "FINISHED":
            self._after(self._client, str(self._run_id))


def result_files(out: Path) -> Iterator[Path]:
    """Tables, options and adapters of a results folder; clients' own adapters never go to a store."""
    adapters = [out / "adapters" / f"{name}.safetensors" for name in ("shared", "server")]
    for path in (*sorted(out.iterdir()), *adapters):
        if path.is_file() and path.suffix in RESULTS and path.name != MISSED:
            yield path


def connect(uri: str, experiment: str) -> tuple[Any, str]:
    """Return a client of the store and the id of the experiment; what is not there yet is made."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # its table-making is of no interest to the user
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # whoever waits here tries again itself
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    from mlflow.tracking import MlflowClient

    with _prepared(uri):
        client = MlflowClient(tracking_uri=uri)
        return client, _experiment_id(client, uri, experiment)


def _experiment_id(client: Any, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    database = _database(uri)
    place = None if database is None else (database.parent / "mlartifacts").as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=place))
    except MlflowException:  # another process was faster
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)


def log_params(client: Any, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Log what is not there yet: a run that was begun by someone else, or before, has some of it."""
    from mlflow.entities import Param, RunTag

    known = client.get_run(run_id).data.params
    new = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in params.items() if name not in known]
    for part in _parts(new, 100):
        client.log_batch(run_id, params=part)
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


def metrics(record: RoundRecord) -> dict[str, float]:
    """The figures of a round by name (``personal/acc_macro``, ``clients/loss_ce``, ``comms/bytes_up``)."""
    found: dict[str, float] = {"comms/bytes_up": record.bytes_up, "comms/bytes_down": record.bytes_down}
    found["clients/failures"], found["clients/notes"] = len(record.failures), len(record.notes)
    for group, values in (("clients", record.clients), ("server", record.server)):
        found |= {f"{group}/{name}": value for name, value in values.items()}
    for view, values in (record.evaluation or {}).items():
        found |= {f"{view}/{name}": value for name, value in values.items() if value is not None}
    return found


def class_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy by class and view; classes are told apart by number, also where two have one name."""
    width = len(str(len(rows)))
    return {
        f"class/{row['class']:0{width}d} {row['name']}/{view}": row[view]
        for row in rows
        for view in ("zero_shot", "global", "personal")
        if row.get(view) is not None
    }


def default_uri(out: Path, *, named: bool) -> str:
    """A database file: in ``out`` if the user named it, else beside all runs of the folder it lies in."""
    return f"sqlite:///{(out if named else out.parent).as_posix()}/mlflow.db"


def view_command(uri: str) -> str:
    """The command that shows the runs."""
    return f"mlflow ui --host 127.0.0.1 --backend-store-uri '{uri}'" if uri.startswith("sqlite") else f"open {uri}"


def note_run(out: Path, uri: str, run_id: str) -> None:
    """Write down in ``out`` which MLflow run is that of this folder."""
    write_whole(out / "tracking.json", (json.dumps({"uri": uri, "run_id": run_id}, indent=2) + "\n").encode())


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


def _missed(out: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (out / MISSED).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


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


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
