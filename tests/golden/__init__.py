"""Input and output pairs recorded from the authors' own code; data, never edited by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayfed.aggregation.exact import FRACTION_BITS, ExactSum

FOLDER = Path(__file__).parent


def manifest(method: str, name: str) -> Any:
    """The content of ``<method>/<name>.json``."""
    return json.loads((FOLDER / method / f"{name}.json").read_text(encoding="utf-8"))


def arrays(method: str, name: str) -> dict[str, dict[str, torch.Tensor]]:
    """``{case: {array: tensor}}`` of ``<method>/<name>.npz``, whose keys are ``case/array``."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with np.load(FOLDER / method / f"{name}.npz") as file:
        for key in file.files:
            case, _, array = key.partition("/")
            found.setdefault(case, {})[array] = torch.from_numpy(file[key])
    return found


def exact_mean(values: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    """Weighted mean [P] of float64 ``values`` by the sum that runs use, before it is rounded to float32."""
    total = ExactSum.zeros(values[0].numel())
    total.add(torch.stack(list(values)), weights)
    return total.total.double() / (total.weight * 2.0**FRACTION_BITS)
