"""torch's compiler stays out of a process that trains, changes no bit of what is trained, and wakes when asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_neither_optimisers_nor_tools_that_look_at_every_module_wake_it_and_it_changes_no_bit():
    asleep = "compiler.leave_asleep(); a = [train(k) for k in KINDS]; assert not awake()\n"
    look = (
        "for module in list(sys.modules.values()): getattr(module, '__file__', 0), getattr(module, '__wrapped__', 0)\n"
    )
    tools = "import inspect; inspect.getmodule(train); from ray import cloudpickle; cloudpickle.dumps(train)\n"
    woken = "assert not awake(); torch._dynamo.config; assert awake(); b = [train(k) for k in KINDS]\n"
    said = "print(all(torch.equal(x, y) for x, y in zip(a, b)))"
    assert python(TRAIN + asleep + look + tools + woken + said) == "True\n"


def test_whoever_imports_a_part_of_it_gets_the_whole():
    code = "compiler.leave_asleep(); import torch._dynamo.config as config; assert awake(); print(config.__name__)"
    assert python(TRAIN + code) == "torch._dynamo.config\n"


def test_what_is_hidden_from_a_sleeping_compiler_stays_hidden_when_it_wakes():
    code = """
compiler.leave_asleep()
traced = lambda: torch.compiler.is_compiling()
plain, decorated = torch._dynamo.disable(traced), torch._dynamo.disable(recursive=True)(traced)
assert not plain() and not decorated() and not awake()
def both(x):
    return x + 1, traced(), plain(), decorated()
print(torch.compile(both, backend="eager")(torch.ones(1))[1:], awake())
"""
    assert python(TRAIN + code) == "(True, False, False) True\n"


def test_a_compiler_that_is_awake_is_left_alone():
    code = "import torch._dynamo as real, torch, sys; from rayfed.engine import compiler; compiler.leave_asleep();"
    assert python(code + "print(sys.modules['torch._dynamo'] is real is torch._dynamo)") == "True\n"


def test_a_whole_run_never_wakes_it(tmp_path: Path):
    words = ["method=fedglad", "clients.n=2", "data.shots=2", "data.test_shots=1", "data.proxy=16", "rounds=1"]
    words += ["train.epochs=1", "partition.alpha=0.5", "engine.pool=local", f"out={tmp_path / 'out'}"]
    said = python(TRAIN + f"from rayfed import run; print('exit', run.main({words!r})); print('awake', awake())")
    assert "exit 0" in said and "awake False" in said
