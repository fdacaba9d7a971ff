"""Who is stopped or mutated (Ray Tune's schedulers), and points that are known beforehand; ``tpe`` proposes others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rayfed import rng
from rayfed.sweep.ledger import Trial
from rayfed.sweep.space import Parameter, Space

if TYPE_CHECKING:
    from rayfed.conf.tune import TuneOptions

ROUND, SCORE = "round", "score"
"""Names under which trials report to Tune."""
WORST = {"max": 0.0, "min": 1.0}
"""What a diverged trial counts with in searchers and schedulers: finite, and no accuracy is worse."""
Begin = Callable[[Trial], dict[str, Any]]
"""Told of a trial that is about to start; returns the configuration it gets."""


def scheduler(tune: TuneOptions, space: Space, rounds: int, known: Iterable[Trial]) -> Any:
    """The scheduler; ``known`` trials of an interrupted sweep are told to it as if it had seen them."""
    from ray.tune import schedulers

    common = {"time_attr": ROUND, "metric": SCORE, "mode": tune.mode}
    if tune.scheduler == "asha":
        asha = schedulers.ASHAScheduler(
            **common,
            max_t=rounds + 1,  # the last round is no reason to stop: the trial ends by itself, with its results written
            grace_period=tune.grace_of(rounds),
            reduction_factor=tune.reduction,
        )
        _replay(asha, known)
        return asha
    if tune.scheduler == "pbt":
        return schedulers.PopulationBasedTraining(
            **common,
            perturbation_interval=tune.grace_of(rounds),
            custom_explore_fn=Mutation(space, tune.seed),
            require_attrs=False,
            log_config=False,
        )
    return schedulers.FIFOScheduler()


class _Known:
    """As much of a Tune trial as ASHA looks at."""

    def __init__(self, trial: Trial) -> None:
        self.trial_id = f"known-{trial.name}"


def _replay(asha: Any, known: Iterable[Trial]) -> None:
    for trial in known:
        stub = _Known(trial)
        asha.on_trial_add(None, stub)
        for rounds, score in trial.scores:
            asha.on_trial_result(None, stub, {ROUND: int(rounds), SCORE: score})


class Mutation:
    """Changes the mutable values of a point that was taken over from a better trial."""

    def __init__(self, space: Space, seed: int) -> None:
        self._parameters: tuple[Parameter, ...] = tuple(p for p in space.parameters if p.mutate)
        self._seed, self._count = seed, 0

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return ``config`` with a mutated point."""
        self._count += 1
        generator = rng.numpy_generator(self._seed, "mutation", self._count)
        changed = copy.deepcopy(config)
        for parameter in self._parameters:
            point = changed["trial"]["point"]
            point[parameter.name] = parameter.mutated(point[parameter.name], generator)
        return changed


def planned(trials: Sequence[Trial], begin: Begin) -> dict[str, Any]:
    """Tune's parameter space for points that are known beforehand: its variant generator goes through them in order."""
    from ray import tune

    return {"trial": tune.grid_search([begin(trial) for trial in trials])}
