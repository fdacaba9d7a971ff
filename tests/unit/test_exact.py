"""Weighted sums: the same bits in any order and grouping, and their range is checked."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from rayfed.aggregation.exact import LIMIT, ExactSum, weighted_mean


def clients(count=7, size=1000):
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(size, generator=generator) * 10.0**-k for k in range(count)]
    return deltas, [3, 50, 1, 17, 200, 8, 31][:count]


def test_order_and_grouping_do_not_change_a_bit():
    deltas, weights = clients()
    expected = weighted_mean(deltas, weights)
    for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 501):
        left, right = ExactSum.zeros(1000), ExactSum.zeros(1000)
        for place, k in enumerate(order):
            (left if place % 3 else right).add(deltas[k].unsqueeze(0), [weights[k]])
        right.merge(left)
        assert torch.equal(right.mean(), expected)
    # Float sums do differ between orders: the test above would notice them.
    plain = sum(w * d for w, d in zip(weights, deltas, strict=True))
    turned = sum(w * d for w, d in zip(weights[::-1], deltas[::-1], strict=True))
    assert not torch.equal(plain, turned)


@pytest.mark.parametrize("alike", [False, True])
def test_several_at_once_are_the_same_as_one_by_one(alike):
    deltas, weights = clients()
    weights = [17] * len(weights) if alike else weights
    deltas = [delta * 10.0**-k for k, delta in enumerate(deltas)]  # down to what a sum no longer resolves
    together = ExactSum.zeros(1000)
    together.add(torch.stack(deltas), weights)
    wide = sum(w * (d.double() * 2.0**40).round() for w, d in zip(weights, deltas, strict=True))
    assert torch.equal(together.total, wide.long()) and together.weight == sum(weights)
    assert torch.equal(together.mean(), weighted_mean(deltas, weights))


def test_a_sum_from_another_process_is_added_up_the_same():
    deltas, weights = clients()
    here, there = ExactSum.zeros(1000), ExactSum.zeros(1000)
    here.add(torch.stack(deltas), weights)
    data = []
    pickled = pickle.dumps(here, protocol=5, buffer_callback=data.append)
    assert len(pickled) < 500 and sum(part.raw().nbytes for part in data) == 8 * 1000  # no copy inside the message
    sent = pickle.loads(pickled, buffers=[part.raw().toreadonly() for part in data])
    there.merge(sent)
    there.add(torch.stack(deltas), weights)
    sent.add(torch.stack(deltas), weights)
    assert torch.equal(there.total, 2 * here.total) and there.bound == sent.bound == 2 * here.bound
    assert torch.equal(sent.total, there.total) and there.weight == 2 * sum(weights)


def test_mean_is_the_weighted_mean():
    deltas, weights = clients()
    exact = sum(w * d.double() for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    torch.testing.assert_close(weighted_mean(deltas, weights).double(), exact, rtol=1e-6, atol=1e-12)


def test_zero_weight_counts_nothing_and_no_weight_gives_zeros():
    deltas, _ = clients(2)
    assert torch.equal(weighted_mean(deltas, [4, 0]), weighted_mean(deltas[:1], [4]))
    assert torch.equal(ExactSum.zeros(3).mean(), torch.zeros(3))


def test_a_sum_that_could_overflow_is_refused_and_left_as_it_was():
    total = ExactSum.zeros(2)
    total.add(torch.ones(1, 2), [10])
    before = total.total.clone()
    for bad in (torch.tensor([LIMIT, 0.0]), torch.tensor([float("nan"), 0.0]), torch.tensor([float("inf"), 0.0])):
        with pytest.raises(OverflowError):
            total.add(torch.stack([torch.ones(2), bad]), [1, 1])
    assert torch.equal(total.total, before) and total.weight == 10
