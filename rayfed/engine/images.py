"""Batches of images from the task's arrays, on the device, augmented there if asked."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.backbones.base import Backbone
from rayfed.backbones.prefix import PrefixCache
from rayfed.errors import AdapterError
from rayfed.methods.base import Batch


class ArrayImages:
    """Some images of a set: uint8 ``pixels`` [M, 3, S, S] (not copied), ``labels`` [M], and which ``index`` [N].

    Frozen features are computed once, in fixed order and batch size, so that they do not depend on who asks first.
    """

    def __init__(
        self,
        pixels: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        index: npt.NDArray[np.int64],
        *,
        backbone: Backbone,
        device: torch.device,
        batch_size: int,
        augment: torch.Generator | None = None,
        prefixes: PrefixCache | None = None,
        key: Hashable = None,
    ) -> None:
        """``prefixes`` keeps the activations before the first adapted block under ``key``; None keeps none."""
        self._pixels, self._labels, self._index = pixels, labels, index
        self._backbone, self._device, self._batch_size = backbone, device, batch_size
        self._augment = augment
        self._prefixes, self._key = prefixes, key
        self._encoded: Tensor | None = None

    def __len__(self) -> int:
        """N."""
        return len(self._index)

    @property
    def is_augmented(self) -> bool:
        """Whether ``batch`` augments."""
        return self._augment is not None

    def batch(self, index: Tensor) -> Batch:
        """The images ``index`` [B] of these, augmented if this set is."""
        return self._batch(index, self._augment)

    def in_order(self) -> Iterator[Batch]:
        """All images in order, never augmented."""
        for start in range(0, len(self), self._batch_size):
            yield self._batch(torch.arange(start, min(start + self._batch_size, len(self))), None)

    def augmented(self, generator: torch.Generator | None) -> ArrayImages:
        """The same images (and cache) with training augmentation drawn from ``generator``."""
        twin = object.__new__(ArrayImages)
        twin.__dict__ = {**self.__dict__, "_augment": generator}
        return twin

    def _batch(self, index: Tensor, augment: torch.Generator | None) -> Batch:
        where = self._index[index.numpy()]
        pixels = torch.from_numpy(self._pixels[where]).to(self._device, non_blocking=True)
        if augment is not None:
            pixels = random_resized_crop_flip(pixels, augment)
        images = self._backbone.normalise(pixels)
        labels = torch.from_numpy(self._labels[where]).to(self._device)
        if augment is not None:
            encoded = functools.cache(lambda: _encode(self._backbone, images))
            prefix = functools.cache(lambda: _head(self._backbone, images))
        else:
            encoded = functools.cache(lambda: self._all_encoded()[index])
            prefix = functools.cache(lambda: self._prefix(index, images))
        return Batch(images, labels, index, lambda: F.normalize(encoded(), dim=-1), encoded, prefix)

    def _prefix(self, index: Tensor, images: Tensor) -> Tensor:
        """Rows of the kept activations, which are made in fixed order and batch size; made for ``images`` if not kept.

        In float32 even where the frozen model computes in bfloat16, so that it does not matter who asks first.
        """
        rows = None if self._prefixes is None else self._prefixes.rows(self._key, len(self), self._all_prefixes)
        if rows is None:
            return _head(self._backbone, images)
        return rows[index].to(self._device, torch.float32, non_blocking=True)

    def _all_prefixes(self) -> Iterator[Tensor]:
        for batch in self.in_order():
            with torch.autocast(self._device.type, enabled=False):
                yield _head(self._backbone, batch.images)

    def _all_encoded(self) -> Tensor:
        if self._encoded is None:
            batches = [_encode(self._backbone, batch.images) for batch in self.in_order()]
            self._encoded = torch.cat(batches) if batches else torch.zeros(0, self._backbone.embed_dim)
        return self._encoded


@torch.no_grad()
def _encode(backbone: Backbone, images: Tensor) -> Tensor:
    # In float32 even where the frozen model computes in bfloat16: methods use the features outside autocast too.
    return backbone.encode_image(images).float()


def _head(backbone: Backbone, images: Tensor) -> Tensor:
    if backbone.split is None:
        raise AdapterError("the image tower of this backbone was not split: it has no prefix.")
    return backbone.split.head(images)


def random_resized_crop_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random resized crop (area 0.08 to 1, ratio 3/4 to 4/3) and horizontal flip of uint8 images [B, 3, S, S].

    All draws come from the CPU ``generator``; resampling runs on the images' device.
    """
    count = len(images)
    area = torch.empty(count).uniform_(0.08, 1.0, generator=generator)
    ratio = torch.empty(count).uniform_(-0.2877, 0.2877, generator=generator).exp()
    width, height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    x, y = ((2 * torch.rand(count, generator=generator) - 1) * (1 - side) for side in (width, height))
    flip = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    zero = torch.zeros(count)
    rows = [torch.stack([flip * width, zero, x], -1), torch.stack([zero, height, y], -1)]
    theta = torch.stack(rows, 1).to(images.device)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    cropped = F.grid_sample(images.float(), grid, mode="bicubic", padding_mode="border", align_corners=False)
    return cropped.round().clamp(0, 255).to(torch.uint8)
