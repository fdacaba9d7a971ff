"""A sweep for each method, and what it found against the paper's defaults on data it was not chosen on.

    python -m benchmarks.sweeps [NAME ...]       sweep, then both points on three seeds; what is there is kept
    python -m benchmarks.sweeps --table          only print the table of what is there

A sweep is the command a user would type: 16 trials, ASHA, 12 short rounds, judged by personal accuracy on validation
images of a seed of its own. ``benchmarks/results/sweeps`` keeps its trials, its plot and the result of every check.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.studies.cells import COMMON, ENVIRONMENT, ROOT, SEEDS, TUNING_SEED, Cell, Result, run_cell
from benchmarks.studies.tables import load, paired, spread

RESULTS = ROOT / "benchmarks" / "results" / "sweeps"
FEDERATION = ("rounds=12", "train.epochs=1", "data.shots=8")
SETTINGS: dict[str, tuple[str, ...]] = {
    "fedglad": (),
    "fedsdg": (),
    # Both branches in every round, so that lambda matters before the first trials are stopped.
    "fedpurel": ("partition.long_tail=10", "partition.alpha=1.0", "method.schedule=interleaved"),
    # Policy optimisation from round 4 on, and nothing stopped before round 6.
    "feddtl": ("method.sft_rounds=3",),
    "blend": ("task.split=base_novel", "partition=dir_boost", "partition.alpha=0.01"),
}
SWEEP = ("tune.samples=16", "tune.scheduler=asha", "data.val_shots=8", "data.test_shots=2")
GRACE = {"feddtl": ("tune.grace=6",)}
DEFAULT, FOUND = "defaults", "found"
Point = dict[str, str]


def sweep_words(name: str) -> list[str]:
    """The words of the sweep of method ``name``."""
    return [f"space={name}", *SWEEP, *GRACE.get(name, ()), *FEDERATION, *SETTINGS[name], f"seed={TUNING_SEED}"]


def run_sweep(name: str) -> None:
    """Play the sweep unless its trials are there; one that was interrupted goes on."""
    target = RESULTS / name
    if (target / "trials.csv").exists():
        return
    out = ROOT / "outputs" / "sweeps" / name
    command = [sys.executable, "-m", "rayfed.tune", *sweep_words(name), *COMMON, f"out={out}", "resume=auto"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "plots" / "parameters.png", target)
    shutil.copy(out / "trials.csv", target)


def trials(name: str) -> list[Point]:
    """The rows of the sweep's ``trials.csv``, best first; none if it has not been played."""
    path = RESULTS / name / "trials.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def parameters(row: Point) -> Point:
    """The searched options a trial had."""
    return {key: value for key, value in row.items() if "." in key and value not in {"", "n/a"}}


def points(name: str) -> dict[str, Point]:
    """The trial at the paper's defaults (trial 0), and the best one."""
    rows = trials(name)
    return {DEFAULT: next(row for row in rows if row["trial"] == "0"), FOUND: rows[0]} if rows else {}


def cells(name: str) -> list[Cell]:
    """Both points on every seed, as runs."""
    shared = (f"method={name}", *FEDERATION, *SETTINGS[name], "eval.every=0")
    return [
        Cell(f"{name}: {label}", seed, (*shared, *(f"{key}={value}" for key, value in parameters(row).items())))
        for seed in SEEDS
        for label, row in points(name).items()
    ]


def table(names: Sequence[str]) -> str:
    """Per method both points, their validation accuracy in the sweep, and personal test accuracy over the seeds."""
    lines = [
        "| method | point | validation PM | PM, three seeds | by seed, less the defaults |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        found = load(cells(name), RESULTS / name)
        for label, row in points(name).items():
            shown = ", ".join(
                f"{key.removeprefix('method.')} {_short(value)}" for key, value in parameters(row).items()
            )
            held = [100 * accuracy(result) for result in found.get(f"{name}: {label}", [])]
            less = paired(found, f"{name}: {label}", f"{name}: {DEFAULT}", accuracy)
            by_seed = ", ".join(f"{100 * value:+.1f}" for value in less) if label == FOUND else ""
            judged = f"{100 * float(row['val/personal_acc']):.1f}"
            lines.append(f"| {name} | {label}: {shown} | {judged} | {spread(held)} | {by_seed} |")
    return "\n".join(lines)


def accuracy(result: Result) -> float:
    """Personal accuracy on test images."""
    return float(result["summary"]["personal"]["acc_macro"])


def _short(value: str) -> str:
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return value


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETTINGS)}; none: all")
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - SETTINGS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SETTINGS)}")
    names = arguments.names or list(SETTINGS)
    for name in names if not arguments.table else ():
        run_sweep(name)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda cell: run_cell(cell, RESULTS / cell.row.partition(":")[0]), cells(name)))
    text = table(list(SETTINGS))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "table.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
