"""Base and novel classes: who knows of which, and figures against a plain computation with the finished models."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import rayfed
from rayfed.config import parse_options
from rayfed.data import build_task_from_options
from rayfed.engine.bench import Bench
from rayfed.engine.client import ClientWorker
from rayfed.errors import OptionError
from rayfed.metrics.novel import harmonic_mean, mean_harmonic_mean
from rayfed.run import main
from tests.conftest import SMALL
from tests.engine.runs import assert_same_bits

SPLIT = [*(w for w in SMALL if not w.startswith("rounds")), "rounds=1", "task.split=base_novel"]
BOOSTED = ["partition=dir_boost", "partition.boost=0.5"]


@pytest.fixture(scope="module")
def split(small):
    return build_task_from_options(small("method=fedglad", "task.split=base_novel"))


@pytest.fixture(scope="module")
def boosted(small):
    """Clients whose test images overlap."""
    task = build_task_from_options(small("method=blend", "task.split=base_novel", *BOOSTED))
    image, client = task.tested_pairs()
    assert len(image) > len(np.unique(image)) and np.array_equal(
        np.bincount(client), [len(c.test) for c in task.clients]
    )
    return task


def _counted(asked):
    original = Bench.class_features
    return lambda self, names=None: asked.append(names) or original(self, names)


def test_base_is_the_first_half_and_its_images_are_those_of_the_whole_task(split, task):
    assert split.classes == task.classes[:48] and split.novel.classes == task.classes[48:]
    for part in ("train", "test"):
        labels = getattr(task, part).labels
        assert set(getattr(split, part).hashes) == set(getattr(task, part).hashes[labels < 48])
    assert split.novel.test.labels.max() == 47 and len(split.novel.test) == 48
    assert len(split.train_counts()) == 48


def test_novel_images_and_names_reach_nothing_but_evaluation(split, small, tmp_path, monkeypatch):
    novel = set(split.novel.test.hashes.tolist())
    for part in ("train", "val", "test", "proxy"):
        images = getattr(split, part)
        assert len(images) and not novel & set(images.hashes.tolist())
        assert images.labels.max() < 48
    names = set(split.novel.classes)
    seen = []
    original = ClientWorker._local_job

    def spy(self, job, state):
        made = original(self, job, state)
        seen.append(made)
        return made

    monkeypatch.setattr(ClientWorker, "_local_job", spy)
    asked = []
    monkeypatch.setattr(Bench, "class_features", _counted(asked))
    assert main(["method=fedlora", "method.towers=both", f"out={tmp_path / 'run'}", *SPLIT, "eval.every=0"]) == 0
    assert len(seen) == 3
    for job in seen:
        assert not names & set(json.dumps(dataclasses.asdict(job.task)).split('"'))
        assert job.class_features is None or job.class_features.shape[0] == 48
        assert job.task.classes == split.classes and len(job.task.counts) == 48
        assert not hasattr(job, "novel")
    assert asked[-1] == split.novel.classes and not any(split.novel.classes == a for a in asked[:-1])


@pytest.fixture(scope="module", params=["zero_shot", "local", "fedlora", "fedglad", "fedsdg", "fedpurel", "blend"])
def finished(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / request.param
    words = {
        "fedlora": ["method.towers=both", "train.lr=0.003"],
        "fedpurel": ["method.kind=prompt", "method.schedule=interleaved"],
        "fedsdg": ["method.gate_init=2"],
        "blend": ["method.gamma=0.5", "train.lr=0.01", *BOOSTED],
    }
    assert main([f"method={request.param}", *words.get(request.param, []), f"out={out}", *SPLIT]) == 0
    return out


def test_figures_equal_a_plain_computation(finished, split, boosted):
    """Every figure from loaded models and numpy; none of the engine's evaluation."""
    split = boosted if finished.name == "blend" else split
    summary = json.loads((finished / "summary.json").read_text())
    whole, novel = rayfed.load_run(finished), rayfed.load_run(finished, classes=split.novel.classes)
    models = {
        "global": [(whole, novel)] * 3,
        "personal": [personal(finished, c, split, whole, novel) for c in range(3)],
    }
    for view, clients in models.items():
        rows = [plain(split, c, *pair) for c, pair in enumerate(clients)]
        expected = {key: float(np.mean([r[key] for r in rows])) for key in rows[0]}
        expected["hm"] = 2 * expected["base"] * expected["novel"] / (expected["base"] + expected["novel"])
        assert {key: summary[view][key] for key in expected} == pytest.approx(expected, abs=1e-9), view
    assert all(summary["zero_shot"][key] is not None for key in ("local", "local_own", "held", "base", "novel", "hm"))


def personal(out, client, split, whole, novel):
    if not (out / "adapters" / "clients" / f"{client:05d}.safetensors").exists():
        return whole, novel
    return rayfed.load_run(out, client=client), rayfed.load_run(out, client=client, classes=split.novel.classes)


def plain(split, client, whole, novel):
    own = split.clients[client]
    logits, labels = whole.logits(split.test.images).numpy(), split.test.labels
    held = sorted(set(split.train.labels[own.train].tolist()))
    among_own = np.array(held)[logits[own.test][:, held].argmax(-1)]
    mine = np.isin(labels, held)
    hits = logits.argmax(-1) == labels
    return {
        "local": hits[own.test].mean(),
        "local_own": (among_own == labels[own.test]).mean(),
        "held": hits[mine].mean(),
        "base": hits.mean(),
        "novel": (novel.logits(split.novel.test.images).argmax(-1).numpy() == split.novel.test.labels).mean(),
    }


def test_evaluation_frequency_changes_no_bit(tmp_path):
    words = ["method=fedsdg", *(w for w in SPLIT if not w.startswith("rounds")), "rounds=2"]
    assert main([*words, f"out={tmp_path / 'a'}"]) == 0
    assert main([*words, "eval.every=0", f"out={tmp_path / 'b'}"]) == 0
    assert_same_bits(tmp_path / "a", tmp_path / "b", figures=False)
    first, last = (json.loads(line)["evaluation"] for line in (tmp_path / "a" / "metrics.jsonl").open())
    assert first["personal"]["novel"] is None and first["global"]["novel"] is not None
    assert last["personal"]["novel"] is not None


def test_class_texts_are_encoded_only_when_text_parameters_changed(tmp_path, monkeypatch):
    counts = []
    from rayfed.backbones.base import Backbone

    original = Backbone.encode_text
    monkeypatch.setattr(Backbone, "encode_text", lambda self, t: counts.append(len(t)) or original(self, t))
    rounds = [w for w in SPLIT if not w.startswith("rounds")] + ["rounds=2"]
    assert main(["method=fedlora", f"out={tmp_path / 'a'}", *rounds]) == 0
    # The probe of what they depend on, then base and novel names, each also for zero-shot, whatever the rounds.
    assert counts == [48] * 5
    asked = []
    monkeypatch.setattr(Bench, "class_features", _counted(asked))
    assert main(["method=fedlora", "method.towers=both", "train.lr=1e-3", f"out={tmp_path / 'b'}", *rounds]) == 0
    # Base at the start and, after every round, of each trained client (its own parameters), then base and novel of the
    # new parameters; the next round starts from these and asks for nothing again.
    assert len(asked) == 1 + 2 * (3 + 2)


def test_what_cannot_be_split_is_refused_in_one_sentence():
    for words, message in (
        (["method=fedlora", "backbone=vit_tiny_patch16_224", "backbone.pretrained=none"], "has no text tower"),
        (["method=fedlora", "method.logit_adjustment=1"], "needs training images of every class"),
    ):
        with pytest.raises(OptionError, match=message) as error:
            parse_options([*words, "task.split=base_novel"])
        assert len(str(error.value).splitlines()) == 1


def test_harmonic_means_are_taken_per_data_set():
    assert harmonic_mean(0.8, 0.6) == pytest.approx(2 / (1 / 0.8 + 1 / 0.6)) and harmonic_mean(0, 0) == 0
    pairs = [(0.9, 0.5), (0.6, 0.8)]
    assert mean_harmonic_mean(pairs) == pytest.approx(np.mean([2 / (1 / b + 1 / n) for b, n in pairs]))
    with pytest.raises(ValueError, match="at least one pair"):
        mean_harmonic_mean([])
