"""FedDTL and its two parts against one LoRA for all: 5 clients, 12 rounds, base and novel classes.

Few-shot: 16 images of each base class over all clients, in disjoint blocks of classes or by Dirichlet 0.1; full: 32, by
Dirichlet 0.1. On noisy images, unseen in pretraining, there is more to learn.
"""

from __future__ import annotations

from benchmarks.studies.cells import SEEDS, Cell, Study, summary

FEDERATION = ("task.split=base_novel", "clients.n=5", "eval.every=0")
METHODS: dict[str, tuple[str, ...]] = {
    "zero_shot": ("method=zero_shot",),
    "fedlora": ("method=fedlora",),
    "feddtl, plain LoRA": ("method=feddtl", "method.decouple=false", "method.two_stage=false"),
    "feddtl, + decoupled": ("method=feddtl", "method.two_stage=false"),
    "feddtl, + two stages": ("method=feddtl", "method.decouple=false", "method.sft_rounds=6"),
    "feddtl, both": ("method=feddtl", "method.sft_rounds=6"),
    # As many supervised rounds as with two stages, and nothing after them.
    "feddtl, plain LoRA, 6 rounds": ("method=feddtl", "method.decouple=false", "method.two_stage=false"),
}
ROUNDS = {"zero_shot": "rounds=1", "feddtl, plain LoRA, 6 rounds": "rounds=6"}
NOISY = "16, noisy, Dirichlet 0.1"
SETTINGS: dict[str, tuple[str, ...]] = {
    "16, disjoint": ("data.shots=16", "partition=disjoint"),
    "16, Dirichlet 0.1": ("data.shots=16", "partition.alpha=0.1"),
    "32, Dirichlet 0.1": ("data.shots=32", "partition.alpha=0.1"),
    NOISY: ("data.shots=16", "data.domains=[noisy]", "partition.alpha=0.1"),
}
EXPLORING: dict[str, tuple[str, ...]] = {
    "feddtl, both, sigma 1": ("method.sigma=1.0",),
    "feddtl, both, categorical": ("method.action=categorical",),
    "feddtl, both, exact KL": ("method.kl_estimator=exact",),
}
"""What may give policy optimisation more to learn from, where there is most to learn."""


def _cells() -> tuple[Cell, ...]:
    found = [
        Cell(f"{setting}: {row}", seed, (*method, *FEDERATION, ROUNDS.get(row, "rounds=12"), *words))
        for seed in SEEDS
        for setting, words in SETTINGS.items()
        for row, method in METHODS.items()
    ]
    found += [
        Cell(f"{NOISY}: {row}", seed, (*METHODS["feddtl, both"], *words, *FEDERATION, "rounds=12", *SETTINGS[NOISY]))
        for seed in SEEDS
        for row, words in EXPLORING.items()
    ]
    return tuple(found)


COLUMNS = (
    ("local", summary("global", "local")),
    ("base", summary("global", "base")),
    ("novel", summary("global", "novel")),
    ("HM", summary("global", "hm")),
    ("validation", summary("val", "personal_acc")),
)

STUDY = Study(_cells(), COLUMNS)
