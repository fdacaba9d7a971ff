"""Which images of a data set are used, and for what: training, validation, test or proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayfed.backbones.text import class_texts
from rayfed.data import datasets, partition
from rayfed.data.long_tail import LongTail, cut
from rayfed.data.pool import ImageSet, Indices, Pool, Source
from rayfed.data.settings import DataSettings, PartitionSettings
from rayfed.errors import DataError
from rayfed.rng import numpy_generator

Hashes = NDArray[np.uint64]

_LEAST_VAL = 10
_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """What the choice of images depends on, apart from the images."""

    options: DataSettings
    division: PartitionSettings
    request: datasets.Request
    num_clients: int
    seed: int
    needs_proxy: bool
    parts: tuple[partition.FilePart, ...] | None
    tail: LongTail | None = None
    splits: bool = False
    """Whether only base classes are trained on."""

    def generator(self, *labels: str | int) -> np.random.Generator:
        """Random stream for choosing images for one purpose."""
        return numpy_generator(self.seed, "data", *labels)


@dataclass(frozen=True)
class Choice:
    """Sorted indices into the official training images (train, val) and test images (test)."""

    train: Indices
    val: Indices
    test: Indices


def request_of(options: DataSettings, image_size: int, backbone: str) -> datasets.Request:
    """What of the options bears on reading the data set."""
    return datasets.Request(
        name=options.name,
        root=options.root,
        image_size=image_size,
        backbone=backbone,
        domains=options.domains,
        shots=options.shots,
        val_shots=options.val_shots,
        test_shots=options.test_shots,
        bad=options.bad,
        download=options.download,
    )


def make_plan(
    options: DataSettings,
    division: PartitionSettings,
    request: datasets.Request,
    *,
    num_clients: int | None,
    seed: int,
    needs_proxy: bool,
    tail: LongTail | None = None,
    splits: bool = False,
) -> Plan:
    """Check what needs no data, and read the partition file. ``splits``: train on base classes only.

    Raises ``DataError`` for no clients, no proxy images where they are needed, and a wrong partition file;
    ``OptionError`` for a wrong template.
    """
    class_texts(["name"], options.template)
    if num_clients is not None:
        partition.check_possible(0, num_clients, 0)
    if needs_proxy and options.proxy < 1:
        raise DataError(f"The method needs proxy images but data.proxy is {options.proxy}; set it to 1 or more.")
    parts = tuple(partition.read_file(division.file, num_clients)) if division.name == "file" else None
    count = len(parts) if parts is not None else num_clients
    if count is None:
        raise DataError(f"Partition {division.name!r} needs to know the number of clients; say how many.")
    if parts is not None and tail is not None:
        raise DataError("Partition 'file' says itself how many images there are of each class; leave the tail out.")
    return Plan(options, division, request, count, seed, needs_proxy, parts, tail, splits)


def usable_images(source: Source, seen: Hashes, notes: list[str]) -> Indices:
    """Training images that are no copy of a test image, of a pretraining image, or of an earlier training image."""
    hashes = source.train.hashes
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    tested, known = np.isin(hashes, source.test.hashes), np.isin(hashes, seen)
    for count, what in (
        (int(tested.sum()), "equal a test image"),
        (int((known & ~tested).sum()), "were used to pretrain the backbone"),
        (int((~first & ~tested & ~known).sum()), "equal another training image"),
    ):
        if count:
            notes.append(f"{count} training images {what} and are left out.")
    return np.flatnonzero(first & ~tested & ~known)


def take_proxy(plan: Plan, source: Source, usable: Indices, seen: Hashes) -> tuple[ImageSet, Indices]:
    """The proxy images, and the usable training images that remain."""
    count = plan.options.proxy if plan.needs_proxy else 0
    if count == 0:
        return source.train.take(np.empty(0, dtype=np.int64), labelled=False), usable
    if plan.options.proxy_from is not None:
        return _foreign_proxy(plan, source, seen, count), usable
    if plan.options.name == "shapes":
        return _drawn_proxy(plan, count, len(source.classes)), usable
    free = usable
    if plan.parts is not None:
        listed = [indices for part in plan.parts for indices in (part.train, part.val) if indices is not None]
        free = np.setdiff1d(usable, np.concatenate(listed))
    if count > len(free) or (plan.parts is None and count == len(free)):
        raise DataError(
            f"data.proxy={count} images cannot be cut from the {len(free)} training images to spare; "
            "lower data.proxy, or set data.proxy_from to another data set."
        )
    chosen = np.sort(plan.generator("proxy").permutation(free)[:count])
    return source.train.take(chosen, labelled=False), np.setdiff1d(usable, chosen)


def _drawn_proxy(plan: Plan, count: int, num_classes: int) -> ImageSet:
    indices = np.arange(count)
    pool = datasets.shapes_pool(plan.request, "proxy", indices % num_classes, indices)
    return pool.take(indices, labelled=False)


def _foreign_proxy(plan: Plan, source: Source, seen: Hashes, count: int) -> ImageSet:
    """Proxy images from the training images of another data set, given as NAME or NAME:ROOT."""
    name, _, root = str(plan.options.proxy_from).partition(":")
    request = replace(plan.request, name=name, root=root or None, domains=(), shots=None, test_shots=None)
    pool = datasets.load_images(request).train
    taken = np.concatenate([source.train.hashes, source.test.hashes, seen])
    first = np.sort(np.unique(pool.hashes, return_index=True)[1])
    free = first[~np.isin(pool.hashes[first], taken)]
    if count > len(free):
        raise DataError(
            f"data.proxy={count} images were asked for but {name!r} has {len(free)} that are not in the data set; "
            "lower data.proxy or name another data.proxy_from."
        )
    return pool.take(np.sort(plan.generator("proxy").permutation(free)[:count]), labelled=False)


def choose(plan: Plan, source: Source, usable: Indices, seen: Hashes, notes: list[str]) -> Choice:
    """Training, validation and test images, as many of each class as the options or the partition file say."""
    known = np.isin(source.test.hashes, seen)
    test = np.flatnonzero(~known & (source.test.labels < len(source.classes)))
    if known.any():
        notes.append(f"{int(known.sum())} test images were used to pretrain the backbone and are left out.")
    if plan.parts is not None:
        return _choose_by_file(plan, plan.parts, source, usable, test, notes)
    if plan.options.test_shots is not None:
        # Not by the run's seed: runs with different seeds are judged on the same images.
        test, _ = _first_of_each(source.test, test, plan.options.test_shots, 0, numpy_generator(0, "data", "test"))
    generator = plan.generator("train")
    shots = plan.options.shots
    if shots is None and plan.options.name == "shapes":
        shots = datasets.SHAPES_TRAIN
    if shots is None:
        train, val = _share_of_each(source.train, usable, plan.options.val, generator)
    else:
        train, val = _first_of_each(source.train, usable, shots, _val_limit(plan, shots), generator)
        _note_short_classes(source, train, shots, notes)
    if plan.tail is not None:
        train = cut(source.train.labels, train, len(source.classes), plan.tail, plan.generator("long_tail"))
    return Choice(train, val, test)


def base_only(plan: Plan, source: Source, usable: Indices) -> tuple[Source, Indices]:
    """``source`` with its base classes alone (the first half of the ids, CoOp's rule), and the usable images of them.

    Images keep their numbers, so that a partition file means the same. Raises ``DataError`` if it lists a novel image.
    """
    count = -(-len(source.classes) // 2)
    for number, part in enumerate(plan.parts or ()):
        for name, pool in (("train", source.train), ("val", source.train), ("test", source.test)):
            listed = getattr(part, name)
            foreign = [] if listed is None else listed[pool.labels[listed] >= count]
            if len(foreign):
                raise DataError(
                    f"The partition file lists {name} image {foreign[0]} of class {pool.labels[foreign[0]]} for client "
                    f"{number}, but task.split=base_novel trains on classes 0 to {count - 1} only: leave it out."
                )
    kept = usable[source.train.labels[usable] < count]
    return replace(source, classes=source.classes[:count]), kept


def novel_test(plan: Plan, source: Source, seen: Hashes) -> Indices:
    """Sorted indices of the test images whose class is not among those of ``source``, as many as the options say."""
    novel = np.flatnonzero(~np.isin(source.test.hashes, seen) & (source.test.labels >= len(source.classes)))
    if plan.options.test_shots is None:
        return novel
    chosen, _ = _first_of_each(source.test, novel, plan.options.test_shots, 0, numpy_generator(0, "data", "novel"))
    return chosen


def _val_limit(plan: Plan, shots: int) -> int:
    return max(_LEAST_VAL, shots) if plan.options.val_shots is None else plan.options.val_shots


def _choose_by_file(
    plan: Plan, parts: Sequence[partition.FilePart], source: Source, usable: Indices, test: Indices, notes: list[str]
) -> Choice:
    """The images a partition file lists; where it lists no validation or test images, those left over."""
    listed = np.concatenate([part.train for part in parts])
    train = np.intersect1d(listed, usable)
    if len(train) < len(listed):
        notes.append(f"{len(listed) - len(train)} training images of the partition file are left out as copies.")
    if parts[0].val is None:
        spare = np.setdiff1d(usable, listed)
        most = int(np.bincount(source.train.labels[train], minlength=1).max())
        val, _ = _first_of_each(source.train, spare, _val_limit(plan, most), 0, plan.generator("val"))
    else:
        val = np.intersect1d(np.concatenate([part.val for part in parts if part.val is not None]), usable)
    if parts[0].test is not None:
        test = np.intersect1d(np.concatenate([part.test for part in parts if part.test is not None]), test)
    elif plan.options.test_shots is not None:
        test, _ = _first_of_each(source.test, test, plan.options.test_shots, 0, numpy_generator(0, "data", "test"))
    return Choice(train, val, test)


def _first_of_each(
    pool: Pool, candidates: Indices, first: int, second: int, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Of every class ``first`` images drawn at random, and up to ``second`` of those that remain."""
    chosen: list[Indices] = [np.empty(0, dtype=np.int64)]
    spare: list[Indices] = [np.empty(0, dtype=np.int64)]
    for label in np.unique(pool.labels[candidates]):
        members = generator.permutation(candidates[pool.labels[candidates] == label])
        chosen.append(members[:first])
        spare.append(members[first : first + second])
    return np.sort(np.concatenate(chosen)), np.sort(np.concatenate(spare))


def _share_of_each(
    pool: Pool, candidates: Indices, share: float, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Of every class the images that remain once ``share`` of them (rounded, never all) is set aside, and those."""
    kept: list[Indices] = [np.empty(0, dtype=np.int64)]
    aside: list[Indices] = [np.empty(0, dtype=np.int64)]
    for label in np.unique(pool.labels[candidates]):
        members = generator.permutation(candidates[pool.labels[candidates] == label])
        count = min(round(share * len(members)), len(members) - 1)
        aside.append(members[:count])
        kept.append(members[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(aside))


def _note_short_classes(source: Source, train: Indices, shots: int, notes: list[str]) -> None:
    counts = np.bincount(source.train.labels[train], minlength=len(source.classes))
    short = [
        f"{source.classes[label]!r} ({counts[label]})" for label in np.flatnonzero((counts > 0) & (counts < shots))
    ]
    if short:
        notes.append(f"{len(short)} classes have fewer than data.shots={shots} training images: {shorten(short)}.")


def shorten(items: Sequence[str]) -> str:
    """The first ten items, and how many more there are."""
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
