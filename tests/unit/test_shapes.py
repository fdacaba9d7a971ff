"""The embedded shapes data set: what an image depends on, and that classes and domains look different."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from rayfed.data.images import content_hashes, resize_rgb
from rayfed.data.shapes import COLOURS, DOMAINS, SHAPES, class_names, render
from rayfed.errors import DataError

ALL = np.arange(96)


def test_class_id_is_eight_times_shape_plus_colour() -> None:
    names = class_names()
    assert len(SHAPES) == 12 and len(COLOURS) == 8 and len(set(names)) == 96
    assert names[8 * SHAPES.index("star") + COLOURS.index("red")] == "red star"


@pytest.mark.parametrize("size", [32, 48])
def test_image_does_not_depend_on_its_batch(size: int) -> None:
    domains = [DOMAINS[number % 4] for number in ALL]
    whole = render(ALL, ALL + 5, seed=3, domain=domains, size=size)
    assert whole.shape == (96, 3, size, size) and whole.dtype == np.uint8
    order = np.argsort(ALL * 37 % 96)
    shuffled = render(ALL[order], ALL[order] + 5, seed=3, domain=[domains[i] for i in order], size=size)
    np.testing.assert_array_equal(shuffled, whole[order])
    singles = [render(ALL[i : i + 1], ALL[i : i + 1] + 5, seed=3, domain=domains[i], size=size) for i in range(96)]
    np.testing.assert_array_equal(np.concatenate(singles), whole)


def test_batches_beyond_the_internal_chunk_agree_with_small_ones() -> None:
    labels = np.arange(1500) % 96
    whole = render(labels, np.arange(1500), seed=1)
    np.testing.assert_array_equal(render(labels[1020:1030], np.arange(1020, 1030), seed=1), whole[1020:1030])


def test_pixels_are_those_of_the_pretraining() -> None:
    """A changed generator would make the shipped hashes and weights belong to other images."""
    digest = hashlib.sha256()
    for domain in DOMAINS:
        digest.update(render(ALL, ALL, seed=7, domain=domain).tobytes())
    assert digest.hexdigest() == "90c1bd76a41afa1a0a5f7fb79adcc853ac1a98e4c2456c1830b8ea126f7fd3b6"


def test_seed_index_label_and_domain_each_change_every_image() -> None:
    base = render(ALL, ALL, seed=0)
    others = [render(ALL, ALL, seed=1), render(ALL, ALL + 96, seed=0), render((ALL + 1) % 96, ALL, seed=0)]
    others += [render(ALL, ALL, seed=0, domain=domain) for domain in DOMAINS[1:]]
    for other in others:
        assert (base != other).reshape(96, -1).any(axis=1).all()


def test_no_two_of_many_images_are_the_same() -> None:
    labels = np.arange(1920) % 96
    hashes = np.concatenate([content_hashes(render(labels, np.arange(1920), seed=0, domain=d)) for d in DOMAINS])
    assert len(np.unique(hashes)) == len(hashes)


def test_domains_differ_in_the_way_their_names_say() -> None:
    photo, sketch, bright, noisy = (render(ALL, ALL, seed=0, domain=d).astype(float) for d in DOMAINS)

    def roughness(images: np.ndarray) -> float:
        return float(np.abs(np.diff(images, axis=3)).mean())

    assert sketch.mean() > 200 > bright.mean() > photo.mean() + 30
    assert roughness(noisy) > 2 * roughness(photo)


def test_colour_of_the_shape_is_the_colour_of_the_name() -> None:
    """The most colourful pixels of a photo have the hue that the class says."""
    hues = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
    for colour, rgb in hues.items():
        labels = np.arange(len(SHAPES)) * len(COLOURS) + COLOURS.index(colour)
        pixels = render(labels, np.arange(len(labels)), seed=4).astype(float).reshape(len(labels), 3, -1)
        strongest = (pixels.max(axis=1) - pixels.min(axis=1)).argmax(axis=1)
        found = pixels[np.arange(len(labels)), :, strongest].argmax(axis=1)
        assert (found == np.argmax(rgb)).all()


def test_shapes_have_outlines_of_their_own() -> None:
    """Mean coverage maps of any two shapes differ clearly (a swapped or repeated outline would not)."""
    count, maps = 60, []
    for shape in range(len(SHAPES)):
        labels = np.full(count, shape * len(COLOURS) + COLOURS.index("red"))
        image = render(labels, np.arange(count), seed=2, domain="sketch").astype(float)
        maps.append((image[:, 0] - image[:, 2]).clip(0).mean(axis=0))
    for first in range(len(SHAPES)):
        for second in range(first):
            assert np.abs(maps[first] - maps[second]).mean() > 2, (SHAPES[first], SHAPES[second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([96])}, "96 is not a shapes class"),
        ({"labels": np.array([-1])}, "labels contain -1"),
        ({"labels": np.array([0.5])}, "one-dimensional integer"),
        ({"indices": np.array([0, 1])}, "1 labels and 2 indices"),
        ({"domain": "painting"}, "Unknown shapes domain 'painting'; choose from photo"),
        ({"domain": ["photo", "photo"]}, "2 domains for 1 images"),
        ({"size": 4}, "size 4 is too small"),
    ],
)
def test_impossible_request_is_explained(change: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"labels": np.array([0]), "indices": np.array([0]), "seed": 0} | change
    with pytest.raises(DataError, match=message):
        render(**request)  # type: ignore[arg-type]


def test_no_images_give_an_empty_array() -> None:
    assert render(np.array([], dtype=int), np.array([], dtype=int), seed=0).shape == (0, 3, 32, 32)


def test_resize_keeps_pixels_at_the_same_size_and_repeats_grey() -> None:
    grey = np.arange(2 * 32 * 32, dtype=np.uint32).reshape(2, 32, 32).astype(np.uint8)
    np.testing.assert_array_equal(resize_rgb(grey, 32), np.repeat(grey[:, None], 3, axis=1))
    rgb = render(ALL[:3], ALL[:3], seed=0)
    np.testing.assert_array_equal(resize_rgb(rgb.transpose(0, 2, 3, 1), 32), rgb)
    assert (resize_rgb(np.full((1, 28, 28), 200, np.uint8), 32) == 200).all()


def test_resize_refuses_what_is_not_a_square_picture() -> None:
    for images in (np.zeros((1, 28, 30), np.uint8), np.zeros((1, 8, 8, 4), np.uint8), np.zeros((1, 8, 8), np.float32)):
        with pytest.raises(DataError):
            resize_rgb(images, 32)


def test_content_hash_sees_pixels_and_shape() -> None:
    flat = np.arange(16, dtype=np.uint8)
    expected = hashlib.blake2b(b"4x4|" + flat.tobytes(), digest_size=8).digest()
    assert content_hashes(flat.reshape(1, 4, 4))[0] == int.from_bytes(expected, "big")
    assert content_hashes(flat.reshape(1, 4, 4))[0] != content_hashes(flat.reshape(1, 2, 8))[0]
    assert content_hashes(np.zeros((0, 4, 4), np.uint8)).shape == (0,)
