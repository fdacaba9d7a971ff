"""CLIP backbones from open_clip, with split attention and settings that travel with the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.factory import get_model_config
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict
from open_clip.pretrained import download_pretrained
from torch import Tensor, nn

from rayfed.backbones import names
from rayfed.backbones.attention import fused_state_dict, split_attention
from rayfed.backbones.base import Backbone, Preprocessing, Tokenizer
from rayfed.backbones.files import read_weights, write_weights
from rayfed.backbones.hub import impatient_hub
from rayfed.backbones.projection import expose_projection, original_state_dict
from rayfed.errors import BackboneError, first_line
from rayfed.rng import derive_seed

logger = logging.getLogger(__name__)

_QUICK = "-quickgelu"
# Where weights came from is no part of the architecture.
_NOT_ARCHITECTURE = ("hf_model_pretrained", "timm_model_pretrained")
_DEFAULTS: dict[str, Any] = {"quick_gelu": False, "custom_text": False}
# Numbers some archives carry among the weights, and a buffer newer text encoders no longer have.
_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "text.transformer.embeddings.position_ids")


def load_clip(name: str, *, pretrained: str | None, checkpoint: str | None) -> Backbone:
    """Load an open_clip model by ``name`` with weights from a tag, from a local file, or random ("none").

    Random weights are the same for every call with the same name. OpenAI-style tags, trained with quick-GELU, switch a
    plain name to its quick-GELU twin, with a warning. Raises ``BackboneError`` for an unknown name or tag, when neither
    or both sources are given, and for a file that does not belong to the model.
    """
    config = _config_of(name)
    if (pretrained is None) == (checkpoint is None):
        raise _one_source(name)
    if checkpoint is not None:
        return from_checkpoint(name, config, checkpoint, _tokenizer_of(name), *_statistics(name, None))
    if pretrained is None or pretrained == "none":
        return build_from_config(name, config, None, _tokenizer_of(name), *_statistics(name, None))
    tag = _known_tag(name, pretrained)
    name, config = _matching_activation(name, config, tag)
    backbone_model = _build(name, config)
    _load_tag(backbone_model, name, tag)
    return _wrap(name, config, backbone_model, _tokenizer_of(name), *_statistics(name, tag))


def build_from_config(
    name: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor] | None,
    tokenizer: Tokenizer,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Backbone:
    """Backbone of an open_clip model configuration, with the weights ``state`` or seeded random ones.

    ``state`` may have the keys of either open_clip class. Raises ``BackboneError`` if it does not fit exactly.
    """
    model = _build(name, config)
    if state is not None:
        _load_state(model, dict(state), f"The state dict given for backbone {name!r}")
    return _wrap(name, config, model, tokenizer, mean, std)


def from_checkpoint(
    name: str,
    config: Mapping[str, Any],
    checkpoint: str,
    tokenizer: Tokenizer,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Backbone:
    """Backbone of ``config`` with the weights of a file, whose own settings must agree and win for mean and std.

    Raises ``BackboneError`` where the file's settings differ, naming the difference, or its weights do not fit.
    """
    state, settings = read_weights(checkpoint)
    if settings is None:
        quick = bool(config.get("quick_gelu", False))
        logger.warning("%s carries no model settings; taken as %s with quick_gelu=%s.", checkpoint, name, quick)
    else:
        _check_settings(checkpoint, settings, name, config)
        mean, std = triple(settings.get("mean", mean)), triple(settings.get("std", std))
    model = _build(name, config)
    _load_state(model, state, f"Checkpoint {checkpoint!r}")
    return _wrap(name, config, model, tokenizer, mean, std)


def save_backbone(backbone: Backbone, path: str | Path) -> None:
    """Write a backbone's weights under their original names, with its settings, as safetensors.

    Raises ``BackboneError`` if adapters have been attached inside a tower.
    """
    image = fused_state_dict(backbone.image_tower)
    if backbone.text_tower is None:
        write_weights(path, image, backbone.settings)
        return
    # open_clip keeps the text tower of a plain CLIP at the root and that of every other model under "text.".
    prefix = "text." if _is_custom_text(backbone.settings["config"]) else ""
    image = original_state_dict(backbone.image_tower, image)
    text = original_state_dict(backbone.text_tower, fused_state_dict(backbone.text_tower))
    state = {f"visual.{key}": value for key, value in image.items()}
    state.update({f"{prefix}{key}": value for key, value in text.items()})
    write_weights(path, {**state, **backbone.extras}, backbone.settings)


def _one_source(name: str) -> BackboneError:
    tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none is published"
    return BackboneError(
        f"Backbone {name!r} needs one source of weights; set either backbone.pretrained to a tag ({tags}) or to 'none' "
        "for random weights, or backbone.checkpoint to a file."
    )


def _config_of(name: str) -> dict[str, Any]:
    config = get_model_config(name)
    if config is None or "multimodal_cfg" in config:
        raise names.unknown_backbone(name)
    return dict(config)


def _known_tag(name: str, pretrained: str) -> str:
    tag = pretrained.lower().replace("-", "_")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag not in tags:
        near = names.nearest(tag, tags, count=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BackboneError(
            f"Weights {pretrained!r} are not published for backbone {name!r}; {hint}"
            f"Known: {', '.join(tags) or 'no tag at all'}, and 'none' for random weights."
        )
    return tag


def _matching_activation(name: str, config: dict[str, Any], tag: str) -> tuple[str, dict[str, Any]]:
    """The model whose activation the weights ``tag`` were trained with."""
    quick_weights = bool(open_clip.get_pretrained_cfg(name, tag).get("quick_gelu", False))
    # A configuration with quick-GELU and a tag that says nothing: the configuration was written for its weights.
    if not quick_weights or config.get("quick_gelu", False):
        return name, config
    twin = get_model_config(name + _QUICK)
    if twin is None:
        raise BackboneError(
            f"Weights {tag!r} were trained with quick-GELU but backbone {name!r} has plain GELU and no "
            "quick-GELU twin; choose other weights."
        )
    logger.warning("Weights %r were trained with quick-GELU: using backbone %r.", tag, name + _QUICK)
    return name + _QUICK, dict(twin)


def _statistics(name: str, tag: str | None) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation for a tag, else those all of the model's published weights start from."""
    tags = open_clip.list_pretrained_tags_by_model(name)
    chosen = tag or (tags[0] if tags else None)
    found = open_clip.get_pretrained_cfg(name, chosen) if chosen else {}
    mean = found.get("mean", open_clip.OPENAI_DATASET_MEAN)
    return triple(mean), triple(found.get("std", open_clip.OPENAI_DATASET_STD))


def triple(values: Any) -> tuple[float, float, float]:
    """Three numbers, one for each channel, as floats."""
    first, second, third = values
    return float(first), float(second), float(third)


def _tokenizer_of(name: str) -> Tokenizer:
    try:
        with impatient_hub():
            tokenizer: Tokenizer = open_clip.get_tokenizer(name)
    except Exception as error:  # the transformers library raises many kinds
        raise BackboneError(
            f"The tokenizer of backbone {name!r} cannot be loaded ({first_line(error)}); it is fetched from the "
            "Hugging Face hub, so connect once or choose a backbone with the built-in tokenizer."
        ) from error
    return tokenizer


def _build(name: str, config: Mapping[str, Any]) -> CustomTextCLIP:
    """An open_clip model with its text tower as a module of its own, with random weights fixed by ``name``."""
    wanted = deepcopy(dict(config))
    wanted.pop("custom_text", None)
    if "hf_model_name" in wanted["text_cfg"]:
        wanted["text_cfg"]["hf_model_pretrained"] = False
    from_hub = impatient_hub() if "hf_model_name" in wanted["text_cfg"] else nullcontext()
    with torch.random.fork_rng(devices=[]), from_hub:
        torch.manual_seed(derive_seed(0, "backbone", name))
        try:
            return CustomTextCLIP(**wanted)
        except OSError as error:  # a Hugging Face text tower fetches its configuration
            raise BackboneError(
                f"Backbone {name!r} cannot be built ({first_line(error)}); its text tower's configuration is fetched "
                "from the Hugging Face hub, so connect once or choose another backbone."
            ) from error


def _load_tag(model: nn.Module, name: str, tag: str) -> None:
    try:
        with impatient_hub():
            path = download_pretrained(open_clip.get_pretrained_cfg(name, tag))
    except Exception as error:  # download errors of three libraries
        raise BackboneError(
            f"Weights {tag!r} of backbone {name!r} cannot be fetched ({first_line(error)}); connect to the network, "
            "or fetch the file elsewhere and set backbone.checkpoint to it."
        ) from error
    open_clip.load_checkpoint(model, path, strict=True, weights_only=True)


def _load_state(model: CustomTextCLIP, state: dict[str, Tensor], what: str) -> None:
    expected = model.state_dict()
    state = convert_to_custom_text_state_dict(convert_state_dict(model, state))
    state = {key: value for key, value in state.items() if key in expected or key not in _NOT_WEIGHTS}
    for key in ("logit_scale", "logit_bias"):  # stored with and without a dimension
        if key in state and key in expected:
            state[key] = state[key].reshape(expected[key].shape)
    if "logit_bias" in expected:
        state.setdefault("logit_bias", torch.zeros_like(expected["logit_bias"]))
    check_fit(state, expected, what)
    model.load_state_dict(state)


def check_fit(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise ``BackboneError`` unless ``state`` has exactly the keys and shapes of ``expected``."""
    shapes = [
        f"{key} {tuple(state[key].shape)} for {tuple(expected[key].shape)}"
        for key in expected
        if key in state and state[key].shape != expected[key].shape
    ]
    problems = (
        ("missing", [key for key in expected if key not in state]),
        ("spare", [key for key in state if key not in expected]),
        ("of another shape", shapes),
    )
    found = [
        f"{len(keys)} {kind} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
        for kind, keys in problems
        if keys
    ]
    if found:
        raise BackboneError(f"{what} does not fit the model: tensors {'; '.join(found)}. Choose the model it is from.")


def _wrap(
    name: str,
    config: Mapping[str, Any],
    model: CustomTextCLIP,
    tokenizer: Tokenizer,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Backbone:
    split_attention(model.visual)
    split_attention(model.text)
    size = _square(name, model.visual.image_size)
    plain = deepcopy(dict(config))
    settings = {"kind": "clip", "name": name, "config": plain, "image_size": size, "mean": [*mean], "std": [*std]}
    extras = {"logit_scale": model.logit_scale}
    if model.logit_bias is not None:
        extras["logit_bias"] = model.logit_bias
    return Backbone(
        name,
        expose_projection(model.visual),
        embed_dim=int(config["embed_dim"]),
        preprocessing=Preprocessing(size, mean, std),
        settings=settings,
        text_tower=expose_projection(model.text),
        tokenizer=tokenizer,
        context_length=int(config["text_cfg"].get("context_length", 77)),
        extras=extras,
    )


def _square(name: str, size: int | tuple[int, int]) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise BackboneError(f"Backbone {name!r} takes images of {height}x{width}; choose one with a square input.")
    return int(height)


def _is_custom_text(config: Mapping[str, Any]) -> bool:
    return bool(config.get("custom_text", False)) or "hf_model_name" in config["text_cfg"]


def _check_settings(path: str, settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
    stored = settings.get("config")
    if not isinstance(stored, dict):
        saved = settings.get("name", settings.get("kind", "another model"))
        raise BackboneError(f"Checkpoint {path!r} is of {saved!r}, not of the CLIP backbone {name!r}; use {saved!r}.")
    differences = _differences(stored, config)
    if differences:
        right = _name_of(stored, settings.get("name"))
        remedy = f"use backbone {right!r}" if right else "use the model it was saved from"
        raise BackboneError(
            f"Checkpoint {path!r} does not belong to backbone {name!r}: {'; '.join(differences[:5])}; {remedy}."
        )


def _differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    ours, theirs = _flat(given), _flat(stored)
    return [
        f"{key} is {theirs.get(key, 'not set')} in the file and {ours.get(key, 'not set')} in the model"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys to values; tuples as lists, as JSON has them."""
    flat = dict(_DEFAULTS)
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": _plain(item) for inner, item in value.items()})
        else:
            flat[key] = _plain(value)
    return {key: value for key, value in flat.items() if key.rsplit(".", 1)[-1] not in _NOT_ARCHITECTURE}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _name_of(stored: Mapping[str, Any], saved_name: Any) -> str | None:
    candidates = [saved_name] if isinstance(saved_name, str) else []
    for candidate in [*candidates, *open_clip.list_models()]:
        config = get_model_config(candidate)
        if config is not None and not _differences(stored, config):
            return str(candidate)
    return candidates[0] if candidates else None
