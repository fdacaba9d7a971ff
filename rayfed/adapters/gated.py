"""Gated dual LoRA: a shared and a private branch, the private one aligned in size and weighed by a scalar gate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rayfed.adapters.attach import Branch, attach_lora, find_targets
from rayfed.adapters.lora import AdaptedLinear, Anchor, LoRABranch, Switch, mix_branches
from rayfed.adapters.scope import Scope, Scoped

Granularity = Literal["mapping", "block", "one"]


@dataclass(frozen=True, slots=True)
class Mixing:
    """How a layer joins its branches: ``mix_branches``' options; ``blend`` weighs the shared one by 1 - m."""

    align: Anchor | None
    floor: float = 0.1
    detach: bool = True
    blend: bool = False


def gated_dual_lora(base: Tensor, shared: Tensor, private: Tensor, gate: Tensor | float, mixing: Mixing) -> Tensor:
    """Return b + g + m p' (FedSDG), or b + (1 - m) g + m p' where ``mixing`` blends (FedDPA); all [B, *, d].

    The anchor of p' sees the unweighted g in both.
    """
    y = mix_branches(base, shared, private, gate, align=mixing.align, floor=mixing.floor, detach=mixing.detach)
    return y - gate * shared if mixing.blend else y


class ScalarGates(Scoped):
    """Mixing weights m = sigmoid(a) [G], one learned logit a for each group of layers; or all fixed at a value."""

    _fixed: Tensor

    def __init__(self, count: int, *, init: float, fixed: float | None = None, scope: Scope = Scope.PRIVATE) -> None:
        super().__init__(scope, "gate")
        self.learned = fixed is None
        if fixed is None:
            self.logits = nn.Parameter(torch.full((count,), init))
        else:
            self.register_buffer("_fixed", torch.full((count,), fixed), persistent=False)

    def forward(self) -> Tensor:
        """Return m [G]."""
        return torch.sigmoid(self.logits) if self.learned else self._fixed

    def one(self, index: int) -> Tensor:
        """Return the weight of group ``index``, a scalar tensor."""
        weights: Tensor = self()
        return weights[index]


class GatedLinear(AdaptedLinear):
    """A frozen linear layer with a shared and a private LoRA branch.

    While the switch is ``gated`` the two active branches (shared first) are joined by ``gated_dual_lora``; otherwise it
    is a plain adapted layer. The gate is a function, not a child: layers may share one.
    """

    def __init__(self, base: nn.Linear, switch: Switch, gate: Callable[[], Tensor], mixing: Mixing) -> None:
        super().__init__(base, switch)
        self.mix_weight = gate
        self.mixing = mixing

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [B, *, d_in] to [B, *, d_out]."""
        if not self._switch.gated:
            return super().forward(x)
        shared, private = (self.branches[name](x) for name in self._switch.active)
        return gated_dual_lora(self.base(x), shared, private, self.mix_weight(), self.mixing)

    @torch.no_grad()
    def energy(self, x: Tensor, names: Sequence[str]) -> Tensor:
        """Mean squares of b, g and m p' for ``x`` [B, *, d_in]; ``names`` are the two branches. Returns [3]."""
        base, (shared, private) = self.base(x), (self.branches[name](x) for name in names)
        zero = torch.zeros_like(base)
        only_private = gated_dual_lora(base, shared, private, self.mix_weight(), self.mixing)
        without = gated_dual_lora(base, shared, zero, self.mix_weight(), self.mixing)
        parts = (base, without - base, only_private - without)
        return torch.stack([part.float().square().mean() for part in parts])


def attach_gated(
    backbone: nn.Module,
    switch: Switch,
    shared: Branch,
    private: Branch,
    *,
    targets: Sequence[str],
    towers: Sequence[str],
    gates: Callable[[int], ScalarGates],
    granularity: Granularity,
    mixing: Mixing,
) -> tuple[list[str], list[int], ScalarGates]:
    """Put gated layers with both branches in place of the ``targets``; return their paths, gate indices and the gates.

    ``gates(count)`` makes the gates once their number is known. Raises AdapterError as ``attach_lora`` does.
    """
    names = find_targets(backbone, targets, towers)
    groups = gate_groups(names, granularity)
    made = gates(max(groups) + 1)
    for name, group in zip(names, groups, strict=True):
        parent_name, _, leaf = name.rpartition(".")
        parent = backbone.get_submodule(parent_name)
        gate = functools.partial(made.one, group)
        setattr(parent, leaf, GatedLinear(getattr(parent, leaf), switch, gate, mixing))
    attach_lora(backbone, switch, [shared, private], targets=targets, towers=towers)
    return names, groups, made


def start_private(branch: LoRABranch, *, aligned: bool, learned_gate: bool) -> None:
    """Draw B of a private branch as the authors do: it must not be zero where a gate has to learn from it.

    Aligned: uniform within 1/sqrt(d_out). Not aligned: std 0.01 under a learned gate, zero under a fixed one.
    """
    with torch.no_grad():
        if aligned:
            bound = 1 / math.sqrt(branch.b.shape[0])
            branch.b.uniform_(-bound, bound)
        elif learned_gate:
            branch.b.normal_(0.0, 0.01)


def gate_groups(names: Sequence[str], granularity: Granularity) -> list[int]:
    """Index of the gate of each layer path in ``names``: its own, its block's (path up to the last number), or one."""
    if granularity == "one":
        return [0] * len(names)
    keys = [name if granularity == "mapping" else _block(name) for name in names]
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _block(name: str) -> str:
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else name


def site(name: str) -> str:
    """Short name of a layer path: depth and place, such as ``03.attn`` or ``03.mlp``."""
    block = _block(name).rpartition(".")[2]
    place = "attn" if ".attn." in name else "mlp" if ".mlp." in name else name.rpartition(".")[2]
    return f"{int(block):02d}.{place}" if block.isdigit() else place
