"""What is known of every trial, one file each, written by the driver aside and renamed.

    out/sweep.json                 what is searched; a resumed sweep must ask for the same
    out/trials/00003/trial.json    its point, the figure of every evaluated round, how it ended
    out/trials/00003/...           the trial's results folder, as that of any run

A sweep that was killed goes on from these: ended trials are known, the others are resumed from their own checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rayfed.engine.store import write_whole
from rayfed.errors import CheckpointError

State = Literal["running", "finished", "stopped", "diverged", "failed"]
ORDER: tuple[State, ...] = ("finished", "stopped", "running", "diverged", "failed")
"""How trials rank by how they ended: a stopped trial's early figure is never compared with that of a whole run."""
NAME = "trial.json"


@dataclass(slots=True)
class Trial:
    """One trial: ``scores`` are (round, validation figure); ``changes`` (round, new values) of mutations."""

    index: int
    point: dict[str, Any]
    state: State = "running"
    scores: list[list[float]] = field(default_factory=list)
    error: str = ""
    changes: list[list[Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Five digits: the name of its folder."""
        return f"{self.index:05d}"

    @property
    def rounds(self) -> int:
        """Rounds played, up to the last evaluated one."""
        return int(self.scores[-1][0]) if self.scores else 0

    @property
    def score(self) -> float | None:
        """The figure of its last round; a diverged or failed trial has none."""
        valid = self.state not in {"diverged", "failed"} and self.scores
        return float(self.scores[-1][1]) if valid else None

    @property
    def ended(self) -> bool:
        """Whether it need not be played again; failed ones are tried again by a resumed sweep."""
        return self.state in {"finished", "stopped", "diverged"}

    def add(self, rounds: int, score: float) -> None:
        """Record a round's figure; rounds from there on (of a state that was given up) are forgotten."""
        self.scores = [entry for entry in self.scores if entry[0] < rounds]
        self.scores.append([rounds, score])


class Ledger:
    """The trials under ``out``."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def folder(self, index: int) -> Path:
        """The results folder of a trial."""
        return self.out / "trials" / f"{index:05d}"

    def save(self, trial: Trial) -> None:
        """Write what is known of ``trial``."""
        write_whole(self.folder(trial.index) / NAME, json.dumps(asdict(trial), indent=1).encode())

    def load(self) -> dict[int, Trial]:
        """Every trial on record, by index; a file that cannot be read is a trial that has not begun."""
        found = {}
        for path in sorted((self.out / "trials").glob(f"*/{NAME}")):
            try:
                trial = Trial(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
            found[trial.index] = trial
        return found

    def claim(self, definition: Mapping[str, Any]) -> None:
        """Record what is searched, or check that a resumed sweep asks for the same.

        Raises:
            CheckpointError: the sweep here is another one.
        """
        path = self.out / "sweep.json"
        wanted = json.loads(json.dumps(definition))
        if not path.exists():
            write_whole(path, json.dumps(wanted, indent=1).encode())
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        other = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
        if other:
            shown = "; ".join(f"{n} was {saved.get(n)} and is now {wanted.get(n)}" for n in other[:3])
            raise CheckpointError(
                f"the sweep in {self.out} is another one ({shown}): restore the options or choose another out=."
            )


def ranked(trials: Iterable[Trial], mode: str) -> list[Trial]:
    """Best first: whole runs by their figure, then stopped ones by rounds and figure, diverged, failed."""
    sign = -1.0 if mode == "max" else 1.0

    def key(trial: Trial) -> tuple[int, int, float, int]:
        rounds = 0 if trial.state == "finished" else -trial.rounds
        score = trial.score
        return ORDER.index(trial.state), rounds, 0.0 if score is None else sign * score, trial.index

    return sorted(trials, key=key)
