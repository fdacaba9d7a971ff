"""The updates of one call to a worker: checked, and added up or kept apart, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rayfed.aggregation.exact import ExactSum
from rayfed.comms import codec
from rayfed.engine.jobs import ClientReport, Predictions, StateRef, TrainJob
from rayfed.messages import ClientFailure, Payload, RoundRef
from rayfed.methods.base import ClientResult

AT_ONCE = 2**16
"""Numbers of small updates that are looked at together: a call into torch costs as much as adding thousands."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Updates on their way to the server: folded into one exact sum, or ``(client_id, num_examples, message)`` each."""

    round: RoundRef
    clients: tuple[int, ...]
    folded: ExactSum | None = None
    items: tuple[tuple[int, int, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of what it carries, about."""
        return (0 if self.folded is None else self.folded.total.nbytes) + sum(
            len(message) for *_, message in self.items
        )


class Update(NamedTuple):
    """What one client made of its job, in ``seconds``; ``state``: its private one as staged."""

    job: TrainJob
    result: ClientResult
    payload: Payload
    state: StateRef | None
    predictions: Predictions | None
    seconds: float

    @property
    def examples(self) -> int:
        """Those it trained on; none without a step."""
        return self.result.report.examples if self.result.report.steps else 0

    def told(self, norm: float) -> ClientReport:
        """What the driver learns of it; ``norm`` of its shared parameters, if it sends any."""
        report = self.result.report
        metrics = {**{f"loss_{k}": v for k, v in report.terms.items()}, **self.result.metrics}
        if self.payload.params is not None:
            metrics["update_norm"] = norm
        size = codec.encoded_size(self.payload)
        client = self.job.client_id
        return ClientReport(
            client, self.examples, report.steps, metrics, size, self.state, self.predictions, self.seconds
        )


@dataclass(slots=True)
class Packing:
    """Updates as they come. ``judge``: what to tell of one, or why it is no good, given its shared parameters' norm."""

    total: ExactSum
    judge: Callable[[Update, float], ClientReport | ClientFailure]
    outcomes: list[ClientReport | ClientFailure] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    items: list[tuple[int, int, bytes]] = field(default_factory=list)
    pending: list[Update] = field(default_factory=list)

    def add(self, update: Update) -> None:
        """Take one update."""
        if update.payload.params is None:
            self._take(update, 0.0)
            return
        self.pending.append(update)
        if len(self.pending) * update.payload.params.numel() >= AT_ONCE:
            self._look()

    def close(self, round_ref: RoundRef) -> tuple[tuple[ClientReport | ClientFailure, ...], Packet]:
        """The outcome of every client, and the packet of those that are good."""
        self._look()
        folded = None if self.items else self.total
        return tuple(self.outcomes), Packet(round_ref, tuple(self.clients), folded, tuple(self.items))

    def _look(self) -> None:
        """Check what is pending, and add up what need not be kept apart.

        A row's norm has the same bits whatever it is stacked with.
        """
        if not self.pending:
            return
        deltas = torch.stack([update.payload.params for update in self.pending if update.payload.params is not None])
        norms = torch.linalg.vector_norm(deltas, dim=1).tolist()
        rows, weights = [], []
        for row, (update, norm) in enumerate(zip(self.pending, norms, strict=True)):
            if self._take(update, norm):
                rows.append(row)
                weights.append(_weight(update))
        self.pending.clear()
        if rows:
            self.total.add(deltas if len(rows) == len(deltas) else deltas[rows], weights)

    def _take(self, update: Update, norm: float) -> bool:
        """Whether the update is good and has only to be added."""
        outcome = self.judge(update, norm)
        self.outcomes.append(outcome)
        if isinstance(outcome, ClientFailure):
            return False
        client, payload = update.job.client_id, update.payload
        self.clients.append(client)
        if update.job.phase.needs_all or payload.extras:
            self.items.append((client, update.examples, codec.encode(payload)))
            return False
        return payload.params is not None


def _weight(update: Update) -> int:
    return update.examples if update.job.phase.weight == "examples" else int(update.examples > 0)
