"""Run what is missing of a study and print its table."""

from __future__ import annotations

import argparse
import importlib
from concurrent.futures import ThreadPoolExecutor

import benchmarks.studies
from benchmarks.studies.cells import ROOT, Study, run_cell
from benchmarks.studies.tables import load, table

NAMES = ("lr", "fedglad", "fashion", "fedpurel", "fedpurel_lr", "fedsdg", "feddtl", "blend", "blend_grid")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=benchmarks.studies.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=NAMES)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="run only rows that begin with this")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    study: Study = importlib.import_module(f"benchmarks.studies.{arguments.study}").STUDY
    folder = ROOT / "benchmarks" / "results" / arguments.study
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            chosen = [cell for cell in study.cells if cell.row.startswith(arguments.only)]
            list(pool.map(lambda cell: run_cell(cell, folder), chosen))
    found = load(study.cells, folder)
    text = table(study, found)
    (folder / "table.md").write_text(text + "\n", "utf-8")
    if study.picture is not None:
        study.picture(found).savefig(folder / "rounds.png", dpi=130)
    print(text)


if __name__ == "__main__":
    main()
