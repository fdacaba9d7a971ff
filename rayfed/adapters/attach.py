"""Putting adapters into a backbone: which layers are meant, and replacing them."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    "proj": ("*_tower.proj",),
    "all": ("*",),
}
"""Short target names, and the module paths they stand for in open_clip and timm towers."""


Init = Literal["normal", "kaiming"]


@dataclass(frozen=True, slots=True)
class Branch:
    """One LoRA branch to attach; A starts with std 1/sqrt(rank) ("normal") or within 1/sqrt(d_in) ("kaiming")."""

    name: str
    scope: Scope
    rank: int
    alpha: float
    tag: str = "lora"
    init: Init = "normal"


def attach_lora(
    backbone: nn.Module, switch: Switch, branches: Sequence[Branch], *, targets: Sequence[str], towers: Sequence[str]
) -> list[str]:
    """Add ``branches`` to the layers that ``targets`` mean inside ``towers`` (module paths); return the layers' paths.

    Plain linear layers are replaced by adapted ones; layers adapted before get the branches beside the old ones.

    Raises:
        AdapterError: a target matches nothing (with near names), or a rank is above a layer's width.
    """
    names = find_targets(backbone, targets, towers)
    for name in names:
        parent_name, _, leaf = name.rpartition(".")
        parent = backbone.get_submodule(parent_name)
        layer = getattr(parent, leaf)
        adapted = layer if isinstance(layer, AdaptedLinear) else AdaptedLinear(layer, switch)
        for branch in branches:
            adapted.branches[branch.name] = _lora(name, adapted, branch)
        setattr(parent, leaf, adapted)
    return names


def _lora(name: str, layer: AdaptedLinear, branch: Branch) -> LoRABranch:
    d_in, d_out = layer.in_features, layer.out_features
    if branch.rank > min(d_in, d_out):
        width = min(d_in, d_out)
        raise AdapterError(f"rank {branch.rank} is above the width {width} of layer {name}: use at most {width}.")
    made = LoRABranch(d_in, d_out, rank=branch.rank, alpha=branch.alpha, scope=branch.scope, tag=branch.tag)
    if branch.init == "kaiming":
        nn.init.kaiming_uniform_(made.a, a=math.sqrt(5))
    return made


def attach_layer_gates(backbone: nn.Module, *, width: int, init: float) -> None:
    """Give every layer with two branches a private gate of its own."""
    for module in list(backbone.modules()):
        if isinstance(module, AdaptedLinear) and len(module.branches) == 2:
            module.gate = LayerGate(module.in_features, width=width, init=init)


def find_targets(backbone: nn.Module, targets: Sequence[str], towers: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers that ``targets`` mean, in module order.

    A target is a short name (``ALIASES``), the end of a module path, or a pattern with ``*``. ``towers`` are module
    paths: a whole tower, or one of its blocks.

    Raises:
        AdapterError: a target matches no linear layer of the towers.
    """
    known = [name for name in _linear_layers(backbone) if any(f"{name}.".startswith(f"{t}.") for t in towers)]
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


def _linear_layers(module: nn.Module, prefix: str = "") -> list[str]:
    """Paths of plain and adapted linear layers; what is inside an adapted one does not count."""
    if isinstance(module, (nn.Linear, AdaptedLinear)):
        return [prefix]
    children = module.named_children()
    return [path for name, child in children for path in _linear_layers(child, f"{prefix}.{name}" if prefix else name)]
