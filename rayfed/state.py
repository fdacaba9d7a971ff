"""What the server and each client keep between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ServerState:
    """State of the server between phases, all float32 on the CPU.

    ``shared``: shared parameters [P]. ``server``: parameters that stay at the server [S].
    ``extras``: what the method keeps besides. ``version`` counts server steps.
    """

    shared: Tensor
    server: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0

    def step(self, shared: Tensor, *, server: Tensor | None = None, **extras: Tensor) -> ServerState:
        """Return the next state: new shared (and server) parameters, extras replaced by name, version one higher."""
        server = self.server if server is None else server
        return replace(self, shared=shared, server=server, extras={**self.extras, **extras}, version=self.version + 1)


@dataclass(frozen=True, slots=True)
class ClientState:
    """Private state of one client: parameters that never leave it [V] and extras by name."""

    private: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
