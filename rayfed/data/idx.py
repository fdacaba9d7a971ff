"""IDX files, and the Fashion-MNIST data set kept in them."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfed.errors import DataError

FASHION_CLASSES: tuple[str, ...] = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

_PREFIX = {"train": "train", "test": "t10k"}
_FILES = tuple(f"{prefix}-{kind}-ubyte" for prefix in _PREFIX.values() for kind in ("images-idx3", "labels-idx1"))
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where the Debian package dataset-fashion-mnist puts them
_LAYOUTS = ("", "FashionMNIST/raw", "fashion-mnist")  # below the root: plain, torchvision's, Debian's


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped or plain, in the shape it declares.

    Raises DataError where the file is missing, is no such file, or holds fewer or more bytes than it declares.
    """
    data = _read_bytes(Path(path))
    if len(data) < 4 or data[:3] != b"\0\0\x08" or data[3] == 0:
        found = data[:4].hex(" ") or "nothing"
        raise DataError(f"{path} starts with {found}, not the 00 00 08 of an IDX file of bytes; download it again.")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise DataError(f"{path} ends within its {start}-byte IDX header; download it again.")
    shape = tuple(int(side) for side in np.frombuffer(data[4:start], dtype=">u4"))
    if len(data) - start != math.prod(shape):
        sides = " x ".join(map(str, shape))
        raise DataError(f"{path} declares {sides} bytes but holds {len(data) - start}; download it again.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); download it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions.") from error


def find_fashion_mnist(root: str | None) -> Path:
    """Folder with the four Fashion-MNIST files (gzipped or plain).

    Looks in ``root``, ``root``/FashionMNIST/raw and ``root``/fashion-mnist, or, without a root, where the Debian
    package dataset-fashion-mnist puts them. Raises DataError, with how to get the files, where none has all four.
    """
    folders = [_DEBIAN] if root is None else [Path(root).expanduser() / layout for layout in _LAYOUTS]
    for folder in folders:
        if all(_existing(folder, name) for name in _FILES):
            return folder
    raise DataError(
        f"Fashion-MNIST is not in {', '.join(map(str, folders))} "
        f"(looked for {', '.join(_FILES)}, with or without .gz); "
        "run `apt-get install dataset-fashion-mnist` and leave data.root out, "
        "or set data.root to a folder that holds torchvision's FashionMNIST/raw."
    )


def _existing(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def load_fashion_mnist(
    root: str | None, split: Literal["train", "test"]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 [N, 28, 28] and labels int64 [N] of the official split (60,000 train, 10,000 test).

    Raises DataError for another split, missing or damaged files, or files that do not belong together.
    """
    if split not in _PREFIX:
        raise DataError(f"Fashion-MNIST has no split {split!r}; use train or test.")
    folder, prefix = find_fashion_mnist(root), _PREFIX[split]
    images = read_idx(_existing(folder, f"{prefix}-images-idx3-ubyte") or folder)
    labels = read_idx(_existing(folder, f"{prefix}-labels-idx1-ubyte") or folder)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or (len(labels) and labels.max() > 9):
        raise DataError(
            f"The {split} files in {folder} hold images of shape {images.shape} and labels of shape {labels.shape}, "
            "not N images of 28 x 28 and N labels from 0 to 9; download them again."
        )
    return images, labels.astype(np.int64)
