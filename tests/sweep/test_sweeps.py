"""Sweeps as a user types them, on a real Ray: what they find, what they leave, and how they end."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import yaml
from mlflow.tracking import MlflowClient
from PIL import Image

from rayfed.engine import actors
from rayfed.run import main as run
from rayfed.tune import main
from tests.engine.runs import ROOT, assert_same_bits, wait_until

CLASSES = ["Boxer (dog)", "AT&T", "it's", "100%", "a,b"]
LITTLE = ["clients.n=2", "rounds=2", "train.epochs=1", "data.proxy=4"]
SHAPES = [*LITTLE, "data.shots=1", "data.test_shots=1", "partition.alpha=1"]
LOCAL = ["engine.pool=local", "tune.concurrent=1"]
"""One trial process after another, which is one process: a process costs five CPU seconds of imports."""
RATES = (1e9, 1e-3, 1e-2, 1e-4, 3e-4, 3e-3, 1e-5, 3e-5)


@pytest.fixture(scope="module", autouse=True)
def whole_cluster(ray_session):
    """Nothing that an earlier test left waiting holds a CPU."""
    actors.release()
    yield
    actors.keep()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Five classes whose names no metric may have, told apart by their brightness."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = (generator.random((32, 32, 3)) * 40 + 50 * label).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


def trials(out):
    """``trials.csv`` by trial number."""
    with (out / "trials.csv").open(encoding="utf-8", newline="") as file:
        return {int(row["trial"]): row for row in csv.DictReader(file)}


def mlflow_runs(uri, experiment="rayfed"):
    """The parent runs and the child runs of a store."""
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    children = [r for r in runs if "mlflow.parentRunId" in r.data.tags]
    return client, [r for r in runs if r not in children], children


@pytest.fixture(scope="module")
def swept(pictures, tmp_path_factory, ray_session):
    """Eight learning rates, the first of which runs away, four at a time into a fresh store, on awkward class names."""
    out = tmp_path_factory.mktemp("sweep") / "réś ults"
    words = [*LITTLE, "engine.pool=local", "data=folder", f"data.root={pictures}", "partition=iid", "data.val=0.3"]
    tuned = [f"train.lr=grid({','.join(map(str, RATES))})", "tune.scheduler=asha", "tune.grace=1", "tune.concurrent=4"]
    assert main(["method=fedlora", *tuned, f"out={out}", *words]) == 0
    return out, f"sqlite:///{out.as_posix()}/mlflow.db"


def test_a_diverged_trial_ranks_last_and_is_marked(swept):
    out, _ = swept
    rows = trials(out)
    assert list(rows)[-1] == 0 and rows[0]["state"] == "diverged" and rows[0]["val/personal_acc"] == "n/a"
    assert "NonFiniteError" in rows[0]["error"]
    assert {row["state"] for index, row in rows.items() if index} <= {"finished", "stopped"} and len(rows) == 8
    best = next(iter(rows.values()))
    assert best["state"] == "finished" and best["rounds"] == "2"


def test_the_figure_is_that_of_the_last_round_on_validation_images(swept):
    out, _ = swept
    for index, row in trials(out).items():
        if row["state"] == "finished":
            summary = json.loads((out / "trials" / f"{index:05d}" / "summary.json").read_text("utf-8"))
            assert float(row["val/personal_acc"]) == summary["val"]["personal_acc"] and summary["rounds"] == 2


def test_mlflow_has_a_parent_and_a_child_per_trial(swept):
    out, uri = swept
    client, parents, children = mlflow_runs(uri)
    (parent,) = parents
    assert parent.info.status == "FINISHED" and parent.data.params["tune.scheduler"] == "asha"
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(child.data.tags["rayfed.trial"] for child in children) == [f"{i:05d}" for i in range(8)]
    assert {child.info.status for child in children} == {"FINISHED"}
    states = {int(c.data.tags["rayfed.trial"]): c.data.tags["rayfed.state"] for c in children}
    assert states == {index: row["state"] for index, row in trials(out).items()}
    for child in children:
        assert all(math.isfinite(v) and abs(v) < 1e300 for v in child.data.metrics.values())
        index = int(child.data.tags["rayfed.trial"])
        assert float(child.data.params["train.lr"]) == RATES[index]
    artifacts = {f.path for f in client.list_artifacts(parent.info.run_id)}
    assert artifacts >= {"best.yaml", "trials.csv", "plots"}


def test_class_names_of_any_kind_are_metrics_of_their_own(swept):
    out, uri = swept
    best = next(iter(trials(out)))
    client, _, children = mlflow_runs(uri)
    child = next(c for c in children if int(c.data.tags["rayfed.trial"]) == best)
    path = client.download_artifacts(child.info.run_id, "metric-names.json")
    with open(path, encoding="utf-8") as file:
        real = json.load(file)
    logged = [name for name in child.data.metrics if name.startswith("class/") and name.endswith("global", 0, -7)]
    views = {real.get(n, n) for n in child.data.metrics if n.startswith("class/")}
    assert {v.split("/")[1] for v in views if v.endswith("/global")} == {
        f"{label} {name}" for label, name in enumerate(sorted(CLASSES))
    }
    assert len(views) == sum(n.startswith("class/") for n in child.data.metrics), logged


def test_the_best_options_are_a_run(swept, tmp_path):
    out, _ = swept
    best = next(iter(trials(out)))
    again = tmp_path / "again"
    assert run([f"config={out / 'best.yaml'}", f"out={again}", "tracking.enabled=false"]) == 0
    assert_same_bits(again, out / "trials" / f"{best:05d}")
    assert (out / "plots" / "parameters.png").stat().st_size > 10_000


def test_all_failed_is_a_failure_with_the_first_line_of_each(tmp_path, capsys, ray_session):
    out = tmp_path / "failed"
    words = ["method=tests.engine.faulty:Faulty", "method.faults=[raise:0@1,raise:1@1]", f"out={out}"]
    assert main([*words, "train.lr=grid(1,2,3)", *SHAPES, *LOCAL]) == 1
    printed = capsys.readouterr()
    assert "no valid trial: 0 of 3 finished" in printed.err
    for index in range(3):
        assert f"trial {index} failed: RoundError: round 1 has 0 good updates of 2" in printed.out
    assert "the client's own mistake" in printed.out
    assert not (out / "best.yaml").exists()
    _, parents, children = mlflow_runs(f"sqlite:///{out.as_posix()}/mlflow.db")
    assert {r.info.status for r in [*parents, *children]} == {"FAILED"} and len(children) == 3


def test_all_diverged_is_a_failure_with_the_first_line_of_each(tmp_path, capsys, ray_session):
    out = tmp_path / "diverged"
    words = ["method=fedlora", "train.lr=grid(1e9,1e10)", "tracking.enabled=false", f"out={out}"]
    assert main([*words, *SHAPES, *LOCAL]) == 1
    printed = capsys.readouterr()
    assert "no valid trial: 0 of 2 finished" in printed.err
    assert all(f"trial {index} diverged: " in printed.out for index in range(2)) and "not finite" in printed.out
    assert [row["state"] for row in trials(out).values()] == ["diverged", "diverged"]
    assert not (out / "best.yaml").exists()


@pytest.mark.parametrize(("fail", "status"), [("all", 0), ("any", 1)])
def test_what_counts_when_only_some_fail_can_be_set(fail, status, tmp_path, capsys):
    """On the ledger of a sweep that has been played: nothing is started."""
    from rayfed.sweep.ledger import Ledger, Trial
    from rayfed.sweep.request import parse_request
    from rayfed.sweep.run import Sweep

    request = parse_request(["train.lr=grid(1,2)", f"tune.fail={fail}", "tracking.enabled=false", *SHAPES, *LOCAL])
    ended = [Trial(0, {"train.lr": 1}, "finished", [[2, 0.5]]), Trial(1, {"train.lr": 2}, "failed", error="E: why")]
    sweep = object.__new__(Sweep)
    sweep.request, sweep.out, sweep.ledger, sweep._store = request, tmp_path, Ledger(tmp_path), None
    from rayfed.errors import SweepError
    from rayfed.tracking.console import Console

    sweep.console = Console(2)
    if status:
        with pytest.raises(SweepError, match=r"1 of 2 trials failed, and tune\.fail=any"):
            sweep._conclude(ended)
    else:
        sweep._conclude(ended)


def test_a_trial_reserves_what_it_starts_and_clients_take_turns(ray_session, tmp_path, capsys):
    """Two clients of 9 CPUs on 16: each trial has one client actor, in a placement group that holds all it starts.

    The points are Optuna's, the baseline first.
    """
    out = tmp_path / "turns"
    words = ["space=fedlora", "tune.searcher=optuna", "tune.samples=2", "clients.cpu=9", "tracking.enabled=false"]
    assert main([*words, f"out={out}", "rounds=1", *[w for w in SHAPES if not w.startswith("rounds")]]) == 0
    assert "2 trials, 1 at a time, 1 client actors each" in capsys.readouterr().out
    rows = trials(out)
    assert [row["state"] for row in rows.values()] == ["finished", "finished"]
    assert rows[0]["train.lr"] == "3e-05" and 1e-5 <= float(rows[1]["train.lr"]) <= 1e-2


def test_a_trial_that_can_never_fit_is_refused_with_the_sum(ray_session, tmp_path, capsys):
    out = tmp_path / "refused"
    assert main(["train.lr=grid(1,2)", "clients.cpu=16", "server.cpu=1", f"out={out}", *SHAPES]) == 2
    printed = capsys.readouterr().err
    assert "need 17 CPUs and 0 GPUs in all, and there is 1 node with 16 CPUs and 0 GPUs in all" in printed
    assert not out.exists()


def start(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rayfed.tune", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, encoding="utf-8"
    )


def terminate_once(found):
    """SIGTERM to this process once ``found``."""
    while not found():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_killed_sweep_goes_on_and_repeats_nothing(ray_session, tmp_path, capsys):
    """kill -9, resume; SIGTERM, resume: ended trials are not played again, the others go on from their checkpoints."""
    out = tmp_path / "killed"
    words = ["method=fedlora", "train.lr=grid(1e-4,1e-3,1e-2)", f"out={out}", *SHAPES, *LOCAL]
    first = start(*words)
    wait_until((out / "trials" / "00001" / "checkpoints" / "round_00001" / "manifest.json").exists, first)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert main(words) == 2
    assert "already holds a run: add resume=auto" in capsys.readouterr().err
    log = out / "trials" / "00000" / "log.txt"
    before = log.read_text("utf-8")

    place = out / "trials" / "00002" / "checkpoints" / "round_00001" / "manifest.json"
    terminating = threading.Thread(target=terminate_once, args=[place.exists])
    terminating.start()
    with pytest.raises(SystemExit) as stop:
        main([*words, "resume=auto"])
    terminating.join()
    assert stop.value.code == 143
    assert "resumed: 1 trials have ended before, 2 go on from their checkpoints" in capsys.readouterr().out
    _, parents, children = mlflow_runs(f"sqlite:///{out.as_posix()}/mlflow.db")
    assert [p.info.status for p in parents] == ["KILLED"]
    ended = sorted(c.info.status for c in children)
    assert ended in (["FINISHED", "FINISHED", "KILLED"], ["FINISHED"] * 3)  # a quick trial is through before the signal

    assert main([*words, "resume=auto"]) == 0
    assert log.read_text("utf-8") == before
    for index in (1, 2) if "KILLED" in ended else (1,):
        assert "resumed after round" in (out / "trials" / f"{index:05d}" / "log.txt").read_text("utf-8")
    assert {row["state"] for row in trials(out).values()} == {"finished"}
    direct = tmp_path / "direct"
    assert run(["method=fedlora", "train.lr=1e-2", *SHAPES, "engine.pool=local", f"out={direct}"]) == 0
    assert_same_bits(direct, out / "trials" / "00002")
    _, parents, children = mlflow_runs(f"sqlite:///{out.as_posix()}/mlflow.db")
    assert {r.info.status for r in [*parents, *children]} == {"FINISHED"} and len(children) == 3 and len(parents) == 1
    assert main([*words[:1], "train.lr=grid(1e-4,1e-3)", *words[2:], "resume=auto"]) == 2
    assert "is another one (parameters was" in capsys.readouterr().err


def test_a_population_takes_over_the_better_state_and_mutates(ray_session, tmp_path):
    """Two trials in turns on one process: the worse goes on from the better one's checkpoint with another rate."""
    out, space = tmp_path / "pbt", tmp_path / "space.yaml"
    space.write_text("parameters:\n  train.lr: {loguniform: [1e-4, 1], mutate: true}\nbaseline: {train.lr: 1e-3}\n")
    words = [
        "method=fedlora",
        f"space={space}",
        "tune.scheduler=pbt",
        "tune.grace=1",
        "tune.samples=2",
        "clients.cpu=16",
    ]
    words += ["tracking.enabled=false", "engine.pool=local", f"out={out}", "rounds=3"]
    assert main([*words, *[w for w in SHAPES if not w.startswith("rounds")]]) == 0
    records = [json.loads((out / "trials" / f"{i:05d}" / "trial.json").read_text()) for i in (0, 1)]
    assert [record["state"] for record in records] == ["finished", "finished"]
    better, worse = records
    assert worse["changes"] and not better["changes"]
    folders = [out / "trials" / f"{r['index']:05d}" for r in (worse, better)]
    histories = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    assert [record["round"] for record in histories[0]] == [0, 1, 2]
    shared = [a == b for a, b in zip(*histories, strict=True)]
    assert shared == [True, True, False], "two rounds are the better trial's, the last one is its own"
    assert "resumed after round" in (folders[0] / "log.txt").read_text()
    saved = yaml.safe_load((folders[0] / "config.yaml").read_text())
    assert saved["train"]["lr"] == worse["point"]["train.lr"] != better["point"]["train.lr"]
