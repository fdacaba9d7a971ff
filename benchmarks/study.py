"""Studies as commands: many runs, one result file per run, so that a study that was stopped goes on where it was.

    python -m benchmarks.study lr            learning rates of the embedded profile, chosen on validation images
    python -m benchmarks.study fedglad       FedGLAD, its ablations and protocols, on shapes
    python -m benchmarks.study fashion       the same, smaller, on Fashion-MNIST
    python -m benchmarks.study NAME --table  only print the table of what is there

Every run is the command a user would type, in its own process; ``--jobs`` of them at a time, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SEEDS = (0, 1, 2)
COMMON = ["engine.pool=local", "tracking.enabled=false"]


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
        return f"{self.row.replace(' ', '_').replace('/', '-')}-s{self.seed}.json"


VARIANTS: dict[str, tuple[str, ...]] = {
    "zero_shot": ("method=zero_shot",),
    "local": ("method=local",),
    "fedlora": ("method=fedlora",),
    "fedglad (A)": ("method=fedglad",),
    "fedglad, no global": ("method=fedglad", "method.branches=local_only"),
    "fedglad, no local": ("method=fedglad", "method.branches=global_only"),
    "fedglad, fixed gate": ("method=fedglad", "method.gate=fixed"),
    "fedglad, no distillation": ("method=fedglad", "method.distill=none"),
    "fedglad (B)": ("method=fedglad", "method.distill=proxy_client"),
    "fedglad (C)": ("method=fedglad", "method.distill=class_mean", "method.min_count=2"),
}


def lr_cells() -> list[Cell]:
    """Each trained method at five learning rates; the seed is none of those that results are reported for."""
    rates = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")
    trained = [
        Cell(f"{method} lr {rate}", 100, (f"method={method}", f"train.lr={rate}", "eval.every=0"))
        for method in ("local", "fedlora", "fedglad")
        for rate in rates
    ]
    distilled = [
        Cell(
            f"fedglad lr 1e-4 distill {rate}",
            100,
            ("method=fedglad", "train.lr=1e-4", f"method.distill_lr={rate}", "eval.every=0"),
        )
        for rate in ("1e-5", "5e-5", "5e-4")
    ]
    others = [
        Cell(f"{method} lr {rate}", 100, (f"method={method}", f"train.lr={rate}", "eval.every=0"))
        for method, rates in (("fedsdg", ("3e-5", "1e-4", "3e-4", "1e-3")), ("fedpurel", ("1e-2", "3e-2", "1e-1")))
        for rate in rates
    ]
    decoupled = [
        Cell(
            f"feddtl lr {rate} text {text}",
            100,
            ("method=feddtl", f"train.lr={rate}", f"method.text_lr={text}", "eval.every=0"),
        )
        for rate, text in (
            *((rate, "1e-3") for rate in ("1e-4", "3e-4", "1e-3")),
            *(("3e-4", text) for text in ("1e-4", "3e-3")),
            *(("1e-3", text) for text in ("1e-4", "3e-5")),
            ("3e-3", "1e-4"),
        )
    ]
    return [*trained, *distilled, *others, *decoupled]


def fedglad_cells() -> list[Cell]:
    """20 clients x 40 images, Dirichlet 0.1, 15 rounds of 2 epochs, 128 proxy images."""
    setting = ("clients.n=20", "data.shots=8", "partition.alpha=0.1", "train.epochs=2", "data.proxy=128")
    rounds = {"zero_shot": "rounds=1"}
    return [
        Cell(row, seed, (*words, *setting, rounds.get(row, "rounds=15")))
        for seed in SEEDS
        for row, words in VARIANTS.items()
    ]


def fashion_cells() -> list[Cell]:
    """10 clients x 40 Fashion-MNIST images, Dirichlet 0.1, 10 rounds of 2 epochs."""
    setting = ("data=fashion_mnist", "clients.n=10", "data.shots=40", "partition.alpha=0.1", "train.epochs=2")
    rounds = {"zero_shot": "rounds=1"}
    rows = ("zero_shot", "local", "fedlora", "fedglad (A)", "fedglad, no distillation")
    return [Cell(row, seed, (*VARIANTS[row], *setting, rounds.get(row, "rounds=10"))) for seed in SEEDS for row in rows]


STUDIES: dict[str, Callable[[], list[Cell]]] = {"lr": lr_cells, "fedglad": fedglad_cells, "fashion": fashion_cells}


def run_cell(cell: Cell, folder: Path) -> None:
    """Run one cell unless its result is there; write the result aside and rename it."""
    target = folder / cell.file
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", *cell.command, *COMMON, f"out={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(cell.command)} failed:\n{done.stderr[-2000:]}")
        history = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
        result = {
            "command": "python -m " + " ".join(f"'{w}'" if " " in w else w for w in cell.command),
            "summary": json.loads((out / "summary.json").read_text("utf-8")),
            "global_by_round": [r["evaluation"]["global"]["acc_macro"] if r["evaluation"] else None for r in history],
            "timing": json.loads((out / "timing.json").read_text("utf-8")),
        }
    aside = target.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    aside.rename(target)
    print(f"{target.relative_to(ROOT)}: done", flush=True)


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], float | None]], ...] = (
    ("PM", lambda s: s["personal"]["acc_macro"]),
    ("GM", lambda s: s["global"]["acc_macro"]),
    ("GM, full test set", lambda s: s["global"]["acc_full"]),
    ("worst client (PM)", lambda s: s["personal"]["acc_worst"]),
    ("validation PM", lambda s: s["val"]["personal_acc"]),
)


def table(study: str, cells: Sequence[Cell], folder: Path) -> str:
    """Markdown table: mean and standard deviation over seeds, bytes, rounds until fedlora's final GM."""
    head = ["", *(name for name, _ in COLUMNS), "MiB up + down", "rounds to fedlora's GM", "seeds"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    goal = _final_gm(cells, folder)
    for row in dict.fromkeys(cell.row for cell in cells):
        found = [
            (c.seed, json.loads((folder / c.file).read_text("utf-8")))
            for c in cells
            if c.row == row and (folder / c.file).exists()
        ]
        if not found:
            continue
        texts = [_spread([100 * v for _, r in found if (v := pick(r["summary"])) is not None]) for _, pick in COLUMNS]
        sent = statistics.mean(r["summary"]["bytes_up"] + r["summary"]["bytes_down"] for _, r in found) / 2**20
        reached = [_reached(r["global_by_round"], goal.get(seed)) for seed, r in found]
        lines.append(f"| {row} | {' | '.join(texts)} | {sent:.1f} | {', '.join(reached)} | {len(found)} |")
    return "\n".join(lines)


def _final_gm(cells: Sequence[Cell], folder: Path) -> dict[int, float]:
    files = {c.seed: folder / c.file for c in cells if c.row == "fedlora"}
    return {seed: json.loads(f.read_text("utf-8"))["global_by_round"][-1] for seed, f in files.items() if f.exists()}


def _reached(by_round: Sequence[float | None], goal: float | None) -> str:
    if goal is None:
        return "-"
    return next((str(i + 1) for i, value in enumerate(by_round) if value is not None and value >= goal), "never")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "n/a"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def main() -> None:
    """Run what is missing of a study, two runs at a time, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    cells, folder = STUDIES[arguments.study](), RESULTS / arguments.study
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda cell: run_cell(cell, folder), cells))
    text = table(arguments.study, cells, folder)
    (folder / "table.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
