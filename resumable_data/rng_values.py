"""RNG states as plain values: words as hex strings, and the checks of everything that is read back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import torch

from resumable_data.errors import RNGRestoreError

TWISTER_WORDS = 624  # length of the Mersenne Twister's state, in 32-bit words

_INT_LIMITS = {
    "pos": TWISTER_WORDS,
    "buffer_pos": 4,
    "has_uint32": 1,
    "has_gauss": 1,
    "uinteger": 2**32 - 1,
}


def encode(value: Any, name: str) -> Any:
    """A numpy RNG state as dicts, ints and strings: unsigned arrays as little-endian hex, floats by ``hex``.

    Raises:
        TypeError: A value of another type; `name` is the stream that the message names.
    """
    if type(value) is dict:
        return {key: encode(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind == "u":
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes().hex()
    if type(value) is float:
        return value.hex()
    if type(value) in (int, str):
        return value
    raise TypeError(f"RNG stream {name}: cannot capture a {type(value).__name__}")


def decode(entry: Any, template: Any, name: str) -> Any:
    """The reverse of `encode`, in the types and lengths of `template`: the present state of the target.

    Raises:
        RNGRestoreError: An entry that does not fit, or that the generator could never have been in.
    """
    if type(template) is dict:
        return _decode_dict(entry, template, name)
    if isinstance(template, np.ndarray):
        raw = from_hex(entry, template.nbytes, name)
        words = np.frombuffer(raw, template.dtype.newbyteorder("<")).astype(template.dtype)
        if words.size == TWISTER_WORDS:
            check_twister(words, name)
        return words.reshape(template.shape)
    if type(template) is float:
        return to_float(entry, name)
    if type(template) is str:
        if type(entry) is not str or entry != template:
            refuse(name, f"found {short(entry)}", f"{template!r}, what the generator here stands on")
        return entry
    return _decode_int(entry, name)


def _decode_dict(entry: Any, template: dict[str, Any], name: str) -> dict[str, Any]:
    kind = template.get("bit_generator")
    if kind is not None and type(entry) is dict and entry.get("bit_generator") != kind:
        # first, for it explains every other difference
        refuse(
            f"{name}.bit_generator",
            f"the state is of {short(entry.get('bit_generator'))}",
            f"{kind!r}, what the generator here stands on",
        )
    check_keys(entry, set(template), name)
    return {key: decode(entry[key], value, f"{name}.{key}") for key, value in template.items()}


def _decode_int(entry: Any, name: str) -> int:
    field = name.rpartition(".")[2]
    limit = _INT_LIMITS.get(field, 2**128 - 1)
    if type(entry) is not int or not 0 <= entry <= limit:
        refuse(name, f"found {short(entry)}", f"an int from 0 to {limit}")
    if field == "inc" and entry % 2 == 0:
        refuse(name, "found an even increment", "an odd one, as every PCG64 stream has")
    return entry


def check_keys(entry: Any, keys: set[str], name: str) -> None:
    """Refuse anything but a dict with exactly `keys`."""
    if type(entry) is not dict:
        refuse(name, f"found {short(entry)}", f"a dict with the keys {sorted(keys)}")
    if entry.keys() != keys:
        found = short(entry) if len(entry) > 20 else f"the keys {sorted(map(str, entry))}"
        refuse(name, f"found {found}", f"the keys {sorted(keys)}")


def check_twister(words: Iterable[Any], name: str) -> None:
    """Refuse the one state a Mersenne Twister never leaves: nothing but zeros in its 19937 bits."""
    array = np.asarray(words)
    if not array[1:].any() and int(array[0]) < 2**31:
        refuse(name, "found a Mersenne Twister of zeros", "a state that some seed leads to")


def from_hex(text: Any, size: int, name: str) -> bytes:
    """`size` bytes from exactly as many pairs of hex digits, or RNGRestoreError."""
    if type(text) is not str:
        refuse(name, f"found {short(text)}", f"a string of {2 * size} hex digits")
    if len(text) != 2 * size:
        refuse(name, f"found {len(text)} characters", f"{2 * size} hex digits")
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise RNGRestoreError(f"RNG stream {name}: {error}; expected {2 * size} hex digits") from error
    if len(raw) != size:  # fromhex passes over spaces
        refuse(name, f"found {len(raw)} bytes and spaces", f"{2 * size} hex digits")
    return raw


def to_float(text: Any, name: str) -> float:
    """A finite float from what ``float.hex`` wrote, or RNGRestoreError."""
    try:
        value = float.fromhex(text) if type(text) is str and len(text) < 64 else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        refuse(name, f"found {short(text)}", "a finite float as float.hex writes it")
    return value


def to_hex(state: torch.Tensor) -> str:
    """The bytes of a uint8 tensor, on whatever device, as hex digits."""
    return state.cpu().numpy().tobytes().hex()


def to_tensor(raw: bytes) -> torch.Tensor:
    """A uint8 CPU tensor of its own, whatever torch's default device is."""
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())


def short(value: Any) -> str:
    """A value as an error shows it: a large one by type and size, never by its millions of items."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str) and len(value) > 80:
        return f"a string of {len(value)} characters"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 90 else f"a {type(value).__name__}"


def refuse(name: str, found: str, expected: str) -> NoReturn:
    """Raise RNGRestoreError naming the stream (or the field of the state)."""
    raise RNGRestoreError(
        f"RNG stream {name}: {found}; expected {expected}. Nothing was restored.",
        expected=expected,
        found=found,
    )
