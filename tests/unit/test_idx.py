"""IDX files, whole and damaged, and finding Fashion-MNIST."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from rayfed.data.idx import FASHION_CLASSES, find_fashion_mnist, load_fashion_mnist, read_idx
from rayfed.errors import DataError


def idx_bytes(array: np.ndarray) -> bytes:
    sides = b"".join(int(side).to_bytes(4, "big") for side in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sides + array.astype(np.uint8).tobytes()


def write_fashion(folder: Path, zipped: bool) -> None:
    folder.mkdir(parents=True)
    for prefix, count in (("train", 3), ("t10k", 2)):
        images = np.arange(count * 784).reshape(count, 28, 28) % 251
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count) + 7)):
            data = idx_bytes(array)
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 28, 28)])
def test_idx_file_is_read_in_its_shape(tmp_path: Path, zipped: bool, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    data = idx_bytes(array)
    (tmp_path / "file").write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    np.testing.assert_array_equal(read_idx(tmp_path / "file"), array, strict=True)


WHOLE = idx_bytes(np.arange(24).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:-1], "declares 2 x 3 x 4 bytes but holds 23"),
        (WHOLE + b"\0", "holds 25"),
        (WHOLE[:10], "ends within its 16-byte IDX header"),
        (b"\0\0\x0d" + WHOLE[3:], "starts with 00 00 0d 03"),
        (b"<htm" + WHOLE[4:], "not the 00 00 08 of an IDX file"),
        (b"", "starts with nothing"),
        (gzip.compress(WHOLE, mtime=0)[:-9], "damaged gzip"),
        (gzip.compress(WHOLE[:-1], mtime=0), "holds 23"),
    ],
)
def test_damaged_idx_file_is_explained(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(caught.value)


def test_absent_idx_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "nowhere")


@pytest.mark.parametrize("layout", ["", "FashionMNIST/raw", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_found_in_every_layout(tmp_path: Path, layout: str, zipped: bool) -> None:
    root = tmp_path / "data"
    write_fashion(root / layout, zipped)
    assert find_fashion_mnist(str(root)) == root / layout
    images, labels = load_fashion_mnist(str(root), "train")
    assert images.shape == (3, 28, 28) and labels.tolist() == [7, 8, 9] and labels.dtype == np.int64
    assert load_fashion_mnist(str(root), "test")[1].tolist() == [7, 8]


def test_missing_fashion_mnist_says_what_and_how(tmp_path: Path) -> None:
    write_fashion(tmp_path / "fashion-mnist", zipped=True)
    (tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as caught:
        find_fashion_mnist(str(tmp_path))
    for part in (str(tmp_path / "FashionMNIST/raw"), "t10k-labels-idx1-ubyte", "apt-get install dataset-fashion-mnist"):
        assert part in str(caught.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_fashion(tmp_path / "x", zipped=False)
    (tmp_path / "x/train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(4)))
    with pytest.raises(DataError, match=r"labels of shape \(4,\)"):
        load_fashion_mnist(str(tmp_path / "x"), "train")
    with pytest.raises(DataError, match="no split 'validation'"):
        load_fashion_mnist(str(tmp_path / "x"), "validation")  # type: ignore[arg-type]


def test_there_are_ten_different_fashion_classes() -> None:
    assert len(set(FASHION_CLASSES)) == 10 and FASHION_CLASSES[9] == "ankle boot"
