"""A frozen tower in two: activations before the first adapted block, which can be kept, and what comes after.

The blocks before the first adapter are the same for every policy, epoch and round. ``split_tower`` gives a tower's two
halves, ``PrefixCache`` keeps what the first half makes of a client's images, within a bound on memory or on disk.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.backbones.base import Backbone
from rayfed.backbones.projection import ProjectedTower
from rayfed.errors import BackboneError

BLOCK_LISTS = ("resblocks", "blocks")
"""What open_clip and timm call the list of a transformer's blocks."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tower's two halves; ``tail(head(x), x)`` does what the tower does to its input ``x``, to the same bits."""

    embed: Callable[[Tensor], Tensor]
    blocks: Sequence[nn.Module]
    first: int
    run: Callable[[nn.Module, Tensor], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor]

    def head(self, x: Tensor) -> Tensor:
        """Activations [B, T, W] before block ``first`` of the tower's input ``x``, without gradient."""
        with torch.no_grad():
            h = self.embed(x)
            for block in self.blocks[: self.first]:
                h = self.run(block, h)
            return h

    def tail(self, h: Tensor, x: Tensor) -> Tensor:
        """Features [B, D] of the activations ``h`` [B, T, W] that ``head`` made of ``x``."""
        for block in self.blocks[self.first :]:
            h = self.run(block, h)
        return self.finish(h, x)


def block_paths(backbone: nn.Module, tower: str) -> list[str]:
    """Module paths of the transformer blocks of ``tower`` ("image_tower", "text_tower"), in order.

    Raises BackboneError for a tower that is no plain row of blocks.
    """
    for path, module in backbone.get_submodule(tower).named_modules():
        if path.rpartition(".")[2] in BLOCK_LISTS and isinstance(module, (nn.ModuleList, nn.Sequential)):
            return [f"{tower}.{path}.{number}" for number in range(len(module))]
    raise BackboneError(f"the {tower.replace('_', ' ')} of this backbone is no row of transformer blocks; use a ViT.")


def last_blocks(backbone: Backbone, tower: str, count: int) -> list[str]:
    """Module paths of the last ``count`` blocks of ``tower``. Raises BackboneError if it has fewer."""
    paths = block_paths(backbone, tower)
    if count > len(paths):
        raise BackboneError(
            f"{count} blocks are asked for but the {tower.replace('_', ' ')} of backbone {backbone.name!r} has "
            f"{len(paths)}: use at most {len(paths)}."
        )
    return paths[len(paths) - count :]


def split_tower(tower: nn.Module, first: int) -> Split | None:
    """Split ``tower`` before block ``first`` (from 0); None for an architecture whose halves are not known here.

    Known are open_clip's own image and text transformers and timm's plain vision transformers. Blocks are looked up at
    each call, so adapters may be attached before or after.
    """
    if not isinstance(tower, ProjectedTower):
        return _of_open_clip(tower, first) or _of_timm(tower, first)
    split = _of_open_clip(tower.trunk, first)
    if split is None:
        return None
    # The projection is looked up at each call too: an adapter may wrap it.
    return Split(split.embed, split.blocks, first, split.run, lambda h, x: tower.proj(split.finish(h, x)))


def _of_open_clip(trunk: Any, first: int) -> Split | None:
    from open_clip.transformer import TextTransformer, Transformer, VisionTransformer

    transformer = getattr(trunk, "transformer", None)
    if not isinstance(transformer, Transformer) or not transformer.batch_first:
        return None
    if isinstance(trunk, VisionTransformer) and not trunk.output_tokens and trunk.proj is None:
        return Split(
            trunk._embeds,
            transformer.resblocks,
            first,
            lambda block, h: block(h, attn_mask=None),
            lambda h, x: trunk._pool(h)[0],
        )
    if isinstance(trunk, TextTransformer) and _is_plain_text(trunk):
        return Split(
            lambda tokens: trunk._embeds(tokens)[0],
            transformer.resblocks,
            first,
            lambda block, h: block(h, attn_mask=trunk.attn_mask),
            lambda h, tokens: _pooled_text(trunk, h, tokens),
        )
    return None


def _is_plain_text(trunk: Any) -> bool:
    """Whether the mask is the same for every text, nothing is appended, and the projection lies outside."""
    return (
        trunk.cls_emb is None and not trunk.use_pad_mask and trunk.text_projection is None and not trunk.output_tokens
    )


def _pooled_text(trunk: Any, h: Tensor, tokens: Tensor) -> Tensor:
    from open_clip.transformer import text_global_pool

    eos = getattr(trunk, "eos_id", None)
    pooled: Tensor = text_global_pool(trunk.ln_final(h), tokens, pool_type=trunk.pool_type, eos_token_id=eos)
    return pooled


def _of_timm(trunk: Any, first: int) -> Split | None:
    from timm.models.vision_transformer import VisionTransformer

    kind = type(trunk)
    plain = isinstance(trunk, VisionTransformer) and all(
        getattr(kind, name) is getattr(VisionTransformer, name) for name in ("forward", "forward_features")
    )
    if not plain:
        return None
    return Split(
        lambda x: trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(x)))),
        trunk.blocks,
        first,
        lambda block, h: block(h),
        lambda h, x: trunk.forward_head(trunk.norm(h)),
    )


class PrefixCache:
    """Activations of whole image sets, by key; the least recently used go first when ``limit`` bytes are exceeded.

    A set that alone exceeds the limit goes to a file in ``folder`` (removed with the process) or, without one, is never
    kept: that depends on the set alone, so results do not depend on who else shares the process. ``dtype``: float32, or
    float16, which halves the bytes and moves features by up to about 1e-3 of their size; None keeps nothing.
    """

    def __init__(self, *, dtype: torch.dtype | None, limit: int, folder: Path | None = None) -> None:
        self._dtype, self._limit, self._folder = dtype, limit, folder
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._too_large: set[Hashable] = set()
        self._on_disk: set[Hashable] = set()

    @property
    def bytes_kept(self) -> int:
        """Bytes in memory."""
        return sum(rows.nbytes for key, rows in self._kept.items() if key not in self._on_disk)

    def rows(self, key: Hashable, count: int, fill: Callable[[], Iterable[Tensor]]) -> Tensor | None:
        """The activations [count, T, W] of set ``key``, made by ``fill`` in batches if they are not kept; or None."""
        if self._dtype is None or key in self._too_large or count == 0:
            return None
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made: Tensor | None = None
        place = 0
        for batch in fill():
            if made is None and (made := self._room(key, (count, *batch.shape[1:]))) is None:
                return None
            made[place : place + len(batch)] = batch.to("cpu", self._dtype)
            place += len(batch)
        assert made is not None
        self._kept[key] = made
        return made

    def _room(self, key: Hashable, shape: tuple[int, ...]) -> Tensor | None:
        assert self._dtype is not None
        size = torch.Size(shape).numel() * self._dtype.itemsize
        if size > self._limit and self._folder is None:
            self._too_large.add(key)
            return None
        if size > self._limit:
            self._on_disk.add(key)
            return _file_tensor(self._folder, shape, self._dtype)
        while self.bytes_kept + size > self._limit:
            oldest = next(k for k in self._kept if k not in self._on_disk)
            del self._kept[oldest]
        return torch.empty(shape, dtype=self._dtype)


def _file_tensor(folder: Path | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is a nameless file in ``folder``. Raises BackboneError if it cannot be made there."""
    numel = torch.Size(shape).numel()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rayfed-prefix-") as file:
            file.truncate(numel * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype).view(shape)
    except (OSError, RuntimeError) as error:
        raise BackboneError(
            f"engine.cache_dir={folder} takes no file of {numel * dtype.itemsize} bytes ({error}): name a folder with "
            "room, or set engine.cache=off."
        ) from error
