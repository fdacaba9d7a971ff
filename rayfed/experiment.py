"""One run from options to results, wherever it is started: by the command, or as a trial of a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed import config
from rayfed.conf.options import RunOptions
from rayfed.engine.resources import Plan
from rayfed.tracking.observers import Observers

if TYPE_CHECKING:
    from rayfed.data.task import Task
    from rayfed.engine.pool import Pool
    from rayfed.engine.run import Federation, RoundRecord
    from rayfed.tracking.console import Console


class StopRun(Exception):
    """Raised by whoever is told of a round: the run ends here on purpose, its saves and its record are in order."""


class Experiment:
    """The steps of one run, in order; observers are told, and told last how it ended.

    ``plan`` says how many client actors fit (``engine.pool=ray``). ``on_round`` hears of every finished and saved round
    after the observers, and may raise ``StopRun``. ``may_change``: options that may differ from those of the saves that
    ``resume=auto`` goes on from.
    """

    def __init__(
        self,
        options: RunOptions,
        out: Path,
        task: Task,
        console: Console,
        plan: Callable[[], Plan],
        *,
        started: float,
        on_round: Callable[[RoundRecord], None] | None = None,
        may_change: frozenset[str] = frozenset(),
    ) -> None:
        self.options, self.out, self.task, self.console = options, out, task, console
        self.observers = Observers(options, out, task, console)
        self.history: list[dict[str, Any]] = []
        self._plan, self._started, self._on_round, self._may_change = plan, started, on_round, may_change

    def play(self) -> bool:
        """Train, evaluate, write; return whether it was played to its end (False: ``StopRun``)."""
        self._announce()
        self.observers.start()
        status, pool = "KILLED", None
        try:
            pool = self._pool()
            self._train(pool)
            status = "FINISHED"
            return True
        except StopRun:
            status = "FINISHED"
            return False
        except Exception:
            status = "FAILED"
            raise
        finally:
            self.observers.close(status)  # first: ending actors takes long where Ray itself is being ended
            if pool is not None:
                pool.close()

    def progress(self, round_index: int, what: str, done: int, total: int) -> None:
        """See ``Observer``."""
        self.observers.progress(round_index, what, done, total)

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """See ``Observer``."""
        self.observers.round_done(record, seconds)
        if self._on_round is not None:
            self._on_round(record)

    def _announce(self) -> None:
        sizes = [len(client.train) for client in self.task.clients]
        here = self.options.engine.pool == "local"
        where = "in this process" if here else f"{self._plan().num_actors} client actors"
        self.console.say(
            f"{self.options.method.name} on {self.options.data.name}: {len(self.task.classes)} classes, {len(sizes)} "
            f"clients with {min(sizes)} to {max(sizes)} training images, {len(self.task.test.labels)} test images; "
            f"{self.options.rounds} rounds, {where}"
        )
        for note in self.task.notes:
            self.console.say(f"note: {note}")
        self.console.say(f"results: {self.out}")

    def _train(self, pool: Pool) -> None:
        federation = self._federation(pool)
        self.observers.ready(federation, time.perf_counter() - self._started)
        self.history = federation.history
        federation.play()
        self.observers.write_results(federation, pool.export(), time.perf_counter() - self._started)

    def _pool(self) -> Pool:
        from rayfed.engine.run import state_folder

        if self.options.engine.pool == "local":
            from rayfed.engine.pool import LocalPool

            return LocalPool(self.options, self.task, state_folder(self.out))
        from rayfed.engine.ray_pool import RayPool

        return RayPool(self.options, self.task, state_folder(self.out), self._plan)

    def _federation(self, pool: Pool) -> Federation:
        from rayfed.backbones import names
        from rayfed.engine.checkpoint import Checkpoints, identity
        from rayfed.engine.run import Federation
        from rayfed.methods import make_method

        known = identity(config.flatten(self.options))
        checkpoints = Checkpoints(
            self.out, keep=self.options.checkpoint.keep, options=known, may_change=self._may_change
        )
        federation = Federation(
            self.options,
            self.task,
            make_method(self.options.method),
            pool,
            checkpoints,
            self,
            has_zero_shot=names.has_text(self.options.backbone.name),
        )
        if self.options.resume == "auto":
            found = federation.resume() or f"nothing saved in {checkpoints.root} yet: starting from the first round"
            self.console.say(found)
        return federation
