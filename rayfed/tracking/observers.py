"""All observers of a run together; what is only for looking at (console, MLflow, plots) may fail without harm."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import rayfed
from rayfed import config
from rayfed.conf.options import RunOptions
from rayfed.data.task import Task
from rayfed.engine import evaluate
from rayfed.engine.run import Federation, RoundRecord, state_folder, summary
from rayfed.engine.server import Export
from rayfed.engine.store import ClientStore, write_whole
from rayfed.tracking import files
from rayfed.tracking.console import Console
from rayfed.tracking.mlflow import (
    MlflowSink,
    class_metrics,
    default_uri,
    note_run,
    saved_run,
    saved_uri,
    view_command,
)

log = logging.getLogger("rayfed")


class Observers:
    """Console, files and MLflow of one run."""

    def __init__(self, options: RunOptions, out: Path, task: Task, console: Console) -> None:
        self.options, self.out, self.task, self.console = options, out, task, console
        self.summary: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._mlflow = self._make_mlflow() if options.tracking.enabled else None

    def _make_mlflow(self) -> MlflowSink:
        tracking, options = self.options.tracking, self.options
        uri = tracking.uri or saved_uri(self.out) or default_uri(self.out, named=options.out is not None)
        name = tracking.run_name or f"{options.method.name}-{options.data.name}-s{options.seed}"
        known = saved_run(self.out, uri) if options.resume == "auto" else None
        return MlflowSink(
            uri,
            tracking.experiment,
            name,
            self.out,
            run_id=known,
            note_run=lambda run_id: note_run(self.out, uri, run_id),
            after=self._log_model if tracking.model != "none" else None,
        )

    def _log_model(self, client: Any, run_id: str) -> None:
        from rayfed.tracking.model import log_model

        log_model(client, run_id, self.out, self.options.tracking)

    def start(self) -> None:
        """Write what is known before training."""
        files.write_start(self.out, self.options, self.task)
        if self._mlflow is not None:
            self._mlflow.start(config.flatten(self.options), provenance())

    def ready(self, federation: Federation, seconds: float) -> None:
        """Actors are up; a resumed run's earlier rounds go back into the files."""
        files.write_history(self.out, federation.history)
        self._startup_s = seconds
        self.console.say(f"trains: {'; '.join(federation.pool.trainable()) or 'nothing'}")

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """See ``Observer``."""
        self._harmless("console", lambda: self.console.progress(round_index, what, done, total))

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """See ``Observer``."""
        files.append_record(self.out, vars(record))
        self._harmless("console", lambda: self.console.round_done(record, seconds))
        if self._mlflow is not None:
            self._mlflow.round_done(record, seconds)

    def flush(self) -> None:
        """Wait a moment until MLflow has what it was told: this process may be ended now."""
        if self._mlflow is not None:
            self._mlflow.flush()

    def write_results(self, federation: Federation, export: Export, seconds: float) -> None:
        """Write summary, tables, adapters, timing and plots."""
        rows = evaluate.client_rows(self.task, federation.scores)
        files.write_table(self.out / "clients.csv", rows)
        classes = evaluate.class_rows(self.task, federation.scores)
        files.write_table(self.out / "classes.csv", classes)
        if self._mlflow is not None:
            self._mlflow.log(class_metrics(classes), len(federation.history))
        store = ClientStore(state_folder(self.out))
        private = {c: export.named_private(store.load(ref).private) for c, ref in federation.private.items()}
        files.write_adapters(self.out, export.shared, export.server, private, export.peft)
        timing = {
            "startup_s": self._startup_s,
            "rounds_s": federation.seconds,
            "total_s": seconds,
            "retried_jobs": federation.pool.retried,
            "workers": federation.pool.num_workers,
            **provenance(),
        }
        write_whole(self.out / "timing.json", files.dump(timing))
        self.summary = summary(self.options, federation.history)
        write_whole(self.out / "summary.json", files.dump(self.summary))
        self._harmless("plots", lambda: self._draw(federation, rows))

    def _draw(self, federation: Federation, rows: list[dict[str, Any]]) -> None:
        from rayfed.tracking.plots import draw_all

        draw_all(self.out, self.task, federation.history, rows)

    def close(self, status: str) -> None:
        """Close the MLflow run with FINISHED, FAILED or KILLED."""
        if self._mlflow is not None:
            self._mlflow.finish(status)

    def print_result(self) -> None:
        """Print the table, where everything is, and how to look at it."""
        self.console.table(self.summary)
        if self._mlflow is not None:
            self.console.say(f"MLflow:  {view_command(self._mlflow.uri)}")
        self.console.say(f"results: {self.out}")

    def _harmless(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # looking at a run must never end it
            if what not in self._warned:
                self._warned.add(what)
                log.warning("%s: %s: %s; the run goes on", what, type(error).__name__, error)


CARDS = Path("/proc/driver/nvidia/gpus")
"""Where the NVIDIA driver tells of its cards; asking torch would take memory of one that the driver was not given."""


def provenance() -> dict[str, str]:
    """Versions, machine and git state: what a number needs beside it."""
    packages = ("torch", "torchvision", "ray", "open_clip_torch", "timm", "peft", "mlflow", "numpy")
    found = {"rayfed": rayfed.__version__, "python": platform.python_version(), "machine": platform.platform()}
    found |= _hardware()
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | _git_state()


def _hardware() -> dict[str, str]:
    """Of the driver's machine: processors, memory, and cards, of which none is opened for it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    found = [line for path in CARDS.glob("*/information") for line in path.read_text("utf-8").splitlines()]
    cards = [line.partition(":")[2].strip() for line in found if line.startswith("Model:")]
    return {
        "cpus": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "memory_gib": f"{memory / 2**30:.1f}",
        "gpus": ", ".join(cards) or "none",
    }


def _git_state() -> dict[str, str]:
    folder = Path(rayfed.__file__).parent
    try:
        run = ["git", "-C", str(folder)]
        commit = subprocess.run(
            [*run, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*run, "status", "--porcelain", "."], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {"git": "unknown"}
    return {"git": commit, "git_dirty": json.dumps(bool(dirty))}
