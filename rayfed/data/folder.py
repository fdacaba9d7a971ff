"""Data sets kept as one folder of pictures for each class."""

from __future__ import annotations

import os
import re
import socket
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from rayfed.data.images import content_hashes
from rayfed.data.pool import ONE_DOMAIN, Indices, Pool, Source
from rayfed.errors import DataError

_ENDINGS = frozenset(
    (".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".pbm", ".pgm", ".ppm", ".pnm", ".tif", ".tiff", ".webp")
)
_BACKGROUND = (255, 255, 255)
_TEST_SHARE = 0.2
_SHOWN = 10


@dataclass(frozen=True)
class _File:
    path: Path
    label: int
    domain: int
    split: str  # "train", "test", or "" where the folder does not say


@dataclass(frozen=True)
class _Picture:
    pixels: NDArray[np.uint8]
    hash: np.uint64


def load_folder(root: str | None, size: int, *, domains: tuple[str, ...] = (), bad: str = "stop") -> Source:
    """Read ``root/train/CLASS/...`` and ``root/test/CLASS/...``, or ``root/CLASS/...`` with a fifth kept for testing.

    With ``domains`` each is a folder of ``root`` laid out so. The class list is the union over all of them in natural
    order ("10" after "9"); hidden folders and files without an image ending do not count. Where there is no test
    folder, the fifth of a class with the largest content hashes is the test set, whatever the files are called. Raises
    ``DataError`` for missing folders, and for damaged files unless ``bad`` is "skip".
    """
    folder = _existing_root(root)
    tops = [folder / name for name in domains] or [folder]
    layouts = [_layout(top) for top in tops]
    classes = _class_names([base for layout in layouts for base in layout.values()], folder)
    files, strays = _list_files(layouts, classes)
    if not files:
        endings = " ".join(sorted(_ENDINGS))
        raise DataError(f"No picture is in the class folders of {folder}; put files ending in {endings} there.")
    pictures, failures = _decode_all(files, size)
    notes = _failure_notes(failures, bad) + ([_stray_note(strays)] if strays else [])
    train, test = _by_split([(file, picture) for file, picture in pictures if picture is not None])
    names = domains or ONE_DOMAIN
    return Source(classes, _pool(train, size, names), _pool(test, size, names), tuple(notes))


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Sort key that reads runs of digits as numbers, so that "10" comes after "9"."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)], name


def decode(path: Path, size: int) -> tuple[NDArray[np.uint8], np.uint64]:
    """A picture as an image viewer shows it, uint8 [3, size, size], and the hash of its RGB pixels before resizing.

    Orientation tags are obeyed, transparent parts lie on white, 16-bit grey keeps its upper 8 bits. The shorter side is
    resized to ``size`` (bicubic) and the middle is kept. Raises ``DataError`` with path and reason.
    """
    try:
        with Image.open(path) as opened:
            picture = to_rgb(ImageOps.exif_transpose(opened))
        source = np.asarray(picture, dtype=np.uint8)
        fitted = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    except Exception as error:  # Pillow's decoders raise a dozen unrelated kinds on damaged files
        raise DataError(f"{path}: {_reason(path, error)}") from error
    pixels = np.ascontiguousarray(np.asarray(fitted, dtype=np.uint8).transpose(2, 0, 1))
    return pixels, content_hashes(source[None])[0]


def to_rgb(picture: Image.Image) -> Image.Image:
    """Three 8-bit channels: transparency laid on white, 16-bit and float grey brought to 0..255."""
    if picture.mode.startswith("I"):
        # PNG keeps 16-bit grey as 0..65535 in either integer mode; smaller ranges are 8-bit values in wide storage.
        values = np.clip(np.asarray(picture, dtype=np.int64), 0, 65535)
        wide = picture.mode != "I" or values.max(initial=0) > 255
        picture = Image.fromarray((values // 257 if wide else values).astype(np.uint8))
    elif picture.mode == "F":
        picture = Image.fromarray(np.clip(np.asarray(picture), 0, 255).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        above = picture.convert("RGBA")
        below = Image.new("RGBA", above.size, (*_BACKGROUND, 255))
        picture = Image.alpha_composite(below, above)
    return picture.convert("RGB")


def _reason(path: Path, error: Exception) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not a picture, whatever its ending says"
    return (str(error) or type(error).__name__).replace("\n", " ")


def _existing_root(root: str | None) -> Path:
    if root is None:
        raise DataError("Data set 'folder' needs a folder of pictures; set data.root to it.")
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(
            f"The data folder {str(folder)!r} is not there on node {socket.gethostname()}; set data.root to a folder "
            "of class folders that this node sees (in a submitted job `.` is a copy of what was uploaded)."
        )
    return folder


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _layout(top: Path) -> dict[str, Path]:
    """Folder of class folders for each split of ``top``, or for "" where it has no splits."""
    if not top.is_dir():
        raise DataError(f"The domain folder {str(top)!r} is not there; correct data.domains or data.root.")
    found = _subfolders(top)
    if "train" in found and "test" in found:
        return {"train": top / "train", "test": top / "test"}
    if found in (["train"], ["train", "val"]):
        raise DataError(f"{str(top / 'test')!r} is not there beside 'train'; add it, or keep class folders alone.")
    return {"": top}


def _class_names(bases: Sequence[Path], folder: Path) -> tuple[str, ...]:
    names = {name for base in bases for name in _subfolders(base)}
    if not names:
        raise DataError(f"The data folder {str(folder)!r} has no class folders; put the pictures of each class in one.")
    return tuple(sorted(names, key=natural_key))


def _list_files(layouts: Sequence[dict[str, Path]], classes: Sequence[str]) -> tuple[list[_File], list[Path]]:
    files, strays = [], []
    for domain, layout in enumerate(layouts):
        for split, base in layout.items():
            for label, name in enumerate(classes):
                for path in _visible_files(base / name):
                    if path.suffix.lower() in _ENDINGS:
                        files.append(_File(path, label, domain, split))
                    else:
                        strays.append(path)
    return files, strays


def _visible_files(folder: Path) -> list[Path]:
    found = []
    for top, inner, names in os.walk(folder, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        found += [Path(top, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: natural_key(unicodedata.normalize("NFC", str(path))))


def _decode_all(files: Sequence[_File], size: int) -> tuple[list[tuple[_File, _Picture | None]], list[str]]:
    def attempt(file: _File) -> _Picture | str:
        try:
            return _Picture(*decode(file.path, size))
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(attempt, files))
    failures = [result for result in results if isinstance(result, str)]
    decoded = [None if isinstance(result, str) else result for result in results]
    return list(zip(files, decoded, strict=True)), failures


def _failure_notes(failures: Sequence[str], bad: str) -> list[str]:
    if not failures:
        return []
    shown = "; ".join(failures[:_SHOWN]) + (f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else "")
    if bad == "skip":
        return [f"{len(failures)} files cannot be read and are left out: {shown}."]
    raise DataError(
        f"{len(failures)} files cannot be read: {shown}. Repair or remove them, or set data.bad=skip to go on without."
    )


def _stray_note(strays: Sequence[Path]) -> str:
    endings = Counter(path.suffix.lower() or "no ending" for path in strays)
    listed = ", ".join(f"{count} with {ending}" for ending, count in sorted(endings.items()))
    return f"Files in class folders without an image ending are left out: {listed}."


def _by_split(
    pictures: Sequence[tuple[_File, _Picture]],
) -> tuple[list[tuple[_File, _Picture]], list[tuple[_File, _Picture]]]:
    held_out = _held_out(pictures)
    train = [pair for place, pair in enumerate(pictures) if pair[0].split != "test" and place not in held_out]
    test = [pair for place, pair in enumerate(pictures) if pair[0].split == "test" or place in held_out]
    return train, test


def _held_out(pictures: Sequence[tuple[_File, _Picture]]) -> set[int]:
    """Places of the test pictures among those without a split: by content, so that renaming changes nothing."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, (file, picture) in enumerate(pictures):
        if not file.split:
            groups.setdefault((file.domain, file.label), []).append((int(picture.hash), place))
    chosen: set[int] = set()
    for members in groups.values():
        count = max(1, round(_TEST_SHARE * len(members))) if len(members) > 1 else 0
        chosen.update(place for _, place in sorted(members)[len(members) - count :])
    return chosen


def _pool(pairs: Sequence[tuple[_File, _Picture]], size: int, domain_names: tuple[str, ...]) -> Pool:
    stacked = np.empty((len(pairs), 3, size, size), dtype=np.uint8)
    for place, (_, picture) in enumerate(pairs):
        stacked[place] = picture.pixels

    def pixels(indices: Indices) -> NDArray[np.uint8]:
        return stacked[indices]

    return Pool(
        labels=np.array([file.label for file, _ in pairs], dtype=np.int64),
        hashes=np.array([picture.hash for _, picture in pairs], dtype=np.uint64),
        domains=np.array([file.domain for file, _ in pairs], dtype=np.int64),
        domain_names=domain_names,
        pixels=pixels,
    )
