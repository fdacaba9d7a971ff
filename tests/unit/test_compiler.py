"""torch's compiler stays out of a process that trains, changes no bit of what is trained, and wakes when asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys, torch
from rayfed.engine import compiler

def train(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

KINDS = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
def awake():
    return "torch._dynamo.eval_frame" in sys.modules
"""


def python(code: str) -> str:
    """Run it in a process of its own: what is imported stays."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_optimisers_do_the_same_without_waking_it():
    asleep = TRAIN + "compiler.leave_asleep(); a = [train(k) for k in KINDS]; assert not awake()\n"
    woken = "torch._dynamo.config; assert awake(); b = [train(k) for k in KINDS]\n"
    assert python(asleep + woken + "print(all(torch.equal(x, y) for x, y in zip(a, b)))") == "True\n"


@pytest.mark.parametrize("how", ["torch.compile", "import torch._dynamo.config", "from torch._dynamo import optimize"])
def test_whoever_wants_the_compiler_gets_it(how):
    wake = {
        "torch.compile": "assert torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item() == 2",
    }.get(how, how)
    code = (
        TRAIN + f"compiler.leave_asleep(); train(torch.optim.SGD); {wake}\nprint(awake(), train(torch.optim.SGD).shape)"
    )
    assert python(code) == "True torch.Size([18])\n"


def test_tools_that_look_at_every_module_do_not_wake_it():
    look = (
        "for module in list(sys.modules.values()): getattr(module, '__file__', None), getattr(module, '__wrapped__', 0)"
    )
    assert python(TRAIN + f"compiler.leave_asleep()\n{look}\nprint(awake())") == "False\n"


def test_what_is_hidden_from_a_sleeping_compiler_stays_hidden_when_it_wakes():
    code = (
        TRAIN
        + """
compiler.leave_asleep()
traced = lambda: torch.compiler.is_compiling()
plain, decorated = torch._dynamo.disable(traced), torch._dynamo.disable(recursive=True)(traced)
assert not plain() and not decorated() and not awake()
def both(x):
    return x + 1, traced(), plain(), decorated()
print(torch.compile(both, backend="eager")(torch.ones(1))[1:], awake())
"""
    )
    assert python(code) == "(True, False, False) True\n"


def test_a_compiler_that_is_awake_is_left_alone():
    code = "import torch._dynamo as real, torch, sys; from rayfed.engine import compiler; compiler.leave_asleep();"
    assert python(code + "print(sys.modules['torch._dynamo'] is real is torch._dynamo)") == "True\n"


def test_a_whole_run_never_wakes_it(tmp_path: Path):
    words = ["method=fedglad", "clients.n=2", "rounds=1", "engine.pool=local", f"out={tmp_path / 'out'}"]
    code = TRAIN + f"from rayfed import run; print('exit', run.main({words!r})); print('awake', awake())"
    said = python(code)
    assert "exit 0" in said and "awake False" in said
