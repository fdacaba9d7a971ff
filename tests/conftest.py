"""Shared fixtures: small options and tasks on the embedded backbone, and one Ray for the whole session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest
import torch

from rayfed.conf.options import RunOptions
from rayfed.config import parse_options
from rayfed.data import build_task_from_options
from rayfed.data.task import Task
from rayfed.engine.actors import kept_actors

torch.set_num_threads(1)
SMALL = [
    "engine.pool=local",
    "tracking.enabled=false",
    "clients.n=3",
    "data.shots=2",
    "data.test_shots=1",
    "data.proxy=16",
    "rounds=2",
    "train.epochs=1",
    "partition.alpha=0.5",
]


@pytest.fixture(scope="session")
def small() -> Callable[..., RunOptions]:
    """Options of a run that takes seconds; words given win."""

    def make(*words: str) -> RunOptions:
        chosen = dict(word.partition("=")[::2] for word in (*SMALL, *words))
        return parse_options([f"{key}={value}" for key, value in chosen.items()])

    return make


@pytest.fixture(scope="session")
def task(small: Callable[..., RunOptions]) -> Task:
    """The task of ``small()`` with proxy images."""
    return build_task_from_options(small("method=fedglad"))


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Ray with pretended CPUs for all tests; its address is in RAY_ADDRESS for commands too."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=16,
        num_gpus=0,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        namespace="rayfed",
    )
    address = context.address_info["address"]
    os.environ["RAY_ADDRESS"] = address
    with kept_actors():  # runs in this process need not import torch in new actors each time
        yield address
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A results folder that does not exist yet, with a space and a letter that is not ASCII in its path."""
    return tmp_path / "réś ults"


collect_ignore = [] if os.environ.get("RAYFED_REAL_DATA") else ["engine/test_real_data.py"]
"""Tests on real files run where those files were asked for; they fail, not skip, if the files are missing then."""
