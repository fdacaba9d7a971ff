"""The only place random streams are made: each is derived from the run seed and a list of labels."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive_seed(run_seed: int, *labels: str | int) -> int:
    """Return a seed in [0, 2**63) that depends on ``run_seed`` and every label, and on nothing else.

    Labels are typed and separated, so ``("a", 12)``, ``("a1", 2)`` and ``("a", "12")`` give different seeds.
    """
    text = "\x1f".join([str(run_seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(run_seed: int, *labels: str | int) -> np.random.Generator:
    """NumPy generator of the stream ``(run_seed, *labels)``."""
    import numpy as np

    return np.random.default_rng(derive_seed(run_seed, *labels))


def torch_generator(run_seed: int, *labels: str | int) -> torch.Generator:
    """CPU torch generator of the stream ``(run_seed, *labels)``; draw on the CPU and move, so devices agree."""
    import torch

    return torch.Generator().manual_seed(derive_seed(run_seed, *labels))
