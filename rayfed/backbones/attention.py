"""Self-attention with explicit query, key, value and output projections, in place of the fused torch layer.

``nn.MultiheadAttention`` keeps the three input projections in one tensor and calls its output projection by hand, so an
adapter on it is applied twice or not at all. ``SplitAttention`` computes the same function from four ``nn.Linear``
layers, which any adapter can wrap, and reads state dicts of the fused layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.errors import BackboneError

_INPUTS = ("q_proj", "k_proj", "v_proj")


class SplitAttention(nn.Module):
    """Multi-head attention over [B, T, E] with Linear layers ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``.

    Equal to a batch-first ``nn.MultiheadAttention`` without dropout; loads its state dict (``in_proj_weight``,
    ``in_proj_bias``) as well as its own. ``fused_state_dict`` gives the fused keys back.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = True) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise BackboneError(f"Attention width {embed_dim} is not divisible by its {num_heads} heads; change one.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.register_load_state_dict_pre_hook(_split_fused_keys)

    @classmethod
    def from_fused(cls, fused: nn.MultiheadAttention) -> SplitAttention:
        """Copy of ``fused`` on its device and in its dtype.

        Raises ``BackboneError`` for variants that are not plain batch-first self-attention.
        """
        same_width = fused.in_proj_weight is not None
        if not (same_width and fused.batch_first) or fused.bias_k is not None or fused.add_zero_attn or fused.dropout:
            raise BackboneError(
                "An attention layer of this backbone is not plain batch-first self-attention without dropout, "
                "so it cannot be split into separate projections; choose another backbone."
            )
        bias = fused.in_proj_bias is not None
        # Built on meta: the usual random initialisation would advance the global random stream for nothing.
        with torch.device("meta"):
            split = cls(fused.embed_dim, fused.num_heads, bias=bias)
        split.load_state_dict({key: value.detach().clone() for key, value in fused.state_dict().items()}, assign=True)
        split.train(fused.training)
        return split

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend from ``query`` [B, T, E] to ``key`` and ``value`` [B, S, E]; returns ([B, T, E], None).

        ``attn_mask`` [T, S] or [B * heads, T, S] is added to the scores, or forbids where it is True. Attention weights
        are never returned; asking for them raises ``BackboneError``.
        """
        if need_weights:
            raise BackboneError("Split attention returns no attention weights; call it with need_weights=False.")
        heads = self._heads(self.q_proj(query))
        mixed = F.scaled_dot_product_attention(
            heads,
            self._heads(self.k_proj(key)),
            self._heads(self.v_proj(value)),
            attn_mask=self._mask(attn_mask, query.shape[0], heads.dtype),
        )
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out, None

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def _mask(self, mask: Tensor | None, batch: int, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        # A True here forbids, in scaled_dot_product_attention it allows; under autocast the projections come out in
        # another type than the mask.
        mask = ~mask if mask.dtype == torch.bool else mask.to(dtype)
        return mask if mask.dim() == 2 else mask.reshape(batch, self.num_heads, *mask.shape[1:])


def _split_fused_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any
) -> None:  # the signature torch calls hooks with
    for kind in ("weight", "bias"):
        fused = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        if fused is not None:
            for name, part in zip(_INPUTS, fused.chunk(3), strict=True):
                state_dict[f"{prefix}{name}.{kind}"] = part


def split_attention(module: nn.Module) -> int:
    """Replace every ``nn.MultiheadAttention`` inside ``module`` by an equal ``SplitAttention``; returns how many."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(parent, name, SplitAttention.from_fused(child))
                count += 1
    return count


def fused_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """State dict of ``module`` (a tower) under the keys it had before ``split_attention``.

    Raises ``BackboneError`` where a projection has been wrapped by an adapter.
    """
    state: dict[str, Tensor] = dict(module.state_dict())
    for path, part in module.named_modules():
        if isinstance(part, SplitAttention):
            prefix = f"{path}." if path else ""
            _fuse_keys(state, prefix, bias=part.q_proj.bias is not None)
    return state


def _fuse_keys(state: dict[str, Tensor], prefix: str, *, bias: bool) -> None:
    for kind in ("weight", "bias") if bias else ("weight",):
        keys = [f"{prefix}{name}.{kind}" for name in _INPUTS]
        if not all(key in state for key in keys):
            raise BackboneError(
                f"Attention {prefix.rstrip('.')!r} carries adapters, so its fused weights cannot be written; "
                "save the backbone before attaching adapters, or export the adapters alone."
            )
        state[f"{prefix}in_proj_{kind}"] = torch.cat([state.pop(key) for key in keys])
