"""The ranking, the ledger, the importance and what a trial reserves: computed here again, the slow way."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from rayfed.config import parse_options
from rayfed.errors import CheckpointError, ResourceError
from rayfed.sweep.ledger import Ledger, Trial, ranked
from rayfed.sweep.placement import bundles, plan_trial, side_by_side
from rayfed.sweep.report import importance
from rayfed.sweep.request import parse_request
from rayfed.sweep.search import Mutation, scheduler

FOUR, ONE = [{"CPU": 4.0}], [{"CPU": 1.0}]


def options(*words):
    return parse_options(["method=fedlora", "clients.n=2", *words])


def test_ranking_never_compares_early_with_late_figures():
    trials = [
        Trial(0, {}, "stopped", [[2, 0.99]]),
        Trial(1, {}, "finished", [[1, 0.9], [4, 0.6]]),
        Trial(2, {}, "diverged", [[1, 0.0]]),
        Trial(3, {}, "finished", [[4, 0.7]]),
        Trial(4, {}, "stopped", [[3, 0.5]]),
        Trial(5, {}, "failed", [[3, 0.8]]),
        Trial(6, {}, "stopped", [[3, 0.6]]),
    ]
    assert [t.index for t in ranked(trials, "max")] == [3, 1, 6, 4, 0, 2, 5]
    assert [t.index for t in ranked(trials, "min")] == [1, 3, 4, 6, 0, 2, 5]
    assert [t.score for t in trials[:3]] == [0.99, 0.6, None]


def test_a_taken_over_state_replaces_later_figures():
    trial = Trial(0, {}, scores=[[1, 0.1], [2, 0.2], [3, 0.3]])
    trial.add(2, 0.5)
    assert trial.scores == [[1, 0.1], [2, 0.5]]


def test_the_ledger_remembers_and_passes_over_what_it_cannot_read(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.save(Trial(3, {"train.lr": 0.1}, "finished", [[1, 0.5]]))
    ledger.save(Trial(4, {"train.lr": 0.2}))
    (tmp_path / "trials" / "00004" / "trial.json").write_text('{"index": 4, "po')
    assert ledger.load() == {3: Trial(3, {"train.lr": 0.1}, "finished", [[1, 0.5]])}
    ledger.claim({"a": [1, 2]})
    ledger.claim({"a": (1, 2)})
    with pytest.raises(CheckpointError, match=r"another one \(a was \[1, 2\] and is now \[1\]\)"):
        ledger.claim({"a": [1]})


def test_importance_is_spearmans_rho_or_the_correlation_ratio_of_ranks():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 5, 30).astype(float), generator.random(30)
    y += 0.2 * x
    assert importance(list(x), list(y), ordered=True) == pytest.approx(abs(spearmanr(x, y).statistic))
    ranks, groups = rankdata(y), {v: [] for v in x}
    for value, rank in zip(x, ranks, strict=True):
        groups[value].append(rank)
    total = sum((r - ranks.mean()) ** 2 for r in ranks)
    between = sum(len(g) * (sum(g) / len(g) - ranks.mean()) ** 2 for g in groups.values())
    assert importance(list(x), list(y), ordered=False) == pytest.approx((between / total) ** 0.5)
    assert importance([1, 2, 3], [1, 2, 3], ordered=True) is None
    assert importance([1, 1, 1, 1], [1, 2, 3, 4], ordered=True) is None


def test_a_trial_reserves_driver_server_and_clients_in_one_group():
    assert bundles(options(), 2) == [{}, {"CPU": 1.0}, {"CPU": 1.0}]
    shares = ["clients.cpu=2", "clients.gpu=0.25", "server.gpu=0.5", "server.cpu=1"]
    assert bundles(options(*shares), 1) == [{}, {"CPU": 1.0, "GPU": 0.5}, {"CPU": 2.0, "GPU": 0.25}]
    assert bundles(options("engine.pool=local", "clients.gpu=0.5", "server.gpu=0.25"), 1) == [{"CPU": 1.0, "GPU": 0.5}]
    assert bundles(options("clients.cpu=0"), 3) == [{"CPU": 0.001}]


def test_as_many_as_fit_run_side_by_side_and_clients_take_turns_where_they_must():
    assert plan_trial(options(), FOUR).num_actors == 2
    assert side_by_side(bundles(options(), 2), FOUR, 3) == 2
    assert plan_trial(options(), ONE).num_actors == 1
    assert side_by_side(bundles(options(), 1), ONE, 3) == 1
    assert side_by_side(bundles(options("engine.pool=local"), 1), [{"CPU": 2.0}, {"CPU": 2.0}], 16) == 4
    with pytest.raises(ResourceError, match="need 3 CPUs and 0 GPUs in all, and there is 1 node with 1 CPUs"):
        plan_trial(options("clients.cpu=2", "server.cpu=1"), ONE)


def test_asha_knows_the_trials_of_an_interrupted_sweep():
    request = parse_request(["space=fedlora", "tune.scheduler=asha", "tune.grace=2", "tune.reduction=2", "rounds=8"])
    known = [Trial(i, {}, "finished", [[2, score], [4, score]]) for i, score in enumerate((0.8, 0.9))]
    for before, action in ((known, "STOP"), ([], "CONTINUE")):
        asha = scheduler(request.tune, request.space, 8, before)
        new = type("New", (), {"trial_id": "new"})()
        asha.on_trial_add(None, new)
        assert asha.on_trial_result(None, new, {"round": 2, "score": 0.5}) == action
        assert asha.on_trial_result(None, new, {"round": 1, "score": 0.5}) == "CONTINUE"


def test_a_mutation_changes_what_may_change_and_nothing_else():
    space = parse_request(["space=fedsdg"]).space
    config = {"trial": {"index": 3, "actors": 2, "point": dict(parse_request(["space=fedsdg"]).points()[0])}}
    before = json.dumps(config)
    changed = Mutation(space, 0)(config)
    assert json.dumps(config) == before
    names = {n for n, v in changed["trial"]["point"].items() if v != config["trial"]["point"][n]}
    assert names and names <= space.mutable
    assert Mutation(space, 0)(config) == changed


def test_a_model_based_search_starts_from_what_is_known():
    """Two trials have ended, one goes on, the next are proposals; values lie in the space and read back."""
    from rayfed.sweep.tpe import Proposals

    request = parse_request(["space=fedsdg", "tune.searcher=optuna", "tune.samples=8"])
    points = parse_request(["space=fedsdg", "tune.samples=4"]).points()
    known = {0: Trial(0, points[0], "finished", [[2, 0.5]]), 1: Trial(1, points[1], "diverged", [[1, 0.0]])}
    begun = []
    search = Proposals(
        request, known, [Trial(2, points[2])], lambda trial: begun.append(trial) or {"index": trial.index}
    )
    study = search._ot_study
    assert sorted(trial.value for trial in study.trials if trial.state.is_finished()) == [0.0, 0.5]
    assert [search.suggest(name)["trial"]["index"] for name in "abc"] == [2, 3, 4]
    assert begun[0].point == points[2]
    for trial in begun:
        assert ("method.floor" in trial.point) == (trial.point["method.align"] == "floor")
        request.options(trial.point)
    search.on_trial_result("a", {"round": 1})
    search.on_trial_complete("a", {"round": 2, "score": 0.7})
    search.on_trial_complete("b", {"round": 0, "state": "failed"})
    assert study.best_value == 0.7
    again = Proposals(
        request, known, [Trial(2, points[2])], lambda trial: begun.append(trial) or {"index": trial.index}
    )
    again.suggest("a"), again.suggest("b")
    assert begun[-1].point == begun[1].point, "same seed, same proposals"
