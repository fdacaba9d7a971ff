"""BLEND and its baselines, what is averaged, and both ranks: 16 images of each base class over 10 clients, 20 rounds.

Most of a class lies at one client (``dir_boost``, 0.01). The width of the image tower is 128.
"""

from __future__ import annotations

from benchmarks.studies.cells import Result, Study, summary
from benchmarks.studies.fedglad import cells
from rayfed.metrics.novel import harmonic_mean

BOOSTED = (
    "task.split=base_novel",
    "partition=dir_boost",
    "partition.alpha=0.01",
    "data.shots=16",
    "clients.n=10",
    "eval.every=0",
)
ROWS: dict[str, tuple[str, ...]] = {
    **{name: (f"method={name}",) for name in ("zero_shot", "fedlora", "mma", "blend")},
    **{
        f"blend, {option} {value}": ("method=blend", f"method.{option}={value}")
        for option, values in (
            ("aggregate", ("none", "full", "vision_only", "text_only")),
            ("rank", ("0", "4", "64", "full")),
            ("projection_rank", ("4", "128", "full")),
        )
        for value in values
    },
    "blend, text projection trained": ("method=blend", "method.text_projection=true"),
}


def per_and_gen(result: Result) -> float | None:
    """Harmonic mean of Per. and Gen., in percent."""
    personal = result["summary"]["personal"]
    mean = harmonic_mean(personal["held"], personal["novel"])
    return None if mean is None else 100 * mean


COLUMNS = (
    ("Per.", summary("personal", "held")),
    ("Gen.", summary("personal", "novel")),
    ("HM", per_and_gen),
    ("Gen. of the general head", summary("global", "novel")),
    ("validation PM", summary("val", "personal_acc")),
)

STUDY = Study(cells(ROWS, BOOSTED, 20), COLUMNS)
