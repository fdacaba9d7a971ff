"""Starting Ray actors, and keeping them between the runs of one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Idle(defaultdict[tuple[type, float, float], list[Any]]):
    """Idle actors by kind and share; ``keeps`` says whether any are wanted."""

    keeps = False


_idle = _Idle(list)


def keep() -> None:
    """From now on the actors of a finished run wait for the next one, which sets them up anew, instead of being killed.

    For a process that plays many short runs with the same shares: the first start of an actor imports torch and
    open_clip, four CPU seconds. They hold their share of the cluster until ``release``, or the end of the process.
    """
    _idle.keeps = True


def release() -> None:
    """End the actors that wait; those of further runs are not kept."""
    _idle.keeps = False
    for actor in [actor for waiting in _idle.values() for actor in waiting]:
        kill(actor)
    _idle.clear()


@contextmanager
def kept_actors() -> Iterator[None]:
    """Inside, actors are kept as after ``keep``."""
    keep()
    try:
        yield
    finally:
        release()


def start(shell: type, cpu: float, gpu: float) -> Any:
    """Return an actor of ``shell`` with its share: an idle one that answers, or a new one."""
    import ray

    while idle := _idle[shell, cpu, gpu]:
        actor = idle.pop()
        try:
            ray.get(actor.ping.remote(), timeout=10)
        except ray.exceptions.RayError:  # dead, killed for memory, or silent
            kill(actor)
        else:
            return actor
    return ray.remote(shell).options(num_cpus=cpu, num_gpus=gpu, max_restarts=0).remote()


def end(actor: Any, shell: type, cpu: float, gpu: float, *, idle: bool) -> None:
    """Kill an actor whose run is over; inside ``kept_actors`` one that is ``idle`` waits for the next run."""
    if _idle.keeps and idle:
        _idle[shell, cpu, gpu].append(actor)
    else:
        kill(actor)


def kill(actor: Any) -> None:
    """End an actor's process for good."""
    import ray

    ray.kill(actor, no_restart=True)
