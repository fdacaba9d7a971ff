"""Calls get shorter as less is left; quick jobs are put together."""

from __future__ import annotations

import pytest

from rayfed.engine.dealing import share, worth_a_call


def sizes(jobs: int, workers: int, worth: int) -> list[int]:
    """Of all calls until nothing is left."""
    found = []
    while jobs:
        found.append(min(share(jobs, workers, worth), jobs))
        jobs -= found[-1]
    return found


@pytest.mark.parametrize("jobs", [1, 7, 20, 1000])
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("worth", [1, 12, 95, 5000])
def test_calls_never_grow_and_nobody_gets_more_than_is_fair_unless_it_is_little(jobs, workers, worth):
    calls = sizes(jobs, workers, worth)
    assert sum(calls) == jobs and calls == sorted(calls, reverse=True)
    assert calls[0] <= max(-(-jobs // workers), worth // 5)


def test_slow_jobs_end_one_by_one_and_quick_ones_in_a_few_calls():
    assert sizes(20, 2, 1) == [5, 4, 3, 2, 2, 1, 1, 1, 1]
    assert sizes(1000, 2, 95) == [250, 188, 141, 106, 95, 95, 63, 31, 19, 12]


def test_what_is_worth_a_call_follows_how_long_jobs_take():
    assert worth_a_call([0.2, 0.3]) == 1
    assert worth_a_call([0.0005] * 40) == 100
