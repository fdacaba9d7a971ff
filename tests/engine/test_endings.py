"""A run with a Ray of its own leaves nothing behind, however it ends, and its MLflow run tells how it ended."""

from __future__ import annotations

import os
import signal
import sqlite3
import time

import psutil
import pytest

from tests.engine.runs import FAST, start

WORDS = [word for word in FAST if not word.startswith(("rounds=", "tracking."))]
METHOD = "method=tests.engine.faulty:Faulty"


def family(root: psutil.Process) -> set[psutil.Process]:
    """Every process below ``root``: Ray's own, the actors."""
    try:
        return set(root.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def play(out, *words, end=None):
    """Run to the end (after round 1, ``end`` is called with the process); return status, stderr, and who was there."""
    process = start(*words, f"out={out}", *WORDS, own_group=True)
    root, seen, saved = psutil.Process(process.pid), set(), out / "checkpoints" / "round_00001" / "manifest.json"
    deadline = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < deadline, process.communicate()
        seen |= family(root)
        if end is not None and saved.exists():
            end(process)
            end, deadline = None, time.monotonic() + 40
        time.sleep(0.1)
    return process.returncode, process.communicate()[1], seen


def left(processes, seconds=30):
    """Who of ``processes`` still lives after so long."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def interrupt(process):
    process.send_signal(signal.SIGINT)


def terminate(process):
    process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("words", "end", "code", "status"),
    [
        (["rounds=1"], None, 0, "FINISHED"),
        (["rounds=1", "method.faults=[setup]"], None, 2, "FAILED"),
        (["rounds=2", "method.faults=[raise:0@2,raise:1@2,raise:2@2,raise:3@2]"], None, 1, "FAILED"),
        (["rounds=500", "eval.every=0"], interrupt, 130, "KILLED"),
        (["rounds=500", "eval.every=0"], terminate, 143, "KILLED"),
    ],
    ids=["success", "failed start", "failed round", "ctrl-c", "terminated"],
)
def test_nothing_is_left(words, end, code, status, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = tmp_path / "run"
    returned, errors, seen = play(out, METHOD, *words, end=end)
    assert returned == code and "Traceback" not in errors, errors
    assert len(seen) > 4
    assert not left(seen)
    with sqlite3.connect(out / "mlflow.db") as store:
        assert store.execute("select status from runs").fetchall() == [(status,)]


def test_nothing_is_left_of_a_group_that_is_terminated(monkeypatch, tmp_path):
    """As a batch system or a shell ends a job: Ray's processes are hit too, perhaps before the run could close."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = tmp_path / "run"
    words = [METHOD, "rounds=500", "eval.every=0"]
    returned, _, seen = play(out, *words, end=lambda process: os.killpg(process.pid, signal.SIGTERM))
    assert returned != 0 and not left(seen)
    assert (out / "checkpoints" / "round_00001" / "manifest.json").exists()
