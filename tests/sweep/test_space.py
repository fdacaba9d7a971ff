"""Search spaces: what they draw, when a parameter counts, and every mistake told before anything heavy is loaded."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from rayfed import config
from rayfed.conf.options import RESUMABLE
from rayfed.methods import METHODS
from rayfed.sweep.request import parse_request
from rayfed.sweep.space import Parameter, as_text, folder, names, read_inline, read_space
from rayfed.tune import main

ROOT = Path(__file__).parents[2]
PAPER = {
    "fedpurel": {"method.weight": 0.9, "method.rank": 8},
    "fedsdg": {"method.gate_init": -3, "method.gate_weight": 0.01, "method.private_weight": 0.001, "method.rank": 8},
    "feddtl": {"method.beta": 0.5, "method.group": 3},
    "blend": {"method.gamma": 0.09, "method.fused_weight": 0.2, "method.rank": 16},
    "fedglad": {"method.gate_init": 1, "method.teacher_weight": 0.2, "method.temperature": 2},
    "fedlora": {"method.rank": 4},
}
"""What each space must try first, by the papers."""


@pytest.mark.parametrize("name", PAPER)
def test_a_shipped_space_tries_the_papers_default_first(name):
    request = parse_request([f"space={name}", "tune.samples=40"])
    points = request.points()
    assert len(points) == 40
    assert points[0].items() >= PAPER[name].items()
    assert points[0]["train.lr"] == request.base.train.lr and not request.notes()
    for point in points:
        options = config.flatten(request.options(point))
        assert all(as_text(options[key]) == as_text(value) for key, value in point.items())


def test_there_is_a_space_for_every_method_that_is_searched():
    assert names() == sorted(PAPER) and set(names()) <= set(METHODS)


def kolmogorov(values, cdf) -> float:
    """Largest distance between the empirical and the wanted distribution function."""
    values = sorted(values)
    steps = [(abs((i + 1) / len(values) - cdf(v)), abs(i / len(values) - cdf(v))) for i, v in enumerate(values)]
    return max(max(pair) for pair in steps)


@pytest.mark.parametrize(
    ("kind", "values", "cdf"),
    [
        ("uniform", (-2, 4), lambda v: (v + 2) / 6),
        ("loguniform", (1e-5, 1e-2), lambda v: math.log(v / 1e-5) / math.log(1e3)),
    ],
)
def test_numbers_are_drawn_from_their_distribution(kind, values, cdf):
    generator = np.random.default_rng(0)
    drawn = [Parameter("x", kind, values).draw(generator) for _ in range(2000)]
    assert all(values[0] <= v <= values[1] for v in drawn)
    assert kolmogorov(drawn, cdf) < 0.04  # 1.6 standard errors of 2,000 draws


def test_whole_numbers_steps_and_lists_are_all_reached():
    generator = np.random.default_rng(0)
    for parameter, wanted in (
        (Parameter("x", "randint", (2, 5)), {2, 3, 4, 5}),
        (Parameter("x", "quniform", (0.0, 1.0, 0.25)), {0.0, 0.25, 0.5, 0.75, 1.0}),
        (Parameter("x", "choice", ("a", None, True)), {"a", None, True}),
    ):
        assert {parameter.draw(generator) for _ in range(200)} == wanted


def test_trial_i_is_the_same_however_many_there_are():
    few, many = (parse_request(["space=fedsdg", f"tune.samples={n}"]).points() for n in (3, 9))
    assert few == many[:3]
    assert parse_request(["space=fedsdg", "tune.samples=3", "tune.seed=1"]).points()[1:] != few[1:]


def test_a_grid_is_every_combination_and_inline_distributions_win():
    words = ["method=fedlora", "train.lr=grid(1e-3,1e-2)", "method.rank=grid(2,4,8)", "rounds=1"]
    points = parse_request(words).points()
    expected = list(itertools.product([1e-3, 1e-2], [2, 4, 8]))
    assert [(p["train.lr"], p["method.rank"]) for p in points] == expected
    mixed = parse_request(["space=fedlora", "method.rank=grid(2,4)", "tune.samples=5"])
    assert [p["method.rank"] for p in mixed.points()] == [4, 2, 4, 2, 4]  # the baseline, then in turn
    fixed = parse_request(["space=fedlora", "train.lr=0.001"])
    assert [p.name for p in fixed.space.parameters] == ["method.rank"] and fixed.base.train.lr == 0.001


def test_a_parameter_counts_only_under_its_condition():
    for point in parse_request(["space=fedsdg", "tune.samples=30"]).points():
        assert ("method.floor" in point) == (point["method.align"] == "floor")
    fixed = parse_request(["space=fedsdg", "method.align=floor", "tune.samples=5"])
    assert all("method.floor" in point for point in fixed.points())
    fixed = parse_request(["space=fedsdg", "method.align=geomean", "tune.samples=5"])
    assert not any("method.floor" in point for point in fixed.points())


def test_a_baseline_outside_the_range_is_moved_and_told():
    request = parse_request(["space=fedlora", "train.lr=loguniform(1e-3,1e-2)"])
    assert request.points()[0]["train.lr"] == 1e-3
    assert request.notes() == ["the baseline's train.lr=3e-05 cannot be drawn: tried at 0.001"]


def test_mutation_stays_in_range_and_moves():
    generator = np.random.default_rng(1)
    lr, rank = Parameter("lr", "loguniform", (1e-4, 1e-2)), Parameter("r", "choice", (2, 4, 8))
    for _ in range(200):
        assert 1e-4 <= lr.mutated(9e-3, generator) <= 1e-2
        assert rank.mutated(2, generator) in {2, 4, 8}
    assert len({lr.mutated(1e-3, generator) for _ in range(50)}) > 5


def test_inline_text():
    assert read_inline("x", "0.5") is None and read_inline("x", "a photo of a {}, grid-like") is None
    assert read_inline("x", "choice([q,k], [v])").values == ("[q,k]", "[v]")
    assert read_inline("x", " grid(1e-3, none, true, a b) ").values == (1e-3, None, True, "a b")


WRONG = {
    "nothing to search": ([], "nothing to search"),
    "unknown space": (["space=fedsgd"], "unknown search space 'fedsgd'; did you mean fedsdg"),
    "missing file": (["space=/nowhere/at/all.yaml"], "space=/nowhere/at/all.yaml cannot be read"),
    "unknown tune option": (
        ["space=fedlora", "tune.sampels=3"],
        "unknown option 'tune.sampels'; did you mean tune.samples",
    ),
    "test metric": (["space=fedlora", "tune.metric=personal/acc_macro"], "nothing may be chosen on others"),
    "no samples": (["space=fedlora", "tune.samples=0"], "tune.samples=0: must be greater than or equal to 1"),
    "unknown run option": (["space=fedlora", "train.lrr=1"], "unknown option 'train.lrr'"),
    "unknown searched option": (["train.lrr=grid(1,2)"], "unknown option 'train.lrr'; did you mean train.lr"),
    "end out of range": (["method=fedlora", "train.lr=uniform(-1,1)"], "train.lr=-1: must be greater than 0"),
    "empty range": (["train.lr=uniform(1,0.1)"], "train.lr: uniform from 1 to 0.1 is empty"),
    "log of zero": (["train.lr=loguniform(0,1)"], "loguniform from 0 has no logarithm"),
    "not numbers": (["train.lr=uniform(a,b)"], "uniform needs [low, high] as numbers"),
    "two methods": (["space=fedlora", "method=fedsdg"], "searches method=fedlora: leave one out"),
    "everything given": (["space=fedlora", "train.lr=1e-3", "method.rank=2"], "nothing is left to search"),
    "how it is run": (["engine.threads=grid(1,2)"], "engine.threads is not searched"),
    "rounds": (["rounds=grid(1,2)"], "rounds is not searched"),
    "grid of a continuum": (["space=fedlora", "tune.searcher=grid"], "cannot list every value of train.lr"),
    "pbt without mutation": (["train.lr=grid(1,2)", "tune.scheduler=pbt"], "needs parameters with `mutate: true`"),
    "pbt with a model": (["space=fedlora", "tune.scheduler=pbt", "tune.searcher=optuna"], "use tune.searcher=random"),
    "population in parts": (
        ["space=fedlora", "tune.scheduler=pbt", "tune.concurrent=2"],
        "all trials advance together",
    ),
    "nothing to stop by": (["space=fedlora", "tune.scheduler=asha", "eval.every=0"], "eval.every=0 leaves"),
    "nothing to decide": (["space=fedlora", "tune.scheduler=asha", "rounds=1"], "nothing to decide in rounds=1"),
    "no validation": (["space=fedlora", "data.val=0"], "data.val=0 leaves no validation images"),
    "resume nowhere": (["space=fedlora", "resume=auto"], "resume=auto needs out=DIR"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_sweeps_are_refused(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, sentence = WRONG[case]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_all_mistakes_are_told_at_once(capsys):
    assert main(["train.lr=uniform(2,1)", "tune.metric=global/acc", "tune.samples=x", "rounds=0"]) == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in ("train.lr", "tune.samples=x", "rounds=0"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- 1", "is no search space"),
        ("parameters: {train.lr: 3}", "train.lr needs one distribution"),
        ("parameters: {train.lr: {lognormal: [1, 2]}}", "train.lr needs one distribution"),
        ("parameters: {train.lr: {uniform: [1, 2]}}\nbaselin: {}", "unknown key 'baselin'; did you mean baseline"),
        ("parameters: {a: {choice: [1], mutate: true, when: {b: 1}}}", "cannot change while training"),
        ("parameters: {train.lr: {grid: [1]}}\nbaseline: {method.rank: 2}", "baseline names method.rank"),
        ("parameters: {a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused(content, sentence, tmp_path, capsys):
    path = tmp_path / "space.yaml"
    path.write_text(content)
    assert main([f"space={path}", "method=fedlora"]) == 2
    assert sentence in capsys.readouterr().err


def test_help_list_and_dry_run(capsys, tmp_path):
    assert main(["--help"]) == 0 and main(["--list"]) == 0
    assert main(["space=fedsdg", "tune.samples=3", f"out={tmp_path / 'run'}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "tune.scheduler [none]" in printed and "fedpurel" in printed and "method.gate_init=-3" in printed
    assert not (tmp_path / "run").exists()


def test_what_is_checked_needs_neither_torch_nor_ray():
    code = (
        "import sys\nfrom rayfed.tune import main\n"
        "assert main(['space=fedsdg', 'tune.samples=x']) == 2 and main(['--list']) == 0\n"
        "assert main(['space=fedsdg', '--dry-run']) == 0\n"
        "assert not {'torch', 'ray', 'mlflow', 'optuna', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=120)


def test_an_installed_wheel_holds_the_spaces(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    source = tmp_path / "source"
    for name in tracked:
        if name.startswith(("rayfed/", "tune_spaces/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "target"
    zipfile.ZipFile(wheel).extractall(target)  # what `pip install --no-deps --target` does
    code = "from rayfed.sweep.space import names, folder; print(folder()); print(names())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [str(target / "rayfed" / "tune_spaces"), str(sorted(PAPER))]


def test_spaces_are_read_as_they_are_written():
    for name in names():
        content = yaml.safe_load((folder() / f"{name}.yaml").read_text())
        space = read_space(name)
        assert [p.name for p in space.parameters] == list(content["parameters"])
        assert not {p.name for p in space.parameters} & RESUMABLE
