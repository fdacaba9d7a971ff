"""Keeping Python's garbage collector away from what lives as long as the process."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def load(*modules: str) -> None:
    """Import ``modules`` without garbage collection, and keep what they leave out of all later ones.

    torch makes hundreds of thousands of objects. Looking through them as they come costs 0.3 CPU seconds a process, and
    later, for nothing, 0.1 s at a time in the middle of a round.
    """
    if all(module in sys.modules for module in modules):
        return
    with quiet():
        for module in modules:
            importlib.import_module(module)
        gc.freeze()


def load_torch() -> None:
    """Import torch as every process of a run does: first, and with its compiler left asleep."""
    load("torch")
    from rayfed.engine import compiler

    compiler.leave_asleep()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, no garbage is collected."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
