"""FedPuReL on a long tail: classes from 60 images down to none (imbalance 100), 20 clients, 8 a round, 2 epochs.

24 rounds train what is shared; FedPuReL adds 6 personal ones. One factor is changed at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.studies.cells import SEEDS, Cell, Result, Study, summary
from benchmarks.studies.tables import paired, spread

TAIL = (
    "partition.long_tail=100",
    "partition.long_tail_order=[shuffled]",
    "clients.n=20",
    "clients.per_round=8",
    "train.epochs=2",
    "data.test_shots=10",
)
LONG_TAIL = (*TAIL, "data.shots=60", "partition.alpha=1.0")
FASHION = (*TAIL, "data=fashion_mnist", "data.shots=300", "data.test_shots=100", "partition.alpha=1.0")
FEDLORA = (
    "method=fedlora",
    "rounds=24",
    "train.optimizer=sgd",
    "train.momentum=0.9",
    "train.clip_norm=0",
    "method.rank=8",
    "method.targets=[fc1,fc2]",
)
PUREL = ("method=fedpurel", "rounds=30", "method.personal_rounds=6")
MAIN: dict[str, tuple[str, ...]] = {
    "zero_shot": ("method=zero_shot", "rounds=1"),
    "fedlora": (*FEDLORA, "train.lr=0.001"),
    "fedpurel": (*PUREL, "train.lr=0.1"),
}
ROWS: dict[str, tuple[str, ...]] = {
    **MAIN,
    "fedlora, lr 0.01": (*FEDLORA, "train.lr=0.01"),
    "fedlora, lr 0.0003": (*FEDLORA, "train.lr=0.0003"),
    "fedlora + logit adjustment": (*MAIN["fedlora"], "method.logit_adjustment=1.0"),
    "fedpurel, prompt": (*PUREL, "method.kind=prompt", "train.lr=0.1"),
    "fedpurel, adapter": (*PUREL, "method.kind=adapter", "train.lr=0.3"),
    "fedpurel, KL": (*MAIN["fedpurel"], "method.alignment=kl"),
    "fedpurel, no purification": (*MAIN["fedpurel"], "method.purify=none"),
    "fedpurel, lambda 0.1": (*MAIN["fedpurel"], "method.weight=0.1"),
    "fedpurel, lambda 0.5": (*MAIN["fedpurel"], "method.weight=0.5"),
}
TRACED = ("fedpurel", "fedpurel, KL", "fedpurel, no purification")
"""Rows whose global model is judged after every round, to set it beside the distance to zero-shot."""
REGIMES: dict[str, tuple[str, ...]] = {
    "Dirichlet 0.1": (*TAIL, "data.shots=60", "partition.alpha=0.1"),
    "noisy domain": (*LONG_TAIL, "data.domains=[noisy]"),
    "Fashion-MNIST": FASHION,
}


def _cells() -> tuple[Cell, ...]:
    found = []
    for seed in SEEDS:
        found += [Cell(row, seed, (*words, *LONG_TAIL, "eval.every=6")) for row, words in ROWS.items()]
        found += [Cell(f"every round: {row}", seed, (*ROWS[row], *LONG_TAIL, "eval.every=1")) for row in TRACED]
        for regime, setting in REGIMES.items():
            found += [Cell(f"{regime}: {row}", seed, (*MAIN[row], *_merge(setting), "eval.every=6")) for row in MAIN]
    return tuple(found)


def _merge(words: Sequence[str]) -> tuple[str, ...]:
    """Each option once, the last one given."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


COLUMNS = (
    ("GM, full test set", summary("global", "acc_full")),
    ("GM many", summary("global", "many")),
    ("GM medium", summary("global", "medium")),
    ("GM few", summary("global", "few")),
    ("GM harmonic mean", summary("global", "harmonic_mean")),
    ("PM", summary("personal", "acc_macro")),
    ("PM few", summary("personal", "few")),
    ("PM worst group", summary("personal", "worst_group")),
)


def _after(found: dict[str, list[Result]]) -> str:
    lines = ["Few-shot classes of the global model against zero-shot, seed by seed (points):", ""]
    for row in found:
        zero = f"{row.rpartition(': ')[0]}: zero_shot" if ": " in row else "zero_shot"
        if row != zero and not row.startswith("every round"):
            gaps = paired(found, row, zero, summary("global", "few"))
            lines.append(f"- {row}: {spread(gaps)} ({', '.join(f'{gap:+.1f}' for gap in gaps)})")
    lines += [
        "",
        "Correlation over the 24 global rounds of a run between TKL to zero-shot (clients' models, as trained in the",
        "round) and balance of the global model:",
        "",
    ]
    for row in TRACED:
        results = found.get(f"every round: {row}", [])
        few, mean = (_correlations(results, f"global.{key}") for key in ("few", "harmonic_mean"))
        if few:
            seeds = ", ".join(f"{value:+.2f}" for value in few)
            lines.append(f"- {row}: with few {spread(few, 2)} ({seeds}), with the harmonic mean {spread(mean, 2)}")
    return "\n".join(lines)


def _correlations(results: Sequence[Result], key: str) -> list[float]:
    found = []
    for result in results:
        pairs = [(r["tkl_drift"], r[key]) for r in result["rounds"] if "tkl_drift" in r and r.get(key) is not None]
        if len(pairs) > 2 and len({y for _, y in pairs}) > 1:
            found.append(statistics.correlation(*zip(*pairs, strict=True)))
    return [value for value in found if not math.isnan(value)]


STUDY = Study(_cells(), COLUMNS, after=_after)
