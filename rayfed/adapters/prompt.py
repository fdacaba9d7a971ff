"""Learned context vectors in front of class names (CoOp-style prompts)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rayfed.adapters.lora import Switch
from rayfed.adapters.scope import Scope, Scoped
from rayfed.errors import AdapterError


class Prompt(Scoped):
    """Context vectors ``context`` [n, width], the same for all classes, drawn from N(0, 0.02^2)."""

    def __init__(self, length: int, width: int, scope: Scope, *, tag: str = "prompt") -> None:
        super().__init__(scope, tag)
        self.context = nn.Parameter(0.02 * torch.randn(length, width))


class PromptedEmbedding(nn.Module):
    """A frozen token embedding; while a prompt's name is switched on, it stands in places 1 .. n of every row."""

    def __init__(self, base: nn.Embedding, switch: Switch, prompts: Mapping[str, Prompt]) -> None:
        super().__init__()
        self.base = base
        self.prompts = nn.ModuleDict(prompts)
        self._switch = switch

    @property
    def weight(self) -> Tensor:
        """The frozen table [V, width]; towers ask it for its type."""
        return self.base.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens`` [N, T] as [N, T, width]."""
        x: Tensor = self.base(tokens)
        for name in self._switch.active:
            if name in self.prompts:
                context = self.prompts[name].get_parameter("context")
                rows = context.to(x.dtype).expand(len(x), -1, -1)
                x = torch.cat([x[:, :1], rows, x[:, 1 + len(context) :]], 1)
        return x


def attach_prompts(tower: nn.Module | None, switch: Switch, owners: Mapping[str, Scope], *, length: int) -> None:
    """Give a text ``tower`` prompts of ``length`` vectors, one for each name in ``owners``.

    Raises AdapterError if the tower keeps no plain token embedding where a prompt could go in.
    """
    found = [n for n, m in (tower.named_modules() if tower else ()) if n.split(".")[-1] == "token_embedding"]
    if tower is None or not found:
        raise AdapterError(
            "the backbone has no text tower with a plain token embedding for a prompt: "
            "use an open_clip model with its own text transformer (such as ViT-B-16), or another kind of adapter."
        )
    parent_name, _, leaf = found[0].rpartition(".")
    parent = tower.get_submodule(parent_name)
    base = getattr(parent, leaf)
    width = int(base.weight.shape[1])
    prompts = {name: Prompt(length, width, scope) for name, scope in owners.items()}
    setattr(parent, leaf, PromptedEmbedding(base, switch, prompts))


def prompt_tokens(tokenize: Callable[[Sequence[str]], Tensor], names: Sequence[str], length: int) -> Tensor:
    """Token rows [C, T] of "{name}." with ``length`` places for a prompt after the start token.

    ``tokenize`` turns texts into rows [N, T].

    Raises AdapterError where a name and the prompt do not fit into a row together.
    """
    rows = tokenize([f"{name.replace('_', ' ')}." for name in names])
    filler = tokenize(["x"])[0]
    padding, tail = filler[-1], rows[:, rows.shape[1] - length :]
    long = (tail != padding).any(1).nonzero().flatten().tolist()
    if long:
        raise AdapterError(
            f"class name {names[long[0]]!r} and a prompt of {length} vectors do not fit into the {rows.shape[1]} "
            "tokens of the text tower: lower method.context or shorten the name."
        )
    places = filler[1].expand(len(rows), length)
    return torch.cat([rows[:, :1], places, rows[:, 1 : rows.shape[1] - length]], 1)
