"""A study's runs: what is run, and the file each leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
TUNING_SEED = 100
"""Choices are made on validation images of this seed; nothing is reported for it."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""Of a command that runs this checkout on one thread."""
COMMON = ["engine.pool=local", "tracking.enabled=false"]
Result = dict[str, Any]
Pick = Callable[[Result], float | None]
Column = tuple[str, Pick]


@dataclass(frozen=True)
class Cell:
    """One run: its row in the table, its seed, and the words of its command."""

    row: str
    seed: int
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command after ``python -m``."""
        return ["rayfed.run", *self.words, f"seed={self.seed}"]

    @property
    def file(self) -> str:
        """Name of the result file."""
        plain = self.row.replace(": ", "--").replace(" ", "_").replace("/", "-")
        return f"{plain}-s{self.seed}.json"


@dataclass(frozen=True)
class Study:
    """Cells, the table's columns, the row whose final GM others are timed by, more text after the table, a picture."""

    cells: tuple[Cell, ...]
    columns: tuple[Column, ...]
    goal: str | None = None
    after: Callable[[dict[str, list[Result]]], str] | None = None
    picture: Callable[[dict[str, list[Result]]], Figure] | None = None


def summary(*path: str, scale: float = 100.0) -> Pick:
    """A column: the value at ``path`` of a run's summary, in percent unless scaled otherwise."""

    def pick(result: Result) -> float | None:
        value = result["summary"]
        for key in path:
            value = value.get(key) if value is not None else None
        return None if value is None else scale * float(value)

    return pick


def run_cell(cell: Cell, folder: Path) -> None:
    """Run one cell unless its result is there; write the result aside and rename it."""
    target = folder / cell.file
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", *cell.command, *COMMON, f"out={out}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(cell.command)} failed:\n{done.stderr[-2000:]}")
        result = _result(cell, out)
    aside = target.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    aside.rename(target)
    print(f"{target.relative_to(ROOT)}: done", flush=True)


def _result(cell: Cell, out: Path) -> Result:
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "command": "python -m " + " ".join(f"'{w}'" if " " in w else w for w in cell.command),
        "summary": json.loads((out / "summary.json").read_text("utf-8")),
        "global_by_round": [r["evaluation"]["global"]["acc_macro"] if r["evaluation"] else None for r in history],
        "rounds": [_round(r) for r in history],
        "timing": json.loads((out / "timing.json").read_text("utf-8")),
    }


GROUPS = ("acc_full", "acc_macro", "many", "medium", "few", "harmonic_mean")


def _round(record: Result) -> Result:
    """A round's method figures and, where it was evaluated, the accuracies over clients and class groups."""
    found: Result = {"round": record["round"], **record["clients"], **record["server"]}
    if record["evaluation"]:
        for view in ("global", "personal"):
            values = record["evaluation"][view]
            found |= {f"{view}.{key}": values[key] for key in GROUPS if key in values}
    return found
