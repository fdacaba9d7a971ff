"""Same seed, same bits: in this process, on 1, 2 and 4 actors, any evaluation frequency, interrupted or not."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from rayfed.engine import ray_pool
from rayfed.engine.jobs import TrainJob
from rayfed.engine.slots import Call
from rayfed.run import main
from tests.engine.runs import FAST, assert_same_bits, run, run_well, start, wait_until

CASES: dict[str, tuple[str, ...]] = {
    "fedglad": ("method=fedglad",),
    "fedsdg": ("method=fedsdg",),
    "fedsdg by agreement": ("method=fedsdg", "method.aggregate=alignment", "method.gate=block"),
    "fedpurel": ("method=fedpurel",),
    "fedpurel, prompt": ("method=fedpurel", "method.kind=prompt"),
    "fedpurel, adapter": ("method=fedpurel", "method.kind=adapter", "method.schedule=interleaved"),
    "feddtl": ("method=feddtl", "method.sft_rounds=1"),
    "blend": ("method=blend",),
    "mma": ("method=mma",),
    "half of the clients": ("method=fedsdg", "clients.per_round=2"),
    "fedlora": ("method=fedlora",),
    "local": ("method=local",),
    "zero_shot": ("method=zero_shot",),
}


def go(*words: str) -> None:
    """The command in this process, which has torch and Ray loaded already."""
    assert main(list(words)) == 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One in-process run per case."""
    folder = tmp_path_factory.mktemp("reference")
    for case, words in CASES.items():
        go(*words, "engine.pool=local", f"out={folder / case}", *FAST)
    return {case: folder / case for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_ray_equals_in_process(case, reference, ray_session, out):
    go(*CASES[case], "clients.actors=2", f"out={out}", *FAST)
    assert_same_bits(reference[case], out)


@pytest.mark.parametrize(
    ("case", "actors"),
    [
        ("fedglad", 1),
        ("fedglad", 4),
        ("half of the clients", 1),
        ("fedsdg by agreement", 4),
        ("fedpurel, adapter", 4),
        ("feddtl", 4),
        ("blend", 4),
    ],
)
def test_number_of_actors_does_not_matter(case, actors, reference, ray_session, out):
    go(*CASES[case], f"clients.actors={actors}", f"out={out}", *FAST)
    assert_same_bits(reference[case], out)


@pytest.mark.parametrize(
    ("small", "in_all", "ahead"), [(0, 0, "all"), (2**30, 2**30, "none"), (2**30, 600_000, "some")]
)
def test_packets_sent_ahead_and_those_that_wait_for_the_server_step_make_the_same_bits(
    small, in_all, ahead, reference, ray_session, out, monkeypatch
):
    monkeypatch.setattr(ray_pool, "SMALL", small)
    monkeypatch.setattr(ray_pool, "SMALL_IN_ALL", in_all)
    calls = []

    def call(*args, **kwargs):
        calls.append(Call(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(ray_pool, "Call", call)
    go(*CASES["fedglad"], "clients.actors=2", "eval.every=0", f"out={out}", *FAST)
    assert_same_bits(reference["fedglad"], out, figures=False)
    trained = sum(call.kind == "work" and isinstance(call.jobs[0], TrainJob) for call in calls)
    sent = sum(call.kind == "delivery" for call in calls)
    assert trained and {"all": sent == trained, "none": sent == 0, "some": 0 < sent < trained}[ahead]


@pytest.mark.parametrize("case", ["fedglad", "fedpurel, prompt", "feddtl", "blend"])
def test_evaluation_frequency_does_not_matter(case, reference, out):
    go(*CASES[case], "engine.pool=local", "eval.every=0", f"out={out}", *FAST)
    assert_same_bits(reference[case], out, figures=False)


@pytest.mark.parametrize("case", [case for case in CASES if case != "zero_shot"])
def test_a_run_cut_short_goes_on_to_the_same_bits(case, reference, out):
    shutil.copytree(reference[case], out)
    shutil.rmtree(out / "checkpoints" / "round_00003")
    shutil.rmtree(out / "adapters")
    (out / "summary.json").unlink()
    go(*CASES[case], "engine.pool=local", f"out={out}", *FAST, "resume=auto")
    assert_same_bits(reference[case], out)


@pytest.mark.parametrize(
    ("case", "pool"), [("fedglad", "ray"), ("fedglad", "local"), ("fedsdg", "local"), ("fedpurel", "local")]
)
def test_killed_driver_resumes_to_the_same_bits(case, pool, reference, ray_session, out):
    words = [*CASES[case], f"engine.pool={pool}", f"out={out}", *FAST]
    process = start(*words)
    wait_until((out / "checkpoints" / "round_00002" / "manifest.json").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "summary.json").exists()
    done = run_well(*words, "resume=auto")
    assert "resumed after round 2" in done.stdout
    assert_same_bits(reference[case], out)


def test_more_rounds_after_a_finished_run_equal_one_go(reference, out):
    words = [word for word in FAST if not word.startswith("rounds")]
    # Warm-up follows the number of rounds; without it the first rounds of a longer run are the same.
    go("method=fedlora", "engine.pool=local", f"out={out}", *words, "rounds=1")
    go("method=fedlora", "engine.pool=local", f"out={out}", *words, "rounds=3", "resume=auto")
    summary = (out / "summary.json").read_text()
    assert '"rounds": 3' in summary
    done = run("method=fedlora", "engine.pool=local", f"out={out}", *words, "rounds=2", "resume=auto")
    assert done.returncode == 2 and "rounds=2 is below the 3 rounds already played" in done.stderr
    assert_same_bits(reference["fedlora"], out, figures=False)


def test_a_cut_checkpoint_is_passed_over(reference, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["method=fedglad", "engine.pool=local", f"out={out}", *FAST]
    go(*words)
    newest = out / "checkpoints" / "round_00003" / "server.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    go(*words, "resume=auto")
    assert "resumed after round 2; passed over round_00003: the server state is damaged" in capsys.readouterr().out
    assert_same_bits(reference["fedglad"], out)


def test_resume_refuses_other_options_and_a_used_folder(reference):
    out = reference["fedlora"]
    done = run("method=fedlora", "engine.pool=local", f"out={out}", *FAST)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    done = run("method=fedlora", "engine.pool=local", f"out={out}", "resume=auto", "train.lr=0.5", *FAST)
    assert done.returncode == 2 and "train.lr was 3e-05 and is now 0.5" in done.stderr
