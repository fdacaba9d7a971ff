"""Bad updates, dying processes, late clients: each loss is named, nothing leaks into the shared state."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import psutil
import pytest

from rayfed.engine import ray_pool
from rayfed.run import main
from tests.engine.runs import FAST, assert_same_bits, results, run_well, start, wait_until

METHOD = "method=tests.engine.faulty:Faulty"


def go(*words):
    """The command in this process, on actors that may have served an earlier run."""
    assert main(list(words)) == 0


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_bad_updates_are_left_out_and_named(tmp_path):
    out = tmp_path / "run"
    faults = "method.faults=[nan:0@1,inf:1@1,huge:2@1,raise:0@2,spare:1@2]"
    done = run_well(METHOD, "engine.pool=local", faults, f"out={out}", *FAST)
    first, second, third = records(out)
    said = {f["client"]: f["message"] for f in first["failures"]}
    assert list(said) == [0, 1, 2]
    for client, what in enumerate(
        ("is not finite", "is not finite", "reaches 1e+30, too large to be a trained adapter")
    ):
        sentence = rf"update refused: shared delta {re.escape(what)} \(in [a-z0-9._]*global[a-z_.]*\)"
        assert re.fullmatch(sentence, said[client]), said[client]
    assert [f["client"] for f in second["failures"]] == [0, 1]
    assert "the client's own mistake" in second["failures"][0]["message"]
    assert "extras ['spare'] where [] are declared" in second["failures"][1]["message"]
    assert third["failures"] == []
    assert "client 0 left out" in done.stderr
    assert json.loads((out / "summary.json").read_text())["failures"] == 5
    _, _, tensors = results(out)
    assert all(bool(t.isfinite().all()) for t in tensors.values())


def test_a_refused_client_leaves_no_private_state_behind(tmp_path):
    out = tmp_path / "run"
    go(METHOD, "engine.pool=local", "method.faults=[nan:0]", f"out={out}", *FAST)
    states = out / "checkpoints" / "clients"
    assert not list((states / "00000").glob("*")) and list((states / "00001").glob("*"))


def test_failed_clients_do_not_count(tmp_path):
    """A round with a refused update equals one in which that client failed before it trained."""
    refused, failed = tmp_path / "refused", tmp_path / "failed"
    for out, faults in ((refused, "nan:0@1,huge:2@1"), (failed, "raise:0@1,raise:2@1")):
        assert main([METHOD, "engine.pool=local", f"method.faults=[{faults}]", f"out={out}", *FAST]) == 0
    first, second = results(refused)[2], results(failed)[2]
    assert first.keys() == second.keys()
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_too_few_good_updates_stop_the_run_with_the_last_state_saved(tmp_path, capsys):
    out = tmp_path / "run"
    faults = "method.faults=[raise:0@2,raise:1@2,raise:2@2]"
    assert main([METHOD, "engine.pool=local", faults, "clients.min_updates=3", f"out={out}", *FAST]) == 1
    assert "round 2 has 1 good updates of 4, below clients.min_updates=3" in capsys.readouterr().err
    assert (out / "checkpoints" / "round_00001" / "manifest.json").exists()
    assert not (out / "summary.json").exists()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults") / "reference"
    flags = tmp_path_factory.mktemp("flags")
    assert main([METHOD, "engine.pool=local", f"method.flags={flags}", "method.once=true", f"out={out}", *FAST]) == 0
    return out, flags


def test_a_killed_client_actor_is_replaced_and_changes_nothing(reference, ray_session, out):
    whole, _ = reference
    flags = out.parent / "flags"
    flags.mkdir()
    words = [METHOD, "clients.actors=2", f"method.flags={flags}", "method.once=true", f"out={out}", *FAST]
    go(*words, "method.faults=[kill:1@2,kill:2@3]")
    assert {p.name for p in flags.iterdir()} == {"kill-1-2", "kill-2-3"}
    assert json.loads((out / "timing.json").read_text())["retried_jobs"] >= 2
    assert_same_bits(whole, out)


def test_a_client_that_always_kills_its_actor_is_lost_alone(ray_session, out, caplog):
    go(METHOD, "clients.actors=2", "method.faults=[kill:1@2]", "engine.retries=1", f"out={out}", *FAST)
    first, second, third = records(out)
    assert [(f["client"], f["error"]) for f in second["failures"]] == [(1, "crashed")]
    assert first["failures"] == third["failures"] == []
    assert "client 1 left out: crashed" in caplog.text


def test_a_late_client_is_named_and_its_answer_never_used(ray_session, out):
    started = time.monotonic()
    go(METHOD, "clients.actors=2", "method.faults=[sleep:2@2]", "clients.deadline_s=12", f"out={out}", *FAST)
    assert time.monotonic() - started < 200
    first, second, third = records(out)
    assert first["failures"] == third["failures"] == []
    assert [(f["client"], f["error"]) for f in second["failures"]] == [(2, "late")]
    assert 2 in third["cohort"]


def test_over_selection_does_not_wait_for_stragglers(ray_session, out):
    started = time.monotonic()
    words = [word for word in FAST if not word.startswith("clients.n=")]
    go(METHOD, "clients.n=4", "clients.per_round=2", "clients.over_select=1", "clients.actors=3",
       "method.faults=[sleep:3]", f"out={out}", *words)  # fmt: skip
    assert time.monotonic() - started < 200
    assert [len(r["cohort"]) for r in records(out)] == [4, 4, 4]
    assert all(r["failures"] == [] for r in records(out))


def test_running_out_of_memory_beside_others_lowers_the_number_side_by_side(reference, ray_session, out, caplog):
    whole, _ = reference
    flags = out.parent / "flags"
    flags.mkdir()
    faults = "method.faults=[memory:0,memory:1,memory:2,memory:3]"
    go(METHOD, "clients.actors=2", faults, f"method.flags={flags}", "engine.retries=4", f"out={out}", *FAST)
    assert "ran out of memory: going on with 1 side by side" in caplog.text
    assert_same_bits(whole, out)


@pytest.mark.parametrize("moment", ["train", "evaluate"])
def test_a_killed_server_actor_costs_only_the_round(moment, reference, ray_session, out):
    whole, _ = reference
    flags = out.parent / "flags"
    flags.mkdir()
    before = servers()
    process = start(METHOD, "clients.actors=2", f"method.flags={flags}", "method.once=true", f"out={out}", *FAST)
    wait_until((out / "checkpoints" / "round_00001" / "manifest.json").exists, process)
    time.sleep(0.15 if moment == "train" else 0.5)
    (server,) = servers() - before
    os.kill(server, signal.SIGKILL)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert "playing the round again" in errors
    assert_same_bits(whole, out)


@pytest.mark.parametrize(
    ("fault", "packets"), [("server@2", "sent ahead"), ("server@2", "with the step"), ("predict", "sent ahead")]
)
def test_who_dies_in_the_server_step_or_while_it_predicts_is_replaced(
    fault, packets, reference, ray_session, out, caplog, monkeypatch
):
    if packets == "with the step":
        monkeypatch.setattr(ray_pool, "SMALL", ray_pool.SMALL_IN_ALL)
    whole, _ = reference
    flags = out.parent / "flags"
    flags.mkdir()
    go(METHOD, "clients.actors=2", f"method.faults=[{fault}]", f"method.flags={flags}", f"out={out}", *FAST)
    assert {p.name for p in flags.iterdir()} == {fault.partition("@")[0]}
    assert ("playing the round again" in caplog.text) == fault.startswith("server")
    assert_same_bits(whole, out)


def servers() -> set[int]:
    found = psutil.process_iter(["cmdline"])
    return {p.pid for p in found if any("ServerActor" in word for word in p.info["cmdline"] or [])}
