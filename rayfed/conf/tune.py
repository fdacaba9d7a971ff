"""Options of a sweep (``tune.*``): typed and checked as those of a run are, before Ray or torch is imported."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayfed.conf.options import Auto, Count, Frozen

VALIDATION_METRICS = ("val/personal_acc",)
"""What a trial may be judged by: measured on the clients' validation images. Nothing is ever chosen on test images."""


class TuneOptions(Frozen):
    """What is tried, in which order, and what counts as good."""

    samples: Count | Auto = "auto"
    """Trials in all, the baseline among them; auto: every point of a grid, else 16."""
    concurrent: Count | Auto = "auto"
    """Trials side by side, at most; auto: as many as fit."""
    metric: str = "val/personal_acc"
    """Validation figure a trial is judged by, of the last round it played."""
    mode: Literal["max", "min"] = "max"
    """Whether more of the metric is better, or less."""
    searcher: Literal["auto", "random", "grid", "optuna"] = "auto"
    """Where points come from: drawn at random, every combination, or Optuna's TPE; auto: grid where all are grids."""
    scheduler: Literal["none", "asha", "pbt"] = "none"
    """Stop the worse trials early (asha), or let trials take over the better ones' state and mutate (pbt)."""
    grace: Count | Auto = "auto"
    """Rounds a trial plays before it may be stopped, or between mutations; auto: a quarter of `rounds`."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """scheduler=asha: of so many trials that reach a rung, one goes on."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the points that are drawn (`seed` is that of every trial's run)."""
    fail: Literal["all", "any"] = "all"
    """When the sweep has failed: only if no trial has a valid result, or if any trial failed."""

    def problems(self) -> list[str]:
        """Contradictions inside the group, one sentence each."""
        found = []
        if self.metric not in VALIDATION_METRICS:
            known = " or ".join(VALIDATION_METRICS)
            found.append(
                f"tune.metric={self.metric} is not measured on validation images, and nothing may be chosen on others: "
                f"use {known}."
            )
        if self.searcher == "grid" and self.samples != "auto":
            found.append(
                f"tune.samples={self.samples} with tune.searcher=grid: a grid has a trial per point; leave one out."
            )
        if self.scheduler == "pbt" and self.concurrent != "auto":
            found.append(
                f"tune.concurrent={self.concurrent} with tune.scheduler=pbt: all trials advance together, taking turns "
                "where not all fit; leave it out."
            )
        if self.scheduler == "pbt" and self.searcher == "optuna":
            found.append(
                "tune.scheduler=pbt changes points while they train, which tune.searcher=optuna cannot model: "
                "use tune.searcher=random."
            )
        return found

    def grace_of(self, rounds: int) -> int:
        """Rounds before the first decision on a trial of ``rounds`` rounds."""
        return max(rounds // 4, 1) if self.grace == "auto" else self.grace
