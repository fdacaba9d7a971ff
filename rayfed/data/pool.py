"""Labelled images of one split, and the larger pools they are chosen from before any pixel is resized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfed.data.images import content_hashes, resize_rgb

Indices = NDArray[np.int64]

ONE_DOMAIN = ("all",)


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [N, 3, S, S] with labels int64 [N] (-1: none), and what identifies them.

    ``hashes`` uint64 [N] are of the source pixels, before resizing; ``domains`` int64 [N] index ``domain_names``.
    """

    images: NDArray[np.uint8]
    labels: Indices
    hashes: NDArray[np.uint64]
    domains: Indices
    domain_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Pool:
    """Every image of an official split; ``pixels(indices)`` gives those wanted as uint8 [n, 3, S, S]."""

    labels: Indices
    hashes: NDArray[np.uint64]
    domains: Indices
    domain_names: tuple[str, ...]
    pixels: Callable[[Indices], NDArray[np.uint8]]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices, *, labelled: bool = True) -> ImageSet:
        """The images at ``indices``, in that order, with labels or with -1 in their place."""
        labels = self.labels[indices] if labelled else np.full(len(indices), -1, dtype=np.int64)
        return ImageSet(
            images=self.pixels(indices),
            labels=labels,
            hashes=self.hashes[indices],
            domains=self.domains[indices],
            domain_names=self.domain_names,
        )


@dataclass(frozen=True)
class Source:
    """A data set as it comes: classes by number, official training and test images, and notes for the user."""

    classes: tuple[str, ...]
    train: Pool
    test: Pool
    notes: tuple[str, ...] = ()


def pool_of_pixels(
    source: NDArray[np.uint8],
    labels: Indices,
    size: int,
) -> Pool:
    """Pool over source pixels [N, H, H] or [N, H, H, 1 or 3], resized to ``size`` only for those chosen."""
    return Pool(
        labels=labels.astype(np.int64),
        hashes=content_hashes(source),
        domains=np.zeros(len(labels), dtype=np.int64),
        domain_names=ONE_DOMAIN,
        pixels=lambda indices: resize_rgb(source[indices], size),
    )
