"""Building a task: every image has one use, clients are judged on classes they train on, and notes say the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfed.data import datasets
from rayfed.data import task as task_module
from rayfed.data.pool import Source, pool_of_pixels
from rayfed.data.task import Task, build_task, check_disjoint
from rayfed.errors import DataError, OptionError


@dataclass(frozen=True)
class Data:
    """Stand-in for the data options."""

    name: str = "shapes"
    root: str | None = None
    shots: int | None = None
    test_shots: int | None = None
    val: float = 0.1
    val_shots: int | None = None
    proxy: int = 0
    proxy_from: str | None = None
    domains: tuple[str, ...] = ()
    bad: str = "stop"
    template: str = "a {}."
    download: bool = False


@dataclass(frozen=True)
class Partition:
    """Stand-in for the partition options."""

    name: str = "iid"
    alpha: float = 0.5
    min_train: int = 2
    file: str | None = None
    max_draws: int = 1000
    boost: float = 1.0


def build(data: Data | None = None, partition: Partition | None = None, **options: Any) -> Task:
    given = {"num_clients": 4, "seed": 0, "image_size": 8, "backbone": "ViT-B-32", "needs_proxy": False, **options}
    return build_task(data or Data("made"), partition or Partition(), **given)


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8), dtype=np.uint8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A data set "made" of 5 classes, 40 training and 10 test images each, that a test may alter before building."""
    parts: dict[str, Any] = {
        "classes": ("cat", "dog", "fox", "hen", "ox"),
        "train": pixels(200, 1),
        "train_labels": np.repeat(np.arange(5), 40),
        "test": pixels(50, 2),
        "test_labels": np.repeat(np.arange(5), 10),
    }

    def load(request: datasets.Request) -> Source:
        train = pool_of_pixels(parts["train"], parts["train_labels"], request.image_size)
        test = pool_of_pixels(parts["test"], parts["test_labels"], request.image_size)
        return Source(parts["classes"], train, test)

    monkeypatch.setattr(datasets, "_LOADERS", {**datasets._LOADERS, "made": load})
    return parts


def sizes(task: Task, part: str) -> list[int]:
    return [len(getattr(client, part)) for client in task.clients]


def assert_whole(task: Task) -> None:
    """Every training image is one client's, and no validation or test image is two clients'."""
    train = np.concatenate([client.train for client in task.clients])
    assert np.array_equal(np.sort(train), np.arange(len(task.train)))
    for part in ("val", "test"):
        listed = np.concatenate([getattr(client, part) for client in task.clients])
        assert len(np.unique(listed)) == len(listed)
        assert all(np.array_equal(getattr(c, part), np.sort(getattr(c, part))) for c in task.clients)
    hashes = np.concatenate([s.hashes for s in (task.train, task.val, task.test, task.proxy)])
    assert len(np.unique(hashes)) == len(hashes)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "disjoint"])
def test_every_image_has_one_use(made: dict[str, Any], name: str) -> None:
    task = build(Data("made", proxy=20), Partition(name), needs_proxy=True)
    assert_whole(task)
    assert len(task.proxy) == 20
    assert set(task.proxy.labels) == {-1}
    assert len(task.train) + len(task.val) == 180
    assert task.train.images.shape == (len(task.train), 3, 8, 8)


def test_a_tenth_of_every_class_is_for_validation(made: dict[str, Any]) -> None:
    task = build()
    assert np.bincount(task.val.labels).tolist() == [4] * 5
    assert np.bincount(build(Data("made", val=0.0)).train.labels).tolist() == [40] * 5


def test_shots_leave_validation_images_up_to_a_limit(made: dict[str, Any]) -> None:
    for data, train, val in (
        (Data("made", shots=4), 4, 10),
        (Data("made", shots=16), 16, 16),
        (Data("made", shots=38), 38, 2),
        (Data("made", shots=4, val_shots=3), 4, 3),
    ):
        task = build(data)
        assert np.bincount(task.train.labels).tolist() == [train] * 5
        assert np.bincount(task.val.labels).tolist() == [val] * 5


def test_too_few_images_for_the_shots_are_noted(made: dict[str, Any]) -> None:
    assert any("'cat' (40)" in note for note in build(Data("made", shots=50)).notes)


def test_test_images_do_not_depend_on_the_seed(made: dict[str, Any]) -> None:
    first, second = (build(Data("made", test_shots=3), seed=seed) for seed in (1, 2))
    assert np.bincount(first.test.labels).tolist() == [3] * 5
    assert np.array_equal(first.test.hashes, second.test.hashes)
    assert not np.array_equal(first.train.hashes, second.train.hashes)


def test_same_arguments_same_task(made: dict[str, Any]) -> None:
    first, second = (build(Data("made", proxy=5), Partition("dirichlet"), needs_proxy=True) for _ in range(2))
    for part in ("train", "val", "test", "proxy"):
        assert np.array_equal(getattr(first, part).images, getattr(second, part).images)
    for one, other in zip(first.clients, second.clients, strict=True):
        assert all(np.array_equal(getattr(one, part), getattr(other, part)) for part in ("train", "val", "test"))


@pytest.mark.parametrize("name", ["dirichlet", "disjoint"])
def test_clients_are_judged_on_classes_they_train_on(made: dict[str, Any], name: str) -> None:
    task = build(partition=Partition(name, alpha=0.2))
    for client in task.clients:
        known = set(task.train.labels[client.train])
        assert set(task.test.labels[client.test]) <= known
        assert set(task.val.labels[client.val]) <= known
    assert sum(sizes(task, "test")) == 50


def test_dir_boost_tests_every_client_on_all_images_of_its_classes(made: dict[str, Any]) -> None:
    task = build(partition=Partition("dir_boost", alpha=0.01))
    for client in task.clients:
        known = np.unique(task.train.labels[client.train])
        assert np.array_equal(client.test, np.flatnonzero(np.isin(task.test.labels, known)))
        assert np.array_equal(client.val, np.flatnonzero(np.isin(task.val.labels, known)))


def test_domains_are_respected_at_test_too() -> None:
    data = Data(shots=4, val_shots=4, test_shots=4, domains=("photo", "sketch"))
    task = build(data, Partition("domain"))
    for client in task.clients:
        assert len(set(task.train.domains[client.train])) == 1
        assert set(task.test.domains[client.test]) <= set(task.train.domains[client.train])
    assert_whole(task)


def test_proxy_of_shapes_is_drawn_anew() -> None:
    task = build(Data(shots=2, test_shots=2, proxy=30), needs_proxy=True)
    assert np.bincount(task.train.labels).tolist() == [2] * 96
    assert len(task.proxy) == 30
    assert_whole(task)


def test_proxy_from_another_data_set(made: dict[str, Any]) -> None:
    task = build(Data("made", proxy=30, proxy_from="digits"), needs_proxy=True)
    assert len(task.proxy) == 30
    assert len(task.train) + len(task.val) == 200
    with pytest.raises(DataError, match="has 0 that are not in the data set"):
        build(Data("made", proxy=30, proxy_from="made"), needs_proxy=True)


def test_proxy_from_a_folder_with_its_own_root(made: dict[str, Any], tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / "pool" / "any" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(1, 50 + number)[0]).save(path)
    data = Data("made", root="elsewhere", proxy=5, proxy_from=f"folder:{tmp_path / 'pool'}")
    assert len(build(data, needs_proxy=True).proxy) == 5


def test_no_proxy_is_made_unless_needed(made: dict[str, Any]) -> None:
    assert len(build(Data("made", proxy=20)).proxy) == 0
    with pytest.raises(DataError, match=r"data\.proxy is 0"):
        build(Data("made"), needs_proxy=True)
    with pytest.raises(DataError, match=r"data\.proxy=200"):
        build(Data("made", proxy=200), needs_proxy=True)


def test_planted_copies_are_dropped_from_training_with_a_note(made: dict[str, Any]) -> None:
    made["train"][3] = made["test"][0]
    made["train"][90] = made["test"][1]
    made["train"][100] = made["train"][7]
    task = build()
    assert len(task.train) + len(task.val) == 197
    assert "2 training images equal a test image and are left out." in task.notes
    assert "1 training images equal another training image and are left out." in task.notes
    assert_whole(task)


def test_pretraining_images_are_left_out(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = np.concatenate([build().train.hashes[:3], build().test.hashes[:2]])
    monkeypatch.setattr(task_module, "_pretraining_hashes", lambda: seen)
    task = build(backbone="tiny")
    assert len(task.test) == 48
    assert not np.isin(np.concatenate([task.train.hashes, task.val.hashes, task.test.hashes]), seen).any()
    assert sum("pretrain" in note for note in task.notes) == 2
    assert len(build().test) == 50


def test_shapes_are_new_to_the_tiny_backbone() -> None:
    task = build(Data(proxy=100), image_size=32, backbone="tiny", needs_proxy=True)
    assert (len(task.train), len(task.val), len(task.test)) == (1920, 960, 960)
    assert task.notes == ()


def test_planted_violations_are_refused(made: dict[str, Any]) -> None:
    task = build(Data("made", proxy=5), needs_proxy=True)
    none = np.empty(0, dtype=np.uint64)
    check_disjoint(task, none)
    planted = task.test.hashes.copy()
    planted[:3] = task.train.hashes[:3]
    with pytest.raises(DataError, match="3 images are both among the training images and among the test images"):
        check_disjoint(replace(task, test=replace(task.test, hashes=planted)), none)
    with pytest.raises(DataError, match="1 images are both among the proxy images and among the images the backbone"):
        check_disjoint(task, task.proxy.hashes[:1])


def test_a_test_image_that_slips_through_ends_the_run(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are left out beforehand; where that fails, the task as built is refused all the same."""
    made["train"][3] = made["test"][5]
    monkeypatch.setattr(task_module, "usable_images", lambda source, seen, notes: np.arange(len(source.train.labels)))
    with pytest.raises(DataError, match="1 images are both among the training images and among the test images"):
        build()


def test_impossible_partitions_end_before_pixels_are_touched(made: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="number of clients is 0"):
        build(Data("gone"), num_clients=0)
    with pytest.raises(DataError, match="200 clients with at least 2"):
        build(num_clients=200)


def test_template_is_checked_first() -> None:
    with pytest.raises(OptionError, match="exactly one"):
        build(Data("gone", template="a photo"))


def write(path: Path, clients: list[dict[str, list[int]]]) -> Partition:
    path.write_text(json.dumps({"clients": clients}), encoding="utf-8")
    return Partition("file", file=str(path))


def test_partition_file_with_an_empty_and_a_small_client(made: dict[str, Any], tmp_path: Path) -> None:
    parts = [[], [0, 41, 81], [*range(10, 30), *range(50, 70)]]
    task = build(partition=write(tmp_path / "p.json", [{"train": part} for part in parts]), num_clients=3)
    assert sizes(task, "train") == [0, 3, 40]
    assert sizes(task, "test")[0] == 0
    assert sum(sizes(task, "test")) == 30
    assert "1 of 3 clients have no training images: 0." in task.notes
    assert any(note.startswith("20 test images belong to no client") for note in task.notes)
    assert task.train.labels[task.clients[1].train].tolist() == [0, 1, 2]
    assert sum(sizes(task, "val")) > 0
    assert_whole(task)


def test_partition_file_says_how_many_clients(made: dict[str, Any], tmp_path: Path) -> None:
    partition = write(tmp_path / "p.json", [{"train": [0]}, {"train": [1, 2]}])
    assert sizes(build(partition=partition, num_clients=None), "train") == [1, 2]
    with pytest.raises(DataError, match="2 clients but 3 were asked for"):
        build(partition=partition, num_clients=3)
    with pytest.raises(DataError, match="number of clients"):
        build(num_clients=None)


def test_partition_file_may_list_everything(made: dict[str, Any], tmp_path: Path) -> None:
    clients = [
        {"train": [0, 1, 40], "val": [2], "test": [0, 10]},
        {"train": [80, 81], "val": [82], "test": [20]},
        {"train": [120], "val": [], "test": []},
    ]
    task = build(partition=write(tmp_path / "p.json", clients), num_clients=3)
    assert (sizes(task, "train"), sizes(task, "val"), sizes(task, "test")) == ([3, 2, 1], [1, 1, 0], [2, 1, 0])
    assert task.test.labels[task.clients[0].test].tolist() == [0, 1]
    assert any("clients have no test images: 2." in note for note in task.notes)
    whole = pool_of_pixels(made["train"], made["train_labels"], 8)
    assert set(task.train.hashes[task.clients[0].train]) == set(whole.hashes[[0, 1, 40]])


def test_listed_copies_are_left_out_of_a_partition_file(made: dict[str, Any], tmp_path: Path) -> None:
    made["train"][1] = made["test"][0]
    task = build(partition=write(tmp_path / "p.json", [{"train": [0, 1, 2]}]), num_clients=1)
    assert sizes(task, "train") == [2]
    assert "1 training images of the partition file are left out as copies." in task.notes


def test_wrong_partition_file_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training image 200, but the data set has 200"):
        build(partition=write(tmp_path / "p.json", [{"train": [200]}]), num_clients=1)


def test_proxy_is_cut_from_what_a_partition_file_leaves(made: dict[str, Any], tmp_path: Path) -> None:
    partition = write(tmp_path / "p.json", [{"train": list(range(0, 200, 2))}])
    task = build(Data("made", proxy=50), partition, num_clients=1, needs_proxy=True)
    assert len(task.proxy) == 50
    assert len(task.train) == 100
    assert_whole(task)


def test_classes_with_one_name_are_kept_by_number_and_noted(made: dict[str, Any]) -> None:
    made["classes"] = ("missile", "missile", "sunglasses", "new_york", "New York")
    task = build()
    assert task.classes == made["classes"]
    assert np.bincount(task.test.labels).tolist() == [10] * 5
    (note,) = [note for note in task.notes if "read alike" in note]
    assert "0 'missile', 1 'missile'; 3 'new_york', 4 'New York'" in note


def test_classes_without_images_are_noted(made: dict[str, Any]) -> None:
    made["classes"] = (*made["classes"], "unicorn")
    notes = build().notes
    assert "1 of 6 classes have no training image: 5 'unicorn'." in notes
    assert "1 of 6 classes have no test image: 5 'unicorn'." in notes


def test_folder_end_to_end(tmp_path: Path) -> None:
    for number, name in enumerate(("9", "10", "狗")):
        for index in range(12):
            path = tmp_path / name / f"{index}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels(1, 1000 * number + index)[0]).save(path)
    task = build(Data("folder", root=str(tmp_path)), num_clients=2)
    assert task.classes == ("9", "10", "狗")
    assert len(task.test) == 6
    assert_whole(task)


def test_an_odd_number_of_classes_has_one_more_base_class(made):
    task = build(split="base_novel")
    assert task.classes == ("cat", "dog", "fox") and task.novel is not None and task.novel.classes == ("hen", "ox")
    assert sorted(set(task.novel.test.labels.tolist())) == [0, 1] and len(task.novel.test) == 20
    assert sorted(set(task.train.labels.tolist())) == [0, 1, 2]


def test_a_partition_file_that_lists_novel_images_is_refused(made, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"clients": [{"train": [0, 1]}, {"train": [40, 130]}]}))
    with pytest.raises(DataError, match="lists train image 130 of class 3 for client 1"):
        build(partition=Partition("file", file=str(path)), num_clients=None, split="base_novel")


def test_a_training_image_among_the_novel_test_images_is_noticed(made):
    made["test"][35] = made["train"][3]
    made["train"][3] = pixels(1, 9)[0]
    task = build(split="base_novel")
    leaked = replace(task, train=replace(task.train, hashes=task.novel.test.hashes[: len(task.train)]))
    with pytest.raises(DataError, match="the test images of novel classes"):
        check_disjoint(leaked, np.empty(0, np.uint64))
