"""FedSDG: 50 clients, 10 a round, 2 epochs, 30 rounds; label and domain shift, gate and alignment ablations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from benchmarks.studies.cells import SEEDS, TUNING_SEED, Cell, Result, Study, summary
from benchmarks.studies.tables import spread

FEDERATION = ("clients.n=50", "clients.per_round=10", "train.epochs=2", "rounds=30", "eval.every=0")
FEDDPA = (
    "method=fedsdg",
    "method.mixing=blend",
    "method.gate=fixed",
    "method.align=none",
    "method.private_weight=0",
)
METHODS: dict[str, tuple[str, ...]] = {
    "zero_shot": ("method=zero_shot",),
    "local": ("method=local",),
    "fedlora": ("method=fedlora",),
    "fixed mixing (FedDPA)": (*FEDDPA, "train.lr=3e-4"),
    "fedsdg": ("method=fedsdg",),
    "fedsdg, lr 3e-3": ("method=fedsdg", "train.lr=3e-3"),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "Dirichlet 0.1": ("partition.alpha=0.1",),
    "Dirichlet 1.0": ("partition.alpha=1.0",),
    "domains": ("partition=domain_dirichlet", "partition.alpha=1.0", "data.domains=[photo,sketch,bright,noisy]"),
    "Dirichlet 0.3": ("partition.alpha=0.3",),
}
ABLATIONS: dict[str, tuple[str, ...]] = {
    "m = 0": ("method.gate=fixed", "method.gate_value=0"),
    "m = 0.047": ("method.gate=fixed", "method.gate_value=0.047"),
    "m = 0.5": ("method.gate=fixed", "method.gate_value=0.5"),
    "m = 1": ("method.gate=fixed", "method.gate_value=1"),
    "gates start at a = 0": ("method.gate_init=0",),
    "gates per block": ("method.gate=block",),
    "no alignment": ("method.align=none",),
    "global anchor": ("method.align=global",),
}
RATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "FedDPA": (FEDDPA, ("1e-4", "3e-4", "1e-3")),
    "fedsdg": (("method=fedsdg",), ("1e-4", "3e-4", "1e-3", "3e-3", "1e-2")),
    "fedlora": (("method=fedlora",), ("1e-5", "3e-5", "1e-4", "3e-4")),
}
TUNED = tuple(
    Cell(
        f"tuning: {name} lr {rate}", TUNING_SEED, (*words, f"train.lr={rate}", *FEDERATION, *SETTINGS["Dirichlet 0.1"])
    )
    for name, (words, rates) in RATES.items()
    for rate in rates
)


def _cells() -> tuple[Cell, ...]:
    """The comparison at Dirichlet 0.1 and its ablations first, then the other settings."""
    first, *others = SETTINGS
    found = [_cell(first, row, seed) for seed in SEEDS for row in METHODS]
    for row, ablation in ABLATIONS.items():
        words = ("method=fedsdg", *ablation, *FEDERATION, *SETTINGS[first])
        found += [Cell(f"fedsdg, {row}", seed, words) for seed in SEEDS]
    found += [_cell(setting, row, seed) for setting in others for seed in SEEDS for row in METHODS]
    return (*TUNED, *found)


def _cell(setting: str, row: str, seed: int) -> Cell:
    federation = tuple("rounds=1" if w == "rounds=30" and row == "zero_shot" else w for w in FEDERATION)
    return Cell(f"{setting}: {row}", seed, (*METHODS[row], *federation, *SETTINGS[setting]))


COLUMNS = (
    ("PM", summary("personal", "acc_macro")),
    ("P10", summary("personal", "p10")),
    ("P50", summary("personal", "p50")),
    ("P90", summary("personal", "p90")),
    ("GM", summary("global", "acc_macro")),
    ("validation PM", summary("val", "personal_acc")),
)


def _after(found: dict[str, list[Result]]) -> str:
    lines = [
        "Gates after the last round: mean, and the share of their sum in the later half of the blocks; share of the"
    ]
    lines += [
        "private branch in the energy of the adapted layers; norm of the private branch, and how far a round moves it:",
        "",
    ]
    for row, results in found.items():
        last = [result["rounds"][-1] for result in results]
        if "private_norm" in last[0]:
            figures = {key: spread([r[key] for r in last], 3) for key in KEYS if key in last[0]}
            deep = [share for r in last if (share := _deep_share(r)) is not None]
            text = ", ".join(f"{key} {value}" for key, value in figures.items())
            lines.append(f"- {row}: {text}{f', deep share {spread(deep, 3)}' if deep else ''}")
    return "\n".join(lines)


KEYS = ("gate_mean", "energy_share", "private_norm", "private_drift")


def _deep_share(figures: Mapping[str, float]) -> float | None:
    """Share of the gates' sum that lies in the later half of the blocks; 0.5 if depth makes no difference."""
    by_block: dict[int, list[float]] = defaultdict(list)
    for name, value in figures.items():
        if name.startswith("gate/"):
            by_block[int(name.rsplit("/", 1)[-1].partition(".")[0])].append(value)
    if len(by_block) < 2:
        return None
    means = [sum(values) / len(values) for _, values in sorted(by_block.items())]
    return sum(means[len(means) // 2 :]) / sum(means)


DRAWN = {
    "Dirichlet 0.1: fedsdg": "base anchor",
    "fedsdg, no alignment": "no alignment",
    "fedsdg, global anchor": "global anchor",
}


def _picture(found: dict[str, list[Result]]) -> Figure:
    """Norm of the private branch, and how far a round moves it, with and without alignment: mean and range of seeds."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for place, (key, title) in zip(
        figure.subplots(1, 2),
        (("private_norm", "norm of the private branch"), ("private_drift", "moved in a round")),
        strict=True,
    ):
        for row, label in DRAWN.items():
            values = np.array([[r[key] for r in result["rounds"]] for result in found.get(row, [])])
            if values.size:
                rounds = np.arange(1, values.shape[1] + 1)
                (line,) = place.plot(rounds, values.mean(0), label=label)
                place.fill_between(rounds, values.min(0), values.max(0), alpha=0.2, color=line.get_color())
        place.set(xlabel="round", title=title)
        place.grid(alpha=0.3)
    place.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(_cells(), COLUMNS, after=_after, picture=_picture)
