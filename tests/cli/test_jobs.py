"""The commands as documented, on a real local cluster: job submission, its status, its results, and how runs end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.runs import FAST, ROOT, assert_same_bits, run_well, start, wait_until

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """``ray start --head`` on loopback with token authentication; stopped by its own process ids."""
    home = tmp_path_factory.mktemp("home")
    port, dashboard = free_port(), free_port()
    environment = {
        **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        "RAY_AUTH_MODE": "token", "HOME": str(home), "RAYFED_HOME": str(home / "rayfed"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }  # fmt: skip
    token = home / ".ray"
    token.mkdir()
    (token / "auth_token").write_text("0123456789abcdef0123456789abcdef")
    temporary = Path("/tmp") / f"rf{os.getpid()}"  # Ray's sockets need a short path
    head = subprocess.Popen(
        [*RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=3", "--node-ip-address=127.0.0.1",
         "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={temporary}",
         f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}"],
        env={k: v for k, v in environment.items() if k != "RAY_ADDRESS"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for_dashboard(dashboard)
    yield environment
    processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    head.terminate()
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        process.kill()
    shutil.rmtree(temporary, ignore_errors=True)


def wait_for_dashboard(port: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError("the dashboard did not come up")


def submit(cluster, cwd, *words):
    """``ray job submit``; a head node that has just started has no agent for jobs yet, and says so."""
    command = [*RAY, "job", "submit", "--working-dir", ".", "--", "python", "-m", "rayfed.run", *words]
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


def test_submitted_job_succeeds_and_its_results_outlive_it(cluster, checkout, tmp_path):
    done = submit(
        cluster, checkout, "method=fedglad", "out=results/é x", "data.template=a photo of a {}, of course.", *FAST
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "succeeded" in text, text[-3000:]
    out = Path(cluster["RAYFED_HOME"]) / "results" / "é x"
    assert f"results: {out}" in text
    assert (out / "summary.json").exists()
    direct = tmp_path / "direct"
    run_well("method=fedglad", "engine.pool=local", "data.template=a photo of a {}, of course.", f"out={direct}", *FAST)
    assert_same_bits(direct, out)
    assert upload_size(text) < 20 * 2**20


def upload_size(text: str) -> int:
    """Bytes of the uploaded working directory, from the package Ray keeps."""
    packages = list(Path("/tmp").glob(f"rf{os.getpid()}/session_*/runtime_resources/working_dir_files/_ray_pkg_*"))
    folders = [p for p in packages if p.is_dir()]
    assert folders, text[-2000:]
    return max(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders)


def test_failing_job_ends_failed(cluster, checkout):
    done = submit(cluster, checkout, "method=fedgald")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "failed" in text
    assert "unknown method 'fedgald'; did you mean fedglad" in text


def test_what_the_cluster_can_never_give_is_refused(ray_session, capsys):
    for words, sentence in (
        (["clients.gpu=4"], "clients.gpu=4 can never be met: the largest node has 0 GPUs"),
        (["clients.gpu=0.5"], "use clients.gpu=0, or join a cluster with GPUs"),
        (["clients.cpu=99"], "clients.cpu=99 can never be met: the largest node has 16 CPUs"),
        (["server.gpu=1"], "server.gpu=1 can never be met"),
    ):
        from tests.engine.runs import run

        started = time.monotonic()
        done = run("method=fedglad", *words)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
        assert time.monotonic() - started < 30  # ten seconds on a quiet machine


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
    return {pid for pid, line in found if "_WorkerShell" in line or "_ServerShell" in line}
