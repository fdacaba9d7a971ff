"""The Ray actors around a ``ClientWorker`` and the ``Server``.

Importing this module imports no torch: the actor's process does that in its own time, with ``heap.load``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.engine import heap

if TYPE_CHECKING:
    from rayfed.conf.options import RunOptions
    from rayfed.data.task import ImageSet, Task
    from rayfed.engine.jobs import PredictJob, TrainJob
    from rayfed.engine.memory import Need
    from rayfed.messages import Broadcast, Piece

SERVER_REMEDY = "raise server.gpu, put the server on the CPU (server.gpu=0), or lower data.proxy"


class Shell:
    """A Ray actor; data arrive by a call, so that a replacement is set up the same."""

    def ping(self) -> bool:
        """Answer, if alive."""
        return True


class ClientActor(Shell):
    """The Ray actor around a ``ClientWorker``."""

    def __init__(self) -> None:
        heap.load("rayfed.engine.client", "torch._dynamo")

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
        with memory.enough("a client actor", "raise clients.gpu so that fewer share a card, or lower clients.actors"):
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

    def train(self, broadcast: Broadcast, jobs: Sequence[TrainJob], *pieces: Piece) -> Any:
        """See ``ClientWorker.train``."""
        return self._worker.train(broadcast, jobs, *pieces)

    def predict(self, broadcast: Broadcast, jobs: Sequence[PredictJob], *pieces: Piece) -> Any:
        """See ``ClientWorker.predict``."""
        return self._worker.predict(broadcast, jobs, *pieces)


class ServerActor(Shell):
    """The Ray actor around the ``Server``."""

    def __init__(self) -> None:
        heap.load("rayfed.engine.server")

    def setup(self, options: RunOptions, view: Any, proxy: ImageSet, novel: tuple[str, ...]) -> None:
        """Build the server. Raises ResourceError if the model does not fit."""
        from rayfed.engine import memory
        from rayfed.engine.server import Server

        self.__dict__.clear()
        with memory.enough("the server", SERVER_REMEDY):
            self._server = Server(options, view, proxy, novel)

    def call(self, verb: str, *args: Any) -> Any:
        """Run a method of the server. Raises ResourceError if it runs out of memory."""
        from rayfed.engine import memory

        with memory.enough("the server", SERVER_REMEDY):
            return getattr(self._server, verb)(*args)
