"""Vision transformers from timm, as image towers without a head."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import cast

import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

from rayfed.backbones import names
from rayfed.backbones.base import Backbone, Preprocessing
from rayfed.backbones.clip import check_fit, triple
from rayfed.backbones.files import read_weights
from rayfed.backbones.hub import impatient_hub
from rayfed.errors import BackboneError, first_line
from rayfed.rng import derive_seed

logger = logging.getLogger(__name__)

_HEADS = ("head.", "head_dist.")


def load_vit(name: str, *, pretrained: str | None, checkpoint: str | None) -> Backbone:
    """Load a timm vision transformer that returns pooled features [B, D] and has no classifier.

    ``pretrained`` is "default" for timm's default weights, one of the model's tags, or "none" for random weights, which
    are the same for every call with the same name. ``checkpoint`` is a local file; a classifier in it is left out.
    Raises ``BackboneError`` for an unknown name or tag, when neither or both sources are given, when weights cannot be
    fetched, and for a file that does not fit.
    """
    name, pretrained = _split_tag(name, pretrained)
    if names.kind(name) != "vit":
        raise names.unknown_backbone(name)
    if (pretrained is None) == (checkpoint is None):
        raise BackboneError(
            f"Backbone {name!r} needs one source of weights; set either backbone.pretrained to 'default', a tag "
            f"({', '.join(_tags(name)) or 'none is published'}) or 'none' for random weights, or backbone.checkpoint "
            "to a file."
        )
    tower = _create(name, pretrained or "none")
    if checkpoint is not None:
        _load_file(tower, name, checkpoint)
    return _wrap(name, tower)


def _split_tag(name: str, pretrained: str | None) -> tuple[str, str | None]:
    """timm writes name and tag as one word; a tag given so counts unless another is asked for."""
    base, _, tag = name.partition(".")
    return base, (pretrained or tag or None)


def _tags(name: str) -> list[str]:
    found = timm.list_models(f"{name}.*", pretrained=True)
    return sorted(entry.partition(".")[2] for entry in found)


def _create(name: str, pretrained: str) -> nn.Module:
    full = name
    if pretrained not in ("none", "default"):
        tags = _tags(name)
        if pretrained not in tags:
            near = names.nearest(pretrained, tags, count=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BackboneError(
                f"Weights {pretrained!r} are not published for backbone {name!r}; {hint}"
                f"Known: {', '.join(tags) or 'no tag at all'}, 'default', and 'none' for random weights."
            )
        full = f"{name}.{pretrained}"
    with torch.random.fork_rng(devices=[]), nullcontext() if pretrained == "none" else impatient_hub():
        torch.manual_seed(derive_seed(0, "backbone", name))
        try:
            model: nn.Module = timm.create_model(full, pretrained=pretrained != "none", num_classes=0)
        except Exception as error:  # download errors of three libraries
            if pretrained == "none":
                raise
            reason = first_line(error)
            raise BackboneError(
                f"Weights {pretrained!r} of backbone {name!r} cannot be loaded ({reason}); connect to the network, "
                "or fetch the file elsewhere and set backbone.checkpoint to it."
            ) from error
    return model


def _load_file(tower: nn.Module, name: str, checkpoint: str) -> None:
    state, settings = read_weights(checkpoint)
    if settings is not None and settings.get("name") != name:
        saved = settings.get("name", settings.get("kind", "another model"))
        raise BackboneError(f"Checkpoint {checkpoint!r} is of {saved!r}, not of backbone {name!r}; use {saved!r}.")
    expected = tower.state_dict()
    spare = [key for key in state if key.startswith(_HEADS) and key not in expected]
    if spare:
        logger.info("The classifier in %s is left out: %s.", checkpoint, ", ".join(spare))
    state = {key: value for key, value in state.items() if key not in spare}
    check_fit(state, expected, f"Checkpoint {checkpoint!r}")
    tower.load_state_dict(state)


def _wrap(name: str, tower: nn.Module) -> Backbone:
    data = resolve_model_data_config(tower)
    _, height, width = data["input_size"]
    if height != width:
        raise BackboneError(f"Backbone {name!r} takes images of {height}x{width}; choose one with a square input.")
    mean, std = triple(data["mean"]), triple(data["std"])
    settings = {"kind": "vit", "name": name, "image_size": height, "mean": [*mean], "std": [*std]}
    return Backbone(
        name,
        tower,
        embed_dim=cast(int, tower.num_features),
        preprocessing=Preprocessing(int(height), mean, std),
        settings=settings,
    )


def vit_image_size(name: str) -> int:
    """Side in pixels of the images timm's ``name`` takes, from its published configuration."""
    config = timm.models.get_pretrained_cfg(name)
    return int(config.input_size[-1]) if config is not None else 224
