"""Class names, paths and prompts with any sign in them, in a locale that knows none of them."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image

from tests.engine.runs import run_well

NAMES = ["café", "狗", "naïve 🐶", "a$b_{c}", 'x,"y"', "it's 100%", "AT&T"]
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("données") / "α β"  # noqa: RUF001
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for name in NAMES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


WORDS = [
    "method=fedglad",
    "engine.pool=local",
    "data=folder",
    "clients.n=2",
    "partition=iid",
    "rounds=1",
    "train.epochs=1",
    "data.proxy=4",
    "data.template=a photo of a {}, a type of thing.",
]


def test_any_sign_survives_any_locale(pictures, out):
    done = run_well(*WORDS, f"data.root={pictures}", f"out={out}", env=PLAIN)
    assert "Traceback" not in done.stderr
    task = json.loads((out / "task.json").read_text("utf-8"))
    assert sorted(task["classes"]) == sorted(NAMES)
    with (out / "classes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == task["classes"]
    assert task["template"] == "a photo of a {}, a type of thing."
    assert f"root: {pictures}" in (out / "config.yaml").read_text("utf-8")
    assert (out / "plots" / "partition.png").stat().st_size > 5000


def test_classes_that_read_alike_are_kept_by_number_and_named(pictures, tmp_path, capsys):
    from rayfed.run import main

    root = tmp_path / "alike"
    for split in ("train", "test"):
        for name in ("new_york", "new york", "Dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(4):
                pixels = np.random.default_rng([len(split), *name.encode(), index]).integers(0, 256, (32, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    out = tmp_path / "run"
    assert main([*WORDS, f"data.root={root}", "method.distill=none", f"out={out}", "tracking.enabled=false"]) == 0
    printed = capsys.readouterr().out
    assert "read alike" in printed and "'new york'" in printed and "'new_york'" in printed
    assert len((out / "classes.csv").read_text().splitlines()) == 4


def test_a_damaged_picture_stops_before_training_with_its_path(pictures, tmp_path, capsys):
    import shutil

    from rayfed.run import main

    root = tmp_path / "damaged"
    shutil.copytree(pictures, root)
    bad = root / "train" / NAMES[0] / "0.png"
    bad.write_bytes(bad.read_bytes()[:60])
    words = [*WORDS, f"data.root={root}", "tracking.enabled=false"]
    assert main([*words, f"out={tmp_path / 'stop'}"]) == 2
    assert str(bad) in capsys.readouterr().err
    assert main([*words, "data.bad=skip", f"out={tmp_path / 'skip'}"]) == 0
    assert str(bad) in capsys.readouterr().out
