"""Clusters for job submission: `ray up` over ssh to this machine, or a plain `ray start --head`.

Both use token authentication, free ports and a folder of their own, and are gone afterwards by process id.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from tests.cli.one_machine_ray import MARK, processes_of
from tests.engine.runs import ROOT

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing answers at port {port}")


def new_home(folder: Path) -> Path:
    """A home folder with a token."""
    (folder / ".ray").mkdir(parents=True)
    (folder / ".ray" / "auth_token").write_text("0123456789abcdef0123456789abcdef")
    return folder


def client_environment(home: Path, dashboard: int) -> dict[str, str]:
    """What the user's shell has on the machine that submits."""
    return {
        **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        "RAY_AUTH_MODE": "token", "HOME": str(home), "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }  # fmt: skip


def head_options(dashboard: int, temporary: Path) -> list[str]:
    return [
        "--num-cpus=3", "--node-ip-address=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={temporary}",
        f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}",
    ]  # fmt: skip


def end(mark: str) -> list[str]:
    """End the processes that carry ``mark`` and are still there; return what they were."""
    left = list(processes_of(mark))
    names = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    for process in left:
        process.terminate()
    _, alive = psutil.wait_procs(left, timeout=15)
    for process in alive:
        process.kill()
    return names


@contextmanager
def started(folder: Path) -> Iterator[dict[str, str]]:
    """``ray start --head`` on loopback; yields the environment of a user who submits to it."""
    dashboard, temporary, mark = free_port(), Path("/tmp") / f"rf{os.getpid()}", f"head-{os.getpid()}"
    environment = client_environment(new_home(folder / "home"), dashboard) | {
        "RAYFED_HOME": str(folder / "rayfed"), "RAYFED_TEMPORARY": str(temporary), MARK: mark,
    }  # fmt: skip
    head = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
    head["PATH"] = f"{Path(sys.executable).parent}:{head['PATH']}"
    command = [*RAY, "start", "--head", "--block", f"--port={free_port()}", "--dashboard-host=127.0.0.1"]
    process = subprocess.Popen(
        [*command, *head_options(dashboard, temporary)],
        env=head, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_port(dashboard, process)
        yield environment
    finally:
        process.terminate()
        process.wait(timeout=30)
        end(mark)
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def launched(folder: Path) -> Iterator[dict[str, str]]:
    """``ray up cluster/local.yaml`` on a pretended machine behind an sshd of its own; ``ray down`` leaves nothing."""
    dashboard, temporary, mark = free_port(), Path("/tmp") / f"rf{os.getpid()}", f"machine-{os.getpid()}"
    machine = pretended_machine(folder / "machine")
    temporary.mkdir()
    with sshd(folder, machine, {MARK: mark, "RAY_TMPDIR": str(temporary)}) as port:
        environment = client_environment(new_home(folder / "home"), dashboard)
        environment["PATH"] = f"{ssh_to(folder / 'bin', port)}:{environment['PATH']}"
        environment |= {"RAY_TMPDIR": str(temporary), "TMPDIR": str(temporary)}
        file = local_cluster(folder, dashboard, temporary)
        try:
            assert home_over_ssh(environment, folder / "keys" / "user") == str(machine)  # nothing touches the real one
            up = ray(environment, "up", "-y", "--no-config-cache", str(file))
            assert up.returncode == 0, up.stdout + up.stderr
            assert "-c" in (machine / "pip").read_text() and "rayfed-src" in (machine / "pip").read_text()
            assert (machine / "rayfed-src" / "rayfed" / "run.py").exists()
            assert (machine / "rayfed-src" / "pyproject.toml").exists()
            wait_for_port(dashboard)
            yield environment | {"RAYFED_HOME": str(folder / "rayfed"), "RAYFED_TEMPORARY": str(temporary), MARK: mark}
            down = ray(environment, "down", "-y", str(file))
            assert down.returncode == 0 and "No nodes remaining" in down.stdout + down.stderr, down.stdout + down.stderr
            left = [p.cmdline() for p in processes_of(mark)]
            assert not left, left
        finally:
            end(mark)
            forget_ssh(yaml.safe_load(file.read_text())["cluster_name"])
            shutil.rmtree(temporary, ignore_errors=True)


def ray(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RAY, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


def pretended_machine(home: Path) -> Path:
    """A home folder where the environment exists already; what pip is asked is written down (it would download)."""
    tools = home / "rayfed-env" / "bin"
    tools.mkdir(parents=True)
    installed = f"export PYTHONPATH='{home / 'rayfed-src'}';"
    only_this = Path(__file__).with_name("one_machine_ray.py")
    for name, line in (
        ("python", f'{installed} exec {sys.executable} "$@"'),
        ("pip", f'echo "$@" > {home}/pip'),
        ("ray", f'{installed} exec {sys.executable} {only_this} "$@"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    # Until the set-up steps have put that environment first, no other Ray of this machine may answer to `ray stop`.
    guard = home / "guard"
    guard.mkdir()
    (guard / "ray").write_text("#!/bin/sh\necho 'not the environment of the set-up steps' >&2; exit 99\n")
    (guard / "ray").chmod(0o755)
    (home / ".bash_profile").write_text(f"PATH={guard}:$PATH\n")
    return home


def home_over_ssh(environment: dict[str, str], key: Path) -> str:
    options = ["-i", str(key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    command = ["ssh", *options, "root@127.0.0.1", "echo $HOME"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def sshd(folder: Path, home: Path, variables: dict[str, str]) -> Iterator[int]:
    """An sshd in the foreground on a free port of loopback, with keys of its own; sessions see ``home`` as home."""
    port, keys = free_port(), folder / "keys"
    keys.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copyfile(keys / "user.pub", keys / "authorized")
    (keys / "authorized").chmod(0o600)
    settings = " ".join(f'{name}="{value}"' for name, value in {"HOME": str(home), **variables}.items())
    (keys / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'authorized'}\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv {settings}\n"
    )
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "these tests need openssh-server and rsync"
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its rights
    with (folder / "sshd.log").open("w") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(keys / "config")], stdout=log, stderr=log)
        try:
            wait_for_port(port, process)
            yield port
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(timeout=15)
            for session in children:  # those that ssh keeps for a next command
                session.terminate()
            psutil.wait_procs(children, timeout=15)


def ssh_to(folder: Path, port: int) -> Path:
    """A folder with an ``ssh`` that uses ``port``, for which a cluster file has no field."""
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -p {port} "$@"\n')
    (folder / "ssh").chmod(0o755)
    return folder


def local_cluster(folder: Path, dashboard: int, temporary: Path) -> Path:
    """The shipped local.yaml for this machine alone, with free ports and folders of its own."""
    text = (ROOT / "cluster" / "local.yaml").read_text("utf-8")
    text = text.replace("--port=6379", f"--port={free_port()} {' '.join(head_options(dashboard, temporary))}", 1)
    text = text.replace("RAYFED_HOME=/mnt/rayfed", f"RAYFED_HOME={folder / 'rayfed'}")
    document = yaml.safe_load(text)
    document["cluster_name"] = f"rayfed-test-{os.getpid()}"
    document["provider"] |= {"head_ip": "127.0.0.1", "worker_ips": []}
    document["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "keys" / "user")}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return folder / "cluster.yaml"


def forget_ssh(cluster: str) -> None:
    """Remove the control sockets Ray's ssh leaves under /tmp."""
    name = hashlib.sha256(cluster.encode()).hexdigest()[:10]
    for folder in Path("/tmp").glob(f"ray_ssh_*/{name}"):
        shutil.rmtree(folder, ignore_errors=True)
