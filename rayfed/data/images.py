"""Common form of small pictures (uint8, RGB, square) and the hashes that tell two of them apart."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rayfed.errors import DataError

_CHUNK = 4096  # images resized at once, to bound memory


def resize_rgb(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Turn square images, uint8 [N, H, H] or [N, H, H, 1 or 3], into uint8 [N, 3, size, size].

    Bicubic with antialiasing, rounded to the nearest level; pixels stay exactly as they are at the same size.
    Raises DataError for another type or shape.
    """
    _check_uint8(images)
    channels = images[..., None] if images.ndim == 3 else images
    if channels.ndim != 4 or channels.shape[1] != channels.shape[2] or channels.shape[3] not in (1, 3):
        raise DataError(f"Images have shape {images.shape}; give square ones, [N, H, H] or [N, H, H, 1 or 3].")
    if size < 1:
        raise DataError(f"Image size {size} is not a positive number of pixels; use 32 or another size above 0.")
    first = channels.transpose(0, 3, 1, 2)
    resized = first if first.shape[2] == size else _bicubic(first, size)
    return np.ascontiguousarray(np.broadcast_to(resized, (len(images), 3, size, size)))


def _bicubic(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize [N, C, H, H] in float32; torch's uint8 kernels differ between processors."""
    result = np.empty((len(images), images.shape[1], size, size), dtype=np.uint8)
    for start in range(0, len(images), _CHUNK):
        part = torch.from_numpy(images[start : start + _CHUNK].astype(np.float32, order="C"))
        sized = F.interpolate(part, (size, size), mode="bicubic", antialias=True, align_corners=False)
        result[start : start + _CHUNK] = sized.round().clamp(0, 255).to(torch.uint8).numpy()
    return result


def content_hashes(images: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """64-bit hash of every image, uint64 [N], for uint8 [N, ...].

    BLAKE2b (8 bytes, big endian) over the per-image shape, as "28x28|", and then the raw pixel bytes in C order: the
    same bytes in another shape are another image. Hash source pixels, before any resizing.
    """
    _check_uint8(images)
    head = ("x".join(str(side) for side in images.shape[1:]) + "|").encode()
    digests = (hashlib.blake2b(head + image.tobytes(), digest_size=8).digest() for image in images)
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def _check_uint8(images: NDArray[Any]) -> None:
    if images.dtype != np.uint8 or images.ndim < 2:
        raise DataError(f"Images are {images.dtype} of shape {images.shape}; give uint8 pixels with one image a row.")
