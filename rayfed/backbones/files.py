"""Reading and writing files of backbone weights, with the model settings that belong to them."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rayfed.errors import BackboneError, first_line

SETTINGS_KEY = "rayfed_settings"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def read_weights(path: str) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """State dict of a checkpoint on the CPU, and its model settings if it has any.

    Settings are the ``rayfed_settings`` entry of a safetensors file, or a JSON file beside it: of the same name with
    the ending ``.json``, or open_clip's ``open_clip_config.json``. Nothing in the file is executed. Raises
    ``BackboneError`` for a missing, damaged or unsuitable file, and for a TorchScript archive.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise BackboneError(f"Checkpoint {str(file.absolute())!r} is not there; give the path of a weights file.")
    if _is_torchscript(file):
        raise BackboneError(
            f"Checkpoint {str(file)!r} is a TorchScript archive, a program rather than a set of weights; convert it "
            "once with torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt') and give that file, or name the "
            "weights with backbone.pretrained."
        )
    if file.suffix == ".safetensors":
        state, settings = _read_safetensors(file)
    elif file.suffix in _TORCH_SUFFIXES:
        state, settings = _read_torch(file), None
    else:
        endings = ", ".join((".safetensors", *_TORCH_SUFFIXES))
        raise BackboneError(f"Checkpoint {str(file)!r} has an unknown ending; files with {endings} can be read.")
    return state, settings if settings is not None else _sibling_settings(file)


def write_weights(path: str | Path, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write ``state`` and ``settings`` as one safetensors file: aside, flushed, then renamed over ``path``."""
    target = Path(path)
    aside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    # Cloned, so that tensors sharing memory are written as the separate tensors they are in the state dict.
    whole = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    try:
        save_file(whole, aside, metadata={SETTINGS_KEY: json.dumps(settings, sort_keys=True)})
        with aside.open("rb+") as handle:
            os.fsync(handle.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") or "/code/" in name for name in archive.namelist())


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            state = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (the handle is no mapping)
    except (SafetensorError, OSError) as error:
        raise BackboneError(f"Checkpoint {str(file)!r} is damaged ({error}); fetch or save it again.") from error
    text = metadata.get(SETTINGS_KEY)
    return state, None if text is None else _parsed(text, file)


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise BackboneError(
            f"Checkpoint {str(file)!r} is damaged or holds more than tensors ({reason}); "
            "save its state dict alone, best as safetensors."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise BackboneError(f"Checkpoint {str(file)!r} holds no state dict of tensors; save model.state_dict() alone.")
    if all(key.startswith("module.") for key in content):
        content = {key.removeprefix("module."): value for key, value in content.items()}
    return content


def _sibling_settings(file: Path) -> dict[str, Any] | None:
    own = file.with_suffix(".json")
    if own.is_file():
        return _parsed(own.read_text(encoding="utf-8"), own)
    foreign = file.with_name("open_clip_config.json")
    if not foreign.is_file():
        return None
    content = _parsed(foreign.read_text(encoding="utf-8"), foreign)
    preprocess = content.get("preprocess_cfg", {})
    statistics = {key: preprocess[key] for key in ("mean", "std") if key in preprocess}
    return {"kind": "clip", "config": content.get("model_cfg", {}), **statistics}


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise BackboneError(f"Model settings in {str(file)!r} are not JSON ({error}); save the file again.") from error
    if not isinstance(settings, dict):
        raise BackboneError(f"Model settings in {str(file)!r} are not a JSON object; save the file again.")
    return settings
