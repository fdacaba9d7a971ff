"""Reading data sets: layouts, class lists, decoding, and errors that name what is missing."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfed.data import idx, shapes
from rayfed.data.datasets import Request, load_images
from rayfed.data.folder import decode, load_folder, natural_key
from rayfed.data.images import content_hashes
from rayfed.errors import DataError
from rayfed.rng import derive_seed


def request(name: str, **options: Any) -> Request:
    return Request(**{"name": name, "root": None, "image_size": 16, "backbone": "ViT-B-32", **options})


def picture(seed: int, size: tuple[int, int] = (20, 20)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(image: Image.Image, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def fill(root: Path, classes: list[str], count: int = 5, start: int = 0) -> None:
    for position, name in enumerate(classes):
        for number in range(count):
            save(picture(start + 100 * position + number), root / name / f"{number}.png")


def centre(path: Path) -> list[int]:
    return decode(path, 8)[0][:, 4, 4].astype(int).tolist()


def test_every_kind_of_channels_becomes_what_a_viewer_shows(tmp_path: Path) -> None:
    red, size = (200, 30, 40), (12, 12)
    palette = Image.new("P", size, 0)
    palette.putpalette([*red, 10, 20, 30])
    files = {
        "grey.jpg": Image.new("L", size, 120),
        "cmyk.jpg": Image.new("RGB", size, red).convert("CMYK"),
        "palette.png": palette,
        "rgba.png": Image.new("RGBA", size, (*red, 255)),
        "grey_alpha.png": Image.new("LA", size, (120, 255)),
        "bilevel.png": Image.new("1", size, 1),
    }
    expected = {
        "grey.jpg": [120] * 3,
        "cmyk.jpg": list(red),
        "palette.png": list(red),
        "rgba.png": list(red),
        "grey_alpha.png": [120] * 3,
        "bilevel.png": [255] * 3,
    }
    for name, image in files.items():
        found = centre(save(image, tmp_path / name))
        assert found == pytest.approx(expected[name], abs=8), name
    batch = np.stack([decode(tmp_path / name, 8)[0] for name in files])
    assert batch.shape == (6, 3, 8, 8)


def test_transparent_parts_lie_on_white(tmp_path: Path) -> None:
    hidden = Image.new("P", (12, 12), 0)
    hidden.putpalette([200, 30, 40])
    assert centre(save(Image.new("RGBA", (12, 12), (200, 30, 40, 0)), tmp_path / "a.png")) == [255] * 3
    assert centre(save(Image.new("LA", (12, 12), (20, 0)), tmp_path / "b.png")) == [255] * 3
    assert centre(save(hidden, tmp_path / "c.png", transparency=0)) == [255] * 3
    half = centre(save(Image.new("RGBA", (12, 12), (0, 0, 0, 128)), tmp_path / "d.png"))
    assert half == pytest.approx([127] * 3, abs=1)


def test_sixteen_bit_grey_keeps_its_upper_bits(tmp_path: Path) -> None:
    wide = Image.fromarray(np.full((10, 10), 40_000, dtype=np.uint16))
    assert centre(save(wide, tmp_path / "wide.png")) == [40_000 // 257] * 3


def test_float_and_integer_pictures_are_read(tmp_path: Path) -> None:
    assert centre(save(Image.fromarray(np.full((9, 9), 77.4, dtype=np.float32)), tmp_path / "f.tif")) == [77] * 3
    assert centre(save(Image.fromarray(np.full((9, 9), 90, dtype=np.int32)), tmp_path / "i.tif")) == [90] * 3


def test_orientation_tag_is_obeyed(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    found, _ = decode(save(image, tmp_path / "turned.png", exif=exif), 16)
    assert found[:, 2].max() < 50
    assert found[:, 13].min() > 200


def test_shorter_side_is_resized_and_the_middle_kept(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), (0, 0, 0))
    image.paste((250, 0, 0), (10, 0, 30, 20))
    found, _ = decode(save(image, tmp_path / "wide.png"), 10)
    assert found.shape == (3, 10, 10)
    assert found[0, :, 1:-1].min() > 200


def test_same_pixels_have_one_hash_in_any_format(tmp_path: Path) -> None:
    image = picture(1)
    hashes = {decode(save(image, tmp_path / name), 8)[1] for name in ("a.png", "b.bmp", "c.tif")}
    assert len(hashes) == 1
    assert hashes == {content_hashes(np.asarray(image)[None])[0]}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    fill(tmp_path, ["cat", "dog"])
    whole = save(picture(77, (64, 64)), tmp_path / "cat" / "cut.jpg").read_bytes()
    (tmp_path / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "empty.jpg").touch()
    (tmp_path / "dog" / "text.png").write_text("no picture")
    return tmp_path


def test_damaged_files_stop_with_path_and_reason(damaged: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_folder(str(damaged), 16)
    message = str(caught.value)
    assert message.startswith("3 files cannot be read")
    assert f"{damaged / 'cat' / 'cut.jpg'}: " in message
    assert "truncated" in message
    assert f"{damaged / 'cat' / 'empty.jpg'}: the file is empty" in message
    assert f"{damaged / 'dog' / 'text.png'}: not a picture" in message
    assert "data.bad=skip" in message


def test_damaged_files_can_be_skipped_and_are_listed_once(damaged: Path) -> None:
    source = load_folder(str(damaged), 16, bad="skip")
    assert len(source.train) + len(source.test) == 10
    assert len(source.notes) == 1
    assert source.notes[0].startswith("3 files cannot be read and are left out")


def test_a_long_list_of_damaged_files_is_shortened(tmp_path: Path) -> None:
    fill(tmp_path, ["cat"])
    for number in range(14):
        (tmp_path / "cat" / f"bad{number}.png").touch()
    with pytest.raises(DataError, match=r"14 files cannot be read.*bad9\.png.*and 4 more") as caught:
        load_folder(str(tmp_path), 16)
    assert "bad10.png" not in str(caught.value)


def test_missing_folders_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=str(tmp_path / "gone")):
        load_folder("gone", 16)
    with pytest.raises(DataError, match=r"set data\.root"):
        load_folder(None, 16)
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="no class folders"):
        load_folder("bare", 16)
    (tmp_path / "bare" / "cat").mkdir()
    with pytest.raises(DataError, match="No picture"):
        load_folder("bare", 16)
    (tmp_path / "half" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="beside 'train'"):
        load_folder("half", 16)


def test_one_natural_class_list_for_all_splits(tmp_path: Path) -> None:
    numbers = [str(number) for number in range(12)]
    fill(tmp_path / "train", [name for name in numbers if name != "7"], count=3)
    (tmp_path / "train" / "7").mkdir()
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    save(picture(9), tmp_path / "train" / ".ipynb_checkpoints" / "x.png")
    fill(tmp_path / "test", [name for name in numbers if name not in ("3", "7")], count=2, start=5000)
    source = load_folder(str(tmp_path), 16)
    assert source.classes == tuple(numbers)
    assert np.bincount(source.train.labels, minlength=12).tolist() == [3] * 7 + [0] + [3] * 4
    assert np.bincount(source.test.labels, minlength=12).tolist() == [2, 2, 2, 0, 2, 2, 2, 0, 2, 2, 2, 2]
    ten = decode(tmp_path / "test" / "10" / "0.png", 16)[1]
    assert source.test.labels[source.test.hashes == ten].tolist() == [10]


def test_natural_order() -> None:
    names = ["b2", "10", "b10", "9", "a", "1"]
    assert sorted(names, key=natural_key) == ["1", "9", "10", "a", "b2", "b10"]


def test_names_of_any_script_survive(tmp_path: Path) -> None:
    names = ["café", "狗", "naïve 🐶", "a$b_{c}", 'x,"y"', unicodedata.normalize("NFD", "é"), "é"]
    fill(tmp_path, names, count=2)
    source = load_folder(str(tmp_path), 16)
    assert sorted(source.classes) == sorted(names)
    assert np.bincount(source.train.labels).tolist() == [1] * 7


def test_split_by_content_keeps_a_fifth_and_ignores_names(tmp_path: Path) -> None:
    fill(tmp_path / "a", ["cat", "dog"], count=10)
    fill(tmp_path / "b", ["cat", "dog"], count=10)
    for number, path in enumerate(sorted((tmp_path / "b").rglob("*.png"))):
        path.rename(path.with_name(f"renamed{97 * number % 31}.png"))
    first, second = load_folder(str(tmp_path / "a"), 16), load_folder(str(tmp_path / "b"), 16)
    assert (len(first.train), len(first.test)) == (16, 4)
    assert sorted(first.test.hashes) == sorted(second.test.hashes)


def test_domains_are_folders(tmp_path: Path) -> None:
    fill(tmp_path / "art", ["cat", "dog"], count=5)
    fill(tmp_path / "photo", ["cat", "fox"], count=5, start=5000)
    source = load_folder(str(tmp_path), 16, domains=("photo", "art"))
    assert source.classes == ("cat", "dog", "fox")
    assert source.train.domain_names == ("photo", "art")
    assert set(source.train.domains[source.train.labels == 1]) == {1}
    assert set(source.train.domains[source.train.labels == 2]) == {0}
    with pytest.raises(DataError, match="sketch"):
        load_folder(str(tmp_path), 16, domains=("sketch",))


def test_files_that_are_no_pictures_are_left_out_and_noted(tmp_path: Path) -> None:
    fill(tmp_path, ["cat"])
    (tmp_path / "cat" / "labels.csv").write_text("a")
    (tmp_path / "cat" / ".DS_Store").write_text("a")
    assert load_folder(str(tmp_path), 16).notes == (
        "Files in class folders without an image ending are left out: 1 with .csv.",
    )


def test_unknown_names_and_domains_are_refused() -> None:
    with pytest.raises(DataError, match="choose from shapes"):
        load_images(request("shape"))
    with pytest.raises(DataError, match="has no domains"):
        load_images(request("digits", domains=("photo",)))


def test_shapes_are_the_same_however_many_are_drawn() -> None:
    few, many = load_images(request("shapes", shots=2)), load_images(request("shapes", shots=3, test_shots=4))
    assert len(few.classes) == 96
    assert np.bincount(few.test.labels).tolist() == [10] * 96
    assert np.bincount(many.test.labels).tolist() == [4] * 96
    assert set(few.train.hashes) < set(many.train.hashes)
    assert not set(many.train.hashes) & set(few.test.hashes)


def test_shapes_hashes_do_not_depend_on_the_size_shown() -> None:
    small = load_images(request("shapes", shots=1, val_shots=1, test_shots=1))
    large = load_images(request("shapes", shots=1, val_shots=1, test_shots=1, image_size=64))
    assert np.array_equal(small.train.hashes, large.train.hashes)
    assert large.train.take(np.array([3])).images.shape == (1, 3, 64, 64)


def test_shapes_hashes_are_of_the_pictures_as_drawn() -> None:
    source = load_images(request("shapes", shots=1, val_shots=0, test_shots=1))
    labels = np.arange(96)
    drawn = shapes.render(labels, np.zeros_like(labels), seed=derive_seed(0, "shapes", "test"))
    assert np.array_equal(source.test.hashes, content_hashes(drawn))
    shown = load_images(request("shapes", shots=1, val_shots=0, test_shots=1, image_size=32)).test.take(labels)
    assert np.array_equal(shown.images, drawn)


def test_shapes_domains_take_turns() -> None:
    source = load_images(request("shapes", shots=2, val_shots=2, domains=("photo", "sketch")))
    assert source.train.domain_names == ("photo", "sketch")
    assert np.bincount(source.train.domains).tolist() == [192, 192]


def test_digits_are_split_the_same_way_each_time() -> None:
    first, again = load_images(request("digits")), load_images(request("digits"))
    assert np.array_equal(first.test.hashes, again.test.hashes)
    assert len(first.train) + len(first.test) == 1797
    assert np.bincount(first.test.labels).min() >= 34
    taken = first.train.take(np.array([5, 2]))
    assert taken.images.shape == (2, 3, 16, 16)
    assert taken.images.max() > 200


@pytest.mark.parametrize(("backbone", "expected"), [("tiny", 20), ("ViT-B-32", 30_020)])
def test_tiny_backbone_gets_the_half_of_fashion_mnist_it_was_not_trained_on(
    monkeypatch: pytest.MonkeyPatch, backbone: str, expected: int
) -> None:
    def stand_in(root: str | None, split: str) -> tuple[np.ndarray, np.ndarray]:
        count = 30_020 if split == "train" else 30
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[:, 0, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
        return images, np.arange(count) % 10

    monkeypatch.setattr(idx, "load_fashion_mnist", stand_in)
    source = load_images(request("fashion_mnist", backbone=backbone, image_size=28))
    assert len(source.train) == expected
    first = source.train.take(np.array([0])).images[0, 0, 0, :4]
    assert int(np.ascontiguousarray(first).view("<u4")[0]) == 30_020 - expected
    assert bool(source.notes) == (backbone == "tiny")


def test_missing_files_are_named_in_full(tmp_path: Path) -> None:
    for name in ("fashion_mnist", "cifar10", "cifar100"):
        with pytest.raises(DataError, match=str(tmp_path)):
            load_images(request(name, root=str(tmp_path / "gone")))
    with pytest.raises(DataError, match=r"data\.download=true"):
        load_images(request("cifar10", root=str(tmp_path)))
    with pytest.raises(DataError, match=r"set data\.root"):
        load_images(request("cifar100"))


def test_cifar_is_read_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        classes = ("cat", "dog")

        def __init__(self, root: Path, *, train: bool, download: bool) -> None:
            assert not download
            self.data = np.random.default_rng(int(train)).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
            self.targets = [0, 1, 0, 1, 0, 1]

    monkeypatch.setattr("torchvision.datasets.CIFAR10", StandIn)
    source = load_images(request("cifar10", root=str(tmp_path), image_size=32))
    expected = np.random.default_rng(1).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    assert np.array_equal(source.train.take(np.arange(6)).images, expected.transpose(0, 3, 1, 2))
    assert source.classes == ("cat", "dog")
