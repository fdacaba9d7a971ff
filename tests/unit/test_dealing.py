"""Calls get shorter as less is left; quick jobs are put together, in proportion to who does more of them."""

from __future__ import annotations

import pytest

from rayfed.engine.dealing import share


def sizes(jobs: int, paces: list[float]) -> list[int]:
    """Of all calls until nothing is left, the actors taking turns."""
    found = []
    while jobs:
        found.append(min(share(jobs, paces[len(found) % len(paces)], paces), jobs))
        jobs -= found[-1]
    return found


@pytest.mark.parametrize("jobs", [1, 7, 20, 1000])
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("pace", [0.0, 3.0, 250.0, 2500.0, 1e5])
def test_calls_never_grow_and_nobody_gets_more_than_is_fair_unless_it_is_little(jobs, workers, pace):
    calls = sizes(jobs, [pace] * workers)
    assert sum(calls) == jobs and calls == sorted(calls, reverse=True) and min(calls) >= 1
    assert calls[0] <= max(-(-jobs // workers), pace * 0.01)


def test_slow_jobs_end_one_by_one_and_quick_ones_in_a_few_calls():
    assert sizes(20, [5.0, 5.0]) == [5, 4, 3, 2, 2, 1, 1, 1, 1]
    assert sizes(4000, [2500.0, 2500.0]) == [1750, 1125, 563, 281, 141, 70, 35, 25, 10]
    assert share(1000, 2500.0, [2500.0, 2500.0]) == 500


def test_an_actor_that_does_twice_as_many_gets_twice_as_many():
    fast, slow = share(900, 2000.0, [2000.0, 1000.0]), share(900, 1000.0, [2000.0, 1000.0])
    assert fast == 600 and slow == 300
    assert share(9000, 2000.0, [2000.0, 1000.0]) == 5250
    assert share(900, 2000.0, [2000.0, 1900.0]) == share(900, 1900.0, [2000.0, 1900.0])


def test_before_all_paces_are_known_nobody_gets_more_than_half_of_its_due():
    assert share(1000, 2500.0, [2500.0, 0.0]) == share(1000, 0.0, [2500.0, 0.0]) == 250
