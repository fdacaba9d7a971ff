"""Private parameters belong to one client, change only when it trains, and are what the personal figure is made of."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import torch

from rayfed.config import flatten
from rayfed.data import build_task_from_options
from rayfed.data.task import Task
from rayfed.engine.checkpoint import Checkpoints, identity
from rayfed.engine.pool import LocalPool
from rayfed.engine.run import Federation, RoundRecord, state_folder
from rayfed.methods import make_method


class Watch:
    """Remembers every client's private state after each round."""

    def __init__(self) -> None:
        self.federation: Federation | None = None
        self.rounds: list[tuple[tuple[int, ...], dict[int, str]]] = []

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """Nothing."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Note who trained and which states count."""
        assert self.federation is not None
        self.rounds.append((record.cohort, {c: ref.sha256 for c, ref in self.federation.private.items()}))


def play(options, task: Task, out) -> tuple[Federation, Watch]:
    watch = Watch()
    checkpoints = Checkpoints(out, keep=2, options=identity(flatten(options)))
    pool = LocalPool(options, task, state_folder(out))
    federation = Federation(options, task, make_method(options.method), pool, checkpoints, watch)
    watch.federation = federation
    federation.play()
    return federation, watch


@pytest.fixture(scope="module")
def relabelled(small):
    """A task in which each client's classes are permuted its own way: only its own parameters can be right.

    Four clients hold the same four classes, ten images each, with labels shifted by the client's number.
    """
    options = small("method=fedglad", "clients.n=4", "data.shots=20", "data.test_shots=10", "partition=iid",
                    "clients.per_round=2", "rounds=4", "train.epochs=10", "train.lr=0.0005", "method.distill=none",
                    "train.batch=8", "eval.every=0", "method.global_weight=0")  # fmt: skip
    task = build_task_from_options(options)
    import dataclasses

    chosen = [0, 2, 4, 6]  # four colours of one shape: what tells them apart is easily seen

    def shifted(part, name):
        labels = part.labels.copy()
        clients = []
        for k, client in enumerate(task.clients):
            own = getattr(client, name)
            own = own[np.isin(part.labels[own], chosen)]
            labels[own] = [chosen[(chosen.index(c) + k) % 4] for c in part.labels[own]]
            clients.append(own)
        return dataclasses.replace(part, labels=labels), clients

    train, train_of = shifted(task.train, "train")
    test, test_of = shifted(task.test, "test")
    clients = tuple(
        dataclasses.replace(c, train=a, test=b, val=c.val[:0])
        for c, a, b in zip(task.clients, train_of, test_of, strict=True)
    )
    return options, dataclasses.replace(task, train=train, test=test, clients=clients)


def test_personal_parameters_make_the_personal_figure(relabelled, tmp_path):
    options, task = relabelled
    federation, watch = play(options, task, tmp_path)
    figures = federation.history[-1]["evaluation"]
    assert figures["personal"]["acc_macro"] > 0.6
    assert figures["global"]["acc_macro"] < 0.5
    assert figures["personal"]["acc_macro"] > figures["global"]["acc_macro"] + 0.25
    states: dict[int, str] = defaultdict(str)
    for cohort, refs in watch.rounds:
        changed = {c for c, sha in refs.items() if states[c] != sha}
        assert changed == set(cohort)
        states.update(refs)


def test_no_test_image_is_ever_in_a_training_batch(relabelled, tmp_path, monkeypatch):
    options, task = relabelled
    from rayfed.engine.images import ArrayImages

    seen = set()
    original = ArrayImages.batch

    def spy(self, index):
        seen.update(row.tobytes() for row in self._pixels[self._index[index.numpy()]])
        return original(self, index)

    monkeypatch.setattr(ArrayImages, "batch", spy)
    play(options.model_copy(update={"rounds": 1}), task, tmp_path)
    tested = {row.tobytes() for row in task.test.images}
    assert seen and not seen & tested


def test_private_states_are_never_sent(small, task, tmp_path):
    """The packets of a phase hold shared deltas of the declared size and nothing as large as a private state."""
    from rayfed.comms import codec
    from rayfed.engine.bench import task_view
    from rayfed.engine.client import ClientWorker
    from rayfed.engine.jobs import TrainJob
    from rayfed.engine.server import Server

    options = small("method=fedglad")
    worker, server = ClientWorker(options, task, tmp_path), Server(options, task_view(task), task.proxy)
    phase = worker.bench.method.phases(0, 2)[0]
    reports, packet = worker.train(server.begin(0, phase), [TrainJob(c, 1, phase) for c in range(3)])
    private = [worker._store.load(r.state).private for r in reports]
    for _, _, message in packet.items:
        payload = codec.decode(message)
        assert payload.params.numel() == worker.bench.initial[next(iter(worker.bench.initial))].numel()
        assert not any(torch.isin(payload.params, p[p != 0]).all() for p in private)


def test_clients_without_images_are_reported_and_left_out(small, tmp_path):
    from tests.engine.runs import FAST, run_well

    path = tmp_path / "p.json"
    clients = [[], list(range(3)), list(range(3, 43))]
    path.write_text(json.dumps({"clients": [{"train": c} for c in clients]}))
    out = tmp_path / "run"
    words = [w for w in FAST if not w.startswith(("clients.n", "partition", "data.shots"))]
    done = run_well("method=fedglad", "engine.pool=local", "partition=file", f"partition.file={path}", "train.batch=8",
                    "train.drop_last=true", f"out={out}", *words)  # fmt: skip
    assert "clients have no training images: 0" in done.stdout
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(r["cohort"] == [1, 2] for r in records)
    text = (out / "summary.json").read_text()
    assert "NaN" not in text
    rows = (out / "clients.csv").read_text().splitlines()
    assert rows[1].startswith("0,0,")
