"""Arrows point one way, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rayfed"

# Which parts of the package a part may import (beside itself).
ANYONE = {"messages", "state", "rng", "errors"}
MAY_IMPORT = {
    "messages": set(),
    "state": set(),
    "rng": set(),
    "errors": set(),
    "conf": set(),
    "metrics": set(),
    "comms": set(),
    "adapters": set(),
    "aggregation": set(),
    "backbones": {"data"},  # pretraining draws its images
    "data": {"backbones", "conf"},
    "methods": {"adapters", "aggregation", "backbones", "conf"},
    "config": {"conf", "methods", "backbones"},
    "engine": {"adapters", "aggregation", "backbones", "comms", "conf", "config", "data", "methods", "metrics"},
    "tracking": {"config", "conf", "data", "engine"},
    "experiment": {"backbones", "config", "conf", "data", "engine", "methods", "tracking"},
    "sweep": {"config", "conf", "data", "engine", "experiment", "tracking"},
}
ENGINE_MAY_IMPORT_OF_METHODS = {"rayfed.methods.base", "rayfed.methods"}


def imported(file: Path) -> set[str]:
    """Every module that ``file`` imports, including inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "rayfed"}
    return found


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "rayfed" and len(names) > 1 else None


FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_is_something_to_check():
    assert len(FILES) > 40 and {p.name for p in PACKAGE.iterdir() if p.is_dir()} >= {"engine", "methods", "adapters"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_arrows_point_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own not in MAY_IMPORT:  # the commands may import anything
        assert own in {"__init__", "run", "describe", "tune", "cluster"}
        return
    allowed = MAY_IMPORT[own] | ANYONE | {own, "__version__"}
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir()}
    used = {part for module in imported(file) if (part := part_of(module)) in parts}
    assert not used - allowed, (file, used - allowed)


@pytest.mark.parametrize(
    "folder", ["methods", "adapters", "aggregation", "backbones", "data", "conf", "metrics", "comms"]
)
def test_ray_and_mlflow_are_for_engine_and_tracking_only(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        assert not {m.split(".")[0] for m in imported(file)} & {"ray", "mlflow"}, file


@pytest.mark.parametrize("folder", ["engine", "sweep"])
def test_engine_never_names_a_method(folder):
    from rayfed.methods import METHODS

    for file in (PACKAGE / folder).rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        # "zero_shot" is also a view of every run, "local" also how Ray calls a cluster of one's own.
        assert not strings & (set(METHODS) - {"zero_shot", "local"}), file
        assert not names & (set(METHODS) - {"zero_shot"}), file
        methods = {m for m in imported(file) if m.startswith("rayfed.methods")}
        assert methods <= ENGINE_MAY_IMPORT_OF_METHODS, (file, methods)


def in_fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env=_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "mlflow"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocker())
"""


def test_everything_but_ray_works_without_ray_and_mlflow(tmp_path):
    code = BLOCK + (
        "import rayfed, importlib\n"
        "from rayfed.methods import METHODS\n"
        "for line in METHODS.values(): importlib.import_module(line.partition(':')[0])\n"
        "from rayfed.run import main\n"
        f"raise SystemExit(main(['method=fedglad', 'engine.pool=local', 'rounds=1', 'clients.n=2', 'data.shots=1',"
        f" 'data.test_shots=1', 'data.proxy=4', 'train.epochs=1', 'partition.alpha=1', r'out={tmp_path / 'run'}']))\n"
    )
    output = in_fresh_python(code)
    assert "fedglad on shapes" in output
    assert (tmp_path / "run" / "summary.json").exists()


def test_options_are_checked_before_torch_or_ray_is_imported():
    code = (
        "import sys\n"
        "from rayfed.run import main\n"
        "assert main(['method=fedglad', 'backbone=ViT-B-16', 'train.lr=-1', 'method.rnk=2']) == 2\n"
        "assert main(['--list']) == 0 and main(['--help']) == 0\n"
        "heavy = {'torch', 'ray', 'mlflow', 'open_clip', 'timm', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    in_fresh_python(code)


def test_documents_speak_only_of_the_project():
    """No path of a development machine and no registry host in a tracked text file."""
    import re

    pattern = re.compile(r"(^|[^\w.])/(work|farm)/|py" + r"pi\.org|npm" + r"js\.org")
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split(
        "\n"
    )
    texts = [ROOT / f for f in tracked if f.endswith((".py", ".md", ".toml", ".yaml", ".yml", ".json", "Makefile"))]
    assert len(texts) > 50
    wrong = [str(f) for f in texts if f.exists() and pattern.search(f.read_text(encoding="utf-8"))]
    assert not wrong
