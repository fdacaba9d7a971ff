"""FedGLAD, its ablations and distillation protocols: 20 clients x 40 images, Dirichlet 0.1, 15 rounds of 2 epochs."""

from __future__ import annotations

from benchmarks.studies.cells import SEEDS, Cell, Study, summary

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
SETTING = ("clients.n=20", "data.shots=8", "partition.alpha=0.1", "train.epochs=2", "data.proxy=128")
COLUMNS = (
    ("PM", summary("personal", "acc_macro")),
    ("GM", summary("global", "acc_macro")),
    ("GM, full test set", summary("global", "acc_full")),
    ("worst client (PM)", summary("personal", "acc_worst")),
)


def cells(rows: dict[str, tuple[str, ...]], setting: tuple[str, ...], rounds: int) -> tuple[Cell, ...]:
    """Every row at every seed; zero-shot needs one round only."""
    return tuple(
        Cell(row, seed, (*words, *setting, f"rounds={1 if row == 'zero_shot' else rounds}"))
        for seed in SEEDS
        for row, words in rows.items()
    )


STUDY = Study(cells(VARIANTS, SETTING, 15), COLUMNS, goal="fedlora")
