"""The methods by name. Adding one: its file, its options in ``rayfed/conf/method``, and its line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfed.conf.options import MethodOptions
    from rayfed.methods.base import Method

METHODS: dict[str, str] = {
    "zero_shot": "rayfed.methods.zero_shot:ZeroShot",
    "local": "rayfed.methods.local:Local",
    "fedlora": "rayfed.methods.fedlora:FedLoRA",
    "fedglad": "rayfed.methods.fedglad:FedGLAD",
    "fedsdg": "rayfed.methods.fedsdg:FedSDG",
    "mma": "rayfed.methods.mma:MMA",
    "blend": "rayfed.methods.blend:Blend",
    "feddtl": "rayfed.methods.feddtl:FedDTL",
    "fedpurel": "rayfed.methods.fedpurel:FedPuReL",
}
"""Name -> module:class. Strings, so that names are known before torch is imported."""


def make_method(options: MethodOptions) -> Method[Any]:
    """Import and construct the method that ``options.name`` names.

    A name of the form ``module:Class`` is imported as it stands: a method outside this package.

    Raises:
        KeyError: the name is not in ``METHODS`` (options are validated before this point).
    """
    module, _, cls = (options.name if ":" in options.name else METHODS[options.name]).partition(":")
    method: Method[Any] = getattr(importlib.import_module(module), cls)(options)
    return method
