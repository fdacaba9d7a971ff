"""What a person sees: a live line on a terminal, plain lines in a log, and the table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rayfed.engine.run import RoundRecord


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def percent(value: float | None) -> str:
    """0.1234 -> '12.3 %'; None -> 'n/a'."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


class _Quiet(RichConsole):
    """A console that falls silent when nobody reads it any more (``... | head``); the run goes on."""

    def on_broken_pipe(self) -> None:
        """Stop printing, and keep the interpreter from flushing into the closed pipe at its end."""
        self.quiet = True
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Console:
    """An observer that prints, to standard output or ``file``."""

    def __init__(self, rounds: int, *, first_round: int = 0, file: TextIO | None = None) -> None:
        wide = file is None and sys.stdout.isatty()
        self._rich = _Quiet(width=None if wide else 110, highlight=False, file=file)
        self._rounds = rounds
        self._seconds = 0.0
        self._played = 0
        self._sent = 0
        self._first = first_round
        self._noted: set[str] = set()
        self._live: Progress | None = None
        self._bar: TaskID | None = None

    def say(self, text: str) -> None:
        """Print one line (markup in it is not interpreted)."""
        self._rich.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Console:
        if self._rich.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=self._rich)
            self._bar = self._live.add_task("starting", total=self._rounds - self._first, state="")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """Move the live line."""
        if self._live is not None and self._bar is not None:
            share = done / max(total, 1) * (0.7 if what == "train" else 0.3) + (0.7 if what == "evaluate" else 0.0)
            self._live.update(
                self._bar,
                completed=round_index - self._first + min(share, 0.99),
                description=f"round {round_index + 1}/{self._rounds}",
                state=f"{what} {done}/{total}, {human_bytes(self._sent)} sent",
            )

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Print the round's line."""
        self._played += 1
        self._sent += record.bytes_up + record.bytes_down
        self._seconds += seconds
        left = self._seconds / self._played * (self._rounds - record.round - 1)
        parts = [f"round {record.round + 1}/{self._rounds}", f"{len(record.cohort)} clients"]
        if "loss_ce" in record.clients:
            parts.append(f"loss {record.clients['loss_ce']:.3f}")
        if record.evaluation is not None:
            parts.append(f"GM {percent(record.evaluation['global']['acc_macro'])}")
            parts.append(f"PM {percent(record.evaluation['personal']['acc_macro'])}")
        parts.append(f"{human_bytes(record.bytes_up + record.bytes_down)} sent")
        parts.append(f"{seconds:.1f} s, {left:.0f} s left")
        if record.failures:
            parts.append(f"left out: {', '.join(str(f['client']) for f in record.failures)}")
        self.say(" | ".join(parts))
        for note in record.notes:
            if note not in self._noted:
                self._noted.add(note)
                self.say(f"note: round {record.round + 1}: {note}")
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, completed=record.round + 1 - self._first)

    def table(self, summary: Mapping[str, Any]) -> None:
        """Print the result: one row per view."""
        ascii_only = (self._rich.encoding or "").lower() not in {"utf-8", "utf8"}
        table = Table(
            box=box.ASCII if ascii_only else box.SIMPLE_HEAD,
            title=f"{summary['method']} on {summary['data']}, round {summary['rounds']}",
        )
        for name in ("model", "mean over clients", "by image", "worst client", "p10", "p50", "p90", "full test set"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for view, label in (("zero_shot", "zero-shot"), ("global", "global (GM)"), ("personal", "personal (PM)")):
            row = summary[view]
            keys = ("acc_macro", "acc_weighted", "acc_worst", "p10", "p50", "p90", "acc_full")
            table.add_row(label, *(percent(row[k]) if k in row else "" for k in keys))
        self._rich.print(table)
        if "novel" in summary["global"]:
            self._novel_table(summary, table.box)
        for view, label in (("zero_shot", "zero-shot"), ("global", "GM"), ("personal", "PM")):
            row = summary[view]
            if row.get("few") is not None and row.get("many") is not None:
                shares = ", ".join(f"{name} {percent(row[name])}" for name in ("many", "medium", "few"))
                self.say(f"{label} by training images of the class: {shares}; worst {percent(row['worst_group'])}")
        self.say(
            f"bytes up {human_bytes(summary['bytes_up'])}, down {human_bytes(summary['bytes_down'])}; "
            f"updates missing: {summary['failures']}"
        )

    def _novel_table(self, summary: Mapping[str, Any], frame: box.Box | None) -> None:
        """Print base and novel accuracy, one row per view."""
        table = Table(box=frame, title="base and novel classes")
        columns = {
            "local": "local",
            "local_own": "local, own classes",
            "held": "classes held",
            "base": "base",
            "novel": "novel",
            "hm": "harmonic mean",
        }
        for name in ("model", *columns.values()):
            table.add_column(name, justify="left" if name == "model" else "right")
        for view, label in (("zero_shot", "zero-shot"), ("global", "global (GM)"), ("personal", "personal (PM)")):
            table.add_row(label, *(percent(summary[view][key]) for key in columns))
        self._rich.print(table)
