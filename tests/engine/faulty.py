"""fedlora with private parameters, and faults on demand: what tests of the engine misbehave with."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rayfed.adapters.attach import Branch
from rayfed.adapters.scope import Scope
from rayfed.conf.options import LoRAOptions
from rayfed.engine import memory
from rayfed.errors import AdapterError
from rayfed.methods.base import Batch, ClientJob, ClientResult, Group, Method, TaskView
from rayfed.methods.model import AdaptedModel


class Options(LoRAOptions):
    """Faults are written ``kind:client@round``, rounds from 1; a flag file makes a fault happen once."""

    name: Literal["tests.engine.faulty:Faulty"] = "tests.engine.faulty:Faulty"
    faults: tuple[str, ...] = ()
    """nan, inf, huge, raise, kill, sleep, memory, or spare, of which client in which round. Without a client: server@2
    kills the server in that round's step, predict a client actor at its first prediction, setup raises in the setup."""
    card_mib: int = 0
    """Pretend that the process has a card of this size, of which training takes 400 MiB."""
    flags: str = ""
    """Folder of the flag files."""
    once: bool = False
    """Only the first time."""


PROFILES: dict[str, dict[str, Any]] = {"embedded": {"train.lr": 3e-3}, "paper": {}}


class Faulty(Method[Options]):
    """A shared and a private LoRA, trained together."""

    def build_model(self, backbone, task: TaskView) -> nn.Module:
        if "setup" in self.config.faults:
            raise AdapterError("nothing to attach to.")
        if self.config.card_mib:
            memory.total, memory.most = lambda device: self.config.card_mib * 2**20, lambda device: 400 * 2**20
        model = AdaptedModel(backbone, task)
        for name, scope in (("global", Scope.SHARED), ("local", Scope.PRIVATE)):
            model.attach(self.config, Branch(name, scope, 2, 4.0))
        return model

    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        fault = self._due(job)
        self._before(fault, job)

        def objective(net, batch: Batch):
            logits = net.logits(net.image_features(batch.images, "global", "local"), job.class_features)
            return {"ce": torch.nn.functional.cross_entropy(logits, batch.labels)}

        report = job.fit(objective, [Group(Scope.SHARED), Group(Scope.PRIVATE)])
        upload = {"spare": torch.zeros(2)} if fault == "spare" else {}
        with torch.no_grad():
            first = next(p for n, p in model.named_parameters() if "global" in n)
            if fault in {"nan", "inf", "huge"}:
                first.view(-1)[0] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}[fault]
        return ClientResult(report, upload=upload)

    def _due(self, job: ClientJob) -> str:
        for fault in self.config.faults:
            kind, _, place = fault.partition(":")
            if not place:
                continue
            client, _, when = place.partition("@")
            if int(client) == job.client_id and (not when or int(when) == job.round_index + 1):
                flag = Path(self.config.flags) / f"{kind}-{client}-{when}"
                if self.config.once and flag.exists():
                    continue
                if self.config.flags:
                    flag.touch()
                return kind
        return ""

    def _before(self, fault: str, job: ClientJob) -> None:
        if fault == "raise":
            raise RuntimeError("the client's own mistake")
        if fault == "kill":
            os.kill(os.getpid(), 9)
        if fault == "sleep":
            time.sleep(600)
        if fault == "memory":
            # As a card that holds one client at a time: whoever comes while another is inside runs out.
            with (Path(self.config.flags) / "card").open("w") as card:
                try:
                    fcntl.flock(card, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when its process ends
                except BlockingIOError:
                    raise torch.OutOfMemoryError("device has no room") from None
                time.sleep(1.0)

    def class_features(self, model, names):
        return model.text_features(names=names)

    def server_step(self, model, state, updates, ctx):
        if f"server@{ctx.round_index + 1}" in self.config.faults:
            self._die_once("server")
        return super().server_step(model, state, updates, ctx)

    def _die_once(self, what: str) -> None:
        flag = Path(self.config.flags) / what
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), 9)

    def predict(self, model, batch: Batch, view, classes):
        if "predict" in self.config.faults:
            self._die_once("predict")
        names = ("global",) if view == "global" else ("global", "local")
        return model.logits(model.image_features(batch.images, *names), classes)
