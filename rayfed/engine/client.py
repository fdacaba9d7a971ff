"""The client half of the engine: one worker holds one model and trains or evaluates clients, one after another.

A plain class: the in-process pool calls it directly, a Ray actor is a thin shell around it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayfed import rng
from rayfed.adapters.scope import Scope
from rayfed.aggregation.exact import ExactSum
from rayfed.comms import codec
from rayfed.conf.options import RunOptions, TrainOptions
from rayfed.data.task import Task
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.images import ArrayImages
from rayfed.engine.policy import update_problem
from rayfed.engine.store import ClientStore, StateRef
from rayfed.messages import Broadcast, ClientFailure, Payload, Phase, RoundRef
from rayfed.methods.base import ClientResult, FitReport, GradientRule, Group, Images, Objective, TaskView, View
from rayfed.state import ClientState

Predictions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Train one client; ``private`` is its saved state, ``score`` asks for its test predictions afterwards."""

    client_id: int
    cost: int
    phase: Phase
    private: StateRef | None = None
    score: bool = False


@dataclass(frozen=True, slots=True)
class PredictJob:
    """Predict ``part`` of the task: a stretch of the test set, or one client's test or validation images."""

    client_id: int
    cost: int
    view: Literal["zero_shot", "global", "personal"]
    part: Literal["stretch", "test", "val"]
    start: int = 0
    stop: int = 0
    private: StateRef | None = None


@dataclass(frozen=True, slots=True)
class ClientReport:
    """What the driver learns of one trained client; its tensors go to the server in a ``Packet``."""

    client_id: int
    num_examples: int
    steps: int
    metrics: dict[str, float]
    bytes_up: int
    state: StateRef | None
    predictions: Predictions | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted class ids of one job."""

    job: PredictJob
    classes: Predictions


@dataclass(frozen=True, slots=True)
class Packet:
    """Updates on their way to the server: folded into one exact sum, or ``(client_id, num_examples, message)`` each."""

    round: RoundRef
    clients: tuple[int, ...]
    folded: ExactSum | None = None
    items: tuple[tuple[int, int, bytes], ...] = ()


@dataclass(slots=True)
class LocalJob:
    """The ``ClientJob`` a method sees."""

    client_id: int
    round_index: int
    rounds: int
    phase: str
    task: TaskView
    train: Images
    proxy: Images
    options: TrainOptions
    extras: Mapping[str, Tensor]
    received: Payload
    class_features: Tensor | None
    bench: Bench
    labels: tuple[str | int, ...] = field(default=())

    def generator(self, purpose: str) -> torch.Generator:
        """CPU generator of this client, round and purpose."""
        return rng.torch_generator(self.bench.options.seed, *self.labels, purpose)

    def fit(
        self,
        objective: Objective,
        groups: Sequence[Group],
        *,
        lr: float | None = None,
        options: TrainOptions | None = None,
        gradient_rule: GradientRule | None = None,
        on_epoch: Callable[[int], None] | None = None,
    ) -> FitReport:
        """Train ``groups`` on the client's training images."""
        options = self.options if options is None else options
        options = options if lr is None else options.model_copy(update={"lr": lr})
        return self.bench.fit(options).run(
            self.train,
            objective,
            groups,
            generator=self.generator("order"),
            gradient_rule=gradient_rule,
            on_epoch=on_epoch,
        )


class ClientWorker:
    """Trains and evaluates clients on one copy of the model."""

    def __init__(self, options: RunOptions, task: Task, states: Path) -> None:
        self.options, self.task = options, task
        self.bench = Bench(options, task_view(task), gpu_share=options.clients.gpu)
        self._store = ClientStore(states)
        self._proxy = self.bench.images(task.proxy)
        self._images: dict[tuple[str, int], ArrayImages] = {}
        self._round: RoundRef | None = None
        self._received = Payload()
        self._classes: dict[tuple[object, ...], Tensor | None] = {}
        self._zero_shot: Tensor | None = None

    # Verbs: each takes a broadcast and a list of jobs, and never raises for a single client's trouble.

    def train(
        self, broadcast: Broadcast, jobs: Sequence[TrainJob]
    ) -> tuple[tuple[ClientReport | ClientFailure, ...], Packet]:
        """Train the clients of ``jobs``; return a report or failure each, and the packet for the server."""
        self._receive(broadcast)
        outcomes: list[ClientReport | ClientFailure] = []
        good: list[tuple[ClientReport, Payload]] = []
        for job in jobs:
            try:
                report, payload = self._train_one(job)
                good.append((report, payload))
                outcomes.append(report)
            except Exception as error:
                outcomes.append(failure(broadcast.round, job.client_id, error))
        return tuple(outcomes), self._pack(broadcast.round, jobs[0].phase, good)

    def predict(
        self, broadcast: Broadcast, jobs: Sequence[PredictJob]
    ) -> tuple[tuple[Prediction | ClientFailure, ...], None]:
        """Predict for ``jobs`` with the broadcast parameters."""
        self._receive(broadcast)
        outcomes: list[Prediction | ClientFailure] = []
        for job in jobs:
            try:
                outcomes.append(Prediction(job, self._predict_one(job)))
            except Exception as error:
                outcomes.append(failure(broadcast.round, job.client_id, error))
        return tuple(outcomes), None

    def _receive(self, broadcast: Broadcast) -> None:
        if broadcast.round != self._round:
            self._received = codec.decode(broadcast.payload)
            self._round = broadcast.round
            self._classes = {key: value for key, value in self._classes.items() if key == ("frozen",)}

    def _load(self, private: StateRef | None) -> ClientState:
        """Put the received shared and one client's private parameters (initial ones for None) into the model."""
        parameters, initial = self.bench.parameters, self.bench.initial
        shared = self._received.params
        parameters[Scope.SHARED].write(initial[Scope.SHARED] if shared is None else shared)
        state = self._store.load(private) if private else ClientState(initial[Scope.PRIVATE])
        parameters[Scope.PRIVATE].write(state.private)
        return state

    def _train_one(self, job: TrainJob) -> tuple[ClientReport, Payload]:
        started = time.perf_counter()
        state = self._load(job.private)
        received = self._received.params
        before = self.bench.initial[Scope.SHARED] if received is None else received
        result = self.bench.method.client_step(self.bench.model, self._local_job(job, state))
        payload = self._upload(job.phase, before, result)
        count = result.report.examples if result.report.steps else 0
        self._refuse_bad(job.phase, payload, count)
        self._refuse_bad_private()
        scored = self._score_trained(job) if job.score else None
        saved = self._stage(job, ClientState(self.bench.parameters[Scope.PRIVATE].read(), result.keep))
        metrics = {**{f"loss_{k}": v for k, v in result.report.terms.items()}, **result.metrics}
        size = codec.encoded_size(payload)
        seconds = time.perf_counter() - started
        return ClientReport(job.client_id, count, result.report.steps, metrics, size, saved, scored, seconds), payload

    def _local_job(self, job: TrainJob, state: ClientState) -> LocalJob:
        assert self._round is not None
        labels = ("client", job.client_id, self._round.round_index, job.phase.name)
        images = self._client_images("train", job.client_id)
        if self._augments:
            images = images.augmented(rng.torch_generator(self.options.seed, *labels, "augment"))
        return LocalJob(
            client_id=job.client_id,
            round_index=self._round.round_index,
            rounds=self.options.rounds,
            phase=job.phase.name,
            task=self.bench.view,
            train=images,
            proxy=self._proxy,
            options=self.options.train,
            extras=state.extras,
            received=self._received,
            class_features=self._class_features(job.private),
            bench=self.bench,
            labels=labels,
        )

    @property
    def _augments(self) -> bool:
        setting = self.options.data.augment
        return setting == "crop_flip" or (setting == "auto" and self.bench.backbone.image_size > 64)

    def _upload(self, phase: Phase, before: Tensor, result: ClientResult) -> Payload:
        if not phase.uploads or not before.numel():
            return Payload(None, result.upload)
        return Payload((self.bench.parameters[Scope.SHARED].data - before.to(self.bench.device)).cpu(), result.upload)

    def _refuse_bad(self, phase: Phase, payload: Payload, count: int) -> None:
        shared = self.bench.initial[Scope.SHARED].numel()
        wire = [f for f in self.bench.method.wire(self.bench.view) if f.direction == "up" and f.phase == phase.name]
        view = self.bench.view
        sizes = {"P": view.num_proxy, "C": len(view.classes), "D": self.bench.backbone.embed_dim, "N": count}
        share = float(count * self.options.cohort_size)
        params = shared if phase.uploads and shared else None
        if problem := update_problem(payload, wire, params=params, sizes=sizes, share=share):
            raise ValueError(f"update refused: {problem}")

    def _refuse_bad_private(self) -> None:
        private = self.bench.parameters[Scope.PRIVATE].data
        if private.numel() and not bool(torch.isfinite(private).all()):
            raise ValueError("update refused: private parameters are not finite")

    def _stage(self, job: TrainJob, state: ClientState) -> StateRef | None:
        assert self._round is not None
        if not job.phase.private or (not state.private.numel() and not state.extras):
            return None
        return self._store.stage(job.client_id, f"r{self._round.round_index:05d}-{job.phase.name}", state)

    def _pack(self, round_ref: RoundRef, phase: Phase, good: Sequence[tuple[ClientReport, Payload]]) -> Packet:
        clients = tuple(report.client_id for report, _ in good)
        keeps_apart = phase.needs_all or any(payload.extras for _, payload in good)
        if keeps_apart:
            items = tuple((r.client_id, r.num_examples, codec.encode(payload)) for r, payload in good)
            return Packet(round_ref, clients, items=items)
        total = ExactSum.zeros(self.bench.initial[Scope.SHARED].numel())
        for report, payload in good:
            if payload.params is not None:
                weight = report.num_examples if phase.weight == "examples" else int(report.num_examples > 0)
                total.add(payload.params, weight)
        return Packet(round_ref, clients, folded=total)

    # Prediction

    def _score_trained(self, job: TrainJob) -> Predictions:
        """Test predictions of the client's model as the client step left it: personal once it has private state."""
        view: View = "personal" if job.phase.private or job.private is not None else "global"
        trained_text = self.bench.text_owners & {Scope.SHARED, Scope.PRIVATE}
        classes = self.bench.class_features() if trained_text else self._class_features(None)
        return self._classify(self._client_images("test", job.client_id), view, classes)

    def _predict_one(self, job: PredictJob) -> Predictions:
        if job.part == "stretch":
            images = self.bench.images(self.task.test, np.arange(job.start, job.stop))
        else:
            images = self._client_images(job.part, job.client_id)
        self._load(job.private)
        if job.view == "zero_shot":
            return self._classify_zero_shot(images)
        return self._classify(images, job.view, self._class_features(job.private))

    def _classify(self, images: ArrayImages, view: View, classes: Tensor | None) -> Predictions:
        found = []
        with self.bench.inference():
            for batch in images.in_order():
                found.append(self.bench.method.predict(self.bench.model, batch, view, classes).argmax(-1).cpu())
        return torch.cat(found).numpy().astype(np.int32) if found else np.zeros(0, np.int32)

    def _classify_zero_shot(self, images: ArrayImages) -> Predictions:
        with self.bench.inference():
            if self._zero_shot is None:
                self._zero_shot = self.bench.zero_shot_classes()
            found = [(batch.frozen() @ self._zero_shot.t()).argmax(-1).cpu() for batch in images.in_order()]
        return torch.cat(found).numpy().astype(np.int32) if found else np.zeros(0, np.int32)

    def _class_features(self, private: StateRef | None) -> Tensor | None:
        """Class features of the loaded parameters, computed again only when something they depend on changed."""
        owners = self.bench.text_owners
        key: tuple[object, ...] = ("frozen",)
        if Scope.PRIVATE in owners:
            key = ("private", private)
        elif owners:
            key = ("shared",)
        if key not in self._classes:
            self._classes[key] = self.bench.class_features()
        return self._classes[key]

    def _client_images(self, part: str, client_id: int) -> ArrayImages:
        key = part, client_id
        if key not in self._images:
            source = getattr(self.task, part)
            self._images[key] = self.bench.images(source, getattr(self.task.clients[client_id], part))
        return self._images[key]


def failure(round_ref: RoundRef, client_id: int, error: BaseException, attempts: int = 1) -> ClientFailure:
    """Name why a client's update is missing; running out of memory says which setting to lower."""
    message = " ".join(str(error).split())
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        message = f"out of memory; lower train.batch, or raise clients.gpu so that fewer share a card ({message})"
    return dataclasses.replace(ClientFailure(round_ref, client_id, type(error).__name__, message), attempts=attempts)
