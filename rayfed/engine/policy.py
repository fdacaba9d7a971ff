"""What an update must satisfy before it can touch shared state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rayfed.aggregation.exact import LIMIT, largest
from rayfed.messages import Payload, WireField


def update_problem(
    payload: Payload,
    wire: Sequence[WireField],
    *,
    params: int | None,
    sizes: Mapping[str, int],
    share: float,
    norm: float = math.inf,
    where: Callable[[Tensor], str] | None = None,
) -> str | None:
    """Return why an upload is refused (keys, shapes, types, finite, size), or None for a good one.

    ``params``: how many shared parameters it must carry (None: none at all). ``sizes``: the symbols of the wire's
    shapes; of R the most rows there may be. ``share``: the client's weight times the number of clients; bounds what
    exact sums can hold. ``norm``: the length of the shared parameters; where that is in range, so is their largest.
    ``where``: the name of the parameter in which their largest lies.
    """
    wanted = {field.name: field for field in wire}
    if payload.extras.keys() != wanted.keys():
        return f"extras {sorted(payload.extras)} where {sorted(wanted)} are declared"
    if problem := _params_problem(payload.params, params, norm, share, where):
        return problem
    sizes = {**sizes, "R": _rows(payload, wire, sizes.get("R", -1))}
    for name, tensor in payload.extras.items():
        field = wanted[name]
        shape = tuple(sizes.get(side, -1) if isinstance(side, str) else side for side in field.shape)
        if tuple(tensor.shape) != shape or tensor.dtype is not getattr(torch, field.dtype):
            return f"{name} is {tensor.dtype} {list(tensor.shape)} where {field.dtype} {list(shape)} is declared"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return None


def out_of_range(payload: Payload, share: float) -> bool:
    """Whether an upload holds numbers that are not finite, or larger than exact sums can hold."""
    if payload.params is not None and not largest(payload.params) * share < LIMIT:
        return True
    return not all(bool(torch.isfinite(tensor).all()) for tensor in payload.extras.values())


def _rows(payload: Payload, wire: Sequence[WireField], most: int) -> int:
    """The number of rows R that the upload's first field of so many has, or -1 if there are too many."""
    for field in wire:
        shape = payload.extras[field.name].shape
        if "R" in field.shape and len(shape) == len(field.shape):
            rows = int(shape[field.shape.index("R")])
            return rows if rows <= most else -1
    return -1


def _params_problem(
    params: Tensor | None, wanted: int | None, norm: float, share: float, where: Callable[[Tensor], str] | None
) -> str | None:
    if wanted is None:
        return None if params is None else "shared parameters in a phase that uploads none"
    if params is None or tuple(params.shape) != (wanted,) or params.dtype is not torch.float32:
        shown = "missing" if params is None else f"{params.dtype} {list(params.shape)}"
        return f"shared delta is {shown} where float32 [{wanted}] is declared"
    if norm * share < LIMIT:
        return None
    size = largest(params)
    if size * share < LIMIT:
        return None
    place = "" if where is None else f" (in {where(params)})"
    if not math.isfinite(size):
        return f"shared delta is not finite{place}"
    return f"shared delta reaches {size:.3g}, too large to be a trained adapter{place}"
