"""rayfed: federated fine-tuning and personalisation of CLIP and ViT adapters on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayfed.engine.predictor import Predictor

__version__ = "0.1.0"


def load_run(out: str | Path, *, client: int | None = None, classes: Sequence[str] | None = None) -> Predictor:
    """Return the global model of a finished run, or the personal model of ``client``; see ``Predictor``."""
    from rayfed.engine.predictor import Predictor

    return Predictor(out, client=client, classes=classes)
