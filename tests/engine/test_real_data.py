"""On the real files of Debian's package dataset-fashion-mnist; collected where RAYFED_REAL_DATA is set."""

from __future__ import annotations

import numpy as np

from rayfed.backbones.tiny import pretraining_hashes
from rayfed.config import parse_options
from rayfed.data import build_task_from_options
from rayfed.data.idx import load_fashion_mnist
from rayfed.data.images import content_hashes
from rayfed.run import main
from tests.engine.runs import assert_same_bits, run_well

WORDS = ["data=fashion_mnist", "clients.n=3", "data.shots=4", "data.test_shots=4", "data.proxy=16", "rounds=1",
         "train.epochs=1", "partition.alpha=1", "tracking.enabled=false"]  # fmt: skip


def test_clients_get_the_second_half_and_no_image_is_used_twice():
    task = build_task_from_options(parse_options(["method=fedglad", *WORDS]))
    pixels, _ = load_fashion_mnist(None, "train")
    second_half = set(content_hashes(pixels[30_000:]).tolist())
    for part in (task.train, task.val, task.proxy):
        assert len(part.hashes) and set(part.hashes.tolist()) <= second_half
    tested = content_hashes(load_fashion_mnist(None, "test")[0])
    assert np.isin(task.test.hashes, tested).all()
    parts = [task.train.hashes, task.val.hashes, task.proxy.hashes, task.test.hashes, pretraining_hashes()]
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


def test_methods_run_in_process_and_on_ray_with_the_same_bits(tmp_path, ray_session):
    for method in ("fedglad", "fedlora", "local", "zero_shot"):
        assert main([f"method={method}", "engine.pool=local", f"out={tmp_path / method}", *WORDS]) == 0
    run_well("method=fedglad", f"out={tmp_path / 'ray'}", *WORDS)
    assert_same_bits(tmp_path / "fedglad", tmp_path / "ray")
