"""Who owns a parameter, and the parameters of one owner as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from rayfed.errors import AdapterError


class Scope(Enum):
    """Owner of a parameter."""

    SHARED = "shared"
    """Broadcast, trained, aggregated."""
    PRIVATE = "private"
    """Never leaves its client."""
    SERVER = "server"
    """Never leaves the server; clients may get what it computes."""


class Scoped(nn.Module):
    """A module whose parameters, and those of its children, belong to ``scope``.

    ``tag`` groups parameters inside a scope (for instance "gate"), so that an optimiser group can name them.
    """

    def __init__(self, scope: Scope, tag: str = "") -> None:
        super().__init__()
        self.scope = scope
        self.tag = tag


class ScopedLinear(Scoped):
    """A linear layer owned by ``scope``, such as a classification head: [*, d_in] -> [*, d_out]."""

    def __init__(self, d_in: int, d_out: int, scope: Scope, *, tag: str = "head", bias: bool = True) -> None:
        super().__init__(scope, tag)
        self.linear = nn.Linear(d_in, d_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.linear(x)
        return out


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one parameter in the flat tensor of its scope."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FlatParameters:
    """All parameters of one scope as views of one contiguous float32 tensor ``data`` [P], gradients of ``grad`` [P].

    Reading or writing a scope is then one copy, and an optimiser step one kernel. Order: tag, then module order, so
    the parameters of a tag are contiguous.
    """

    def __init__(self, entries: list[tuple[Entry, nn.Parameter]], device: torch.device) -> None:
        self.entries = tuple(entry for entry, _ in entries)
        self.parameters = tuple(parameter for _, parameter in entries)
        size = self.entries[-1].stop if entries else 0
        self.data = torch.zeros(size, device=device)
        self.grad = torch.zeros(size, device=device)
        for entry, parameter in entries:
            place = self.data[entry.start : entry.stop].view(entry.shape)
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad = self.grad[entry.start : entry.stop].view(entry.shape)

    def read(self) -> Tensor:
        """Return a copy of the values [P] on the CPU."""
        return self.data.detach().to("cpu", copy=True)

    def write(self, values: Tensor) -> None:
        """Overwrite the values with ``values`` [P]. Raises AdapterError for another length."""
        if values.shape != self.data.shape:
            raise AdapterError(f"a flat tensor of {values.numel()} values does not fit {self.data.numel()} parameters.")
        self.data.copy_(values)

    def span(self, tag: str | None) -> slice:
        """Return where the parameters of ``tag`` lie (all of them for None). Raises AdapterError if there are none."""
        if tag is None:
            return slice(0, self.data.numel())
        places = [entry for entry in self.entries if entry.tag == tag]
        if not places:
            raise AdapterError(f"no parameter is tagged {tag!r}; tags: {sorted({e.tag for e in self.entries})}.")
        return slice(places[0].start, places[-1].stop)

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Split flat ``values`` [P] into ``{parameter name: tensor}``."""
        return {entry.name: values[entry.start : entry.stop].view(entry.shape) for entry in self.entries}

    def largest(self, values: Tensor) -> str:
        """Name of the parameter in which the largest magnitude of ``values`` [P] lies; one that is not finite wins."""
        place = int(values.abs().nan_to_num(nan=float("inf")).argmax())
        return next(entry.name for entry in self.entries if entry.start <= place < entry.stop)

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the flat tensor [P] of named ``tensors``. Raises AdapterError listing missing and spare names."""
        names = {entry.name for entry in self.entries}
        if problems := _differences(names, tensors, {e.name: e.shape for e in self.entries}):
            raise AdapterError(f"the saved adapter does not fit: {'; '.join(problems)}.")
        if not self.entries:
            return torch.zeros(0)
        return torch.cat([tensors[entry.name].float().reshape(-1) for entry in self.entries])


def _differences(names: set[str], tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    wrong = [n for n in sorted(names & tensors.keys()) if tuple(tensors[n].shape) != shapes[n]]
    groups = (("missing", sorted(names - tensors.keys())), ("not in the model", sorted(tensors.keys() - names)))
    found = [f"{what}: {', '.join(which)}" for what, which in groups if which]
    return [*found, *(f"{n} has shape {list(tensors[n].shape)}, not {list(shapes[n])}" for n in wrong)]


def named_scoped(module: nn.Module, scope: Scope) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield ``(name, tag, parameter)`` of every parameter owned by ``scope``, in module order."""
    for prefix, child in module.named_modules():
        if isinstance(child, Scoped) and child.scope is scope:
            for name, parameter in child.named_parameters():
                yield (f"{prefix}.{name}" if prefix else name), child.tag, parameter


def flatten_scopes(model: nn.Module) -> dict[Scope, FlatParameters]:
    """Move the parameters of each scope into one flat tensor; everything without a scope is frozen.

    Call it once, after the model is on its device.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return {scope: _flatten(model, scope) for scope in Scope}


def in_flat_order(model: nn.Module, scope: Scope) -> list[tuple[str, str, nn.Parameter]]:
    """``(name, tag, parameter)`` of ``scope`` in the order of its flat tensor."""
    return sorted(named_scoped(model, scope), key=lambda item: item[1])


def _flatten(model: nn.Module, scope: Scope) -> FlatParameters:
    found = in_flat_order(model, scope)
    entries, start = [], 0
    for name, tag, parameter in found:
        entries.append((Entry(name, tag, tuple(parameter.shape), start, start + parameter.numel()), parameter))
        start += parameter.numel()
    device = found[0][2].device if found else torch.device("cpu")
    return FlatParameters(entries, device)
