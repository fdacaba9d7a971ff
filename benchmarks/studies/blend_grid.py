"""BLEND's share of the personal head and weight of its loss, on validation images of a seed nothing is reported for."""

from __future__ import annotations

from benchmarks.studies.blend import BOOSTED, COLUMNS
from benchmarks.studies.cells import TUNING_SEED, Cell, Study

CELLS = tuple(
    Cell(
        f"gamma {gamma} lambda {weight}",
        TUNING_SEED,
        ("method=blend", f"method.gamma={gamma}", f"method.fused_weight={weight}", *BOOSTED, "rounds=20"),
    )
    for gamma in ("0.09", "0.3", "0.9")
    for weight in ("0.2", "0.5", "0.8")
)

STUDY = Study(CELLS, COLUMNS)
