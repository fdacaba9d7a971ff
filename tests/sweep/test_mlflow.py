"""What goes to MLflow beside figures: names of any kind, the adapted model, and a server that goes and comes back."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

import rayfed
from rayfed.config import parse_options
from rayfed.engine.run import RoundRecord
from rayfed.errors import OptionError
from rayfed.run import main
from rayfed.tracking.mlflow import MISSED, MlflowSink, class_metrics
from rayfed.tracking.names import NameTable

SMALL = ["engine.pool=local", "clients.n=2", "data.shots=1", "data.test_shots=1", "rounds=1", "train.epochs=1"]
NAMES = [
    "Boxer (dog)",
    "AT&T",
    "it's",
    "100%",
    "a,b",
    "../x",
    "..",
    ".",
    "a//b",
    "/a",
    "a b",
    " a",
    "é",
    "e",
    "A",
    "狗",
    "",
]


def test_any_name_becomes_one_the_store_takes_and_no_two_become_one(tmp_path):
    table = NameTable()
    safe = [table.name(name) for name in NAMES]
    assert len(set(safe)) == len(NAMES)
    assert table.name("personal/acc_macro") == "personal/acc_macro" and table.name("AT&T") == safe[1]
    long = [table.name("x" * 400 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(name) < 250 for name in long)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'm.db'}")
    run = client.create_run(client.create_experiment("names")).info.run_id
    for index, name in enumerate([*safe, *long]):
        client.log_metric(run, name, index)
    assert len(client.get_run(run).data.metrics) == len(NAMES) + 2
    table.write(tmp_path)
    real = json.loads((tmp_path / "metric-names.json").read_text("utf-8"))
    assert {real.get(s, s) for s in safe} == set(NAMES)


def test_a_name_made_to_look_like_a_safe_one_gets_another():
    table = NameTable()
    pretender = table.name("AT&T")
    fresh = NameTable()
    assert fresh.name(pretender) == pretender and fresh.name("AT&T") != pretender


def test_classes_with_one_name_have_metrics_of_their_own():
    rows = [{"class": i, "name": "missile", "global": i / 10, "personal": None} for i in range(2)]
    assert class_metrics(rows) == {"class/0 missile/global": 0.0, "class/1 missile/global": 0.1}


def test_registering_needs_a_model():
    with pytest.raises(OptionError, match=r"tracking\.register_as=glad but tracking\.model=none logs no model"):
        parse_options(["tracking.register_as=glad"])


def test_the_logged_model_predicts_what_the_run_does(tmp_path):
    out = tmp_path / "run"
    words = ["method=fedglad", "method.distill=none", "tracking.model=personal", "tracking.register_as=glad"]
    assert main([*words, f"out={out}", *SMALL]) == 0
    mlflow.set_tracking_uri(f"sqlite:///{out}/mlflow.db")
    run_id = json.loads((out / "tracking.json").read_text())["run_id"]
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    by_run, by_name = (mlflow.pyfunc.load_model(uri) for uri in (f"runs:/{run_id}/model", "models:/glad/1"))
    np.testing.assert_array_equal(by_run.predict(images), rayfed.load_run(out).probabilities(images))
    np.testing.assert_array_equal(by_run.predict(images), by_name.predict(images))
    personal = by_run.predict(images, params={"client": 1})
    np.testing.assert_array_equal(personal, rayfed.load_run(out, client=1).probabilities(images))
    assert not np.array_equal(personal, by_run.predict(images))
    files = MlflowClient().list_artifacts(run_id, "model")
    assert not [f.path for f in files if f.path.endswith((".pkl", ".pickle"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``mlflow server`` on loopback, which can be killed and started again."""

    def __init__(self, folder) -> None:
        self.port, self._folder = free_port(), folder
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/server.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        quiet = subprocess.DEVNULL
        light = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=light)
        for _ in itertools.count():
            assert self._process.poll() is None
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)

    def kill(self) -> None:
        import psutil

        processes = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)


def sink_for(out, uri, run_id=None) -> tuple[MlflowSink, list[str]]:
    found: list[str] = [run_id] if run_id else []
    return MlflowSink(uri, "outage", "run", out, run_id=run_id, note_run=found.append), found


def round_record(index: int) -> RoundRecord:
    return RoundRecord(index, clients={"loss_ce": 1.0 / (index + 1)})


def test_a_server_that_goes_away_costs_nothing_and_gets_what_it_missed(tmp_path, caplog):
    """Killed after the first round and started again before the end of the run."""
    server, out = Server(tmp_path), tmp_path / "out"
    out.mkdir()
    server.start()
    sink, ids = sink_for(out, server.uri)
    sink.start({"train.lr": 0.1}, {"git": "abc"})
    sink.round_done(round_record(0), 1.0)
    while not ids or sink._queue.qsize():
        sink.flush()
    server.kill()
    started = time.monotonic()
    for index in (1, 2):
        sink.round_done(round_record(index), 1.0)
        sink.flush()
    assert time.monotonic() - started < 10
    server.start()
    try:
        sink.finish("FINISHED")
        client = MlflowClient(tracking_uri=server.uri)
        run = client.get_run(ids[0])
        assert run.info.status == "FINISHED" and run.data.params["train.lr"] == "0.1"
        history = client.get_metric_history(ids[0], "clients/loss_ce")
        assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
        assert not (out / MISSED).exists()
    finally:
        server.kill()
    assert "answers again" in " ".join(record.getMessage() for record in caplog.records)


def test_what_was_missed_to_the_end_is_kept_and_made_up_by_a_resumed_run(tmp_path, caplog):
    out, uri = tmp_path / "out", f"sqlite:///{tmp_path}/m.db"
    out.mkdir()
    sink, ids = sink_for(out, uri)
    sink.start({"train.lr": 0.1}, {})
    sink.round_done(round_record(0), 1.0)
    while not ids or sink._queue.qsize():
        sink.flush()
    sink._client = MlflowClient(tracking_uri=f"http://127.0.0.1:{free_port()}")  # nobody listens there
    sink.round_done(round_record(1), 1.0)
    sink.finish("FINISHED")
    (kept,) = [json.loads(line) for line in (out / MISSED).read_text().splitlines()]
    assert kept["step"] == 2 and kept["metrics"]["clients/loss_ce"] == 0.5
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert re.search(r"missed is kept in .*tracking-missed\.jsonl; resume=auto makes it up", messages)

    sink, _ = sink_for(out, uri, ids[0])
    sink.start({}, {})
    sink.finish("FINISHED")
    client = MlflowClient(tracking_uri=uri)
    assert [m.step for m in client.get_metric_history(ids[0], "clients/loss_ce")] == [1, 2]
    assert not (out / MISSED).exists() and client.get_run(ids[0]).info.status == "FINISHED"
