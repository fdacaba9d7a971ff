"""Partitions use every image once, are reproducible, and refuse what cannot be made."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfed.data.long_tail import class_counts
from rayfed.data.partition import Request, check_file, count_table, dirichlet_boost, divide, follow, read_file
from rayfed.errors import DataError
from tests.golden import manifest

RULES = ["iid", "dirichlet", "dir_boost", "disjoint", "domain", "domain_dirichlet"]


def request(classes: int = 10, per_class: int = 100, clients: int = 10, **options: Any) -> Request:
    labels = np.repeat(np.arange(classes), per_class)
    return Request(
        **{"labels": labels, "domains": np.arange(len(labels)) % 4, "num_clients": clients, "seed": 1, **options}
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("clients", [1, 3, 10])
def test_every_image_is_used_exactly_once(name: str, clients: int) -> None:
    parts = divide(name, request(clients=clients))
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert all(np.array_equal(part, np.sort(part)) and part.dtype == np.int64 for part in parts)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("dirichlet", "fmnist_LT noniid-labeldir n=20 beta=1 seed=1"),
        ("dirichlet", "cifar100_LT noniid-labeldir n=20 beta=1 seed=1"),
        ("iid", "fmnist_LT homo n=20"),
    ],
)
def test_a_long_tail_is_divided_as_the_authors_recorded(name: str, recorded: str) -> None:
    """Invariants: totals, everything assigned once. Their third rule puts test images into training: it is not made."""
    record = manifest("fedpurel", "e_partition_invariants")["runs"][recorded]
    largest, classes = (6000, 10) if recorded.startswith("fmnist") else (500, 100)
    labels = np.repeat(np.arange(classes), class_counts(largest, classes, 0.01))
    assert len(labels) == record["train_total"] == record["train_assigned"] and record["train_disjoint"]
    parts = divide(name, Request(labels, np.zeros_like(labels), record["n_clients"], 1, alpha=1.0))
    assert len(parts) == record["n_clients"]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    if name == "iid":
        assert [min(map(len, parts)), max(map(len, parts))] == record["train_size_min_max"]


@pytest.mark.parametrize("name", RULES)
def test_same_seed_same_split_and_another_seed_another(name: str) -> None:
    first, again, other = (divide(name, request(seed=seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_parts_are_even() -> None:
    sizes = [len(part) for part in divide("iid", request(clients=7))]
    assert max(sizes) - min(sizes) <= 1


def boosted(seed: int = 3, **options: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(50), 20))
    chosen = {"alpha": 0.01, "boost": 1.0, "shots": 16, **options}
    return labels, dirichlet_boost(labels, 10, seed=seed, **chosen)


def test_dir_boost_gives_each_class_its_shots_once_and_mostly_to_its_own_client() -> None:
    labels, parts = boosted()
    every = np.concatenate(parts)
    assert len(np.unique(every)) == len(every)
    assert np.bincount(labels[every]).tolist() == [16] * 50
    tables = np.stack([count_table(*boosted(seed), 50) for seed in range(20)])
    own = tables[:, np.arange(50), np.arange(50) % 10] / 16
    # E of the own share is (1 + 0.01) / (1 + 10 * 0.01) = 0.918; all 16 images in about three quarters of the classes.
    assert abs(own.mean() - 0.918) < 0.02
    assert abs((own == 1).mean() - 0.75) < 0.05
    assert abs((tables > 0).sum(axis=2).mean() - 1.28) < 0.06


def test_dir_boost_leaves_no_client_empty_and_follows_the_seed() -> None:
    labels = np.repeat([0, 1], 30)
    parts = dirichlet_boost(labels, 7, alpha=0.001, boost=50.0, shots=16, seed=1)
    assert sorted(len(part) for part in parts) == [1, 1, 1, 1, 1, 13, 14]
    again, other = (boosted(seed)[1] for seed in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(boosted(3)[1], again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(again, other, strict=True))
    for options in ({"alpha": 0.0}, {"boost": -1.0}, {"shots": 0}):
        with pytest.raises(DataError, match="dir_boost needs alpha > 0, boost >= 0 and shots >= 1"):
            boosted(**options)
    with pytest.raises(DataError, match="there are 2"):
        dirichlet_boost(labels, 3, alpha=0.1, boost=1.0, shots=1, seed=0)


def test_dir_boost_fills_clients_up_to_the_minimum() -> None:
    parts = divide("dir_boost", request(classes=2, clients=7, alpha=0.001, boost=50.0, min_train=5))
    assert min(len(part) for part in parts) == 5
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(200))


def test_disjoint_clients_share_no_class() -> None:
    table = count_table(request().labels, divide("disjoint", request(clients=4)), 10)
    assert ((table > 0).sum(axis=1) == 1).all()
    assert sorted((table > 0).sum(axis=0)) == [2, 2, 3, 3]


def test_disjoint_needs_a_class_for_each_client() -> None:
    with pytest.raises(DataError, match="at most 10 clients"):
        divide("disjoint", request(clients=11))


@pytest.mark.parametrize("name", ["domain", "domain_dirichlet"])
def test_a_client_sees_one_domain(name: str) -> None:
    given = request(clients=6)
    owned = [np.unique(given.domains[part]).tolist() for part in divide(name, given)]
    assert owned == [[0], [0], [1], [1], [2], [3]]


def test_domains_are_shared_out_whole_if_clients_are_few() -> None:
    given = request(clients=2)
    assert [np.unique(given.domains[part]).tolist() for part in divide("domain", given)] == [[0, 1], [2, 3]]


def test_one_domain_is_refused_for_domain_partitions() -> None:
    with pytest.raises(DataError, match=r"data\.domains"):
        divide("domain", request(domains=np.zeros(1000, dtype=np.int64)))


def test_smaller_alpha_means_fewer_classes_at_a_client() -> None:
    def classes_per_client(alpha: float) -> float:
        given = request(alpha=alpha, min_train=1)
        return float((count_table(given.labels, divide("dirichlet", given), 10) > 0).sum(axis=0).mean())

    assert classes_per_client(0.1) < classes_per_client(1.0) < classes_per_client(100.0) == 10


@pytest.mark.parametrize("alpha", [1e-3, 1e5])
def test_extreme_alpha_still_uses_every_image(alpha: float) -> None:
    parts = divide("dirichlet", request(clients=3, alpha=alpha, min_train=0))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_every_client_reaches_the_minimum() -> None:
    parts = divide("dirichlet", request(alpha=0.3, min_train=20))
    assert min(len(part) for part in parts) >= 20


def test_unreachable_minimum_ends_soon_and_says_what_to_change() -> None:
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        divide("dirichlet", request(clients=50, alpha=0.05, min_train=10))
    assert time.monotonic() - start < 5
    for words in ("n=50", "alpha=0.05", "min_train=10", "never got more than", "raise partition.alpha"):
        assert words in str(caught.value)


def test_redrawing_is_bounded_for_many_clients_too() -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match="never got more"):
        divide("dirichlet", request(classes=100, per_class=200, clients=5000, alpha=0.05, max_draws=10**9))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", RULES)
def test_impossible_requests_are_refused_at_once(name: str) -> None:
    with pytest.raises(DataError, match="200 clients with at least 2 training images each need 400, but there are 100"):
        divide(name, request(per_class=10, clients=200))
    with pytest.raises(DataError, match="number of clients is 0"):
        divide(name, request(clients=0))


def test_blocks_below_the_minimum_are_refused() -> None:
    labels = np.array([0] * 50 + [1])
    with pytest.raises(DataError, match="leaves one with 1 training images"):
        divide("disjoint", request(labels=labels, domains=labels, clients=2))


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(DataError, match="choose from iid"):
        divide("diriclet", request())


def test_test_images_follow_the_train_counts() -> None:
    table = np.array([[30, 10, 0], [0, 0, 5], [0, 0, 0]])
    labels = np.array([0] * 8 + [1] * 3 + [2] * 2)
    parts, unclaimed = follow(labels, table, np.random.default_rng(0))
    assert count_table(labels, parts, 3).tolist() == [[6, 2, 0], [0, 0, 3], [0, 0, 0]]
    assert unclaimed.tolist() == [11, 12]


def test_largest_remainder_gives_whole_images_only_to_clients_that_train_on_the_class() -> None:
    generator = np.random.default_rng(3)
    for _ in range(200):
        weights = generator.integers(0, 6, size=9)
        weights[generator.integers(9)] += 1
        labels = np.zeros(int(generator.integers(0, 30)), dtype=np.int64)
        parts, unclaimed = follow(labels, weights[None, :], generator)
        counts = np.array([len(part) for part in parts])
        assert counts.sum() == len(labels)
        assert len(unclaimed) == 0
        assert (counts[weights == 0] == 0).all()
        assert (np.abs(counts - len(labels) * weights / weights.sum()) < 1).all()


def write(path: Path, clients: Any) -> str:
    path.write_text(json.dumps({"clients": clients}), encoding="utf-8")
    return str(path)


def test_partition_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", [{"train": []}, {"train": [5, 1]}])
    parts = read_file(path, 2)
    check_file(parts, path, 6, 0)
    assert [part.train.tolist() for part in parts] == [[], [1, 5]]
    assert parts[0].val is None


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([{"train": [0, 9]}, {"train": []}], "training image 9, but the data set has 6"),
        ([{"train": [-1]}, {"train": []}], "training image -1"),
        ([{"train": [0, 1]}, {"train": [1]}], "Training image 1 is listed twice"),
        ([{"train": [0], "val": [0]}, {"train": [], "val": []}], "image 0 is listed twice"),
        ([{"train": [0], "test": [3]}, {"train": [], "test": []}], "test image 3, but the data set has 3"),
        ([{"train": [0], "val": [1]}, {"train": []}], "not for client 1"),
        ([{"train": [0]}], "divides data over 1 clients but 2 were asked for"),
        ([{"train": [0.5]}, {"train": []}], "no list of whole numbers"),
        ([{"train": [True]}, {"train": []}], "no list of whole numbers"),
        ([{"tran": [0]}, {"train": []}], "unknown part 'tran'"),
        ([{"val": [0]}, {"train": []}], "no 'train'"),
        ("abc", "lacks"),
    ],
)
def test_wrong_partition_files_are_refused(tmp_path: Path, clients: Any, words: str) -> None:
    path = write(tmp_path / "p.json", clients)
    with pytest.raises(DataError, match=words):
        check_file(read_file(path, 2), path, 6, 3)


def test_missing_and_damaged_partition_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{", encoding="utf-8")
    for path, words in ((None, r"partition\.file"), ("gone.json", "cannot be read"), ("p.json", "not UTF-8 JSON")):
        with pytest.raises(DataError, match=words):
            read_file(path and str(tmp_path / path), 2)
