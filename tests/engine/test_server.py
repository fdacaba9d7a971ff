"""What counts in a phase: accepted clients of this very phase, once each, whatever else arrives."""

from __future__ import annotations

import math

import pytest
import torch

from rayfed.aggregation.exact import ExactSum, weighted_mean
from rayfed.engine import memory
from rayfed.engine.bench import task_view
from rayfed.engine.client import ClientWorker
from rayfed.engine.jobs import ClientReport, TrainJob
from rayfed.engine.memory import Need
from rayfed.engine.packing import Packing, Update
from rayfed.engine.server import Server
from rayfed.errors import ResourceError, RoundError
from rayfed.messages import ClientFailure, Payload, Phase, RoundRef
from rayfed.methods.base import ClientResult, FitReport

METHOD = "method=tests.engine.faulty:Faulty"


@pytest.fixture
def pair(small, task, tmp_path):
    options = small(METHOD)
    return ClientWorker(options, task, tmp_path), Server(options, task_view(task), task.proxy)


def trained(worker, server, broadcast, clients):
    phase = worker.bench.method.phases(0, 2)[0]
    outcomes, packet = worker.train(broadcast, [TrainJob(c, 1, phase) for c in clients])
    assert all(isinstance(outcome, ClientReport) for outcome in outcomes)
    return outcomes, packet


def finished(server, packets, accepted):
    phase = server.bench.method.phases(0, 2)[0]
    for packet in packets:
        server.receive(packet)
    server.finish(phase, (0, 1, 2), accepted)
    return server.state.shared


def test_grouping_of_clients_over_packets_changes_no_bit(small, task, tmp_path):
    results = []
    for groups in ([[0, 1, 2]], [[2], [0, 1]], [[1], [2], [0]]):
        options = small(METHOD)
        worker, server = ClientWorker(options, task, tmp_path), Server(options, task_view(task), task.proxy)
        phase = worker.bench.method.phases(0, 2)[0]
        broadcast = server.begin(0, phase)
        packets = [trained(worker, server, broadcast, group)[1] for group in groups]
        results.append(finished(server, packets, (0, 1, 2)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_job_done_twice_is_a_job_done_once(pair):
    """A reply that was lost is answered again with the same bits, and counts once even if both arrive."""
    worker, server = pair
    phase = worker.bench.method.phases(0, 2)[0]
    broadcast = server.begin(0, phase)
    first, packet = trained(worker, server, broadcast, [0, 1])
    again, repeated = trained(worker, server, broadcast, [0, 1])
    assert [r.state for r in first] == [r.state for r in again]
    assert torch.equal(packet.folded.total, repeated.folded.total)
    once = finished(server, [packet, repeated], (0, 1))
    expected = worker.bench.initial[next(iter(worker.bench.initial))] + packet.folded.mean()
    assert torch.equal(once, expected)


def test_late_and_unwanted_answers_are_not_mixed_in(pair):
    worker, server = pair
    phase = worker.bench.method.phases(0, 2)[0]
    _, old = trained(worker, server, server.begin(0, phase), [0])
    finished(server, [old], (0,))
    broadcast = server.begin(1, phase)
    _, wanted = trained(worker, server, broadcast, [1])
    _, beyond = trained(worker, server, broadcast, [2])
    before = server.state.shared
    after = finished(server, [old, wanted, beyond], (1,))
    assert torch.equal(after, before + wanted.folded.mean())


def test_an_accepted_update_that_is_not_there_stops_the_round(pair):
    worker, server = pair
    phase = worker.bench.method.phases(0, 2)[0]
    _, packet = trained(worker, server, server.begin(0, phase), [0])
    server.receive(packet)
    with pytest.raises(RoundError, match=r"updates of clients \[2\] never reached the server"):
        server.finish(phase, (0, 2), (0, 2))


def test_a_phase_in_which_nobody_made_a_step_changes_nothing(pair):
    _, server = pair
    phase = server.bench.method.phases(0, 2)[0]
    before, version = server.state.shared, server.state.version
    server.begin(0, phase)
    server.finish(phase, (), ())
    assert server.state.version == version and torch.equal(server.state.shared, before)


def test_snapshot_and_restore_give_the_same_state(pair, small, task):
    worker, server = pair
    phase = worker.bench.method.phases(0, 2)[0]
    _, packet = trained(worker, server, server.begin(0, phase), [0, 1])
    finished(server, [packet], (0, 1))
    server.state = server.state.step(server.state.shared, teacher=torch.arange(3.0))
    other = Server(small(METHOD), task_view(task), task.proxy)
    other.restore(server.snapshot())
    assert other.state.version == server.state.version
    assert torch.equal(other.state.shared, server.state.shared)
    assert torch.equal(other.state.extras["teacher"], torch.arange(3.0))


def packed(deltas, counts, judge):
    """Outcomes and packet of clients that made these deltas [1000] on so many images."""
    packing = Packing(ExactSum.zeros(1000), judge)
    for client, (delta, count) in enumerate(zip(deltas, counts, strict=True)):
        result = ClientResult(FitReport(1, count, {"ce": 0.5}))
        packing.add(Update(TrainJob(client, 0, Phase()), result, Payload(delta), None, None, 0.25))
    return packing.close(RoundRef(0, "train", 0))


def test_a_packet_holds_every_update_however_many_are_added_up_at_once():
    """66 of this size are added up together: 150 leave a remainder."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(1000, generator=generator) for _ in range(150)]
    counts = [client % 7 for client in range(150)]
    outcomes, packet = packed(deltas, counts, Update.told)
    assert [outcome.metrics["update_norm"] for outcome in outcomes] == [float(delta.norm()) for delta in deltas]
    assert packet.clients == tuple(range(150)) and packet.items == ()
    assert torch.equal(packet.folded.mean(), weighted_mean(deltas, counts))


def test_a_refused_update_is_left_out_of_the_sum_of_those_it_came_with():
    deltas = [torch.full((1000,), float(value)) for value in (1, 2, float("nan"), 4)]

    def judge(update, norm):
        problem = ClientFailure(RoundRef(0, "train", 0), update.job.client_id, "NonFiniteError", "not finite")
        return update.told(norm) if math.isfinite(norm) else problem

    outcomes, packet = packed(deltas, [3] * 4, judge)
    assert [type(outcome) for outcome in outcomes] == [ClientReport, ClientReport, ClientFailure, ClientReport]
    assert packet.clients == (0, 1, 3)
    assert packet.folded.weight == 9 and torch.equal(packet.folded.mean(), torch.full((1000,), 7 / 3))


def test_figures_that_cannot_be_told_are_that_client_s_failure_alone(small, task, tmp_path, monkeypatch):
    server = Server(small(METHOD), task_view(task), task.proxy)
    worker = ClientWorker(small(METHOD), task, tmp_path)
    step = worker.bench.method.client_step

    def odd(model, job):
        result = step(model, job)
        return ClientResult(FitReport(1, 1, None), result.upload, result.keep) if job.client_id == 1 else result

    monkeypatch.setattr(worker.bench.method, "client_step", odd)
    phase = server.bench.method.phases(0, 2)[0]
    outcomes, packet = worker.train(server.begin(0, phase), [TrainJob(c, 1, phase) for c in range(3)])
    assert [type(outcome) for outcome in outcomes] == [ClientReport, ClientFailure, ClientReport]
    assert packet.clients == (0, 2) and outcomes[1].error_type == "AttributeError"


def test_a_rehearsal_tells_what_it_took_and_changes_nothing(small, task, tmp_path, monkeypatch):
    server = Server(small(METHOD), task_view(task), task.proxy)
    phase = server.bench.method.phases(0, 2)[0]
    broadcast, job = server.begin(0, phase), TrainJob(1, 1, phase)
    plain, rehearsed = (ClientWorker(small(METHOD), task, tmp_path / name) for name in ("plain", "rehearsed"))
    assert rehearsed.rehearse(broadcast, job) is None, "the CPU has no card"
    monkeypatch.setattr(memory, "total", lambda device: 1000)
    monkeypatch.setattr(memory, "most", lambda device: 400)
    assert rehearsed.rehearse(broadcast, job) == Need(400, 1000)
    (one, _), (other, _) = (worker.train(broadcast, [job]) for worker in (plain, rehearsed))
    assert one[0].metrics == other[0].metrics and one[0].state == other[0].state

    def runs_out(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(rehearsed.bench.method, "client_step", runs_out)
    with pytest.raises(ResourceError, match=r"one client alone ran out of memory \(no room\): lower train\.batch"):
        rehearsed.rehearse(broadcast, job)
