"""The commands as documented, on a real local cluster: job submission, its status, its results, and how runs end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rayfed.run import main
from tests.cli import clusters
from tests.cli.clusters import RAY
from tests.cli.one_machine_ray import MARK, processes_of
from tests.engine.runs import FAST, ROOT, assert_same_bits, start, wait_until

REAL = os.environ.get("RAYFED_REAL_CLUSTER") == "1"
"""Whether `ray up` makes the cluster, over ssh to this machine; else it is `ray start --head`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with token authentication on loopback; the environment of a user who submits to it."""
    make = clusters.launched if REAL else clusters.started
    with make(tmp_path_factory.mktemp("cluster")) as environment:
        yield environment


UPLOAD = ("--working-dir", ".")
OURS = ("rayfed.run", "ClientActor", "ServerActor")
"""What the processes of a run have in their command lines."""


def submit(cluster, cwd, *words, flags=UPLOAD, module="rayfed.run"):
    """``ray job submit``; a head node that has just started has no agent for jobs yet, and says so."""
    command = [*RAY, "job", "submit", *flags, "--", "python", "-m", module, *words]
    for _ in range(8):
        done = subprocess.run(
            command, cwd=cwd, env=cluster, capture_output=True, text=True, timeout=300, encoding="utf-8", check=False
        )
        if "No available agent" not in done.stdout + done.stderr:
            break
        time.sleep(3)
    return done


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """An ordinary checkout: tracked files, a large .git, data beside it."""
    folder = tmp_path_factory.mktemp("checkout") / "ray fed"
    folder.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for name, size in ((".git/objects/pack", 60), ("data/many", 60), ("outputs/old", 60)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size << 20))
    return folder


TEMPLATE = 'a photo of a {}, it\'s "of course".'


def test_submitted_job_succeeds_and_its_results_outlive_it(cluster, checkout, tmp_path):
    words = ["method=fedglad", f"data.template={TEMPLATE}", *[w for w in FAST if w != "rounds=3"], "rounds=2"]
    done = submit(cluster, checkout, "out=results/é x", *words)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "succeeded" in text, text[-3000:]
    assert "round 1/2" in text  # logs are followed
    out = Path(cluster["RAYFED_HOME"]) / "results" / "é x"
    assert f"results: {out}" in done.stdout[done.stdout.rindex("bytes up") :]
    assert (out / "summary.json").exists()
    direct = tmp_path / "direct"
    assert main([*words, "engine.pool=local", f"out={direct}"]) == 0
    assert_same_bits(direct, out)
    settings = [yaml.safe_load((folder / "config.yaml").read_text("utf-8")) for folder in (direct, out)]
    assert settings[0]["data"] == settings[1]["data"] and settings[1]["data"]["template"] == TEMPLATE
    assert upload_size(cluster) < 20 * 2**20


def upload_size(cluster) -> int:
    """Bytes of the uploaded working directory, from the package Ray keeps."""
    packages = Path(cluster["RAYFED_TEMPORARY"]).glob("session_*/runtime_resources/working_dir_files/_ray_pkg_*")
    folders = [p for p in packages if p.is_dir()]
    assert folders
    return max(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders)


def test_failing_job_ends_failed_and_says_which_path_was_tried_where(cluster, checkout):
    done = submit(cluster, checkout, "method=fedlora", "data=folder", "data.root=./data/my pets", "rounds=1")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "failed" in text
    tried = re.search(r"error: The data folder '.*/_ray_pkg_\w+/data/my pets' is not there on node (\S+);", text)
    assert tried and tried[1] == socket.gethostname(), text[-3000:]


def test_a_sweep_whose_trials_all_fail_is_a_failed_job(cluster, checkout):
    words = ["method=tests.engine.faulty:Faulty", "method.faults=[raise:0@1,raise:1@1,raise:2@1,raise:3@1]"]
    grid = ["train.lr=grid(1,2,3)", "tune.concurrent=1", "engine.pool=local"]
    done = submit(cluster, checkout, *words, *grid, *FAST, module="rayfed.tune")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "failed" in text, text[-3000:]
    assert "no valid trial: 0 of 3 finished" in text
    assert all(f"trial {index} failed: RoundError" in text for index in range(3))


def test_stopped_job_ends_in_order(cluster, checkout):
    """`ray job stop`: within 30 s the run is closed, also in the tracking store, and none of its processes is left."""
    words = [w for w in FAST if not w.startswith(("rounds=", "tracking."))]
    out = Path(cluster["RAYFED_HOME"]) / "stopped"
    done = submit(
        cluster, checkout, "method=fedglad", "out=stopped", "rounds=500", "eval.every=0", *words,
        flags=["--no-wait", "--submission-id=stopped", *(() if REAL else UPLOAD)],  # ray up has put rayfed there
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "round_00001" / "manifest.json").exists():
        assert time.monotonic() < deadline, clusters.ray(cluster, "job", "logs", "stopped").stdout
        time.sleep(0.1)
    asked = time.monotonic()
    stop = clusters.ray(cluster, "job", "stop", "stopped")
    assert stop.returncode == 0 and "was stopped" in stop.stdout + stop.stderr, stop.stdout + stop.stderr
    while ours := [line for line in commands(cluster) if any(w in line for w in OURS)]:
        assert time.monotonic() < asked + 30, ours
        time.sleep(0.2)
    with sqlite3.connect(out / "mlflow.db") as store:
        assert store.execute("select status from runs").fetchall() == [("KILLED",)]


def commands(cluster) -> list[str]:
    """The command lines of the cluster's processes."""
    return [" ".join(process.cmdline()) for process in processes_of(cluster[MARK])]


def test_what_the_cluster_can_never_give_is_refused(ray_session, capsys):
    for words, sentence in (
        (["clients.gpu=4"], "clients.gpu=4 can never be met: the largest node has 0 GPUs"),
        (["clients.gpu=0.5"], "use clients.gpu=0, or join a cluster with GPUs"),
        (["clients.cpu=99"], "clients.cpu=99 can never be met: the largest node has 16 CPUs"),
        (["server.gpu=1"], "server.gpu=1 can never be met"),
    ):
        from tests.engine.runs import run

        done = run("method=fedglad", *words)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_no_process_and_can_go_on(kind, ray_session, out):
    before = workers()
    process = start("method=fedglad", f"out={out}", "clients.actors=2", *FAST)
    wait_until((out / "checkpoints" / "round_00001" / "manifest.json").exists, process)
    process.send_signal(kind)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if kind == signal.SIGINT else 143), output + errors
    assert "Traceback" not in errors, errors
    deadline = time.monotonic() + 30
    while workers() - before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not workers() - before
    assert (out / "checkpoints" / "round_00001" / "manifest.json").exists()


def workers() -> set[int]:
    """Process ids of client and server actors; some wait for the next test."""
    found = ((p.pid, " ".join(p.info["cmdline"] or [])) for p in psutil.process_iter(["cmdline"]))
    return {pid for pid, line in found if any(name in line for name in OURS[1:])}
