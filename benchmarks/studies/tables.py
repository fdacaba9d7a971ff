"""Markdown tables of a study: mean and standard deviation over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.studies.cells import Cell, Result, Study


def table(study: Study, found: dict[str, list[Result]]) -> str:
    """One row per variant: the study's columns, bytes sent, rounds until the goal row's final GM, seeds found."""
    goals = {r["summary"]["seed"]: r["global_by_round"][-1] for r in found.get(study.goal or "", [])}
    head = ["", *(name for name, _ in study.columns), "MiB up + down"]
    head += [f"rounds to {study.goal}'s GM", "seeds"] if study.goal else ["seeds"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, results in found.items():
        texts = [row, *(_column(results, pick) for _, pick in study.columns), _mebibytes(results)]
        if study.goal:
            texts.append(", ".join(_reached(r["global_by_round"], goals.get(r["summary"]["seed"])) for r in results))
        lines.append(f"| {' | '.join([*texts, str(len(results))])} |")
    text = "\n".join(lines)
    return f"{text}\n\n{study.after(found)}" if study.after else text


def load(cells: Sequence[Cell], folder: Path) -> dict[str, list[Result]]:
    """Results that are there, by row in the order of the cells."""
    found: dict[str, list[Result]] = {}
    for cell in cells:
        if (folder / cell.file).exists():
            found.setdefault(cell.row, []).append(json.loads((folder / cell.file).read_text("utf-8")))
    return {row: found[row] for row in dict.fromkeys(cell.row for cell in cells) if row in found}


def spread(values: Sequence[float], digits: int = 1) -> str:
    """``mean ± standard deviation`` over seeds."""
    if not values:
        return "n/a"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def paired(found: Mapping[str, list[Result]], row: str, other: str, pick: object) -> list[float]:
    """Differences ``row`` minus ``other`` seed by seed."""
    assert callable(pick)
    base = {r["summary"]["seed"]: pick(r) for r in found.get(other, [])}
    return [pick(r) - base[r["summary"]["seed"]] for r in found.get(row, []) if r["summary"]["seed"] in base]


def _column(results: Sequence[Result], pick: object) -> str:
    assert callable(pick)
    return spread([value for result in results if (value := pick(result)) is not None])


def _mebibytes(results: Sequence[Result]) -> str:
    sent = statistics.mean(r["summary"]["bytes_up"] + r["summary"]["bytes_down"] for r in results)
    return f"{sent / 2**20:.1f}"


def _reached(by_round: Sequence[float | None], goal: float | None) -> str:
    if goal is None:
        return "-"
    return next((str(i + 1) for i, value in enumerate(by_round) if value is not None and value >= goal), "never")
