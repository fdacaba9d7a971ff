"""Which backbones exist and how wide they are, told without importing torch, timm or open_clip.

Options are checked before anything heavy is loaded, so names are read from the installed packages' files.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rayfed.errors import BackboneError

Kind = Literal["tiny", "clip", "vit", "outside"]

TINY = "tiny"
_VIT_SOURCES = ("vision_transformer.py", "deit.py", "eva.py", "beit.py")
_VIT_FUNCTION = re.compile(r"^@register_model\s+def (\w+)\(", re.MULTILINE)
_VIT_WIDTH = re.compile(r"\bembed_dim\s*=\s*(\d+)")
_VIT_DEFAULT_WIDTH = 768  # of timm's VisionTransformer, Eva and Beit classes


def kind(name: str) -> Kind | None:
    """What sort of backbone ``name`` is, or None if it is unknown. A timm name may end in ".tag".

    ``module:function`` is one from outside the package.
    """
    if name == TINY:
        return "tiny"
    if ":" in name:
        return "outside"
    if _untagged(name) in _vit_widths():
        return "vit"
    return "clip" if name in _clip_configs() else None


def known_names() -> dict[str, list[str]]:
    """Every name ``kind`` knows, by kind, sorted. A name timm and open_clip share is timm's."""
    vits = _vit_widths()
    return {
        "tiny": [TINY],
        "clip": sorted(name for name in _clip_configs() if name not in vits),
        "vit": sorted(vits),
    }


def clip_image_size(name: str) -> int | None:
    """Input size in pixels of a CLIP's image tower, or None if its files do not tell."""
    config = _tiny_config() if kind(name) == "tiny" else _clip_configs().get(name)
    size = (config or {}).get("vision_cfg", {}).get("image_size")
    first = size[0] if isinstance(size, list) else size
    return first if isinstance(first, int) else None


def outside(name: str) -> Callable[..., Any]:
    """The function of ``module:function``: ``function(pretrained=..., checkpoint=...)`` returns a ``Backbone``.

    It has an attribute ``image_size`` (pixels), and ``has_text = True`` if the backbone has a text tower. Raises
    ``BackboneError`` where there is no such thing.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), attribute, None)
    except (ImportError, ValueError) as error:
        raise BackboneError(f"backbone={name}: module {module!r} cannot be imported ({error}).") from error
    if not callable(found) or not isinstance(getattr(found, "image_size", None), int):
        raise BackboneError(
            f"backbone={name}: {module!r} has no function {attribute!r} with an attribute image_size (pixels)."
        )
    return found


def has_text(name: str) -> bool:
    """Whether backbone ``name`` has a text tower, so that class names alone make a classifier."""
    sort = kind(name)
    return bool(getattr(outside(name), "has_text", False)) if sort == "outside" else sort in {"tiny", "clip"}


def width(name: str) -> int | None:
    """Width of the image tower's tokens, or None if the name is unknown or its files do not tell."""
    sort = kind(name)
    if sort == "vit":
        return _vit_widths()[_untagged(name)]
    config = _tiny_config() if sort == "tiny" else _clip_configs().get(name)
    if config is None:
        return None
    vision = config.get("vision_cfg", {})
    if "timm_model_name" in vision:
        return _vit_widths().get(_untagged(vision["timm_model_name"]))
    found = vision.get("width")
    return found if isinstance(found, int) else None


def nearest(word: str, options: Iterable[str], *, count: int = 3) -> list[str]:
    """Up to ``count`` of ``options`` that look like ``word``, best first, without regard to case."""
    by_lower: dict[str, str] = {}
    for option in options:
        by_lower.setdefault(option.lower(), option)
    found = difflib.get_close_matches(word.lower().replace("/", "-"), by_lower, n=count, cutoff=0.6)
    return [by_lower[match] for match in found]


def unknown_backbone(name: str) -> BackboneError:
    """The error for a name ``kind`` does not know, with the names it looks like."""
    near = nearest(name, (known for group in known_names().values() for known in group))
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "use 'tiny', an open_clip CLIP or a timm ViT."
    return BackboneError(f"Backbone {name!r} is not known; {hint}")


def _untagged(name: str) -> str:
    return name.split(".", 1)[0]


def _package_folder(package: str) -> Path | None:
    spec = find_spec(package)  # finds a top-level package without importing it
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _clip_configs() -> dict[str, dict[str, Any]]:
    folder = _package_folder("open_clip")
    if folder is None:
        return {}
    files = sorted((folder / "model_configs").glob("*.json"))
    configs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    # CoCa models are captioners: their encoders return sequences, not one feature per image and text.
    return {name: config for name, config in configs.items() if "multimodal_cfg" not in config}


@cache
def _vit_widths() -> dict[str, int]:
    folder = _package_folder("timm")
    widths: dict[str, int] = {}
    for source in _VIT_SOURCES if folder else ():
        path = folder / "models" / source if folder else Path(source)
        if path.is_file():
            widths.update(_widths_in(path.read_text(encoding="utf-8")))
    return widths


def _widths_in(source: str) -> dict[str, int]:
    starts = list(_VIT_FUNCTION.finditer(source))
    ends = [match.start() for match in starts[1:]] + [len(source)]
    widths = {}
    for match, end in zip(starts, ends, strict=True):
        found = _VIT_WIDTH.search(source, match.end(), end)
        widths[match.group(1)] = int(found.group(1)) if found else _VIT_DEFAULT_WIDTH
    return widths


@cache
def _tiny_config() -> dict[str, Any] | None:
    path = Path(__file__).parent / "tiny" / "config.json"
    if not path.is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
