"""MLflow: a real store, what is in it, several processes on a fresh one, and trouble that must not end a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from rayfed.run import main
from tests.engine.runs import run_well, start

WORDS = [
    "engine.pool=local",
    "clients.n=2",
    "data.shots=1",
    "data.test_shots=1",
    "data.proxy=4",
    "rounds=2",
    "train.epochs=1",
    "partition.alpha=1",
]


def test_a_run_is_in_the_store_with_options_figures_and_files(out):
    assert main(["method=fedglad", f"out={out}", *WORDS]) == 0
    uri = f"sqlite:///{out.as_posix()}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("rayfed")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.rank"] == "4" and run.data.params["train.batch"] == "32"
    assert {"torch", "mlflow", "git", "machine", "cpus", "memory_gib", "gpus"} <= run.data.tags.keys()
    summary = json.loads((out / "summary.json").read_text())
    for name, value in (
        ("personal/acc_macro", summary["personal"]["acc_macro"]),
        ("global/acc_full", summary["global"]["acc_full"]),
    ):
        history = client.get_metric_history(run.info.run_id, name)
        assert [m.step for m in history] == [1, 2]
        assert history[-1].value == pytest.approx(value)
    assert len(client.get_metric_history(run.info.run_id, "comms/bytes_up")) == 2
    names = {f.path for f in client.list_artifacts(run.info.run_id)}
    assert names >= {"plots", "adapters", "config.yaml", "clients.csv", "summary.json"}
    # What is private to a client stays out of the store, which may be on another machine.
    adapters = {f.path for f in client.list_artifacts(run.info.run_id, "adapters")}
    assert adapters == {"adapters/shared.safetensors", "adapters/peft"}
    plots = {f.path for f in client.list_artifacts(run.info.run_id, "plots")}
    assert "plots/accuracy.png" in plots
    assert json.loads((out / "tracking.json").read_text())["run_id"] == run.info.run_id


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(out):
    words = [w for w in WORDS if not w.startswith("rounds")]
    assert main(["method=fedlora", f"out={out}", *words, "rounds=1"]) == 0
    assert main(["method=fedlora", f"out={out}", *words, "rounds=2", "resume=auto"]) == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{out.as_posix()}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("rayfed").experiment_id])
    assert run.info.status == "FINISHED"
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "personal/acc_macro")]
    assert steps == [1, 2]


def test_several_processes_open_a_fresh_store_together(tmp_path):
    uri = f"sqlite:///{tmp_path.as_posix()}/shared.db"
    words = ["method=zero_shot", f"tracking.uri={uri}", "tracking.experiment=new", *WORDS]
    running = [start(*words, f"out={tmp_path / str(k)}", f"seed={k}") for k in range(8)]
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and "MLflow at" not in errors, output + errors
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("new").experiment_id])
    assert sorted(run.data.params["seed"] for run in runs) == [str(k) for k in range(8)]
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_without_any_option_the_run_is_in_a_database_that_the_shown_command_opens(tmp_path):
    words = [word for word in WORDS if not word.startswith("tracking.")]
    done = run_well("method=zero_shot", *words, cwd=tmp_path)
    (uri,) = re.findall(r"mlflow ui --host 127\.0\.0\.1 --backend-store-uri '(.+)'", done.stdout.replace("\n", ""))
    assert Path(uri.removeprefix("sqlite:///")).resolve() == tmp_path / "outputs" / "mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("rayfed").experiment_id])
    assert found.info.status == "FINISHED"


def test_a_store_that_cannot_be_reached_costs_one_warning(tmp_path, caplog):
    out = tmp_path / "run"
    database = tmp_path / "file"
    database.write_text("this is not a database, and long enough that sqlite notices it is none" * 20)
    assert main(["method=fedlora", f"out={out}", f"tracking.uri=sqlite:///{database}", *WORDS]) == 0
    warnings = [r.message for r in caplog.records if "MLflow at" in r.getMessage()]
    assert len(warnings) == 1
    assert (out / "summary.json").exists() and (out / "plots" / "accuracy.png").exists()


def test_a_failed_run_is_closed_as_failed(out):
    faults = "method.faults=[raise:0@2,raise:1@2]"
    assert main(["method=tests.engine.faulty:Faulty", faults, f"out={out}", *WORDS]) == 1
    client = MlflowClient(tracking_uri=f"sqlite:///{out.as_posix()}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("rayfed").experiment_id])
    assert run.info.status == "FAILED"
