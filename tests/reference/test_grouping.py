"""Which worker trains which client, and in which order, changes no bit of what the methods with two branches leave."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from rayfed.data import build_task_from_options
from rayfed.engine.bench import task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, TrainJob
from rayfed.engine.server import Server

RUNS = {
    "fedsdg": ("method=fedsdg",),
    "fedsdg by agreement": ("method=fedsdg", "method.aggregate=alignment"),
    "fedpurel prompt": ("method=fedpurel", "method.kind=prompt", "method.schedule=interleaved"),
    "fedpurel lora": ("method=fedpurel", "method.kind=lora", "method.schedule=interleaved", "method.dropout=0.2"),
    "fedpurel adapter": ("method=fedpurel", "method.kind=adapter", "method.schedule=interleaved"),
    "fedpurel unrecorded": ("method=fedpurel", "method.schedule=interleaved", "method.record=false"),
}


def play(options, task, folder, groups):
    """One round with one worker for each group of clients; server parameters and private states."""
    server = Server(options, task_view(task), task.proxy)
    workers = [ClientWorker(options, task, folder) for _ in groups]
    private: dict = {}
    for phase in server.bench.method.phases(0, options.rounds):
        broadcast = server.begin(0, phase)
        for worker, clients in zip(workers, groups, strict=True):
            reports, packet = worker.train(broadcast, [TrainJob(c, 1, phase, private.get(c)) for c in clients])
            assert all(isinstance(report, ClientReport) for report in reports), reports
            server.receive(packet)
            private |= {r.client_id: r.state for r in reports if r.state is not None}
        server.finish(phase, (0, 1, 2), (0, 1, 2))
    states = {c: workers[0]._store.load(ref).private for c, ref in private.items()}
    return safetensors.torch.load(server.snapshot()), states


@pytest.fixture(scope="module")
def few(small):
    """A task of one image a class."""
    return build_task_from_options(small("method=fedlora", "data.shots=1"))


@pytest.mark.parametrize("name", RUNS)
def test_same_bits_in_any_grouping(small, few, tmp_path, name):
    options, task = small(*RUNS[name], "train.epochs=1", "data.shots=1"), few
    first, private = play(options, task, tmp_path / "a", [(0, 1, 2)])
    second, others = play(options, task, tmp_path / "b", [(2, 0), (1,)])
    assert first.keys() == second.keys() and private.keys() == others.keys() == {0, 1, 2}
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    for client, value in private.items():
        assert torch.equal(value, others[client]), client
