"""rayfed's engine on the neutral workload of a framework comparison: ``run_ours.py VARIANT CLIENTS ROUNDS``.

Needs the comparison's ``common`` and ``workload`` modules on PYTHONPATH. Every part is the one a run uses: the round
loop, the Ray pool, messages, checks, exact sums. Only model and local training are the workload's own, so that equal
rounds give every runner's checksum.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from pathlib import Path

from rayfed.engine import heap

heap.load_torch()  # first, and as rayfed.run does

# ruff: noqa: E402
import common  # type: ignore[import-not-found]  # the comparison's own modules
import numpy as np
import torch
import workload  # type: ignore[import-not-found]
from torch import Tensor, nn

from rayfed.adapters.scope import Scope, Scoped
from rayfed.backbones.base import Backbone, Preprocessing
from rayfed.conf.options import MethodOptions
from rayfed.config import parse_options
from rayfed.data.task import ClientData, ImageSet, Task
from rayfed.engine.checkpoint import Checkpoints
from rayfed.engine.ray_pool import RayPool
from rayfed.engine.resources import Plan, connect
from rayfed.engine.run import Federation, RoundRecord, state_folder
from rayfed.methods.base import Batch, ClientJob, ClientResult, FitReport, Method, TaskView, View


class Options(MethodOptions):
    """Which workload."""

    name: str = "run_ours:Neutral"
    variant: str = "mlp"
    """mlp, vit8 or vit."""


PROFILES: dict[str, dict[str, object]] = {"embedded": {}, "paper": {}}


class Whole(Scoped):
    """The workload's model; what it trains is shared, the rest stays frozen."""

    def __init__(self, variant: str) -> None:
        super().__init__(Scope.SHARED, "all")
        self.trains = False
        self.inner = workload.make_model(variant)
        frozen = [(n, p) for n, p in self.inner.named_parameters() if not p.requires_grad]
        for name, parameter in frozen:  # as buffers: only parameters are sent
            owner = self.inner.get_submodule(name.rpartition(".")[0])
            delattr(owner, name.rpartition(".")[2])
            owner.register_buffer(name.rpartition(".")[2], parameter.detach())


def backbone(*, pretrained: str | None, checkpoint: str | None) -> Backbone:
    """Nothing: the workload brings its own model."""
    del pretrained, checkpoint
    size = Preprocessing(image_size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return Backbone("none", nn.Identity(), embed_dim=1, preprocessing=size, settings={})


backbone.image_size = 32  # type: ignore[attr-defined]  # what the options need to know of it


class Neutral(Method[Options]):
    """FedAvg of the workload's trainable parameters."""

    def build_model(self, backbone: object, task: TaskView) -> nn.Module:
        """The same initial values in every runner."""
        return Whole(self.config.variant)

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """The workload's own local epoch, on this client's own data."""
        assert isinstance(model, Whole)
        if not model.trains:
            model.requires_grad_(True)
            model.trains = True
        spec = workload.SPEC[self.config.variant]
        count, loss = workload.train(model.inner, *client_data(self.config.variant, job.client_id), spec["lr"])
        return ClientResult(FitReport(1, count, {"ce": loss}))

    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Not measured: the task has no test images."""
        return torch.zeros(len(batch.labels), 2)


DATA: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}


def client_data(variant: str, client_id: int) -> tuple[Tensor, Tensor]:
    """The client's data, generated once per process as in the other runners."""
    if (variant, client_id) not in DATA:
        DATA[variant, client_id] = workload.client_data(variant, client_id)
    return DATA[variant, client_id]


def empty_task(clients: int, examples: int) -> Task:
    """A task whose images are never looked at; sizes tell the scheduler that clients cost the same."""
    pixels = np.zeros((1, 3, 32, 32), np.uint8)
    some = ImageSet(pixels, np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.int64), ("photo",))
    none = ImageSet(pixels[:0], np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64), ("photo",))
    own = ClientData(np.zeros(examples, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Task("neutral", ("a", "b"), "a photo of a {}.", some, none, none, none, (own,) * clients, ())


class Clock:
    """Marks the end of every round."""

    def __init__(self, run: common.Run) -> None:
        self.run = run

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """Nothing."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Mark."""
        self.run.mark()


def main() -> None:
    """Run and report."""
    variant, clients, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = common.Run("ours", variant, clients)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    method = f"method={Options().name}"
    words = [
        method,
        "backbone=run_ours:backbone",
        f"method.variant={variant}",
        f"clients.n={clients}",
        f"rounds={rounds}",
        "eval.every=0",
        "clients.actors=2",
    ]
    options = parse_options([*words, "checkpoint.every=1000000"])
    # As much as the comparison's hand-written pool has: Ray's default is a third of the memory.
    os.environ.setdefault("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(500 * 2**20))
    connect(options)
    started = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        task = empty_task(clients, workload.SPEC[variant]["n"])
        pool = RayPool(options, task, state_folder(Path(scratch)), lambda: Plan(2))
        ready = time.time()
        federation = Federation(
            options, task, Neutral(options.method), pool, Checkpoints(Path(scratch), keep=1, options={}), Clock(run),
            has_zero_shot=False,
        )  # fmt: skip
        gc.freeze()  # as rayfed.run does
        run.mark()
        federation.play()
        params = list(pool.export().shared.values())
        loss = federation.history[-1]["clients"]["loss_ce"]
        run.report(loss=round(loss, 6), chk=round(workload.checksum([p.numpy() for p in params]), 4),
                   actors_ready_s=round(ready - started, 2))  # fmt: skip
        pool.close()


if __name__ == "__main__":
    sys.modules["run_ours"] = sys.modules["__main__"]
    main()
