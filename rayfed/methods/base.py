"""The contract between a method and the engine.

A method is a frozen description of one federated algorithm: what is trained and who owns it, the local objective,
what is uploaded, the server step, and how the global and the personal model predict. It holds no mutable state and
knows nothing of Ray, files, bytes or seeds. A baseline writes ``build_model``, ``client_step`` and ``predict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Generator, Tensor, nn

from rayfed.adapters.scope import FlatParameters, Scope
from rayfed.aggregation.exact import ExactSum, weighted_mean
from rayfed.backbones.base import Backbone
from rayfed.conf.options import MethodOptions, TrainOptions
from rayfed.errors import AdapterError
from rayfed.messages import ClientUpdate, Payload, Phase, WireField
from rayfed.state import ServerState

ConfigT = TypeVar("ConfigT", bound=MethodOptions)
View = Literal["global", "personal"]


@dataclass(frozen=True, slots=True)
class TaskView:
    """All a method may know of the task.

    Class names in order, prompt template, number of proxy images; of each class, its training images over all clients
    (``counts``) and whether that makes it one of "many", "medium" or "few" (``groups``).
    """

    classes: tuple[str, ...]
    template: str
    num_proxy: int
    counts: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


def _no_features() -> Tensor:
    raise AdapterError("these items are no images: they have no encoded features.")


def _no_prefix() -> Tensor:
    raise AdapterError("these items are no images of a backbone that was split: they have no prefix.")


@dataclass(frozen=True, slots=True)
class Batch:
    """``images`` [B, 3, S, S] normalised, ``labels`` [B] (-1: unlabelled), ``index`` [B] into the items it came from.

    ``frozen()`` gives the normalised image features [B, D] of the untouched backbone, ``encoded()`` the same before
    normalisation; they are computed once per image where images are not augmented. ``prefix()`` gives the activations
    [B, T, W] before the block at which the method split the image tower (``backbone.split``), once per batch or, within
    the engine's cache, once per image.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    frozen: Callable[[], Tensor]
    encoded: Callable[[], Tensor] = _no_features
    prefix: Callable[[], Tensor] = _no_prefix


class Items(Protocol):
    """Something with batches: a client's images, the proxy images, rows of a tensor."""

    def __len__(self) -> int:
        """Number of items N."""
        ...

    def batch(self, index: Tensor) -> Batch:
        """Return the items ``index`` [B] as one batch."""
        ...


class Images(Items, Protocol):
    """Images of one owner."""

    @property
    def is_augmented(self) -> bool:
        """Whether ``batch`` gives another picture of an image each time."""
        ...

    def in_order(self) -> Iterator[Batch]:
        """Yield all images in fixed order and batch size, never augmented."""
        ...


Objective = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""``(model, batch) -> {name: scalar loss term}``; the terms are summed.

No in-place writes, no ``item()``, no branches on data: several clients may be trained as one stacked batch.
"""

GradientRule = Callable[[Mapping[str, Tensor]], Tensor]
"""``{term name: flat gradient [G]} -> flat gradient [G]`` that the optimiser gets (purification)."""


@dataclass(frozen=True, slots=True)
class Group:
    """An optimiser group: all parameters of ``scope``, or those of one ``tag``; None takes the run's option."""

    scope: Scope
    tag: str | None = None
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a fit did: optimiser steps, examples seen in the last epoch, mean of every loss term over its examples."""

    steps: int
    examples: int
    terms: dict[str, float]


class ClientJob(Protocol):
    """One client's work in one phase."""

    client_id: int
    round_index: int
    rounds: int
    phase: str
    """Name of the phase."""
    task: TaskView
    train: Images
    proxy: Images
    options: TrainOptions
    extras: Mapping[str, Tensor]
    """Private tensors the method kept for this client, by name (empty the first time)."""
    received: Payload
    class_features: Tensor | None
    """[C, D] of the received model, without gradient; None for a backbone without text tower."""

    def generator(self, purpose: str) -> Generator:
        """CPU generator of this client, round and purpose."""
        ...

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
        """Train the groups on ``train`` with a fresh optimiser, by the run's train.* options.

        ``options`` replaces them for this fit (a phase trained otherwise), ``lr`` the learning rate alone.
        """
        ...


class ServerContext(Protocol):
    """What the server may use in its step."""

    round_index: int
    rounds: int
    cohort: tuple[int, ...]
    task: TaskView
    proxy: Images
    parameters: Mapping[Scope, FlatParameters]
    """The model's parameters by owner: read and write them here."""

    def generator(self, purpose: str) -> Generator:
        """CPU generator of this round and purpose."""
        ...

    def fit(
        self, items: Items, objective: Objective, groups: Sequence[Group], *, lr: float, epochs: int, batch: int
    ) -> FitReport:
        """Train the groups on ``items`` with a fresh AdamW without weight decay."""
        ...

    def log(self, name: str, value: float) -> None:
        """Record a figure of this round."""
        ...


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What a client step leaves: the fit's report, extras to upload, private extras to keep, figures to log.

    The engine takes the shared delta and the private parameters from the model itself.
    """

    report: FitReport
    upload: dict[str, Tensor] = field(default_factory=dict)
    keep: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Updates:
    """The good updates of a phase in client order: each by itself where the phase ``needs_all``, else their sum."""

    folded: ExactSum
    items: tuple[ClientUpdate, ...] = ()
    equal: bool = False

    @property
    def weights(self) -> list[int]:
        """Weight of each item: its examples, or 1."""
        return [int(u.num_examples > 0) if self.equal else u.num_examples for u in self.items]

    def mean_delta(self) -> Tensor:
        """Return the weighted mean of the shared deltas [P]."""
        if not self.items:
            return self.folded.mean()
        return weighted_mean([_params(update) for update in self.items], self.weights)


def _params(update: ClientUpdate) -> Tensor:
    assert update.payload.params is not None
    return update.payload.params


class Method(ABC, Generic[ConfigT]):
    """One federated algorithm."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def wire(self, task: TaskView) -> tuple[WireField, ...]:
        """Extra tensors this configuration sends besides the shared parameters."""
        return ()

    @abstractmethod
    def build_model(self, backbone: Backbone, task: TaskView) -> nn.Module:
        """Put the adapters into ``backbone`` (in place) and return the model.

        The engine seeds it: every client starts with the same values. Adapters carry a ``Scope``; unless ``predict``
        or an objective switches them on they must not act, so that the bare backbone stays available as zero-shot.
        """

    def phases(self, round_index: int, rounds: int) -> tuple[Phase, ...]:
        """The exchanges of a round."""
        return (Phase(),)

    def server_init(self, state: ServerState, ctx: ServerContext) -> ServerState:
        """Return the state before the first round, given the initial parameters."""
        return state

    def broadcast(self, state: ServerState, phase: Phase) -> Payload:
        """What clients get at the start of a phase: the shared parameters, if there are any."""
        return Payload(state.shared if state.shared.numel() else None)

    @abstractmethod
    def client_step(self, model: nn.Module, job: ClientJob) -> ClientResult:
        """Train one client; ``model`` holds the broadcast shared and the client's own private parameters."""

    def server_step(self, model: nn.Module, state: ServerState, updates: Updates, ctx: ServerContext) -> ServerState:
        """Combine the updates of a phase: here, add the weighted mean delta."""
        return state.step(state.shared + updates.mean_delta()) if state.shared.numel() else state.step(state.shared)

    def notes(self, figures: Mapping[str, float]) -> list[str]:
        """What the user should be told of a round's ``figures`` (means over clients, the server's), a sentence each."""
        return []

    def class_features(self, model: nn.Module, names: Sequence[str]) -> Tensor | None:
        """Text features [C, D] of the classes ``names``, normalised, as the model makes them; None: no text classifier.

        [K, C, D] where the model has K classifiers: ``predict`` and ``job.class_features`` get them as they are.
        ``names`` are the task's own or others it is judged on. The engine calls this where the parameters it depends
        on live (at the server for those of ``Scope.SERVER``) and again only when these have changed.
        """
        return None

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch, view: View, classes: Tensor | None) -> Tensor:
        """Logits [B, C] of the global or the personal model; ``classes`` are the class features [C, D].

        They may be of other classes than the task's, which the model must not assume anything about.
        """


AnyMethod = Method[Any]
