"""Learning rates of the embedded profile, chosen on validation images."""

from __future__ import annotations

from benchmarks.studies.cells import TUNING_SEED, Cell, Study, summary
from benchmarks.studies.fedglad import COLUMNS

RATES = {
    "local": ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3"),
    "fedlora": ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3"),
    "fedglad": ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3"),
    "fedsdg": ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3"),
    "fedpurel": ("1e-2", "3e-2", "1e-1", "3e-1"),
    "blend": ("1e-3", "3e-3", "1e-2", "3e-2"),
    "mma": ("1e-3", "3e-3", "1e-2", "3e-2"),
}


def _cells() -> tuple[Cell, ...]:
    trained = [
        Cell(f"{method} lr {rate}", TUNING_SEED, (f"method={method}", f"train.lr={rate}", "eval.every=0"))
        for method, rates in RATES.items()
        for rate in rates
    ]
    distilled = [
        Cell(
            f"fedglad lr 1e-4 distill {rate}",
            TUNING_SEED,
            ("method=fedglad", "train.lr=1e-4", f"method.distill_lr={rate}", "eval.every=0"),
        )
        for rate in ("1e-5", "5e-5", "5e-4")
    ]
    decoupled = [
        Cell(
            f"feddtl lr {rate} text {text}",
            TUNING_SEED,
            ("method=feddtl", f"train.lr={rate}", f"method.text_lr={text}", "eval.every=0"),
        )
        for rate, text in (
            *((rate, "1e-3") for rate in ("1e-4", "3e-4", "1e-3")),
            *(("3e-4", text) for text in ("1e-4", "3e-3")),
            *(("1e-3", text) for text in ("1e-4", "3e-5")),
            ("3e-3", "1e-4"),
        )
    ]
    return (*trained, *distilled, *decoupled)


STUDY = Study(_cells(), (*COLUMNS, ("validation PM", summary("val", "personal_acc"))))
