"""Long-tailed data, accuracy by class group, and logit adjustment."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rayfed.data import build_task_from_options
from rayfed.data.long_tail import LongTail, class_counts, cut, rank_classes
from rayfed.engine.bench import Bench, task_view
from rayfed.errors import DataError, OptionError
from rayfed.metrics.balance import NAMES, balance
from rayfed.metrics.groups import class_groups, many_medium_few
from tests.golden import manifest


def test_counts_equal_the_recorded_ones():
    cases = manifest("fedpurel", "d_longtail_counts")["cases"]
    assert len(cases) == 18
    for case in cases:
        n_max = case.get("n_max", case.get("n_total", 0) / case["n_classes"])
        assert class_counts(n_max, case["n_classes"], case["imb_factor"]) == case["counts"]


def test_counts_at_the_edges():
    assert class_counts(500, 1, 0.01) == [500]
    assert class_counts(60, 47, 0.01)[-6:] == [0] * 6
    assert min(class_counts(60, 47, 0.01, at_least=1)) == 1
    for wrong in ((-1, 3, 0.1), (5, 0, 0.1), (5, 3, 0.0), (5, 3, 1.5)):
        with pytest.raises(ValueError, match="must"):
            class_counts(*wrong)


def test_cut_keeps_a_prefix_of_each_class_in_the_order_asked_for():
    labels = np.repeat(np.arange(10), 20)
    images = np.arange(200)
    tail = LongTail(0.1, tuple(str(c) for c in reversed(range(10))))
    kept = cut(labels, images, 10, tail, np.random.default_rng(0))
    assert np.bincount(labels[kept])[::-1].tolist() == class_counts(20, 10, 0.1)
    assert kept.tolist() == sorted(set(kept.tolist()))
    again = cut(labels, images, 10, tail, np.random.default_rng(0))
    assert kept.tolist() == again.tolist()
    shuffled = rank_classes(("shuffled",), 10, np.random.default_rng(1))
    assert sorted(shuffled) == list(range(10)) and shuffled != list(range(10))
    with pytest.raises(DataError, match="long_tail_order"):
        rank_classes(("1", "2"), 10, np.random.default_rng(1))


@pytest.mark.parametrize("word", ["partition.long_tail=10", "partition.long_tail=0.1"])
def test_a_long_tailed_task(small, word):
    task = build_task_from_options(small("method=fedlora", "data.shots=10", word))
    assert task.train_counts() == class_counts(10, 96, 0.1)
    assert task_view(task).groups == class_groups(task.train_counts())
    full = build_task_from_options(small("method=fedlora", "data.shots=10"))
    assert np.array_equal(task.test.hashes, full.test.hashes)
    assert set(task.train.hashes.tolist()) < set(full.train.hashes.tolist())


def test_a_partition_file_excludes_a_tail(small, tmp_path):
    file = tmp_path / "p.json"
    file.write_text('{"clients": [{"train": [0, 1]}]}')
    with pytest.raises(OptionError, match="long_tail is not used by partition=file"):
        small("method=fedlora", "partition=file", f"partition.file={file}", "clients.n=1", "partition.long_tail=10")


def test_groups_count_classes_never_right():
    counts, accuracy = [500, 101, 100, 21, 20, 1], [1.0, 0.5, 0.0, 0.4, 0.0, 0.3]
    assert many_medium_few(counts, accuracy) == pytest.approx((0.75, 0.2, 0.15))
    many, medium, few = many_medium_few([500, 400], [0.5, None])
    assert many == 0.5 and math.isnan(medium) and math.isnan(few)
    assert many_medium_few([10, 5, 1], [0.9, 0.5, 0.1], many=6, few=2) == pytest.approx((0.9, 0.5, 0.1))
    with pytest.raises(ValueError, match="zip"):
        many_medium_few([1, 2], [0.5])


def test_groups_by_thirds_where_a_fixed_one_is_empty():
    assert class_groups([500, 50, 5]) == ("many", "medium", "few")
    assert class_groups([6, 5, 4, 3, 2, 1]) == ("many", "many", "medium", "medium", "few", "few")
    assert class_groups([1, 2, 3, 4, 5, 6]) == ("few", "few", "medium", "medium", "many", "many")
    assert class_groups([9, 9, 9]) == ("many",) * 3


def test_balance():
    found = balance(("many", "medium", "few"), [0.8, 0.4, 0.2])
    assert found == pytest.approx(
        {
            "many": 0.8,
            "medium": 0.4,
            "few": 0.2,
            "worst_group": 0.2,
            "harmonic_mean": 3 / (1 / 0.8 + 1 / 0.4 + 1 / 0.2),
            "class_spread": float(np.std([0.8, 0.4, 0.2])),
        }
    )
    assert balance(("many", "few"), [0.5, 0.0])["harmonic_mean"] == 0.0
    assert balance(("many", "few"), [None, None]) == dict.fromkeys(NAMES)


def test_logit_adjustment_is_post_hoc(small):
    words = ("data.shots=10", "partition.long_tail=10")
    task = build_task_from_options(small("method=fedlora", *words))
    logits = []
    for tau in (0.0, 1.5):
        options = small("method=fedlora", *words, f"method.logit_adjustment={tau}")
        bench = Bench(options, task_view(task), gpu_share=0)
        batch = next(iter(bench.images(task.test).in_order()))
        with torch.no_grad():
            logits.append(bench.method.predict(bench.model, batch, "global", bench.class_features()))
    counts = torch.tensor(task.train_counts(), dtype=torch.float32)
    torch.testing.assert_close(logits[1], logits[0] - 1.5 * torch.log(counts / counts.sum()))
