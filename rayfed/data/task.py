"""The task: images, classes and clients of one experiment, built once and the same for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfed.backbones.text import class_texts
from rayfed.data import datasets, partition
from rayfed.data.long_tail import LongTail
from rayfed.data.pool import ImageSet, Indices, Pool, Source
from rayfed.data.select import (
    Choice,
    Hashes,
    Plan,
    base_only,
    choose,
    make_plan,
    novel_test,
    request_of,
    shorten,
    take_proxy,
    usable_images,
)
from rayfed.data.settings import DataSettings, PartitionSettings
from rayfed.errors import DataError
from rayfed.rng import numpy_generator

Split = Literal["all", "base_novel"]

__all__ = ["ClientData", "ImageSet", "Novel", "Task", "build_task", "check_disjoint"]


@dataclass(frozen=True)
class ClientData:
    """One client's images: sorted int64 indices into the task's ``train``, ``val`` and ``test``."""

    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True)
class Novel:
    """Classes that nobody trains on, numbered from 0 among themselves: names and test images, for evaluation alone."""

    classes: tuple[str, ...]
    test: ImageSet


@dataclass(frozen=True)
class Task:
    """Everything a run knows about its data.

    Classes are known by number; ``classes[c]`` is the name of class c, and names may repeat. ``proxy`` images have
    label -1. ``notes`` are sentences the user should see. With ``novel`` classes held back, everything else is of the
    base classes alone.
    """

    name: str
    classes: tuple[str, ...]
    template: str
    train: ImageSet
    val: ImageSet
    test: ImageSet
    proxy: ImageSet
    clients: tuple[ClientData, ...]
    notes: tuple[str, ...]
    novel: Novel | None = None

    def train_counts(self) -> list[int]:
        """Training images of each class over all clients [C]."""
        held = np.concatenate([np.zeros(0, np.int64), *(self.train.labels[client.train] for client in self.clients)])
        counts: list[int] = np.bincount(held, minlength=len(self.classes)).tolist()
        return counts

    def held_classes(self) -> NDArray[np.bool_]:
        """Which classes each client has training images of [K, C]."""
        held = np.zeros((len(self.clients), len(self.classes)), dtype=np.bool_)
        for row, client in zip(held, self.clients, strict=True):
            row[self.train.labels[client.train]] = True
        return held

    def tested_pairs(self) -> tuple[Indices, Indices]:
        """Test images and the clients that test on them, a pair for each [M]; in order of images, then of clients.

        An image may belong to several clients, or to none.
        """
        image = np.concatenate([np.zeros(0, np.int64), *(client.test for client in self.clients)])
        client = np.repeat(np.arange(len(self.clients)), [len(client.test) for client in self.clients])
        order = np.lexsort((client, image))
        return image[order], client[order]


def build_task(
    options: DataSettings,
    partition_options: PartitionSettings,
    *,
    num_clients: int | None,
    seed: int,
    image_size: int,
    backbone: str,
    needs_proxy: bool,
    tail: LongTail | None = None,
    split: Split = "all",
) -> Task:
    """Load the data, set proxy and validation images aside, and divide the rest over ``num_clients`` clients.

    With ``num_clients`` None a partition file says how many. ``tail`` makes the training images long-tailed;
    ``split="base_novel"`` holds the second half of the classes back. Images are ``image_size`` pixels square. The same
    arguments give the same task; ``seed`` decides which images are chosen and who gets them, never which are test
    images. Raises ``DataError`` (``OptionError`` for the template) if data are missing or damaged, the partition cannot
    be made, or an image would be used twice.
    """
    request = request_of(options, image_size, backbone)
    plan = make_plan(
        options,
        partition_options,
        request,
        num_clients=num_clients,
        seed=seed,
        needs_proxy=needs_proxy,
        tail=tail,
        splits=split == "base_novel",
    )
    source = datasets.load_images(plan.request)
    if plan.parts is not None:
        partition.check_file(plan.parts, str(partition_options.file), len(source.train), len(source.test))
    seen = _pretraining_hashes() if backbone == "tiny" else np.empty(0, dtype=np.uint64)
    notes = [*source.notes, *_alike_notes(source.classes, options.template)]
    usable, names = usable_images(source, seen, notes), source.classes
    if plan.splits:
        source, usable = base_only(plan, source, usable)
    proxy, usable = take_proxy(plan, source, usable, seen)
    choice = choose(plan, source, usable, seen, notes)
    task = replace(_assemble(plan, source, choice, proxy, notes), novel=_novel(plan, source, names, seen))
    check_disjoint(task, seen)
    return task


def check_disjoint(task: Task, seen: Hashes) -> None:
    """Raise ``DataError`` if an image is in two of train, val, test and proxy, or in ``seen`` (pretraining) as well."""
    sets = {
        "the training images": task.train.hashes,
        "the validation images": task.val.hashes,
        "the test images": task.test.hashes,
        "the proxy images": task.proxy.hashes,
        "the images the backbone was pretrained on": seen,
    }
    pairs = list(combinations(sets.items(), 2))
    if task.novel is not None:  # against all but the other test images: an image may be tested twice
        novel = "the test images of novel classes", task.novel.test.hashes
        pairs += [(novel, other) for other in sets.items() if other[0] != "the test images"]
    for (name, hashes), (other, others) in pairs:
        common = len(np.intersect1d(hashes, others))
        if common:
            raise DataError(
                f"{common} images are both among {name} and among {other}; remove the copies from the data set, "
                "since figures measured on images already seen are worthless."
            )


def _novel(plan: Plan, source: Source, names: Sequence[str], seen: Hashes) -> Novel | None:
    """The classes ``names`` beyond those of ``source``, numbered from 0, with their test images."""
    if not plan.splits:
        return None
    count = len(source.classes)
    images = source.test.take(novel_test(plan, source, seen))
    if not len(images):
        raise DataError(
            f"task.split=base_novel needs test images of novel classes, but classes {count} to {len(names) - 1} of "
            f"{len(names)} have none: use task.split=all."
        )
    return Novel(tuple(names[count:]), replace(images, labels=images.labels - count))


def _pretraining_hashes() -> Hashes:
    from rayfed.backbones.tiny import pretraining_hashes

    return pretraining_hashes()


def _alike_notes(classes: Sequence[str], template: str) -> list[str]:
    _, groups = class_texts(classes, template)
    listed = [", ".join(f"{index} {classes[index]!r}" for index in group) for group in groups]
    return [f"Class names that read alike, so that text cannot tell them apart: {'; '.join(listed)}."] if listed else []


def _assemble(plan: Plan, source: Source, choice: Choice, proxy: ImageSet, notes: list[str]) -> Task:
    clients = _clients(plan, source, choice, notes)  # before any pixel is touched: an impossible partition ends here
    train, val = source.train.take(choice.train), source.train.take(choice.val)
    test = source.test.take(choice.test)
    notes.extend(_absence_notes(source.classes, train, val, test, clients))
    return Task(
        name=plan.options.name,
        classes=source.classes,
        template=plan.options.template,
        train=train,
        val=val,
        test=test,
        proxy=proxy,
        clients=clients,
        notes=tuple(notes),
    )


def _clients(plan: Plan, source: Source, choice: Choice, notes: list[str]) -> tuple[ClientData, ...]:
    parts = _train_parts(plan, source, choice)
    by_domain = plan.division.name.startswith("domain")
    num_cells = len(source.classes) * (len(source.train.domain_names) if by_domain else 1)
    table = partition.count_table(_cells(source.train, choice.train, by_domain), parts, num_cells)
    val, _ = _follow(plan, "val", _cells(source.train, choice.val, by_domain), table, choice.val)
    test, unclaimed = _follow(plan, "test", _cells(source.test, choice.test, by_domain), table, choice.test)
    if unclaimed:
        where = "class in their domain" if by_domain else "class"
        notes.append(f"{unclaimed} test images belong to no client, because none trains on their {where}.")
    return tuple(ClientData(*own) for own in zip(parts, val, test, strict=True))


def _train_parts(plan: Plan, source: Source, choice: Choice) -> list[Indices]:
    if plan.parts is not None:
        return [_places(part.train, choice.train) for part in plan.parts]
    request = partition.Request(
        labels=source.train.labels[choice.train],
        domains=source.train.domains[choice.train],
        num_clients=plan.num_clients,
        seed=plan.seed,
        alpha=plan.division.alpha,
        min_train=plan.division.min_train,
        max_draws=plan.division.max_draws,
        boost=plan.division.boost,
    )
    return partition.divide(plan.division.name, request)


def _follow(
    plan: Plan, name: str, cells: Indices, table: NDArray[np.int64], chosen: Indices
) -> tuple[list[Indices], int]:
    """Each client's validation or test images, as its partition file or else its training images say."""
    listed = [getattr(part, name) for part in plan.parts or ()]
    if listed and listed[0] is not None:
        return [_places(indices, chosen) for indices in listed], 0
    if plan.division.name == "dir_boost":
        # A class lies almost whole at one client: a share of its few test images would often be none.
        parts, unclaimed = partition.give_to_holders(cells, table)
        return parts, len(unclaimed)
    parts, unclaimed = partition.follow(cells, table, numpy_generator(plan.seed, "partition", name))
    return parts, len(unclaimed)


def _places(listed: Indices, chosen: Indices) -> Indices:
    """Places in the sorted ``chosen`` of those ``listed`` that are there."""
    return np.searchsorted(chosen, np.intersect1d(listed, chosen))


def _cells(pool: Pool, indices: Indices, by_domain: bool) -> Indices:
    """What decides to which clients an image may go: its class, and its domain where clients are divided by it."""
    labels = pool.labels[indices]
    return labels * len(pool.domain_names) + pool.domains[indices] if by_domain else labels


def _absence_notes(
    classes: Sequence[str], train: ImageSet, val: ImageSet, test: ImageSet, clients: Sequence[ClientData]
) -> list[str]:
    notes = [f"There are no {name} images." for name, part in (("validation", val), ("test", test)) if not len(part)]
    for name, part in (("training", train), ("test", test)):
        missing = np.flatnonzero(np.bincount(part.labels, minlength=len(classes)) == 0)
        if len(missing) and len(part):
            listed = shorten([f"{index} {classes[int(index)]!r}" for index in missing])
            notes.append(f"{len(missing)} of {len(classes)} classes have no {name} image: {listed}.")
    for name, sizes in (
        ("training", [len(client.train) for client in clients]),
        ("test", [len(client.test) for client in clients]),
    ):
        without = [str(number) for number, size in enumerate(sizes) if size == 0]
        if without:
            notes.append(f"{len(without)} of {len(clients)} clients have no {name} images: {shorten(without)}.")
    return notes
