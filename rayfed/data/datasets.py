"""The data sets by name: where their images and classes come from."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.data import idx, shapes
from rayfed.data.images import content_hashes, resize_rgb
from rayfed.data.pool import Indices, Pool, Source, pool_of_pixels
from rayfed.errors import DataError
from rayfed.rng import derive_seed, numpy_generator

SHAPES_TRAIN = 20
SHAPES_TEST = 10
_SHAPES_VAL = 10
_SHAPES_SIZE = 32  # drawn at this size whatever the backbone, so that an image has one content hash
_TINY_PRETRAINED = 30_000  # the embedded model was trained on the first half of Fashion-MNIST's training images
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Request:
    """Which data set to load and how: the options that bear on reading it, and the backbone it is read for.

    ``image_size`` in pixels; ``shots``, ``val_shots`` and ``test_shots`` per class matter only where images are drawn
    rather than read.
    """

    name: str
    root: str | None
    image_size: int
    backbone: str
    domains: tuple[str, ...] = ()
    shots: int | None = None
    val_shots: int | None = None
    test_shots: int | None = None
    bad: str = "stop"
    download: bool = False


def load_images(request: Request) -> Source:
    """Load a data set: its classes and its official training and test images, not yet resized where that can wait.

    Raises ``DataError`` for an unknown name, for missing or damaged files (with the path tried), and for domains the
    data set does not have.
    """
    loader = _LOADERS.get(request.name)
    if loader is None:
        raise DataError(f"Data set {request.name!r} is not known; choose from {', '.join(_LOADERS)}.")
    if request.domains and request.name not in ("shapes", "folder"):
        raise DataError(f"Data set {request.name!r} has no domains; leave data.domains out.")
    return loader(request)


def shapes_pool(request: Request, use: str, labels: Indices, indices: Indices) -> Pool:
    """Shapes pictures of one use ("train", "test", "proxy"): each use has scenes of its own, the same for every run.

    ``labels`` and ``indices`` [N] say what is drawn; the request's domains take turns along ``indices``. Hashes are of
    the pictures as drawn, uint8 [3, 32, 32].
    """
    names = request.domains or shapes.DOMAINS[:1]
    domains = indices % len(names)
    seed = derive_seed(0, "shapes", use)
    drawn = shapes.render(labels, indices, seed=seed, domain=[names[number] for number in domains], size=_SHAPES_SIZE)
    return Pool(
        labels=labels,
        hashes=content_hashes(drawn),
        domains=domains,
        domain_names=tuple(names),
        pixels=lambda wanted: resize_rgb(drawn[wanted].transpose(0, 2, 3, 1), request.image_size),
    )


def _load_shapes(request: Request) -> Source:
    classes = shapes.class_names()
    val = _SHAPES_VAL if request.val_shots is None else request.val_shots

    def pool(use: str, count: int) -> Pool:
        labels = np.repeat(np.arange(len(classes)), count)
        return shapes_pool(request, use, labels, np.tile(np.arange(count), len(classes)))

    train = pool("train", (request.shots or SHAPES_TRAIN) + val)
    return Source(classes, train, pool("test", request.test_shots or SHAPES_TEST))


def _load_fashion_mnist(request: Request) -> Source:
    train_images, train_labels = idx.load_fashion_mnist(request.root, "train")
    test_images, test_labels = idx.load_fashion_mnist(request.root, "test")
    notes: tuple[str, ...] = ()
    if request.backbone == "tiny":
        train_images, train_labels = train_images[_TINY_PRETRAINED:], train_labels[_TINY_PRETRAINED:]
        notes = (
            f"The first {_TINY_PRETRAINED:,} training images of Fashion-MNIST are left out, because the tiny backbone "
            "was pretrained on them.",
        )
    return Source(
        idx.FASHION_CLASSES,
        pool_of_pixels(train_images, train_labels, request.image_size),
        pool_of_pixels(test_images, test_labels, request.image_size),
        notes,
    )


def _load_digits(request: Request) -> Source:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)  # grey levels 0..16
    labels = data.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = numpy_generator(0, "digits", label).permutation(np.flatnonzero(labels == label))
        test[members[: round(_TEST_SHARE * len(members))]] = True
    return Source(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
        pool_of_pixels(images[~test], labels[~test], request.image_size),
        pool_of_pixels(images[test], labels[test], request.image_size),
    )


def _load_cifar(request: Request) -> Source:
    if request.root is None:
        raise DataError(f"Data set {request.name!r} needs a folder; set data.root to where torchvision keeps it.")
    import torchvision.datasets

    root = Path(request.root).expanduser().absolute()
    if not (root.is_dir() or request.download):
        raise _no_cifar(request.name, root, "the folder is not there")
    kinds = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}
    try:
        # torchvision checks the files' MD5 sums before it unpickles them, so only the published ones are opened.
        train, test = (kinds[request.name](root, train=flag, download=request.download) for flag in (True, False))
    except (RuntimeError, OSError) as error:
        raise _no_cifar(request.name, root, (str(error).splitlines() or ["damaged"])[0]) from error

    def labels(part: Any) -> Indices:
        return np.asarray(part.targets, dtype=np.int64)

    return Source(
        tuple(str(name) for name in train.classes),
        pool_of_pixels(train.data, labels(train), request.image_size),
        pool_of_pixels(test.data, labels(test), request.image_size),
    )


def _no_cifar(name: str, root: Path, reason: str) -> DataError:
    return DataError(
        f"Data set {name!r} cannot be read from {str(root)!r} on node {socket.gethostname()} ({reason}); set data.root "
        "to the folder torchvision downloaded it to, or data.download=true to fetch it there."
    )


def _load_folder(request: Request) -> Source:
    from rayfed.data.folder import load_folder  # Pillow costs every process a tenth of a second

    return load_folder(request.root, request.image_size, domains=request.domains, bad=request.bad)


_LOADERS: Mapping[str, Callable[[Request], Source]] = {
    "shapes": _load_shapes,
    "fashion_mnist": _load_fashion_mnist,
    "digits": _load_digits,
    "cifar10": _load_cifar,
    "cifar100": _load_cifar,
    "folder": _load_folder,
}

DATASETS = tuple(_LOADERS)
