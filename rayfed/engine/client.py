"""The client half of the engine: one worker holds one model and trains or evaluates clients, one after another.

A plain class: the in-process pool calls it directly, a Ray actor is a thin shell around it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from rayfed.engine import memory
from rayfed.engine.bench import Bench, task_view
from rayfed.engine.images import ArrayImages
from rayfed.engine.jobs import ClientReport, Prediction, Predictions, PredictJob, StateRef, TrainJob
from rayfed.engine.memory import Need
from rayfed.engine.packing import Packet, Packing, Update
from rayfed.engine.policy import out_of_range, update_problem
from rayfed.engine.store import ClientStore
from rayfed.errors import NonFiniteError, ResourceError, StorageError
from rayfed.messages import Broadcast, ClassList, ClientFailure, Payload, Phase, Piece, RoundRef, WireField
from rayfed.methods.base import Batch, ClientResult, FitReport, GradientRule, Group, Images, Objective, TaskView, View
from rayfed.state import ClientState

KEPT_SETS = 1024
"""Sets of images (train, val or test of one client) whose frozen features a worker keeps."""


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


@dataclass(frozen=True, slots=True)
class Candidates:
    """Images to be judged again among some classes: ``rows`` [M] which ones, ascending, ``allowed`` [M, C] the classes.

    An image may be there several times, or not at all.
    """

    rows: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.bool_]

    def of(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """The part about the ``count`` images from ``start`` on, rows counted from there."""
        first, last = np.searchsorted(self.rows, [start, start + count])
        return torch.from_numpy(self.rows[first:last] - start), torch.from_numpy(self.allowed[first:last])


class ClientWorker:
    """Trains and evaluates clients on one copy of the model."""

    def __init__(self, options: RunOptions, task: Task, states: Path) -> None:
        self.options, self.task = options, task
        self.bench = Bench(options, task_view(task), gpu_share=options.clients.gpu)
        self._store = ClientStore(states)
        self._proxy = self.bench.images(task.proxy)
        self._images: OrderedDict[tuple[str, int], ArrayImages] = OrderedDict()
        self._round: RoundRef | None = None
        self._received = Payload()
        self._before = torch.empty(0)
        """The shared parameters every client starts from."""
        self._classes: dict[tuple[object, ...], Tensor | None] = {}
        self._texts: dict[str, Tensor] = {}
        self._wires: dict[str, tuple[WireField, ...]] = {}
        self._pieces: dict[str, tuple[str, Tensor]] = {}
        self._zero_shot: dict[ClassList, Tensor] = {}
        self._held = task.held_classes() if task.novel is not None else None
        self._pairs = task.tested_pairs()

    # Verbs: each takes a broadcast and a list of jobs, and never raises for a single client's trouble.

    def train(
        self, broadcast: Broadcast, jobs: Sequence[TrainJob], *pieces: Piece
    ) -> tuple[tuple[ClientReport | ClientFailure, ...], Packet]:
        """Train the clients of ``jobs``; return a report or failure each, and the packet for the server.

        ``pieces`` are those of the broadcast that came without data and are not held here yet.
        """
        self._receive(broadcast, pieces)
        packing = Packing(ExactSum.zeros(self._before.numel()), self._judged)
        for job in jobs:
            try:
                update = self._train_one(job)
            except StorageError:  # not the client's trouble but the run's
                raise
            except Exception as error:
                packing.outcomes.append(failure(broadcast.round, job.client_id, error))
            else:
                packing.add(update)
        return packing.close(broadcast.round)

    def rehearse(self, broadcast: Broadcast, job: TrainJob, *pieces: Piece) -> Need | None:
        """Train one batch of a client's images and forget it; return what that took of the card, None on the CPU.

        Raises:
            ResourceError: not even one client fits.
        """
        available = memory.total(self.bench.device)
        if available is None:
            return None
        self._receive(broadcast, pieces)
        state = self._load(None)
        first = self.task.clients[job.client_id].train[: self.options.train.batch]
        images = self.bench.images(self.task.train, first)
        options = self.options.train.model_copy(update={"epochs": 1})
        rehearsed = dataclasses.replace(self._local_job(job, state), train=images, options=options)
        try:
            with memory.enough("one client alone", "lower train.batch, or choose a smaller backbone"):
                self.bench.method.client_step(self.bench.model, rehearsed)
        except ResourceError:
            raise
        except Exception:  # whatever it is, the client's own training will tell
            return None
        return Need(memory.most(self.bench.device), available)

    def predict(
        self, broadcast: Broadcast, jobs: Sequence[PredictJob], *pieces: Piece
    ) -> tuple[tuple[Prediction | ClientFailure, ...], None]:
        """Predict for ``jobs`` with the broadcast parameters; ``pieces`` as for ``train``."""
        self._receive(broadcast, pieces)
        outcomes: list[Prediction | ClientFailure] = []
        for job in jobs:
            try:
                outcomes.append(self._predict_one(job))
            except Exception as error:
                outcomes.append(failure(broadcast.round, job.client_id, error))
        return tuple(outcomes), None

    @property
    def held(self) -> frozenset[tuple[str, str]]:
        """Name and version of every sticky field that is kept here."""
        return frozenset((name, version) for name, (version, _) in self._pieces.items())

    def _receive(self, broadcast: Broadcast, pieces: Sequence[Piece] = ()) -> None:
        if broadcast.round != self._round:
            received = self._with_pieces(codec.decode(broadcast.payload), broadcast, pieces)
            kept = {"frozen", "shared"} if _same(received.params, self._received.params) else {"frozen"}
            self._classes = {key: value for key, value in self._classes.items() if key[0] in kept}
            self._received, self._texts = received, codec.decode(broadcast.texts).extras
            before = self.bench.initial[Scope.SHARED] if received.params is None else received.params
            self._before = before.to(self.bench.device, copy=True)
            self._round = broadcast.round

    def _with_pieces(self, received: Payload, broadcast: Broadcast, pieces: Sequence[Piece]) -> Payload:
        """Keep the pieces that came with data; add the broadcast's to ``received``."""
        for piece in (*broadcast.pieces, *pieces):
            if piece.data:
                self._pieces[piece.name] = piece.version, codec.decode(piece.data).extras[piece.name]
        kept = {}
        for piece in broadcast.pieces:
            version, tensor = self._pieces.get(piece.name, ("", torch.empty(0)))
            assert version == piece.version, f"{piece.name} {piece.version} was never sent here"
            kept[piece.name] = tensor
        return Payload(received.params, received.extras | kept)

    def _load(self, private: StateRef | None) -> ClientState:
        """Put the received shared and one client's private parameters (initial ones for None) into the model."""
        parameters, initial = self.bench.parameters, self.bench.initial
        parameters[Scope.SHARED].write(self._before)
        state = self._store.load(private) if private else ClientState(initial[Scope.PRIVATE])
        if parameters[Scope.PRIVATE].entries:
            parameters[Scope.PRIVATE].write(state.private)
        return state

    def _train_one(self, job: TrainJob) -> Update:
        started = time.perf_counter()
        state = self._load(job.private)
        result = self.bench.method.client_step(self.bench.model, self._local_job(job, state))
        payload = self._upload(job.phase, result)
        self._refuse_bad_private()
        scored = self._score_trained(job) if job.score else None
        saved = self._stage(job, result.keep)
        return Update(job, result, payload, saved, scored, time.perf_counter() - started)

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

    def _upload(self, phase: Phase, result: ClientResult) -> Payload:
        values = self.bench.parameters[Scope.SHARED].data
        if not phase.uploads or not values.numel():
            return Payload(None, result.upload)
        return Payload((values - self._before).cpu(), result.upload)

    def _judged(self, update: Update, norm: float) -> ClientReport | ClientFailure:
        """What the driver learns of an update, or why it is no good: its staged private state is removed then.

        ``norm`` of its shared parameters.
        """
        assert self._round is not None
        try:
            error = self._problem(update, norm)
            if error is None:
                return update.told(norm)
        except Exception as unexpected:
            error = unexpected
        if update.state is not None:
            self._store.discard(update.state)
        return failure(self._round, update.job.client_id, error)

    def _problem(self, update: Update, norm: float) -> Exception | None:
        phase, client, count = update.job.phase, update.job.client_id, update.examples
        wire = self._wire_up(phase.name)
        clients = self.options.clients.n if phase.cohort == "all" else self.options.cohort_size
        share, shared = float(count * clients), self.bench.initial[Scope.SHARED].numel()
        problem = update_problem(
            update.payload,
            wire,
            params=shared if phase.uploads and shared else None,
            norm=norm,
            sizes=self._sizes(client, count) if wire else {},
            share=share,
            where=self.bench.parameters[Scope.SHARED].largest,
        )
        if problem is None:
            return None
        kind = NonFiniteError if out_of_range(update.payload, share) else ValueError
        return kind(f"update refused: {problem}")

    def _wire_up(self, phase: str) -> tuple[WireField, ...]:
        if phase not in self._wires:
            wire = self.bench.method.wire(self.bench.view)
            self._wires[phase] = tuple(f for f in wire if f.direction == "up" and f.phase == phase)
        return self._wires[phase]

    def _sizes(self, client_id: int, count: int) -> dict[str, int]:
        """The symbols of the wire's shapes."""
        view = self.bench.view
        sizes = {"P": view.num_proxy, "C": len(view.classes), "D": self.bench.backbone.embed_dim, "N": count}
        return sizes | {"R": len(self.task.clients[client_id].train)}

    def _refuse_bad_private(self) -> None:
        private = self.bench.parameters[Scope.PRIVATE]
        if private.entries and not bool(torch.isfinite(private.data).all()):
            where = private.largest(private.data)
            raise NonFiniteError(f"update refused: private parameters are not finite (in {where})")

    def _stage(self, job: TrainJob, keep: dict[str, Tensor]) -> StateRef | None:
        assert self._round is not None
        private = self.bench.parameters[Scope.PRIVATE]
        if not job.phase.private or (not private.data.numel() and not keep):
            return None
        state = ClientState(private.read(), keep)
        return self._store.stage(job.client_id, f"r{self._round.round_index:05d}-{job.phase.name}", state)

    # Prediction

    def _score_trained(self, job: TrainJob) -> Predictions:
        """Test predictions of the client's model as the client step left it: personal once it has private state."""
        view: View = "personal" if job.phase.private or job.private is not None else "global"
        images = self._client_images("test", job.client_id)
        if not len(images):
            return np.zeros(0, np.int32)
        trained_text = self.bench.text_owners & {Scope.SHARED, Scope.PRIVATE}
        classes = self.bench.class_features() if trained_text else self._class_features(None)
        with self.bench.inference():
            return self._most_likely(images, lambda batch: self._logits(batch, view, classes))[0]

    def _predict_one(self, job: PredictJob) -> Prediction:
        images, candidates = self._images_of(job), self._candidates(job)
        self._load(job.private)
        names: ClassList = "novel" if job.part == "novel" else "base"
        with self.bench.inference():
            if job.view == "zero_shot":
                zero_shot = self._zero_shot_classes(names)
                found = self._most_likely(images, lambda batch: batch.frozen() @ zero_shot.t(), candidates)
            else:
                view, classes = job.view, self._class_features(job.private, names)
                found = self._most_likely(images, lambda batch: self._logits(batch, view, classes), candidates)
        return Prediction(job, *found)

    def _images_of(self, job: PredictJob) -> ArrayImages:
        if job.part == "novel":
            assert self.task.novel is not None
            return self.bench.images(self.task.novel.test, np.arange(job.start, job.stop))
        if job.part == "stretch":
            return self.bench.images(self.task.test, np.arange(job.start, job.stop))
        return self._client_images(job.part, job.client_id)

    def _candidates(self, job: PredictJob) -> Candidates | None:
        """The classes held by the clients that test on the job's images, where that matters."""
        if self._held is None:
            return None
        if job.part == "test":
            count = len(self.task.clients[job.client_id].test)
            return Candidates(np.arange(count), np.tile(self._held[job.client_id], (count, 1)))
        if job.part == "stretch" and job.client_id < 0:
            image, client = self._pairs
            inside = (image >= job.start) & (image < job.stop)
            return Candidates(image[inside] - job.start, self._held[client[inside]])
        return None

    def _logits(self, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        return self.bench.method.predict(self.bench.model, batch, view, classes)

    def _most_likely(
        self, images: ArrayImages, logits_of: Callable[[Batch], Tensor], candidates: Candidates | None = None
    ) -> tuple[Predictions, Predictions | None]:
        """The class of the largest logit of every image [N] among all, and of every pair in ``candidates`` [M]."""
        among_all, among_own = [], []
        for batch in images.in_order():
            logits = logits_of(batch)
            among_all.append(logits.argmax(-1).cpu())
            if candidates is not None:
                rows, allowed = candidates.of(int(batch.index[0]), len(batch.index))
                own = logits[rows.to(logits.device)].masked_fill(~allowed.to(logits.device), float("-inf"))
                among_own.append(own.argmax(-1).cpu())
        return _joined(among_all), None if candidates is None else _joined(among_own)

    def _names(self, names: ClassList) -> tuple[str, ...]:
        if names == "base":
            return self.bench.view.classes
        assert self.task.novel is not None
        return self.task.novel.classes

    def _zero_shot_classes(self, names: ClassList) -> Tensor:
        if names not in self._zero_shot:
            self._zero_shot[names] = self.bench.zero_shot_classes(self._names(names))
        return self._zero_shot[names]

    def _class_features(self, private: StateRef | None, names: ClassList = "base") -> Tensor | None:
        """Class features of the loaded parameters, computed again only when something they depend on changed."""
        owners = self.bench.text_owners
        if Scope.SERVER in owners:
            return self._texts[names].to(self.bench.device)
        key: tuple[object, ...] = ("frozen", names)
        if Scope.PRIVATE in owners:
            key = ("private", names, private)
        elif owners:
            key = ("shared", names)
        if key not in self._classes:
            self._classes[key] = self.bench.class_features(self._names(names))
        return self._classes[key]

    def _client_images(self, part: str, client_id: int) -> ArrayImages:
        """One client's images and what was computed of them; of the latest clients only, however many there are."""
        key = part, client_id
        if key not in self._images:
            source = getattr(self.task, part)
            own = getattr(self.task.clients[client_id], part)
            # Only training images are encoded again and again by different adapters.
            self._images[key] = self.bench.images(source, own, key=key if part == "train" else None)
            if len(self._images) > KEPT_SETS:
                self._images.popitem(last=False)
        self._images.move_to_end(key)
        return self._images[key]


def _joined(found: Sequence[Tensor]) -> Predictions:
    return torch.cat(list(found)).numpy().astype(np.int32) if found else np.zeros(0, np.int32)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def failure(round_ref: RoundRef, client_id: int, error: BaseException, attempts: int = 1) -> ClientFailure:
    """Name why a client's update is missing; running out of memory says which setting to lower."""
    message = " ".join(str(error).split())
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        message = f"out of memory; lower train.batch, or raise clients.gpu so that fewer share a card ({message})"
    return dataclasses.replace(ClientFailure(round_ref, client_id, type(error).__name__, message), attempts=attempts)
