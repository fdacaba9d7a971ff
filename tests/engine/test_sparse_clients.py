"""Clients that lack classes or test images: finite losses, "n/a" instead of 0 or NaN, and words for what is missing."""

from __future__ import annotations

import contextlib
import csv
import io
import json

import numpy as np
import pytest

from rayfed.data import datasets
from rayfed.run import main
from tests.engine.runs import FAST

WORDS = [w for w in FAST if not w.startswith(("clients.n", "partition", "data.shots", "data.test_shots"))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Client 0 has classes 0 and 1, client 1 only class 2, client 2 no test picture; class sizes differ 20-fold."""
    folder = tmp_path_factory.mktemp("sparse")
    path, out = folder / "split.json", folder / "run"
    source = datasets.load_images(datasets.Request("shapes", None, 32, "tiny"))
    train, test = ([np.flatnonzero(pool.labels == c) for c in range(5)] for pool in (source.train, source.test))
    clients = [
        {"train": [*train[0][:20].tolist(), int(train[1][0])], "test": [*test[0][:2].tolist(), *test[1][:2].tolist()]},
        {"train": train[2][:5].tolist(), "test": test[2][:2].tolist()},
        {"train": [int(train[3][0]), int(train[4][0])], "test": []},
    ]
    path.write_text(json.dumps({"clients": clients}))
    words = ["method=fedlora", "method.logit_adjustment=1.0", "engine.pool=local", "partition=file"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*words, f"partition.file={path}", f"out={out}", *WORDS]) == 0
    return out, printed.getvalue()


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_nothing_is_undefined(finished):
    for name in ("summary.json", "metrics.jsonl", "clients.csv", "classes.csv"):
        text = (finished[0] / name).read_text("utf-8")
        assert "NaN" not in text and "nan" not in text.split(",") and "inf" not in text.lower().split(",")
    records = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(r["clients"]["loss_ce"]) and not r["failures"] for r in records)


def test_what_a_client_lacks_is_not_applicable(finished):
    clients = rows(finished[0] / "clients.csv")
    assert [c["num_test"] for c in clients] == ["4", "2", "0"]
    assert clients[2]["personal"] == clients[2]["global"] == "n/a"
    held = [float(c["personal"]) for c in clients[:2]]
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary["personal"]["acc_macro"] == pytest.approx(sum(held) / 2)
    classes = rows(finished[0] / "classes.csv")
    assert [c["num_train"] for c in classes[:6]] == ["20", "1", "5", "1", "1", "0"]
    assert all(c["global"] == "n/a" for c in classes[3:]), "a class without test picture at a client has no accuracy"


def test_missing_test_images_are_said(finished):
    assert "1 of 3 clients have no test images: 2." in finished[1]
