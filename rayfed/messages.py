"""Every type that crosses between client and server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoundRef:
    """Which exchange a message belongs to; makes stale and doubled messages visible."""

    round_index: int
    phase: str
    server_version: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What a message carries.

    ``params``: the shared parameters as one flat float32 tensor [P]: values down, deltas up; None for nothing.
    ``extras``: further tensors by the names the method declares in ``wire``.
    """

    params: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send; an empty payload costs no message."""
        return self.params is None and not self.extras


@dataclass(frozen=True, slots=True)
class Piece:
    """A sticky field of a broadcast: who holds this ``version`` of ``name`` is sent it without ``data``.

    ``version`` is a hash of the content, ``size`` the bytes of ``data`` whether it is there or not.
    """

    name: str
    version: str
    size: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Server to clients: one payload, encoded once per phase.

    ``texts``: class features by class list ("base", "novel"), encoded, where they are made at the server; else empty.
    ``pieces``: what clients keep from one broadcast to the next.
    """

    round: RoundRef
    payload: bytes
    texts: bytes = b""
    pieces: tuple[Piece, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that every client gets, whatever it keeps of earlier broadcasts."""
        return len(self.payload) + len(self.texts)


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """Client to server: the update of one client; ``num_examples`` 0 means it made no step and weighs nothing."""

    round: RoundRef
    client_id: int
    num_examples: int
    payload: Payload
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientFailure:
    """Client to server: why one client's update is missing."""

    round: RoundRef
    client_id: int
    error_type: str
    message: str
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class WireField:
    """An extra tensor a method sends besides the shared parameters.

    ``shape`` is in symbols: N the client's images, P proxy images, C classes, D embedding, or a fixed size. R is any
    number of rows up to the client's images, the same in all fields of a message. A ``sticky`` field is sent down only
    to those who do not hold its present content.
    """

    name: str
    direction: Literal["up", "down"]
    shape: tuple[str | int, ...]
    dtype: str = "float32"
    phase: str = "train"
    sticky: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """One exchange inside a round.

    ``cohort``: draw clients ("sample"), take those of the round's first phase ("same"), or all.
    ``weight``: clients count by examples trained on, or equally. ``needs_all``: the server step gets every update by
    itself; otherwise only their weighted sum travels. ``private`` False leaves the clients' private state alone: none
    is saved, and a client that has none yet still counts as never personalised.
    """

    name: str = "train"
    cohort: Literal["sample", "same", "all"] = "sample"
    uploads: bool = True
    weight: Literal["examples", "equal"] = "examples"
    needs_all: bool = False
    private: bool = True


EVALUATION = Phase("evaluate", uploads=False)
"""Not a method's phase: the exchange in which clients get what they are evaluated with."""

ClassList = Literal["base", "novel"]
"""The task's own classes, or those nobody trains on."""
