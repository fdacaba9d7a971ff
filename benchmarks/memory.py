"""Resident memory and processes over many rounds: ``python -m benchmarks.memory [rounds [name=value ...]]``.

    python -m benchmarks.memory 50                  a small run of 50 rounds
    python -m benchmarks.memory 8 method=fedglad    the main job

A real run on Ray in a process of its own; its driver, worker and server processes are looked at all the time.
Prints memory after round 5 and after the last one, the peak, and the time to the end of the first round.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.studies.cells import ENVIRONMENT

WORDS = [
    "method=fedglad",
    "clients.n=10",
    "data.shots=2",
    "data.test_shots=1",
    "data.proxy=16",
    "train.epochs=1",
]


def tree(root: psutil.Process) -> list[psutil.Process]:
    """The run's own processes: driver, workers, server (Ray's daemons are not ours)."""
    found = [root]
    for process in root.children(recursive=True):
        try:
            if any(name in " ".join(process.cmdline()) for name in ("ClientActor", "ServerActor")):
                found.append(process)
        except psutil.Error:
            continue
    return found


def resident(processes: list[psutil.Process]) -> float:
    """MiB of unique memory (what would be free if they ended)."""
    total = 0.0
    for process in processes:
        try:
            total += process.memory_full_info().uss / 2**20
        except psutil.Error:
            continue
    return total


def main() -> None:
    """Run, watch, print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    started = time.monotonic()
    samples: dict[int, tuple[float, int]] = {}
    peak, first = 0.0, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        words = [*(sys.argv[2:] or WORDS), "tracking.enabled=false", f"rounds={rounds}", f"out={out}"]
        command = [sys.executable, "-m", "rayfed.run", *words]
        run = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        root, log = psutil.Process(run.pid), out / "metrics.jsonl"
        while run.poll() is None:
            done = log.read_text("utf-8").count("\n") if log.exists() else 0
            first = first or (time.monotonic() - started if done else 0.0)
            processes = tree(root)
            now = resident(processes)
            peak = max(peak, now)
            if done not in samples:
                samples[done] = now, len(processes)
            time.sleep(0.2)
    last = max(done for done in samples if done < rounds)  # after the last round the pool is ended
    (early, before), (late, after) = samples[5], samples[last]
    print(f"after round 5: {early:.0f} MiB in {before} processes")
    print(f"after round {last}: {late:.0f} MiB in {after} ({100 * (late / early - 1):+.1f} %)")
    print(f"peak {peak:.0f} MiB; end of the first round after {first:.1f} s; {time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
