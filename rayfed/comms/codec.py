"""Payloads as bytes: one safetensors blob per message (no pickles), measured as it would travel."""

from __future__ import annotations

import functools
import json
import math

import safetensors.torch
import torch
from torch import Tensor

from rayfed.messages import Payload

PARAMS = "params"
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def encode(payload: Payload) -> bytes:
    """Return the message, ``b""`` for an empty payload: with nothing to say nothing is sent."""
    if payload.is_empty:
        return b""
    data: bytes = safetensors.torch.save(_tensors(payload))
    return data


def decode(message: bytes) -> Payload:
    """Return the payload of a message made by ``encode``."""
    if not message:
        return Payload()
    tensors = safetensors.torch.load(message)
    return Payload(tensors.pop(PARAMS, None), tensors)


def encoded_size(payload: Payload) -> int:
    """Return ``len(encode(payload))`` without copying the values."""
    if payload.is_empty:
        return 0
    tensors = payload.extras if payload.params is None else {**payload.extras, PARAMS: payload.params}
    table = tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    return sum(t.nbytes for t in tensors.values()) + _header_size(table)


@functools.cache
def _header_size(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    """Bytes of a message besides its values: an 8-byte length and the table of names, types and shapes."""
    start, table = 0, {}
    # The format stores tensors by descending item size, then by name.
    for name, dtype, shape in sorted(tensors, key=lambda item: (-item[1].itemsize, item[0])):
        stop = start + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = len(json.dumps(table, separators=(",", ":")))
    return 8 + -(-text // 8) * 8


def _tensors(payload: Payload) -> dict[str, Tensor]:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in payload.extras.items()}
    if payload.params is not None:
        tensors[PARAMS] = payload.params.contiguous().cpu()
    return tensors
