"""Learning rates of the long-tail study, chosen on validation images of another seed."""

from __future__ import annotations

from benchmarks.studies.cells import TUNING_SEED, Cell, Study, summary
from benchmarks.studies.fedpurel import COLUMNS, FEDLORA, LONG_TAIL, PUREL

RATES = {
    "fedlora": (FEDLORA, ("0.0001", "0.0003", "0.001", "0.003", "0.01", "0.03", "0.1")),
    "fedpurel, lora": (PUREL, ("0.03", "0.1", "0.3")),
    "fedpurel, prompt": ((*PUREL, "method.kind=prompt"), ("0.01", "0.1", "1")),
    "fedpurel, adapter": ((*PUREL, "method.kind=adapter"), ("0.03", "0.3", "3")),
}
CELLS = tuple(
    Cell(f"{row} lr {rate}", TUNING_SEED, (*words, *LONG_TAIL, f"train.lr={rate}", "eval.every=0"))
    for row, (words, rates) in RATES.items()
    for rate in rates
)

STUDY = Study(CELLS, (("validation PM", summary("val", "personal_acc")), *COLUMNS))
