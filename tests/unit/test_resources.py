"""What a cluster can run is computed before anything is asked of it."""

from __future__ import annotations

import pytest
import torch

from rayfed.config import parse_options
from rayfed.engine.bench import use_autocast
from rayfed.engine.resources import plan_actors
from rayfed.errors import OptionError, ResourceError

ONE_GPU = [{"CPU": 8.0, "GPU": 1.0}]
BOX = [{"CPU": 2.0}]


def plan(nodes, *words):
    return plan_actors(parse_options(["method=fedlora", "clients.n=20", *words]), nodes)


@pytest.mark.parametrize(
    ("nodes", "words", "sentence"),
    [
        (
            ONE_GPU,
            ["clients.gpu=4"],
            "clients.gpu=4 can never be met: the largest node has 1 GPUs .*use at most clients.gpu=1",
        ),
        (BOX, ["clients.gpu=0.5"], "the largest node has 0 GPUs .*use clients.gpu=0, or join a cluster with GPUs"),
        (BOX, ["server.gpu=0.2"], "server.gpu=0.2 can never be met"),
        (BOX, ["clients.cpu=3"], "clients.cpu=3 can never be met: the largest node has 2 CPUs"),
        (BOX, ["server.cpu=2"], "leaves no room for a client actor"),
    ],
)
def test_the_impossible_is_refused(nodes, words, sentence):
    with pytest.raises(ResourceError, match=sentence):
        plan(nodes, *words)


def test_shares_of_a_card_are_counted_per_card():
    assert plan(ONE_GPU, "clients.gpu=0.25", "clients.cpu=1").num_actors == 4
    assert plan(ONE_GPU, "clients.gpu=0.4").num_actors == 2
    assert plan([{"CPU": 16.0, "GPU": 2.0}], "clients.gpu=0.4").num_actors == 4
    assert plan([{"CPU": 16.0, "GPU": 4.0}], "clients.gpu=2").num_actors == 2
    assert plan(ONE_GPU, "clients.gpu=0.25", "server.gpu=0.5").num_actors == 2


def test_more_actors_than_fit_take_turns_and_it_is_said():
    found = plan(ONE_GPU, "clients.gpu=0.34", "clients.actors=3")
    assert found.num_actors == 2 and "clients.actors=3 but 2 fit" in str(found.note)


def test_no_more_actors_than_clients_drawn():
    assert plan([{"CPU": 64.0}], "clients.per_round=5").num_actors == 5
    assert plan([{"CPU": 64.0}], "clients.actors=3").num_actors == 3
    assert plan([{"CPU": 2.0}, {"CPU": 4.0}]).num_actors == 6


def test_half_precision_is_refused_with_the_reason(small):
    with pytest.raises(OptionError, match=r"engine\.precision=fp16: must be .*'bf16' \(half precision ends at 65,504"):
        small("method=fedlora", "engine.precision=fp16")


def test_a_card_without_bfloat16_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    card = torch.device("cuda")
    with pytest.raises(ResourceError, match=r"this GPU has no bfloat16: use engine\.precision=fp32"):
        use_autocast("bf16", card)
    assert not use_autocast("auto", card) and not use_autocast("fp32", card)
    assert use_autocast("bf16", torch.device("cpu")) and not use_autocast("auto", torch.device("cpu"))
