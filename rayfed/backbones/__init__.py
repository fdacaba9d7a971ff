"""Frozen pretrained models: CLIP from open_clip, ViT from timm, and the embedded tiny CLIP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayfed.backbones import names

if TYPE_CHECKING:
    from rayfed.backbones.base import Backbone


def load_backbone(name: str, *, pretrained: str | None = None, checkpoint: str | None = None) -> Backbone:
    """Load the backbone ``name``: "tiny", a timm vision transformer, an open_clip model, or ``module:function``.

    ``pretrained`` names published weights, or "none" for random ones that are the same for every call; ``checkpoint``
    is a local file. Only the tiny model has weights of its own when neither is given. Raises ``BackboneError`` for an
    unknown name (with near ones) and whatever the loaders refuse.
    """
    sort = names.kind(name)
    if sort is None:
        raise names.unknown_backbone(name)
    if sort == "tiny":
        return _load_tiny(pretrained=pretrained, checkpoint=checkpoint)
    if sort == "outside":
        backbone: Backbone = names.outside(name)(pretrained=pretrained, checkpoint=checkpoint)
        return backbone
    if sort == "vit":
        from rayfed.backbones.vit import load_vit

        return load_vit(name, pretrained=pretrained, checkpoint=checkpoint)
    from rayfed.backbones.clip import load_clip

    return load_clip(name, pretrained=pretrained, checkpoint=checkpoint)


def image_size(name: str) -> int:
    """Side in pixels of the images backbone ``name`` takes. Raises ``BackboneError`` for an unknown name."""
    sort = names.kind(name)
    if sort is None:
        raise names.unknown_backbone(name)
    if sort == "vit":
        from rayfed.backbones.vit import vit_image_size

        return vit_image_size(name)
    if sort == "outside":
        size: int = names.outside(name).image_size  # type: ignore[attr-defined]  # checked by names.outside
        return size
    return names.clip_image_size(name) or 224


def _load_tiny(*, pretrained: str | None, checkpoint: str | None) -> Backbone:
    from rayfed.backbones import tiny
    from rayfed.backbones.clip import build_from_config, from_checkpoint
    from rayfed.errors import BackboneError

    if pretrained not in (None, "none") or (pretrained and checkpoint):
        raise BackboneError(
            f"Weights {pretrained!r} with checkpoint {checkpoint!r} are not possible for backbone 'tiny'; leave both "
            "out for its embedded weights, or set backbone.pretrained=none or backbone.checkpoint alone."
        )
    tokenizer = tiny.HashTokenizer()
    if checkpoint is not None:
        return from_checkpoint("tiny", tiny.CONFIG, checkpoint, tokenizer, tiny.MEAN, tiny.STD)
    state = None if pretrained == "none" else tiny.load_tiny().state_dict()
    return build_from_config("tiny", tiny.CONFIG, state, tokenizer, tiny.MEAN, tiny.STD)
