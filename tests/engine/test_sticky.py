"""What is sent to an actor once is sent again to the actor that replaces it."""

from __future__ import annotations

import json

import ray

from rayfed.engine.ray_pool import RayPool
from rayfed.run import main
from tests.engine.runs import assert_same_bits
from tests.reference.test_feddtl import RUN


def test_an_actor_that_dies_with_the_anchor_changes_nothing(ray_session, tmp_path, monkeypatch):
    """FedDTL sends the supervised adapter before the third of four rounds; an actor dies before the fourth."""
    assert main([*RUN, f"out={tmp_path / 'whole'}"]) == 0
    original = RayPool.begin

    def begin(self, round_index, phase):
        if round_index == 3 and phase.name == "train":
            ray.kill(self._slots[0].actor)
        return original(self, round_index, phase)

    monkeypatch.setattr(RayPool, "begin", begin)
    words = [w for w in RUN if not w.startswith("engine.pool")]
    assert main([*words, "clients.actors=2", f"out={tmp_path / 'run'}"]) == 0
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "timing.json").read_text())["retried_jobs"] > 0
