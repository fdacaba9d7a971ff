"""Where points come from (Ray Tune's variant generator, or Optuna's TPE through it), and who is stopped or mutated."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayfed import rng
from rayfed.sweep.ledger import Trial
from rayfed.sweep.space import LISTS, Parameter, Point, Space, as_text

if TYPE_CHECKING:
    from rayfed.conf.tune import TuneOptions
    from rayfed.sweep.request import Request

ROUND, SCORE = "round", "score"
"""Names under which trials report to Tune."""
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


def optuna(request: Request, known: Mapping[int, Trial], first: Sequence[Trial], begin: Begin) -> Any:
    """Optuna's TPE through Tune: ``known`` trials are its evidence, the points of ``first`` are tried before its own."""
    import optuna as ot
    from ray.tune.search.optuna import OptunaSearch

    ot.logging.set_verbosity(ot.logging.WARNING)
    space, fixed, mode = request.space, request.fixed, request.tune.mode
    waiting = deque(first)
    numbers = itertools.count(max([*known, *(trial.index for trial in first)], default=-1) + 1)

    def define(trial: Any) -> None:
        """Suggest values in order; what its conditions leave out is not suggested."""
        chosen: Point = {}
        for parameter in space.parameters:
            if parameter.name in space.active({**chosen, parameter.name: None}, fixed):
                chosen[parameter.name] = _suggest(trial, parameter)

    class Numbered(OptunaSearch):  # type: ignore[misc]  # Ray is not typed
        """Gives every suggestion its number, and the ledger the chance to record it."""

        def suggest(self, trial_id: str) -> Any:
            """The next point."""
            values = super().suggest(trial_id)
            if waiting:
                return {"trial": begin(waiting.popleft())}
            point = {p.name: p.value_of(values[p.name]) for p in space.parameters if p.name in values}
            return {"trial": begin(Trial(next(numbers), point))}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            """Only the last figure counts, and a trial that failed has none."""

        def save(self, checkpoint_path: str) -> None:
            """The ledger is the memory of a sweep."""

    storage = ot.storages.InMemoryStorage()
    study = ot.create_study(storage=storage, study_name="sweep", direction=f"{mode}imize")
    for trial in known.values():
        value = WORST[mode] if trial.state == "diverged" else trial.score
        if value is not None:
            used = {p.name: _distribution(ot, p) for p in space.parameters if p.name in trial.point}
            study.add_trial(ot.trial.create_trial(params=_params(space, trial), distributions=used, value=value))
    return Numbered(
        define,
        metric=SCORE,
        mode=mode,
        storage=storage,
        study_name="sweep",
        seed=rng.derive_seed(request.tune.seed, "tpe") % 2**32,
        points_to_evaluate=[_params(space, trial) for trial in first],
    )


WORST = {"max": 0.0, "min": 1.0}
"""The figure a diverged trial counts with in searchers and schedulers: an accuracy has no worse one, and it is finite."""


def _params(space: Space, trial: Trial) -> Point:
    """A trial's point as Optuna holds it: listed values by their text, since some are lists."""
    held = {p.name: p for p in space.parameters}
    return {n: as_text(v) if held[n].kind in LISTS else v for n, v in trial.point.items()}


def _distribution(ot: Any, parameter: Parameter) -> Any:
    if parameter.kind in LISTS:
        return ot.distributions.CategoricalDistribution([as_text(v) for v in parameter.values])
    low, high, *step = parameter.values
    if parameter.kind == "randint":
        return ot.distributions.IntDistribution(low, high)
    log = parameter.kind == "loguniform"
    return ot.distributions.FloatDistribution(low, high, log=log, step=step[0] if step else None)


def _suggest(trial: Any, parameter: Parameter) -> Any:
    if parameter.kind in LISTS:
        return parameter.value_of(trial.suggest_categorical(parameter.name, [as_text(v) for v in parameter.values]))
    low, high, *step = parameter.values
    if parameter.kind == "randint":
        return trial.suggest_int(parameter.name, low, high)
    log = parameter.kind == "loguniform"
    return trial.suggest_float(parameter.name, low, high, log=log, step=step[0] if step else None)
