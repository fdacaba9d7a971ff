"""Putting adapters into a backbone: which layers are meant, and replacing them."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from rayfed.adapters.gate import LayerGate
from rayfed.adapters.lora import AdaptedLinear, LoRABranch, Switch
from rayfed.adapters.scope import Scope
from rayfed.errors import AdapterError

ALIASES: dict[str, tuple[str, ...]] = {
    "q": ("*.q_proj", "*.qkv"),
    "k": ("*.k_proj", "*.qkv"),
    "v": ("*.v_proj", "*.qkv"),
    "out": ("*.out_proj", "*.attn.proj"),
    "fc1": ("*.c_fc", "*.fc1"),
    "fc2": ("*.mlp.c_proj", "*.fc2"),
    "proj": ("image_tower.proj", "text_tower.text_projection"),
    "all": ("*",),
}
"""Short target names, and the module paths they stand for in open_clip and timm towers."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One LoRA branch to attach."""

    name: str
    scope: Scope
    rank: int
    alpha: float


def attach_lora(
    backbone: nn.Module, branches: Sequence[Branch], *, targets: Sequence[str], towers: Sequence[str]
) -> Switch:
    """Replace the layers that ``targets`` mean inside ``towers`` (child names) by adapted ones; return their switch.

    Raises:
        AdapterError: a target matches nothing (with near names), or a rank is above a layer's width.
    """
    switch = Switch()
    for name in find_targets(backbone, targets, towers):
        parent_name, _, leaf = name.rpartition(".")
        parent = backbone.get_submodule(parent_name)
        base = getattr(parent, leaf)
        adapted = base if isinstance(base, AdaptedLinear) else AdaptedLinear(base, switch)
        for branch in branches:
            _check_rank(name, base, branch.rank)
            adapted.branches[branch.name] = LoRABranch(
                base.in_features, base.out_features, rank=branch.rank, alpha=branch.alpha, scope=branch.scope
            )
        setattr(parent, leaf, adapted)
    return switch


def attach_layer_gates(backbone: nn.Module, *, width: int, init: float) -> None:
    """Give every adapted layer a private gate of its own."""
    for module in backbone.modules():
        if isinstance(module, AdaptedLinear):
            module.gate = LayerGate(module.in_features, width=width, init=init)


def find_targets(backbone: nn.Module, targets: Sequence[str], towers: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers that ``targets`` mean, in module order.

    A target is a short name (``ALIASES``), the end of a module path, or a pattern with ``*``.

    Raises:
        AdapterError: a target matches no linear layer of the towers.
    """
    known = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear) and n.split(".")[0] in towers]
    chosen: set[str] = set()
    for target in targets:
        hits = [name for name in known if _matches(name, target)]
        if not hits:
            raise AdapterError(_no_match(target, known, towers))
        chosen.update(hits)
    return [name for name in known if name in chosen]


def _matches(name: str, target: str) -> bool:
    patterns = ALIASES.get(target, (target,))
    return any(fnmatch.fnmatchcase(name, p) or name.endswith(f".{p}") for p in patterns)


def _no_match(target: str, known: Sequence[str], towers: Sequence[str]) -> str:
    endings = sorted({name.rpartition(".")[2] for name in known} | set(ALIASES))
    near = difflib.get_close_matches(target, endings, n=3, cutoff=0.4) or endings
    return f"target {target!r} matches no linear layer of {' or '.join(towers)}; near names: {', '.join(near)}."


def _check_rank(name: str, base: nn.Module, rank: int) -> None:
    width = min(int(base.in_features), int(base.out_features))
    if rank > width:
        raise AdapterError(f"rank {rank} is above the width {width} of layer {name}: use at most {width}.")
