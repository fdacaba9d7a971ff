"""torch's compiler, left asleep in processes that compile nothing."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER, UTILITIES = "torch._dynamo", "torch._dynamo.utils"


class _Asleep:
    """Stands where the module ``name`` would, with what is asked of it while nothing is compiled.

    Whoever wants more gets the real one. No subclass of a module: what walks over all modules in search of a name would
    wake it.
    """

    __spec__ = None

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        # Asked of every module by tools that want none of it; a path, by whoever imports a module of this package.
        if name.startswith("__") and (name, self.__name__) != ("__path__", COMPILER):
            raise AttributeError(name)
        if _is_asleep():
            del sys.modules[COMPILER], sys.modules[UTILITIES], torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_Asleep):
    """For optimisers."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Hide ``fn`` from the compiler once that is awake; until then it is called as it is.

        Without ``fn``, what decorates one.
        """
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        hidden: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_asleep():
                return fn(*args, **kwargs)
            if not hidden:
                hidden.append(importlib.import_module(COMPILER).disable(fn, recursive, **options))
            return hidden[0](*args, **kwargs)

        return call


class _Utilities(_Asleep):
    """For torchvision, which imports a function that it calls when it detects objects."""

    def is_compile_supported(self, device_type: str) -> Any:
        """Ask the real one."""
        return self.__getattr__("is_compile_supported")(device_type)


def _is_asleep() -> bool:
    return isinstance(sys.modules.get(COMPILER), _Asleep)


def leave_asleep() -> None:
    """Keep this process from importing torch's compiler before somebody compiles.

    The first optimiser would, and torchvision does, with sympy and triton and only to tell it to look away: a CPU
    second and 150 MB in every process. ``torch.compile`` still works: it wakes the compiler.
    """
    if COMPILER in sys.modules:
        return
    compiler: Any = _Compiler(COMPILER)
    sys.modules[COMPILER], sys.modules[UTILITIES] = compiler, _Utilities(UTILITIES)  # type: ignore[assignment]
    torch._dynamo = compiler
