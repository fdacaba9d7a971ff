"""A backbone from outside the package, named ``module:function``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import rayfed
from rayfed.backbones import image_size, load_backbone, names
from rayfed.errors import BackboneError
from rayfed.run import main
from tests.engine import plain
from tests.engine.runs import FAST

NAME = "tests.engine.plain:backbone"


def test_what_the_options_know_of_it():
    assert names.kind(NAME) == "outside"
    assert image_size(NAME) == 8
    assert not names.has_text(NAME)
    weights = load_backbone(NAME).image_tower[1].weight
    assert torch.equal(weights, plain.backbone(pretrained=None, checkpoint=None).image_tower[1].weight)


@pytest.mark.parametrize("name", ["nowhere.at:all", "tests.engine.plain:torch", "tests.engine.plain:missing", "os:"])
def test_what_is_no_backbone_is_refused(name):
    with pytest.raises(BackboneError, match=r"cannot be imported|has no function"):
        load_backbone(name)


def test_a_run_adapts_it_and_can_be_loaded(tmp_path, capsys):
    words = [f"backbone={NAME}", "method=fedlora", "profile=paper", "engine.pool=local", f"out={tmp_path / 'run'}"]
    assert main([*words, *FAST]) == 0
    assert "2 tensors in the image tower" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["backbone"] == NAME and summary["zero_shot"]["acc_macro"] is None
    model = rayfed.load_run(tmp_path / "run")
    images = np.zeros((2, 3, 8, 8), np.uint8)
    probabilities = model.probabilities(images)
    assert probabilities.shape == (2, 96) and np.allclose(probabilities.sum(1), 1)
