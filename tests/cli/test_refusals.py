"""Every wrong input gets one sentence and a non-zero exit, before anything heavy starts; nothing is left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rayfed.run import main

WRONG = {
    "unknown method": (["method=fedgald"], "unknown method 'fedgald'; did you mean fedglad"),
    "unknown option": (["train.lrr=1"], "unknown option 'train.lrr'; did you mean train.lr"),
    "unknown method option": (
        ["method.rnk=2"],
        "unknown option of method=fedglad 'method.rnk'; did you mean method.rank",
    ),
    "option of another method": (
        ["method=fedlora", "method.gate=layer"],
        "unknown option of method=fedlora 'method.gate'",
    ),
    "unknown data set": (["data=shaps"], "unknown data set 'shaps'; did you mean shapes?"),
    "unknown backbone": (["backbone=ViT-B-166"], "unknown backbone 'ViT-B-166'; did you mean"),
    "unknown partition": (["partition=dirichlt"], "partition=dirichlt: must be 'dirichlet'"),
    "unknown profile": (["method=zero_shot", "profile=authors"], "method=zero_shot has no profile 'authors'"),
    "not an option": (["fedglad"], "'fedglad' is not an option: write name=value"),
    "not a flag": (["--lsit"], "--lsit is not a flag"),
    "given twice": (["seed=1", "seed=2"], "seed is given twice"),
    "group without member": (["train=3"], "train is a group and takes no value itself"),
    "not a number": (["clients.n=many"], "clients.n=many: must be a valid integer"),
    "not a switch": (["data.download=perhaps"], "data.download=perhaps: must be a valid boolean"),
    "negative": (["train.lr=-1"], "train.lr=-1: must be greater than 0"),
    "infinite": (["train.lr=inf"], "train.lr=inf: must be"),
    "zero clients": (["clients.n=0"], "clients.n=0: must be greater than or equal to 1"),
    "rank above width": (["method.rank=500"], "method.rank=500 is above the width 128"),
    "cohort above clients": (["clients.n=5", "clients.per_round=6"], "clients.per_round=6 is above clients.n=5"),
    "updates above cohort": (["clients.n=2", "clients.min_updates=3"], "clients.min_updates=3 can never be met"),
    "fraction of several cards": (["clients.gpu=1.5"], "clients.gpu=1.5 is refused by Ray"),
    "template without place": (["data.template=a photo"], "data.template='a photo' must contain {} once"),
    "weights for none": (["backbone=ViT-B-16"], "backbone=ViT-B-16 needs weights"),
    "weights for tiny": (["backbone.pretrained=openai"], "backbone=tiny has no pretrained tag 'openai'"),
    "text method on a ViT": (
        ["backbone=vit_tiny_patch16_224", "backbone.pretrained=none"],
        "method=fedglad classifies by class texts but backbone=vit_tiny_patch16_224 has no text tower",
    ),
    "text adapters at the server": (["method.distill=class_mean_server"], "set method.towers=both"),
    "no proxy images": (["data.proxy=0"], "data.proxy=0"),
    "folder tracking": (["tracking.uri=./mlruns"], "use a database file, tracking.uri=sqlite:///./mlruns/mlflow.db"),
    "file tracking": (["tracking.uri=file:///tmp/x"], "sqlite:////tmp/x/mlflow.db"),
    "data without root": (["data=cifar10"], "data=cifar10 needs data.root"),
    "resume nowhere": (["resume=auto"], "resume=auto needs out=DIR"),
    "partition without file": (["partition=file"], "partition=file needs partition.file"),
    "address nobody answers": (["engine.address=127.0.0.1:9"], "nothing answers at engine.address=127.0.0.1:9"),
    "no targets": (["method.targets=[]"], "method.targets"),
    "extra clients without side by side": (
        ["engine.pool=local", "clients.over_select=0.5"],
        "clients.over_select needs",
    ),
    "outside backbone without module": (["backbone=nowhere.at:all"], "module 'nowhere.at' cannot be imported"),
    "outside backbone without size": (["backbone=os:getcwd"], "no function 'getcwd' with an attribute image_size"),
    "outside backbone without text": (["backbone=tests.engine.plain:backbone"], "has no text tower"),
    "outside method without module": (["method=nowhere.at:All"], "module 'nowhere.at' cannot be imported"),
    "outside method without options": (["method=os:path"], "has no 'Options'"),
    "missing config": (["config=nowhere.yaml"], "config=nowhere.yaml cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, sentence = WRONG[case]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and "Traceback" not in printed
    assert all(line.startswith("error: ") for line in printed.splitlines())
    assert not list(tmp_path.iterdir())


def test_another_cluster_than_the_one_joined_is_refused(capsys, tmp_path, monkeypatch, ray_session):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("", 0)) as listener:
        asked = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main([f"engine.address={asked}"]) == 2
        assert main(["engine.address=127.0.0.1:9"]) == 2
    printed = capsys.readouterr().err
    assert f"engine.address={asked} but this process is in the Ray cluster at {ray_session} already" in printed
    assert "nothing answers at engine.address=127.0.0.1:9" in printed
    assert not list(tmp_path.iterdir())


def test_all_mistakes_are_told_at_once(capsys):
    assert main(["train.lr=-1", "rounds=0", "clients.n=x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


LOCAL = ["engine.pool=local", "tracking.enabled=false"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=folder", "data.root=/nowhere/at all"], "/nowhere/at all"),
        (["data=fashion_mnist", "data.root=/nowhere"], "/nowhere"),
        (["data=cifar10", "data.root=/nowhere"], "/nowhere"),
        (["clients.n=3000"], "3000"),
        (["clients.n=50", "partition.alpha=0.05", "partition.min_train=30"], "smallest"),
        (["data.domains=[photos]"], "photos"),
        (["data.shots=2", "data.proxy_from=digitz"], "digitz"),
        (["method.targets=[q,w_proj]"], "target 'w_proj' matches no linear layer"),
        (["backbone=ViT-B-32", "backbone.checkpoint=/nowhere.pt"], "/nowhere.pt"),
    ],
)
def test_impossible_data_and_models_are_refused(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, *LOCAL, f"out={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and "Traceback" not in printed
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_runs_that_choose_the_same_name_get_folders_of_their_own(tmp_path):
    from rayfed.run import reserve

    first, second = (reserve(tmp_path / "outputs" / "run", named=False) for _ in range(2))
    assert (first.name, second.name) == ("run", "run-2") and second.is_dir()
    assert reserve(tmp_path / "mine", named=True) == reserve(tmp_path / "mine", named=True)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    from tests.engine.runs import start

    process = start("method=zero_shot", "clients.n=2", "data.shots=1", "data.test_shots=1", "partition.alpha=1", *LOCAL,
                    f"out={tmp_path / 'run'}")  # fmt: skip
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_results_folder_that_cannot_be_written_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    assert main(["method=zero_shot", *LOCAL, f"out={tmp_path / 'file'}"]) == 2
    assert "is a file: name a folder" in capsys.readouterr().err


def test_a_partition_file_is_checked(capsys, tmp_path):
    path = tmp_path / "p.json"
    words = [*LOCAL, "partition=file", f"partition.file={path}", f"out={tmp_path / 'run'}", "data.proxy=4"]
    for content, sentence in (
        ("not json", "is not a partition"),
        (json.dumps({"clients": [{"train": [0, 0]}]}), "0"),
        (json.dumps({"clients": [{"train": [10**7]}]}), str(10**7)),
    ):
        path.write_text(content)
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


def test_help_lists_every_option(capsys):
    assert main(["--help", "method=fedlora"]) == 0
    text = capsys.readouterr().out
    for name in (
        "method",
        "data.root",
        "clients.per_round",
        "engine.pool",
        "eval.every",
        "method.rank",
        "tracking.uri",
    ):
        assert f"\n  {name} " in text or f"\n  {name}\n" in text
    assert "method.gate" not in text


def test_list_names_methods_data_and_backbones(capsys):
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for name in ("fedglad", "fedlora", "local", "zero_shot", "shapes", "fashion_mnist", "tiny", "ViT-B-16"):
        assert name in text


def test_dry_run_tells_bytes_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["method=fedglad", "--dry-run", "clients.n=3", "data.shots=2", "data.test_shots=1", "out=run"]) == 0
    text = capsys.readouterr().out
    assert "rank: 4" in text and "down and" in text and str(tmp_path / "run") in text
    assert not list(tmp_path.iterdir())


def test_dry_run_bytes_are_those_of_the_run(capsys, tmp_path):
    words = [
        "method=fedglad",
        "clients.n=3",
        "data.shots=2",
        "data.test_shots=1",
        "data.proxy=16",
        "rounds=1",
        "train.epochs=1",
        "partition.alpha=0.5",
        "method.distill=proxy_client",
        *LOCAL,
    ]
    assert main([*words, "--dry-run"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("bytes:"))
    down, up = int(line.split()[1]), int(line.split()[4])
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["bytes_down"], summary["bytes_up"]) == (3 * down, 3 * up)


def test_config_file_runs_again_and_the_command_line_wins(tmp_path):
    words = [
        "method=fedlora",
        "clients.n=3",
        "data.shots=1",
        "data.test_shots=1",
        "rounds=1",
        "train.epochs=1",
        "partition.alpha=1",
        "data.template=a picture of {}, really.",
        *LOCAL,
    ]
    first, second = tmp_path / "a", tmp_path / "b"
    assert main([*words, f"out={first}"]) == 0
    assert main([f"config={first / 'config.yaml'}", f"out={second}", "resume=never"]) == 0
    assert (first / "summary.json").read_text() == (second / "summary.json").read_text()
    assert "a picture of {}, really." in (second / "config.yaml").read_text()


def test_files_of_a_run(tmp_path):
    out = tmp_path / "run"
    words = [
        "method=fedglad",
        "clients.n=3",
        "clients.per_round=2",
        "data.shots=1",
        "data.test_shots=1",
        "data.proxy=4",
        "rounds=2",
        "train.epochs=1",
        "partition.alpha=1",
        *LOCAL,
    ]
    assert main([*words, f"out={out}"]) == 0
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and "checkpoints" not in p.parts}
    assert names >= {
        "config.yaml", "metrics.jsonl", "clients.csv", "classes.csv", "summary.json", "timing.json", "task.json",
        "adapters/shared.safetensors", "adapters/peft/adapter_model.safetensors", "adapters/peft/adapter_config.json",
        "plots/accuracy.png", "plots/clients.png", "plots/partition.png", "plots/training.png",
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    for view in ("zero_shot", "global", "personal"):
        assert {"acc_macro", "acc_weighted", "acc_worst", "p10", "p50", "p90"} <= summary[view].keys()
    assert summary["rounds"] == 2 and summary["failures"] == 0 and summary["bytes_up"] > 0
    assert "acc_full" in summary["global"] and "personal_acc" in summary["val"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1] and all(len(line["cohort"]) == 2 for line in lines)
    assert not [p for p in Path(out).rglob("*") if p.suffix in {".pt", ".pkl", ".pth", ".tmp"}]
