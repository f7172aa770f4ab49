"""Any plain value as JSON text and back: what a sampler or dataset of the user's gives as its state."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np
import torch

_TAG = "~"  # a one-key-list under this key marks what JSON does not have
_DEPTH = 64


def encode(value: Any, name: str) -> str:
    """The value as compact JSON text.

    Args:
        value: Dicts, lists, tuples, numbers, strings, bytes, None, strided tensors, numpy arrays and scalars.
        name: What the value is called in an error.

    Raises:
        TypeError: Something else is in it; the error names its key path.
    """
    return json.dumps(_pack(value, name, 0), separators=(",", ":"))


def decode(text: str) -> Any:
    """The value that ``encode`` was given.

    Raises:
        ValueError: Not such a text.
    """
    try:
        return _unpack(json.loads(text))
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not an encoded state: {error}") from error


def _pack(value: Any, path: str, depth: int) -> Any:
    if depth > _DEPTH:
        raise TypeError(f"{path} is nested deeper than {_DEPTH}: a state must be a tree of plain values")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: ["float", repr(value)]}
    if type(value) is list:
        return [_pack(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: ["tuple", [_pack(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]]}
    if isinstance(value, dict):
        return _pack_dict(value, path, depth)
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: ["bytes", bytes(value).hex()]}
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _pack_array(value, path)
    _refuse(path, value)


def _pack_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _pack(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    pairs = [
        [_pack(key, f"{path} (a key)", depth + 1), _pack(item, f"{path}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {_TAG: ["dict", pairs]}


def _pack_array(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or type(value) is not torch.Tensor:
            _refuse(path, value)
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return {_TAG: ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data.hex()]}
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        _refuse(path, value)
    kind = "scalar" if isinstance(value, np.generic) else "array"
    return {_TAG: [kind, array.dtype.str, list(array.shape), array.tobytes().hex()]}


def _refuse(path: str, value: Any) -> NoReturn:
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a state cannot carry; expected dicts, lists, tuples, "
        "numbers, strings, bytes, None, tensors or arrays: make state_dict() return these"
    )


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _unpack(item) for key, item in value.items()}
    kind, *rest = value[_TAG]
    if kind == "float":
        return float(rest[0])
    if kind == "tuple":
        return tuple(_unpack(item) for item in rest[0])
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "dict":
        return {_unpack(key): _unpack(item) for key, item in rest[0]}
    return _unpack_array(kind, *rest)


def _unpack_array(kind: str, dtype: str, shape: list[int], data: str) -> Any:
    raw = bytearray.fromhex(data)
    if kind == "tensor":
        wanted = getattr(torch, dtype)
        if not isinstance(wanted, torch.dtype):
            raise TypeError(f"{dtype!r} is no dtype")
        flat = torch.frombuffer(raw, dtype=wanted) if raw else torch.empty(0, dtype=wanted)
        return flat.reshape(shape).clone()
    if kind in ("array", "scalar"):
        array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
        return array[()] if kind == "scalar" else array.copy()
    raise ValueError(f"unknown kind {kind!r}")
