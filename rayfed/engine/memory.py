"""Whether what runs side by side fits the memory of a card, and what to say when memory runs out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rayfed.errors import ResourceError, first_line

CONTEXT = 2**29
"""Bytes that a process takes of a card besides its tensors: the CUDA context and its kernels."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one client took of its card at most while it trained, and what the card has, in bytes."""

    most: int
    total: int

    @property
    def side_by_side(self) -> int:
        """How many such clients the card holds."""
        return math.floor(self.total / self.most)

    def __str__(self) -> str:
        """In words."""
        return f"a client needs {self.most / 2**30:.1f} GiB and its card has {self.total / 2**30:.1f} GiB"


def total(device: torch.device) -> int | None:
    """Bytes of the card ``device``; None for the CPU, whose memory Ray watches."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def most(device: torch.device) -> int:
    """Bytes that this process has had of the card ``device`` at most."""
    return torch.cuda.max_memory_reserved(device) + CONTEXT


@contextmanager
def enough(who: str, remedy: str) -> Iterator[None]:
    """Inside, running out of memory is a ResourceError: ``who`` did, and the ``remedy``."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"{who} ran out of memory ({first_line(error)}): {remedy}.") from error
