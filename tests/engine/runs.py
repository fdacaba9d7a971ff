"""Running the command as a user types it, and comparing what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch

ROOT = Path(__file__).parents[2]
FAST = [
    "clients.n=4",
    "data.shots=2",
    "data.test_shots=1",
    "data.proxy=16",
    "rounds=3",
    "train.epochs=1",
    "partition.alpha=0.5",
    "tracking.enabled=false",
]


def start(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, own_group: bool = False
) -> subprocess.Popen[str]:
    """Start ``python -m rayfed.run`` with ``words``, where asked as the first of a group of processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, "-m", "rayfed.run", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, **pipes, text=True, cwd=cwd, env=environment, encoding="utf-8", start_new_session=own_group
    )


def wait_until(found: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    """Wait until ``found``; a process that ended, or took too long, fails the test with what it said."""
    deadline = time.monotonic() + seconds
    while not found():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError("".join(process.communicate()))
        time.sleep(0.02)


def run(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m rayfed.run`` with ``words`` to its end."""
    process = start(*words, env=env, cwd=cwd)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_well(*words: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run to the end and insist on success."""
    done = run(*words, **kwargs)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def results(out: Path) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Summary, per-round figures and every saved tensor of a run."""
    tensors = {
        str(path.relative_to(out / "adapters")) + ":" + name: tensor
        for path in sorted((out / "adapters").rglob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    return (out / "summary.json").read_text("utf-8"), (out / "metrics.jsonl").read_text("utf-8"), tensors


def assert_same_bits(first: Path, second: Path, *, figures: bool = True) -> None:
    """Equal summary, per-round figures (unless evaluated at other rounds) and tensors, to the last bit."""
    summary_a, history_a, tensors_a = results(first)
    summary_b, history_b, tensors_b = results(second)
    assert json.loads(summary_a) == json.loads(summary_b)
    assert summary_a == summary_b
    if figures:
        assert history_a == history_b
    assert tensors_a.keys() == tensors_b.keys()
    different = [name for name in tensors_a if not torch.equal(tensors_a[name], tensors_b[name])]
    assert not different, different[:5]
