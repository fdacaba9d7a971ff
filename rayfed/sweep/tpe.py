"""Optuna's tree-structured Parzen estimator through Ray Tune: points proposed from how the earlier ones did."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from ray.tune.search.optuna import OptunaSearch

from rayfed import rng
from rayfed.sweep.ledger import Trial
from rayfed.sweep.request import Request
from rayfed.sweep.search import SCORE, WORST, Begin
from rayfed.sweep.space import LISTS, Parameter, Point, Space, as_text

STUDY = "sweep"


class Proposals(OptunaSearch):  # type: ignore[misc]  # Ray is not typed
    """Gives every proposal its number, and the ledger the chance to record it.

    ``known`` trials are evidence, the points of ``first`` are tried in their order before any proposal.
    """

    def __init__(self, request: Request, known: Mapping[int, Trial], first: Sequence[Trial], begin: Begin) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._request, self._begin, self._waiting = request, begin, deque(first)
        self._numbers = itertools.count(max([*known, *(trial.index for trial in first)], default=-1) + 1)
        storage = optuna.storages.InMemoryStorage()
        study = optuna.create_study(storage=storage, study_name=STUDY, direction=f"{request.tune.mode}imize")
        for trial in known.values():
            if (evidence := _evidence(request, trial)) is not None:
                study.add_trial(evidence)
        super().__init__(
            self._define,
            metric=SCORE,
            mode=request.tune.mode,
            storage=storage,
            study_name=STUDY,
            seed=rng.derive_seed(request.tune.seed, "tpe") % 2**32,
            points_to_evaluate=[_params(request.space, trial) for trial in first],
        )

    def suggest(self, trial_id: str) -> Any:
        """The next point."""
        values = super().suggest(trial_id)
        if self._waiting:
            return {"trial": self._begin(self._waiting.popleft())}
        parameters = self._request.space.parameters
        point = {p.name: p.value_of(values[p.name]) for p in parameters if p.name in values}
        return {"trial": self._begin(Trial(next(self._numbers), point))}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Only the last figure counts, and a trial that failed has none."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the ledger is the memory of a sweep."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def _define(self, trial: Any) -> None:
        """Suggest values in order; what its conditions leave out is not suggested."""
        chosen: Point = {}
        space, fixed = self._request.space, self._request.fixed
        for parameter in space.parameters:
            if parameter.name in space.active({**chosen, parameter.name: None}, fixed):
                chosen[parameter.name] = _suggest(trial, parameter)


def _evidence(request: Request, trial: Trial) -> optuna.trial.FrozenTrial | None:
    """What Optuna learns of a trial that has ended, or None without a figure."""
    value = WORST[request.tune.mode] if trial.state == "diverged" else trial.score
    if value is None:
        return None
    used = {p.name: _distribution(p) for p in request.space.parameters if p.name in trial.point}
    return optuna.trial.create_trial(params=_params(request.space, trial), distributions=used, value=value)


def _params(space: Space, trial: Trial) -> Point:
    """A trial's point as Optuna holds it: listed values by their text, since some are lists."""
    held = {p.name: p for p in space.parameters}
    return {name: as_text(v) if held[name].kind in LISTS else v for name, v in trial.point.items()}


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    if parameter.kind in LISTS:
        return optuna.distributions.CategoricalDistribution([as_text(v) for v in parameter.values])
    low, high, *step = parameter.values
    if parameter.kind == "randint":
        return optuna.distributions.IntDistribution(low, high)
    log = parameter.kind == "loguniform"
    return optuna.distributions.FloatDistribution(low, high, log=log, step=step[0] if step else None)


def _suggest(trial: Any, parameter: Parameter) -> Any:
    if parameter.kind in LISTS:
        return parameter.value_of(trial.suggest_categorical(parameter.name, [as_text(v) for v in parameter.values]))
    low, high, *step = parameter.values
    if parameter.kind == "randint":
        return trial.suggest_int(parameter.name, low, high)
    log = parameter.kind == "loguniform"
    return trial.suggest_float(parameter.name, low, high, log=log, step=step[0] if step else None)
