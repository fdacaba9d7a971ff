"""The Ray actors around a ``ClientWorker`` and the ``Server``.

Importing this module imports no torch: the actor's process does that in its own time, with ``heap.load``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.engine import heap
from rayfed.engine.jobs import pack, unpack

if TYPE_CHECKING:
    from rayfed.conf.options import RunOptions
    from rayfed.data.task import ImageSet, Task
    from rayfed.engine.jobs import TrainJob
    from rayfed.engine.memory import Need
    from rayfed.messages import Broadcast, Piece

CLIENT_REMEDY = "raise clients.gpu so that fewer share a card, or lower clients.actors"
SERVER_REMEDY = "raise server.gpu, put the server on the CPU (server.gpu=0), or lower data.proxy"


class Shell:
    """A Ray actor around what ``module`` defines; data arrive by a call, so that a replacement is set up the same."""

    module: str

    def __init__(self) -> None:
        heap.load_torch()
        heap.load(self.module)

    def ping(self) -> bool:
        """Answer, if alive."""
        return True


class ClientActor(Shell):
    """The Ray actor around a ``ClientWorker``."""

    module = "rayfed.engine.client"

    def setup(self, options: RunOptions, task: Task, states: Path) -> tuple[str, str]:
        """Build the worker; return its node and its cards.

        Raises:
            ResourceError: the model does not fit, or other nodes would not see states saved here.
        """
        from rayfed.adapters.scope import Scope
        from rayfed.engine import memory
        from rayfed.engine.client import ClientWorker
        from rayfed.errors import ResourceError

        self.__dict__.clear()  # the worker of an earlier run, before there are two
        with heap.quiet(), memory.enough("a client actor", CLIENT_REMEDY):
            self._worker = ClientWorker(options, task, states)
        run = states.parents[1]
        if self._worker.bench.initial[Scope.PRIVATE].numel() and not run.is_dir():
            import socket

            raise ResourceError(
                f"out={run} is not there on node {socket.gethostname()}: private client states must be on storage that "
                "every node sees; set out= to a shared folder."
            )
        import ray

        here = ray.get_runtime_context()
        return here.get_node_id(), ",".join(here.get_accelerator_ids().get("GPU", []))

    def rehearse(self, broadcast: Broadcast, job: TrainJob, *pieces: Piece) -> Need | None:
        """See ``ClientWorker.rehearse``."""
        return self._worker.rehearse(broadcast, job, *pieces)

    def work(self, verb: str, broadcast: Broadcast, jobs: bytes, *pieces: Piece) -> tuple[tuple[bytes, int], Any]:
        """Train or predict as the ``ClientWorker`` does; return the outcomes with the packet's size, and the packet.

        ``jobs`` and outcomes are packed.
        """
        outcomes, packet = getattr(self._worker, verb)(broadcast, unpack(jobs), *pieces)
        return (pack(outcomes), 0 if packet is None else packet.size), packet


class ServerActor(Shell):
    """The Ray actor around the ``Server``. What runs out of memory raises ResourceError."""

    module = "rayfed.engine.server"

    def setup(self, options: RunOptions, view: Any, proxy: ImageSet, novel: tuple[str, ...]) -> None:
        """Build the server."""
        from rayfed.engine import memory
        from rayfed.engine.server import Server

        self.__dict__.clear()
        self._enough = functools.partial(memory.enough, "the server", SERVER_REMEDY)
        with heap.quiet(), self._enough():
            self._server = Server(options, view, proxy, novel)

    def call(self, verb: str, *args: Any) -> Any:
        """Run a method of the server."""
        with self._enough():
            return getattr(self._server, verb)(*args)
