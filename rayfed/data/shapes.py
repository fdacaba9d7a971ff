"""Embedded data set: pictures of coloured shapes, drawn from numbers alone.

12 shapes x 8 colours make 96 classes (class id = 8 * shape + colour). Size, place, rotation, texture and
background vary from image to image, and four domains (photo, sketch, bright, noisy) change how a scene is drawn.

An image depends on (seed, index, label, domain, size) and on nothing else: every random number is a hash of
(seed, index, label, use, position), so an image is the same whatever batch it is drawn in. Per pixel only correctly
rounded operations (+ - * / sqrt) are used, so batch layout cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.errors import DataError

SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "cross",
    "ring",
    "heart",
    "diamond",
    "crescent",
    "arrow",
    "hourglass",
    "drop",
)
COLOURS: tuple[str, ...] = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
DOMAINS: tuple[str, ...] = ("photo", "sketch", "bright", "noisy")

Floats: TypeAlias = NDArray[np.floating[Any]]  # float32; NumPy's stubs lose the width
_Keys: TypeAlias = NDArray[np.uint64]

_RGB = np.array(
    [
        (0.84, 0.13, 0.13),
        (0.96, 0.53, 0.10),
        (0.95, 0.87, 0.18),
        (0.16, 0.62, 0.24),
        (0.18, 0.78, 0.84),
        (0.16, 0.28, 0.86),
        (0.53, 0.20, 0.72),
        (0.96, 0.52, 0.74),
    ],
    dtype=np.float32,
)

# Largest rotation in degrees, in the order of SHAPES: small where turning makes one shape another (square, diamond).
_TURN = np.array([180, 12, 25, 36, 15, 180, 25, 12, 40, 40, 25, 25], dtype=np.float64)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_PIXELS = 1 << 20  # bounds memory to about 100 MB whatever the number of images


class _Use(IntEnum):
    """What a random number is for; part of the hash, so adding a use never moves the others."""

    SIZE = 0
    CENTRE = 1
    TURN = 2
    COLOUR = 3
    TEXTURE = 4
    BACKGROUND = 5
    STROKE = 6
    NOISE = 7


def class_names() -> tuple[str, ...]:
    """The 96 class names, "colour shape", at the position of their class id."""
    return tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)


def render(
    labels: NDArray[np.integer[Any]],
    indices: NDArray[np.integer[Any]],
    *,
    seed: int,
    domain: str | Sequence[str] = "photo",
    size: int = 32,
) -> NDArray[np.uint8]:
    """Draw the images ``indices`` of classes ``labels`` (both integer [N]); returns uint8 [N, 3, size, size].

    ``domain`` is one name for all or one per image. The same index and label show the same scene in every domain.
    Raises DataError for a label, index, domain or size that does not exist.
    """
    labels, indices = _checked_ids("labels", labels), _checked_ids("indices", indices)
    domains = _domain_ids(domain, len(labels))
    if len(labels) != len(indices):
        raise DataError(f"Got {len(labels)} labels and {len(indices)} indices; give one label for each index.")
    if len(labels) and int(labels.max()) >= len(SHAPES) * len(COLOURS):
        raise DataError(f"Label {int(labels.max())} is not a shapes class; use ids from 0 to 95 (8 * shape + colour).")
    if size < 8:
        raise DataError(f"Image size {size} is too small to tell the shapes apart; use 8 or more.")
    keys = _keys(seed, indices, labels)
    images = np.empty((len(labels), 3, size, size), dtype=np.uint8)
    for part in _chunks(len(labels), size):
        images[part] = _draw(keys[part], labels[part], domains[part], size)
    return images


def _checked_ids(what: str, values: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise DataError(f"{what} are {array.dtype} of shape {array.shape}; give a one-dimensional integer array.")
    if array.size and int(array.min()) < 0:
        raise DataError(f"{what} contain {int(array.min())}; use numbers from 0 up.")
    return array.astype(np.int64)


def _domain_ids(domain: str | Sequence[str], count: int) -> NDArray[np.int64]:
    names = [domain] * count if isinstance(domain, str) else list(domain)
    unknown = {domain} - set(DOMAINS) if isinstance(domain, str) else set(names) - set(DOMAINS)
    if unknown:
        raise DataError(f"Unknown shapes domain {min(unknown)!r}; choose from {', '.join(DOMAINS)}.")
    if len(names) != count:
        raise DataError(f"Got {len(names)} domains for {count} images; give one name for all or one for each image.")
    return np.array([DOMAINS.index(name) for name in names], dtype=np.int64)


def _chunks(count: int, size: int) -> Iterator[slice]:
    step = max(1, _CHUNK_PIXELS // (size * size))
    return (slice(start, start + step) for start in range(0, count, step))


# Random numbers ------------------------------------------------------------------------------------------------------


def _mix(values: _Keys) -> _Keys:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, indices: NDArray[np.int64], labels: NDArray[np.int64]) -> _Keys:
    """One 64-bit key per image."""
    start = _mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    return _mix(_mix(start + indices.astype(np.uint64) * _GOLDEN) + (labels.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _bits(keys: _Keys, use: _Use, count: int) -> _Keys:
    """``count`` hashes for each key: uint64 [N, count]."""
    positions = (np.arange(count, dtype=np.uint64) + np.uint64((use << 32) + 1)) * _GOLDEN
    return _mix(keys[:, None] + positions)


def _uniform(keys: _Keys, use: _Use, count: int) -> Floats:
    """``count`` numbers in [0, 1) for each key: [N, count]."""
    return (_bits(keys, use, count) >> np.uint64(40)).astype(np.float32) * (2.0**-24)


def _normal(keys: _Keys, use: _Use, count: int) -> Floats:
    """Nearly normal numbers (sum of four uniform ones, variance 1): [N, count]."""
    bits = _bits(keys, use, count)
    total = sum(((bits >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.float32) for part in range(4))
    return np.asarray((total * (2.0**-16) - 2.0) * (3.0**0.5), dtype=np.float32)


# Geometry: signed distances in the shape's own frame (unit radius, y up), negative inside ----------------------------


def _length(x: Floats, y: Floats) -> Floats:
    length: Floats = np.sqrt(x * x + y * y)
    return length


def _polygon(corners: Sequence[tuple[float, float]]) -> Callable[[Floats, Floats], Floats]:
    """Signed distance of a simple polygon: nearest edge, and the sign by counting crossings."""
    points = np.array(corners, dtype=np.float32)

    def distance(x: Floats, y: Floats) -> Floats:
        nearest = np.full_like(x, np.inf)
        inside = np.zeros(x.shape, dtype=bool)
        for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, axis=0), strict=True):
            ex, ey, px, py = bx - ax, by - ay, x - ax, y - ay
            along = np.clip((px * ex + py * ey) / (ex * ex + ey * ey), 0, 1)
            dx, dy = px - ex * along, py - ey * along
            nearest = np.minimum(nearest, dx * dx + dy * dy)
            crosses = (y >= ay) != (y >= by)
            inside ^= crosses & ((ex * py > ey * px) == (by > ay))
        return np.where(inside, -np.sqrt(nearest), np.sqrt(nearest))

    return distance


def _star_corners() -> list[tuple[float, float]]:
    turns = np.pi / 2 + np.arange(10) * np.pi / 5
    radii = np.where(np.arange(10) % 2 == 0, 1.0, 0.42)
    return [(float(r * np.cos(t)), float(r * np.sin(t))) for r, t in zip(radii, turns, strict=True)]


def _circle(x: Floats, y: Floats) -> Floats:
    return _length(x, y) - 0.86


def _ring(x: Floats, y: Floats) -> Floats:
    distance: Floats = np.abs(_length(x, y) - 0.72) - 0.2
    return distance


def _heart(x: Floats, y: Floats) -> Floats:
    """Two lobes on a corner (after Inigo Quilez' exact heart), scaled to the unit circle."""
    scale = 1.72
    x, y = np.abs(x) / scale, y / scale + 0.55
    lobe: Floats = _length(x - 0.25, y - 0.75) - (2.0**0.5 / 4)
    slope = np.maximum(x + y, 0) * 0.5
    near = np.minimum(_length(x, y - 1), _length(x - slope, y - slope))
    return np.where(x + y > 1, lobe, np.where(x > y, near, -near)) * scale


def _crescent(x: Floats, y: Floats) -> Floats:
    """A disc of radius 0.94 less a disc of radius 0.74 (after Inigo Quilez' exact moon)."""
    outer, bite, shift = 0.94, 0.74, 0.48
    y = np.abs(y)
    tip_x = (outer**2 - bite**2 + shift**2) / (2 * shift)
    tip_y = (outer**2 - tip_x**2) ** 0.5
    at_tip = shift * (x * tip_y - y * tip_x) > shift**2 * np.maximum(tip_y - y, 0)
    arcs = np.maximum(_length(x, y) - outer, bite - _length(x - shift, y))
    return np.where(at_tip, _length(x - tip_x, y - tip_y), arcs)


_cone = _polygon([(-0.538, -0.095), (0.538, -0.095), (0.0, 1.0)])


def _drop(x: Floats, y: Floats) -> Floats:
    """A disc and the two tangents to it from a tip above."""
    disc: Floats = _length(x, y + 0.36) - 0.6
    return np.minimum(disc, _cone(x, y))


_ARM = 0.32
_DISTANCE: tuple[Callable[[Floats, Floats], Floats], ...] = (
    _circle,
    _polygon([(-0.74, -0.74), (0.74, -0.74), (0.74, 0.74), (-0.74, 0.74)]),
    _polygon([(-0.93, -0.66), (0.93, -0.66), (0.0, 0.95)]),
    _polygon(_star_corners()),
    _polygon(
        [
            *((-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM)),
            *((_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)),
        ]
    ),
    _ring,
    _heart,
    _polygon([(0, -1), (0.66, 0), (0, 1), (-0.66, 0)]),
    _crescent,
    _polygon([(-0.25, -1), (0.25, -1), (0.25, 0.05), (0.8, 0.05), (0, 1), (-0.8, 0.05), (-0.25, 0.05)]),
    _polygon([(-0.74, -0.95), (0.74, -0.95), (0.12, 0), (0.74, 0.95), (-0.74, 0.95), (-0.12, 0)]),
    _drop,
)


def _grid(size: int) -> tuple[Floats, Floats]:
    """Centres of the pixels, x to the right and y up, in [-1, 1]: two arrays [size * size]."""
    line = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    return np.tile(line, size), np.repeat(-line, size)


def _frame(keys: _Keys, shape: NDArray[np.int64], size: int) -> tuple[Floats, Floats, Floats]:
    """Pixel places in each shape's own frame, x and y [N, pixels], and the radius [N, 1] in image units."""
    radius = 0.46 + 0.28 * _uniform(keys, _Use.SIZE, 1)
    centre = (2 * _uniform(keys, _Use.CENTRE, 2) - 1) * (0.94 - radius)
    turn = np.deg2rad((2 * _uniform(keys, _Use.TURN, 1).astype(np.float64) - 1) * _TURN[shape][:, None])
    cos, sin = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
    x, y = _grid(size)
    dx, dy = (x - centre[:, :1]) / radius, (y - centre[:, 1:]) / radius
    return dx * cos + dy * sin, dy * cos - dx * sin, radius


def _signed_distance(shape: NDArray[np.int64], x: Floats, y: Floats) -> Floats:
    distance = np.empty_like(x)
    for kind in np.unique(shape):
        rows = shape == kind
        distance[rows] = _DISTANCE[kind](x[rows], y[rows])
    return distance


# Painting: colours are [N, 3, pixels] or [N, 3, 1] in [0, 1], masks [N, 1, pixels] ------------------------------------


def _wave(values: Floats) -> Floats:
    """Triangle wave of period 1 between -1 and 1."""
    wave: Floats = np.abs(values - np.floor(values) - 0.5) * 4 - 1
    return wave


def _texture(keys: _Keys, x: Floats, y: Floats) -> Floats:
    """Where the shape is shaded, [N, pixels] in [0, 1]: nowhere (solid), in stripes, dots or checks."""
    draw = _uniform(keys, _Use.TEXTURE, 4)
    kind, rate = np.floor(draw[:, :1] * 4), 1.3 + 0.7 * draw[:, 1:2]
    u, v = _wave(x * rate + draw[:, 2:3]), _wave(y * rate + draw[:, 3:])
    pattern = np.where(kind == 1, v, np.where(kind == 2, u + v - 0.7, u * v * 2))
    return np.where(kind == 0, 0, np.clip(0.5 + 3 * pattern, 0, 1))


def _background(keys: _Keys, size: int) -> Floats:
    """Two dull tones that blend along a line, with waves across: [N, 3, pixels]."""
    draw = _uniform(keys, _Use.BACKGROUND, 14)
    x, y = _grid(size)
    slope = x * (2 * draw[:, :1] - 1) + y * (2 * draw[:, 1:2] - 1)
    ripple = _wave(x * (3 * draw[:, 2:3] - 1.5) + y * (3 * draw[:, 3:4] - 1.5) + draw[:, 4:5]) * draw[:, 5:6] ** 2
    blend = np.clip(0.5 + 0.5 * slope + 0.4 * ripple, 0, 1)[:, None]
    tint = 0.16 * (draw[:, 8:14] - 0.5).reshape(-1, 2, 3)
    tones = 0.08 + 0.84 * draw[:, 6:8, None] + tint
    return tones[:, 0, :, None] * (1 - blend) + tones[:, 1, :, None] * blend


def _colour(keys: _Keys, colour: NDArray[np.int64]) -> Floats:
    draw = _uniform(keys, _Use.COLOUR, 4)
    shades: Floats = (_RGB[colour] + 0.1 * (draw[:, :3] - 0.5)) * (0.78 + 0.3 * draw[:, 3:])
    return shades[:, :, None]


def _over(paint: Floats, below: Floats, cover: Floats) -> Floats:
    return below + (paint - below) * cover


def _photo(keys: _Keys, colour: Floats, cover: Floats, shade: Floats, size: int) -> Floats:
    return _over(colour * (1 - 0.42 * shade), _background(keys, size), cover)


def _sketch(keys: _Keys, colour: Floats, edge: Floats, cover: Floats, shade: Floats, size: int) -> Floats:
    """A coloured outline on pale paper; the texture is a faint crayon fill."""
    paper = 0.84 + 0.16 * _background(keys, size)
    return _over(colour * 0.85, _over(colour, paper, 0.3 * cover * shade), edge)


def _draw(keys: _Keys, labels: NDArray[np.int64], domains: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Images of one chunk, uint8 [N, 3, size, size]."""
    shape, colour_id = labels // len(COLOURS), labels % len(COLOURS)
    x, y, radius = _frame(keys, shape, size)
    pixels = _signed_distance(shape, x, y) * radius * (size / 2)
    width = (0.9 + 0.5 * _uniform(keys, _Use.STROKE, 1)) * (size / 32)
    cover = np.clip(0.5 - pixels, 0, 1)[:, None]
    edge = np.clip(0.5 + width - np.abs(pixels), 0, 1)[:, None]
    shade, colour = _texture(keys, x, y)[:, None], _colour(keys, colour_id)
    picture = np.empty((len(keys), 3, size * size), dtype=np.float32)
    for number, name in enumerate(DOMAINS):
        rows = domains == number
        if name == "sketch":
            picture[rows] = _sketch(keys[rows], colour[rows], edge[rows], cover[rows], shade[rows], size)
        else:
            picture[rows] = _filtered(
                name, keys[rows], _photo(keys[rows], colour[rows], cover[rows], shade[rows], size)
            )
    levels: Floats = np.floor(np.clip(picture, 0, 1) * 255 + 0.5)
    return levels.astype(np.uint8).reshape(-1, 3, size, size)


def _filtered(domain: str, keys: _Keys, photo: Floats) -> Floats:
    """The photo as the domains "bright" (overexposed) and "noisy" (weak light, sensor noise) show it."""
    if domain == "bright":
        return 0.3 + 0.85 * photo
    if domain == "noisy":
        noise = _normal(keys, _Use.NOISE, photo.shape[1] * photo.shape[2]).reshape(photo.shape)
        return 0.1 + 0.65 * photo + 0.13 * noise
    return photo
