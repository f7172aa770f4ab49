"""One validated change for each random stream: python, numpy, torch, devices and the caller's generators."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resumable_data.errors import RNGRestoreError
from resumable_data.rng_values import (
    TWISTER_WORDS,
    check_keys,
    check_twister,
    decode,
    encode,
    from_hex,
    refuse,
    short,
    to_float,
    to_hex,
    to_tensor,
)

DEVICE_KINDS = ("cuda", "mps", "xpu")
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_TORCH_WORDS = slice(24, 24 + 8 * TWISTER_WORDS)  # of torch's CPU state: the words, held in 64 bits each
_MAX_DEVICES = 1024  # no machine has more; a longer list is not ours


@dataclass(frozen=True)
class Change:
    """One validated stream, not yet set.

    Attributes:
        name: Of the stream, as errors and the report name it.
        apply: Sets the stream.
        undo: Puts back what stood there when the stream was validated.
    """

    name: str
    apply: Callable[[], None]
    undo: Callable[[], None]


def python_entry(source: Any, name: str) -> dict[str, Any]:
    """The state of the `random` module or of a `random.Random`; TypeError where it has none."""
    try:
        version, words, gauss = source.getstate()
        packed = struct.pack(f"<{TWISTER_WORDS + 1}I", *words)
    except (NotImplementedError, TypeError, ValueError, struct.error) as error:
        raise TypeError(f"RNG stream {name}: {source!r} has no Mersenne Twister state to capture") from error
    return {"version": version, "words": packed.hex(), "gauss": "" if gauss is None else float(gauss).hex()}


def plan_python(target: Any, entry: Any, name: str) -> Change:
    """For the `random` module and for a `random.Random`; RNGRestoreError where the entry does not fit."""
    check_keys(entry, {"version", "words", "gauss"}, name)
    before = target.getstate()
    if type(entry["version"]) is not int or entry["version"] != before[0]:
        refuse(f"{name}.version", f"found {short(entry['version'])}", f"{before[0]}, this Python's")
    words = struct.unpack(
        f"<{TWISTER_WORDS + 1}I", from_hex(entry["words"], 4 * (TWISTER_WORDS + 1), f"{name}.words")
    )
    if words[-1] > TWISTER_WORDS:
        refuse(f"{name}.words", f"found position {words[-1]}", f"at most {TWISTER_WORDS}")
    check_twister(words[:-1], f"{name}.words")
    gauss = None if entry["gauss"] == "" else to_float(entry["gauss"], f"{name}.gauss")
    after = (before[0], words, gauss)
    return Change(name, lambda: target.setstate(after), lambda: target.setstate(before))


def plan_numpy_legacy(target: Any, entry: Any, name: str) -> Change:
    """For `numpy.random` itself and for a `RandomState`: a bit generator and a cached Gaussian.

    Raises RNGRestoreError where the entry does not fit, or stands on another bit generator.
    """
    before = target.get_state(legacy=False)
    after = decode(entry, before, name)
    if after["bit_generator"] != "MT19937":  # the legacy global may stand on any; `decode` knows this one
        source = np.random.get_bit_generator() if target is np.random else target
        trial = copy.deepcopy(source)
        if target is np.random:
            trial = np.random.RandomState(trial)
        _try(lambda: trial.set_state(after), lambda: trial.get_state(legacy=False), after, name)
    return Change(name, lambda: target.set_state(after), lambda: target.set_state(before))


def _plan_numpy(target: np.random.Generator, entry: Any, name: str) -> Change:
    def set_to(bits: Any, state: Any) -> None:
        bits.state = state

    bits: Any = target.bit_generator
    before = bits.state
    after = decode(entry, before, name)
    trial: Any = copy.deepcopy(bits)
    _try(lambda: set_to(trial, after), lambda: trial.state, after, name)
    return Change(name, lambda: set_to(bits, after), lambda: set_to(bits, before))


def _try(set_trial: Callable[[], None], get_trial: Callable[[], Any], after: Any, name: str) -> None:
    """Set a copy first: what it refuses, or gives back otherwise than given, the real one never sees."""
    try:
        set_trial()
    except Exception as error:
        raise RNGRestoreError(f"RNG stream {name}: the generator refuses the state ({error})") from error
    if encode(get_trial(), name) != encode(after, name):
        refuse(name, "the generator gives back another state", "the state that was set")


def plan_torch(target: torch.Generator, entry: Any, name: str) -> Change:
    """For torch's default CPU generator and any other; RNGRestoreError where the entry does not fit."""
    before = target.get_state()
    raw = from_hex(entry, before.numel(), name)
    after = to_tensor(raw)
    if target.device.type == "cpu":
        words = np.frombuffer(raw[_TORCH_WORDS], dtype=np.uint64)
        if int(words.max()) >= 2**32:
            refuse(name, f"found a word of {int(words.max())}", "words below 2**32")
        check_twister(words, name)
    trial = torch.Generator(target.device)
    try:
        trial.set_state(after)
    except RuntimeError as error:
        raise RNGRestoreError(f"RNG stream {name}: torch refuses the state ({error})") from error
    if not torch.equal(trial.get_state(), after):
        refuse(name, "torch gives back another state", "the state that was set")
    return Change(name, lambda: _drop(target.set_state(after)), lambda: _drop(target.set_state(before)))


def _drop(_: object) -> None:
    """Turn a call that gives something into one that gives nothing."""


def device_module(kind: str) -> Any:
    """The torch module of a kind of device; the only door to it, so that tests can stand in for hardware."""
    return getattr(torch, kind)


def device_count(kind: str) -> int:
    """Visible devices of a kind of `DEVICE_KINDS`, 0 where there is no such hardware."""
    module = device_module(kind)
    if kind == "mps":  # torch.mps has no is_available everywhere, and one device at most
        available = getattr(module, "is_available", torch.backends.mps.is_available)
        return 1 if available() else 0
    return int(module.device_count()) if module.is_available() else 0


def device_get(kind: str, index: int) -> torch.Tensor:
    """The state of a device's default generator, a uint8 tensor."""
    module = device_module(kind)
    state: torch.Tensor = module.get_rng_state() if kind == "mps" else module.get_rng_state(index)
    return state


def _device_set(kind: str, index: int, state: torch.Tensor) -> None:
    module = device_module(kind)
    if kind == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, index)
    if not torch.equal(device_get(kind, index).cpu(), state):
        raise RuntimeError(f"{kind} device {index} gives back another state than was set")


def plan_devices(kind: str, entries: Any, strict: bool, skipped: dict[str, str]) -> list[Change]:
    """A change for each device that state and process both have.

    Under `strict` any difference is an RNGRestoreError; else it goes to `skipped` with its reason.
    """
    stream, count = f"torch_{kind}", device_count(kind)
    if type(entries) is not list or len(entries) > _MAX_DEVICES:
        refuse(stream, f"found {short(entries)}", f"a list of at most {_MAX_DEVICES} hex strings")
    if strict and len(entries) != count:
        refuse(
            stream,
            f"the state holds {len(entries)} {kind} device(s), this process sees {count}",
            "the same devices; strict=False restores the streams both sides have",
        )
    for i in range(count, len(entries)):
        skipped[f"{stream}[{i}]"] = f"in the state, but this process sees {count} {kind} device(s)"
    for i in range(len(entries), count):
        skipped[f"{stream}[{i}]"] = f"present here, but the state holds {len(entries)} {kind} device(s)"
    return [_plan_device(kind, i, entries[i]) for i in range(min(count, len(entries)))]


def _plan_device(kind: str, index: int, entry: Any) -> Change:
    name = f"torch_{kind}[{index}]"
    before = device_get(kind, index).cpu().clone()
    after = to_tensor(from_hex(entry, before.numel(), name))
    return Change(name, lambda: _device_set(kind, index, after), lambda: _device_set(kind, index, before))


def _label(name: str) -> str:
    return f"generators[{name!r}]"


def checked_generators(generators: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The mapping itself, {} for None; TypeError for one with other keys or unknown kinds of generators."""
    if generators is None:
        return {}
    if not isinstance(generators, Mapping) or any(type(name) is not str for name in generators):
        raise TypeError(f"generators must map names (str) to generator objects, found {generators!r}")
    for name, generator in generators.items():
        _generator_kind(generator, _label(name))
    return generators


def _generator_kind(generator: Any, name: str) -> str:
    kinds = ("torch.Generator", "numpy.Generator", "numpy.RandomState", "random.Random")
    for kind, cls in zip(kinds, GENERATOR_TYPES, strict=True):
        if isinstance(generator, cls) and not isinstance(generator, random.SystemRandom):
            return kind
    raise TypeError(
        f"{name} must be a torch.Generator, numpy Generator or RandomState, or random.Random, found a "
        f"{type(generator).__name__}"
    )


def generator_entry(generator: Any, key: str) -> dict[str, Any]:
    """The state of a generator of the caller's, `key` its name in their mapping."""
    name = _label(key)
    kind = _generator_kind(generator, name)
    if kind == "torch.Generator":
        return {"kind": kind, "device": generator.device.type, "state": to_hex(generator.get_state())}
    if kind == "numpy.Generator":
        return {"kind": kind, "state": encode(generator.bit_generator.state, name)}
    if kind == "numpy.RandomState":
        return {"kind": kind, "state": encode(generator.get_state(legacy=False), name)}
    return {"kind": kind, "state": python_entry(generator, name)}


def plan_generators(
    given: Mapping[str, Any], entries: Any, strict: bool, skipped: dict[str, str]
) -> list[Change]:
    """A change for each generator that both the state and the caller have; `strict` as in `plan_devices`."""
    if type(entries) is not dict or any(type(name) is not str for name in entries):
        refuse("generators", f"found {short(entries)}", "a dict of names to states")
    differing = dict.fromkeys(entries.keys() - given.keys(), "in the state, but not given to restore")
    differing |= dict.fromkeys(given.keys() - entries.keys(), "given to restore, but not in the state")
    for name in sorted(differing):
        if strict:
            refuse(_label(name), differing[name], "the same generators=... as at capture")
        skipped[_label(name)] = differing[name]
    return [_plan_generator(given[name], entries[name], _label(name)) for name in given if name in entries]


def _plan_generator(generator: Any, entry: Any, name: str) -> Change:
    kind = _generator_kind(generator, name)
    check_keys(entry, {"kind", "state"} | ({"device"} if kind == "torch.Generator" else set()), name)
    if entry["kind"] != kind:
        refuse(f"{name}.kind", f"the state is of a {short(entry['kind'])}", f"{kind}, which was given")
    if kind == "torch.Generator":
        if entry["device"] != generator.device.type:
            refuse(f"{name}.device", f"found {short(entry['device'])}", f"{generator.device.type!r}")
        return plan_torch(generator, entry["state"], name)
    if kind == "numpy.Generator":
        return _plan_numpy(generator, entry["state"], name)
    if kind == "numpy.RandomState":
        return plan_numpy_legacy(generator, entry["state"], name)
    return plan_python(generator, entry["state"], name)
