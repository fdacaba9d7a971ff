"""What a run saves can be loaded elsewhere: by rayfed, strictly, and by PEFT."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from peft import PeftModel

import rayfed
from rayfed.adapters.scope import Scope
from rayfed.backbones import load_backbone
from rayfed.data import build_task_from_options
from rayfed.engine.bench import Bench, task_view
from rayfed.errors import AdapterError
from rayfed.run import main

WORDS = [
    "engine.pool=local",
    "tracking.enabled=false",
    "clients.n=3",
    "clients.per_round=2",
    "data.shots=2",
    "data.test_shots=1",
    "data.proxy=16",
    "rounds=1",
    "train.epochs=1",
    "train.lr=0.001",
    "partition.alpha=0.5",
]


INTERLEAVED = ["method=fedpurel", "method.schedule=interleaved"]
RUNS = {
    "fedglad": ["method=fedglad"],
    "fedlora": ["method=fedlora"],
    "local": ["method=local"],
    "prompt": [*INTERLEAVED, "method.kind=prompt"],
    "mask": [*INTERLEAVED, "method.kind=adapter"],
    "head": ["method=fedlora", "backbone=tests.engine.plain:backbone", "profile=paper"],
    "bottlenecks": ["method=blend"],
    "gates": ["method=fedsdg"],
}


@pytest.fixture(scope="module", params=RUNS)
def finished(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / request.param
    assert main([*RUNS[request.param], f"out={out}", *WORDS]) == 0
    return request.param, out


def images(count=6):
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def test_loaded_models_predict_what_the_run_recorded(finished, small):
    what, out = finished
    task = build_task_from_options(small(*RUNS[what], *WORDS))
    rows = (out / "clients.csv").read_text().splitlines()
    header = rows[0].split(",")
    for line in rows[1:]:
        row = dict(zip(header, line.split(","), strict=True))
        client = int(row["client"])
        file = out / "adapters" / "clients" / f"{client:05d}.safetensors"
        own = task.clients[client].test
        predictor = rayfed.load_run(out, client=client if file.exists() else None)
        hits = predictor.logits(task.test.images[own]).argmax(-1).numpy() == task.test.labels[own]
        assert float(row["personal"]) == pytest.approx(hits.mean(), abs=1e-12)


def test_a_missing_or_spare_tensor_stops_the_load(finished):
    what, out = finished
    file = next(iter(sorted((out / "adapters").rglob("*.safetensors"))))
    if what in {"fedlora", "head"}:  # the first file is PEFT's
        file = out / "adapters" / "shared.safetensors"
    whole = safetensors.torch.load_file(file)
    client = int(file.stem) if file.stem.isdigit() else None
    name = next(iter(whole))
    for tensors, problem in (
        ({k: v for k, v in whole.items() if k != name}, f"missing: {name}"),
        ({**whole, "spare": torch.ones(2)}, "not in the model: spare"),
    ):
        safetensors.torch.save_file(tensors, file)
        with pytest.raises(AdapterError, match=problem.replace(".", r"\.")):
            rayfed.load_run(out, client=client)
    safetensors.torch.save_file(whole, file)
    rayfed.load_run(out, client=client)


def test_a_client_that_does_not_exist_is_named(finished):
    with pytest.raises(AdapterError, match="client 9 does not exist: the run has clients 0 to 2"):
        rayfed.load_run(finished[1], client=9)


def test_peft_loads_the_shared_lora_and_computes_the_same(finished):
    what, out = finished
    if what not in {"fedglad", "fedlora", "gates"}:  # no shared LoRA, or not on a CLIP
        assert what == "head" or not (out / "adapters" / "peft").exists()
        return
    adapted = PeftModel.from_pretrained(load_backbone("tiny"), str(out / "adapters" / "peft"))
    backbone = adapted.base_model.model
    batch = backbone.normalise(torch.from_numpy(images()))
    with torch.no_grad():
        features = F.normalize(backbone.encode_image(batch), dim=-1)
        classes = F.normalize(backbone.encode_text(backbone.tokenize(texts(out))), dim=-1)
    expected = rayfed.load_run(out).logits(images())
    torch.testing.assert_close(backbone.logit_scale * features @ classes.T, expected, rtol=1e-4, atol=1e-4)
    frozen = load_backbone("tiny")
    with torch.no_grad():
        untouched = F.normalize(frozen.encode_image(batch), dim=-1)
    assert not torch.allclose(untouched, features, atol=1e-4)


def texts(out):
    import json

    task = json.loads((out / "task.json").read_text())
    return [task["template"].replace("{}", name) for name in task["classes"]]


def test_adapters_do_not_act_unless_switched_on(small, task):
    for words in (
        ["method=fedglad"],
        ["method=fedglad", "method.gate=layer"],
        ["method=fedlora", "method.towers=both"],
    ):
        bench = Bench(small(*words), task_view(task), gpu_share=0)
        for scope in (Scope.SHARED, Scope.PRIVATE):
            bench.parameters[scope].data.normal_()
        fresh = load_backbone("tiny")
        batch = fresh.normalise(torch.from_numpy(images()))
        with torch.no_grad():
            assert torch.equal(bench.backbone.encode_image(batch), fresh.encode_image(batch))
            tokens = fresh.tokenize(["a photo of a red star."])
            assert torch.equal(bench.backbone.encode_text(tokens), fresh.encode_text(tokens))
