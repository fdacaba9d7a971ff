"""Every shipped cluster file, through Ray's own loader and the check; broken copies are named by field."""

from __future__ import annotations

import copy
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rayfed.cluster.__main__ import main
from rayfed.cluster.check import check_file
from rayfed.cluster.versions import pinned
from rayfed.errors import OptionError

ROOT = Path(__file__).parents[2]
FILES = ROOT / "cluster"
LAUNCHER = ["gpu.yaml", "gpu-gcp.yaml", "local.yaml"]
SHIPPED = [*LAUNCHER, "kuberay.yaml"]


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # file mounts are relative to the checkout


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_is_fine(name, capsys):
    assert main(["check", str(FILES / name)]) == 0
    said = capsys.readouterr()
    assert f"{name}: fine" in said.out
    others = [line for line in said.err.splitlines() if "still to be replaced" not in line and "auth_token" not in line]
    assert not others  # the token exists only where somebody made one


@pytest.mark.parametrize("name", LAUNCHER)
def test_ray_loads_shipped_file(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    loaded = prepare_config(yaml.safe_load((FILES / name).read_text("utf-8")))
    validate_config(loaded)
    for kind, node in loaded["available_node_types"].items():
        assert node["min_workers"] == 0 or name == "local.yaml", kind
    if name != "local.yaml":
        assert loaded["available_node_types"]["gpu"]["resources"] == {"CPU": 8, "GPU": 1}
        assert any("until nvidia-smi" in c for c in loaded["available_node_types"]["gpu"]["initialization_commands"])
        assert any("rayfed-src" in c for c in loaded["worker_setup_commands"])
        assert any("rayfed-src" in c for c in loaded["head_setup_commands"])


def broken(tmp_path, name, change):
    """A copy of a shipped file after ``change``; its comments (with the run it is for) are kept."""
    text = (FILES / name).read_text("utf-8")
    documents = [copy.deepcopy(d) for d in yaml.safe_load_all(text)]
    change(documents[0] if len(documents) == 1 else {d["kind"]: d for d in documents})
    comments = "\n".join(re.findall(r"^#.*", text, re.MULTILINE))
    file = tmp_path / name
    file.write_text(comments + "\n" + yaml.safe_dump_all(documents), "utf-8")
    return file


def gpu(document):
    return document["available_node_types"]["gpu"]


def pod(documents):
    return documents["RayCluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]


def group(documents):
    return documents["RayCluster"]["spec"]["workerGroupSpecs"][0]


DRIVER_STEP = "python -c 'import torch; assert torch.cuda.is_available()'"
BROKEN = [
    ("gpu.yaml", lambda d: gpu(d).pop("max_workers"), [], "available_node_types.gpu.max_workers"),
    ("gpu.yaml", lambda d: gpu(d).update(max_workers=0, min_workers=1), [], "available_node_types.gpu.max_workers"),
    ("gpu.yaml", lambda d: d.pop("max_workers"), [], "max_workers"),
    ("gpu.yaml", lambda d: d["docker"].update(worker_image="rayproject/ray:2.59.0-py311-gpu"), [],
     "docker.worker_image"),
    ("gpu.yaml", lambda d: d["docker"].update(head_image="rayproject/ray:2.60.0-py312-cpu"), [], "docker.head_image"),
    ("gpu.yaml", lambda d: d["docker"].update(image="rayproject/ray:latest-gpu"), [], "docker.image"),
    ("gpu.yaml", lambda d: d["setup_commands"].append("pip install 'ray[default]==2.50.0'"), [], "setup_commands[1]"),
    ("gpu.yaml", lambda d: None, ["server.gpu=0.2"], "available_node_types.head.resources.GPU"),
    ("gpu.yaml", lambda d: None, ["clients.gpu=4"], "available_node_types.gpu.resources"),
    ("gpu.yaml", lambda d: d["setup_commands"].insert(0, DRIVER_STEP), [], "setup_commands[0]"),
    ("gpu.yaml", lambda d: gpu(d)["initialization_commands"].__setitem__(1, "nvidia-smi"), [],
     "available_node_types.gpu.initialization_commands[1]"),
    ("gpu-gcp.yaml", lambda d: gpu(d).pop("initialization_commands"), [],
     "available_node_types.gpu.initialization_commands"),
    ("gpu.yaml", lambda d: d.update(max_worker=3), [], "the file"),
    ("gpu.yaml", lambda d: gpu(d).update(resources={"CPU": "8"}), [], "available_node_types.gpu.resources.CPU"),
    ("gpu.yaml", lambda d: d.update(head_node_type="haed"), [], "the file"),
    ("gpu.yaml", lambda d: d["provider"].update(type="awz"), [], "provider.type"),
    ("local.yaml", lambda d: d["provider"].pop("worker_ips"), [], "the file"),
    ("local.yaml", lambda d: d["setup_commands"].insert(0, "python3.12 -m venv ~/env"), [], "setup_commands[0]"),
    ("kuberay.yaml", lambda d: group(d).pop("maxReplicas"), [],
     "RayCluster/rayfed.spec.workerGroupSpecs[0].maxReplicas"),
    ("kuberay.yaml", lambda d: group(d).update(maxReplica=2), [], "RayCluster/rayfed.spec.workerGroupSpecs[0]"),
    ("kuberay.yaml", lambda d: group(d).update(rayStartParams={"num-gpus": 1}), [],
     "RayCluster/rayfed.spec.workerGroupSpecs[0].rayStartParams.num-gpus"),
    ("kuberay.yaml", lambda d: pod(d)["containers"][0].update(image="rayproject/ray:2.9.0-py311-gpu"), [],
     "RayCluster/rayfed.spec.workerGroupSpecs[0].template.spec.containers[0].image"),
    ("kuberay.yaml", lambda d: d["RayCluster"]["spec"].update(rayVersion="2.59.0"), [],
     "RayCluster/rayfed.spec.rayVersion"),
    ("kuberay.yaml", lambda d: d["RayCluster"]["spec"].pop("enableInTreeAutoscaling"), [],
     "RayCluster/rayfed.spec.enableInTreeAutoscaling"),
    ("kuberay.yaml", lambda d: None, ["server.gpu=0.2"],
     "RayCluster/rayfed.spec.headGroupSpec.template.spec.containers[0].resources.GPU"),
    ("kuberay.yaml", lambda d: pod(d).pop("volumes"), [],
     "RayCluster/rayfed.spec.workerGroupSpecs[0].template.spec.volumes"),
    ("kuberay.yaml", lambda d: d["RayJob"]["spec"]["clusterSelector"].update({"ray.io/cluster": "other"}), [],
     "RayJob/rayfed-job.spec.clusterSelector"),
    ("kuberay.yaml", lambda d: d["RayJob"]["spec"].pop("clusterSelector"), [], "RayJob/rayfed-job.spec"),
    ("kuberay.yaml", lambda d: d["PersistentVolumeClaim"]["spec"].update(accessModes=["ReadWriteOnce"]), [],
     "PersistentVolumeClaim/rayfed-home.spec.accessModes"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, words, field", BROKEN, ids=lambda v: v if isinstance(v, str) else "")
def test_broken_copy_is_named_by_field(name, change, words, field, tmp_path, capsys):
    assert main(["check", str(broken(tmp_path, name, change)), *words]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {field} "), errors


RISKY = [
    (lambda d: d["head_start_ray_commands"].__setitem__(1, "ray start --head --dashboard-host=0.0.0.0"),
     "head_start_ray_commands[1]"),
    (lambda d: d["docker"]["run_options"].remove("--env=RAY_AUTH_MODE=token"), "docker.run_options"),
    (lambda d: d["docker"]["run_options"].remove("--env=RAYFED_HOME=/mnt/rayfed"), "docker.run_options"),
    (lambda d: (d.pop("initialization_commands"),
                gpu(d).update(initialization_commands=["bash -c 'until nvidia-smi; do sleep 1; done'"])),
     "initialization_commands"),
    (lambda d: d["file_mounts"].pop("/home/ray/.ray/auth_token"), "file_mounts"),
    (lambda d: d["file_mounts"].update({"/home/ray/data": "./not-here"}), "file_mounts./home/ray/data"),
]  # fmt: skip


@pytest.mark.parametrize("change, field", RISKY, ids=lambda v: v if isinstance(v, str) else "")
def test_risky_copy_is_warned_of(change, field, tmp_path):
    found = check_file(broken(tmp_path, "gpu.yaml", change))
    assert not [finding for finding in found if finding.refused]
    assert field in {finding.field for finding in found if "replaced" not in finding.sentence}


def test_risky_manifest_is_warned_of(tmp_path):
    def change(documents):
        spec = documents["RayCluster"]["spec"]
        del spec["authOptions"]
        spec["headGroupSpec"]["serviceType"] = "LoadBalancer"
        spec["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = []

    fields = {f.field for f in check_file(broken(tmp_path, "kuberay.yaml", change)) if not f.refused}
    spec = "RayCluster/rayfed.spec"
    assert {f"{spec}.authOptions.mode", f"{spec}.headGroupSpec.serviceType"} < fields
    assert f"{spec}.headGroupSpec.template.spec.containers[0].env" in fields


def test_the_run_is_read_from_the_file_and_the_command_line_wins(tmp_path):
    text = (FILES / "gpu.yaml").read_text("utf-8").replace("server.gpu=0\n", "server.gpu=0.2 clients.gpu=1\n")
    (tmp_path / "gpu.yaml").write_text(text)
    assert any(f.refused for f in check_file(tmp_path / "gpu.yaml"))
    assert not any(f.refused for f in check_file(tmp_path / "gpu.yaml", ["server.gpu=0"]))


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["check", "nowhere.yaml"], "nowhere.yaml cannot be read (No such file or directory)"),
        (["check", "README.md"], "README.md"),
        (["check", "cluster/gpu.yaml", "clients.gpuu=1"], "clients.gpu"),
        (["chekc", "cluster/gpu.yaml"], "is not a command: use check FILE"),
        (["check"], "is not a command"),
        (["upload-size", "nowhere"], "nowhere is no folder"),
    ],
)
def test_wrong_command_is_refused_in_a_sentence(words, sentence, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and "Traceback" not in error


def test_every_file_runs_the_versions_the_project_is_tested_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = pinned()
    assert Version(versions["python"]) in SpecifierSet(project["requires-python"])
    ranges = {re.split(r"[\[><=]", d)[0].lower(): re.sub(r"^[\w.-]+(\[.*?\])?", "", d) for d in project["dependencies"]}
    assert ranges.keys() == versions.keys() - {"python"}, "constraints.txt pins every direct dependency, no other"
    for name, allowed in ranges.items():
        assert Version(versions[name]) in SpecifierSet(allowed), name
    short = f"py{versions['python'].replace('.', '')}"
    for file in sorted(FILES.iterdir()):
        text = file.read_text("utf-8")
        said = re.findall(r"ray(?:project/ray:)?(\d+\.\d+\.\d+)-(py\d+)", text)
        assert set(said) <= {(versions["ray"], short)}, file
        assert said or file.name in {"local.yaml", "slurm.sh"}, file
        assert set(re.findall(r"python(3\.\d+)", text)) <= {versions["python"]}, file
        assert file.name == "kuberay.yaml" or "rayfed/cluster/constraints.txt" in text, file


def test_nodes_get_what_the_package_is_built_from():
    lines = (FILES / "Dockerfile").read_text("utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[2:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {"pyproject.toml", "setup.py", "rayfed", "tune_spaces", project["readme"], "LICENSE"}
    assert needed == copied and all((ROOT / source).exists() for source in needed)
    for name in LAUNCHER:
        mounts = yaml.safe_load((FILES / name).read_text("utf-8"))["file_mounts"]
        assert {Path(local).name for local in mounts.values()} - {"auth_token"} == needed, name
        assert all(
            remote.endswith(f"rayfed-src/{Path(local).name}") for remote, local in mounts.items() if "src" in remote
        )


STUBS = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    "srun": 'for word; do shift; case "$word" in --nodelist=*) node=${word#*=};; --*) ;;\n'
    '*) set -- "$word" "$@"; break;; esac; done; echo "srun $node: $*" >> "$LOG"\n'
    'if [ "$1" = hostname ]; then echo "10.0.0.1 10.1.0.1"; else exec sleep 30; fi',
    "ray": 'echo "ray $*" >> "$LOG"',
    # As the real one, `python -` returns only once every node has joined.
    "python": 'if [ "$1" = - ]; then cat > /dev/null\n'
    'until [ "$(grep -c "ray start" "$LOG")" -ge 3 ]; do sleep 0.05; done; exit 0; fi\n'
    'echo "python $* in $PWD with $RAY_AUTH_MODE" >> "$LOG"\n'
    'if [ "$STATUS" = wait ]; then exec sleep 30; fi; exit "$STATUS"',
}
"""What slurm.sh calls: each writes down what it was asked."""


@pytest.fixture
def slurm(tmp_path):
    """Starts slurm.sh among stubs; returns the process."""
    tools = tmp_path / "env" / "bin"
    tools.mkdir(parents=True)
    for name, body in STUBS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    variables = {"RAYFED_ENV": str(tmp_path / "env"), "RAYFED_HOME": str(tmp_path / "home"), "SLURM_JOB_ID": "77",
                 "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "16", "SLURM_GPUS_ON_NODE": "4",
                 "LOG": str(tmp_path / "log"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}  # fmt: skip

    def start(status):
        return subprocess.Popen(
            ["bash", str(FILES / "slurm.sh"), "method=fedglad", "out=a b"],
            env={**variables, "STATUS": status}, text=True, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("status", ["0", "2"])
def test_slurm_script_starts_a_node_each_and_ends_as_the_run_does(slurm, status, tmp_path):
    process = slurm(status)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == int(status), errors
    log = (tmp_path / "log").read_text().splitlines()
    node = "ray start --block --num-cpus=16 --num-gpus=4 --temp-dir=/tmp/ray-77"
    assert log[0] == "ray get-auth-token --generate" and log[1] == "srun n1: hostname --ip-address"
    assert sorted(line for line in log if "ray start" in line) == [
        f"srun n1: {node} --head --node-ip-address=10.0.0.1 --port=20077 --include-dashboard=false",
        f"srun n2: {node} --address=10.0.0.1:20077",
        f"srun n3: {node} --address=10.0.0.1:20077",
    ]
    run = f"python -m rayfed.run engine.address=10.0.0.1:20077 method=fedglad out=a b in {tmp_path / 'home'} with token"
    assert run in log


def test_slurm_script_passes_the_warning_on(slurm, tmp_path):
    import time

    process = slurm("wait")
    log, deadline = tmp_path / "log", time.monotonic() + 20
    while not (log.exists() and "rayfed.run" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_slurm_script_is_sound():
    text = (FILES / "slurm.sh").read_text("utf-8")
    subprocess.run(["bash", "-n", str(FILES / "slurm.sh")], check=True)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0] == "#!/usr/bin/env bash" and lines[first] == "set -euo pipefail"
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")], "Slurm reads none after a command"
    shell = re.sub(r"<<'PYTHON'.*?^PYTHON$", "", "\n".join(lines[first:]), flags=re.MULTILINE | re.DOTALL)
    code = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in shell.splitlines())
    outside = re.sub(r'"(?:\$\(.*?\)|\$\{[^}]*\}|[^"])*"', '""', code)  # what is left is not quoted
    bare = re.findall(r"\$\{?[A-Za-z_@*]\w*[^}\s]*\}?", re.sub(r"'[^']*'", "", outside))
    assert not [v for v in bare if not v.startswith(("$((", "${pids"))], bare
    compile(re.search(r"<<'PYTHON'\n(.*?)^PYTHON$", text, re.MULTILINE | re.DOTALL)[1], "slurm.sh", "exec")
    for need in ("RAY_AUTH_MODE=token", "trap stop_nodes EXIT", "--signal=B:TERM@"):
        assert need in text


def places(value, path=()):
    """Every place inside a document, as the keys that lead there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


@pytest.mark.parametrize("name", ["gpu.yaml", "local.yaml", "kuberay.yaml"])
def test_whatever_is_missing_is_a_finding_not_a_crash(name, tmp_path):
    documents = list(yaml.safe_load_all((FILES / name).read_text("utf-8")))
    where = [(i, path) for i, document in enumerate(documents) for path in places(document)]
    for number, (i, path) in enumerate(where[::4]):
        changed = copy.deepcopy(documents)
        parent = changed[i]
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = (None, "x", 5, [], {})[number % 5]
        (tmp_path / name).write_text(yaml.safe_dump_all(changed))
        try:
            check_file(tmp_path / name)
        except OptionError as error:
            assert str(error).endswith("."), error
