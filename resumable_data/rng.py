"""Every random stream of this process as one plain value, and back again.

The state is a dict of dicts, lists, ints and strings, so that JSON and ``torch.load(weights_only=True)``
both take it; it is about 20 KB::

    schema      "resumable_data.rng.v1"
    rank, world_size                      whose streams these are
    python      {version, words, gauss}   the `random` module
    numpy       its legacy global stream, as numpy names the fields of its bit generator
    torch_cpu   torch's default CPU generator, the bytes of its get_state()
    torch_cuda, torch_mps, torch_xpu      a list with such bytes for each device, [] without one
    generators  {name: {kind, ...}}       the caller's own

Arrays of words are hex strings of little-endian bytes, floats are ``float.hex`` strings, a cached Gaussian
that is absent is ``""``.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resumable_data.errors import RNGRestoreError
from resumable_data.rng_streams import (
    DEVICE_KINDS,
    Change,
    checked_generators,
    device_count,
    device_get,
    generator_entry,
    plan_devices,
    plan_generators,
    plan_numpy_legacy,
    plan_python,
    plan_torch,
    python_entry,
)
from resumable_data.rng_values import encode, refuse, short, to_hex

SCHEMA = "resumable_data.rng.v1"

_DEVICE_STREAMS = tuple(f"torch_{kind}" for kind in DEVICE_KINDS)
_KEYS = {"schema", "rank", "world_size", "python", "numpy", "torch_cpu", "generators", *_DEVICE_STREAMS}
_named_accelerators: set[str] = set()  # those that the warning at capture has been given for


@dataclass(frozen=True)
class RNGReport:
    """What a restore did.

    Attributes:
        restored: Names of the streams that were set, in order (``"torch_cuda[0]"``, ``"generators['aug']"``).
        skipped: Name -> reason of those that were not; always empty under ``strict``.
    """

    restored: tuple[str, ...]
    skipped: Mapping[str, str]


def capture_rng_state(
    generators: Mapping[str, Any] | None = None, *, rank: int | None = None, world_size: int | None = None
) -> dict[str, Any]:
    """The state of every random stream of this process; nothing is drawn.

    How many children a numpy Generator has spawned is not part of it: spawn them all at the start.

    Every rank calls it for itself. Where CUDA or XPU devices are visible, all of them are captured, which
    initialises that runtime. The first capture beside an active accelerator of another kind warns that its
    stream is not in the state.

    Args:
        generators: Further generators by name: ``torch.Generator``, ``numpy.random.Generator`` over any
            bit generator, ``numpy.random.RandomState``, ``random.Random``.
        rank: Whose state it is, ``0 <= rank < world_size``; by default from ``torch.distributed``, else from
            the environment's RANK and WORLD_SIZE, else 0 of 1.
        world_size: Processes of the job, by default from the same place.

    Returns:
        The state described at the head of this module, for `restore_rng_state`.

    Raises:
        TypeError: A generator of a kind that cannot be captured.
        ValueError: `rank` and `world_size` that do not fit together.
    """
    rank, world_size = _whose(rank, world_size)
    _name_unknown_accelerator()
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": rank,
        "world_size": world_size,
        "python": python_entry(random, "python"),
        "numpy": encode(np.random.get_state(legacy=False), "numpy"),
        "torch_cpu": to_hex(torch.default_generator.get_state()),
    }
    for kind in DEVICE_KINDS:
        state[f"torch_{kind}"] = [to_hex(device_get(kind, i)) for i in range(device_count(kind))]
    given = checked_generators(generators)
    state["generators"] = {name: generator_entry(generator, name) for name, generator in given.items()}
    return state


def restore_rng_state(
    state: Mapping[str, Any],
    *,
    generators: Mapping[str, Any] | None = None,
    strict: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
) -> RNGReport:
    """Set every stream to what `capture_rng_state` found; all of them or none.

    Each stream is validated before the first is set. Every rank calls it with its own state: another rank's
    is refused, so that no two ranks draw the same numbers. The same rank of a job of another size is
    accepted with a warning.

    Args:
        state: What `capture_rng_state` gave, also after JSON or ``torch.load(weights_only=True)``.
        generators: The generators to set, under the names and of the kinds they were captured with.
        strict: Refuse a state whose devices or named generators are not exactly those present. Otherwise
            what both sides have is restored; the rest is named in the report and in one warning.
        rank: As for `capture_rng_state`.
        world_size: As for `capture_rng_state`.

    Returns:
        The names of the streams that were set, and of those skipped with the reason.

    Raises:
        RNGRestoreError: Naming the stream and the cause; every stream is as it was before the call.
        TypeError: A generator of a kind that cannot be restored.
        ValueError: `rank` and `world_size` that do not fit together.
    """
    plan = plan_rng_restore(
        state, generators=generators, strict=strict, rank=rank, world_size=world_size, stacklevel=3
    )
    plan.apply()
    return plan.report


@dataclass(frozen=True)
class RNGPlan:
    """A validated state, not yet set.

    Attributes:
        report: What `apply` will have done.
        changes: One for each stream.
    """

    report: RNGReport
    changes: tuple[Change, ...]

    def apply(self) -> None:
        """Set every stream, or raise RNGRestoreError with every stream as it was when the plan was made."""
        _apply(self.changes)

    def undo(self) -> None:
        """Put every stream back to what it was when the plan was made, or raise RNGRestoreError."""
        lost = _put_back(self.changes)
        if lost:
            raise RNGRestoreError(f"RNG streams that could not be put back: {', '.join(lost)}")


def plan_rng_restore(
    state: Mapping[str, Any],
    *,
    generators: Mapping[str, Any] | None = None,
    strict: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    stacklevel: int = 2,
) -> RNGPlan:
    """The first half of `restore_rng_state`: validate, warn, change nothing; arguments and errors are its.

    For callers that restore other things too, and want to know that all can be before any is.
    """
    given = checked_generators(generators)
    _check_head(state, *_whose(rank, world_size), stacklevel + 1)
    skipped: dict[str, str] = {}
    changes = [
        plan_python(random, state["python"], "python"),
        plan_numpy_legacy(np.random, state["numpy"], "numpy"),
        plan_torch(torch.default_generator, state["torch_cpu"], "torch_cpu"),
    ]
    for kind in DEVICE_KINDS:
        changes += plan_devices(kind, state[f"torch_{kind}"], strict, skipped)
    changes += plan_generators(given, state["generators"], strict, skipped)
    if skipped:  # before anything is set: a filter may turn the warning into an error
        what = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        warnings.warn(
            f"RNG streams not restored: {what}. Draws from them will differ.", stacklevel=stacklevel
        )
    return RNGPlan(RNGReport(tuple(change.name for change in changes), skipped), tuple(changes))


def _apply(changes: Sequence[Change]) -> None:
    """Set the validated streams; on any failure, an interrupt included, put all of them back."""
    begun: list[Change] = []
    try:
        for change in changes:
            begun.append(change)
            change.apply()
    except BaseException as error:
        lost = _put_back(begun)
        if not isinstance(error, Exception):
            raise
        outcome = f"Could not put back {', '.join(lost)}" if lost else "Every stream was put back"
        raise RNGRestoreError(
            f"RNG stream {begun[-1].name}: setting it failed ({type(error).__name__}: {error}). {outcome}. "
            "Restore on the kind of device and the library versions that the state was captured with."
        ) from error


def _put_back(changes: Sequence[Change]) -> list[str]:
    """Undo each change; the names of those whose undoing failed as well."""
    lost = []
    for change in reversed(changes):
        try:
            change.undo()
        except Exception as error:  # noqa: BLE001 - the others must still be put back; the caller names it
            lost.append(f"{change.name} ({error})")
    return lost


def _whose(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        found_rank, found_size = _ambient_rank()
        rank = found_rank if rank is None else rank
        world_size = found_size if world_size is None else world_size
    for name, value in (("rank", rank), ("world_size", world_size)):
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, found {value!r}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank and world_size must satisfy 0 <= rank < world_size, found rank={rank}, "
            f"world_size={world_size} (by default torch.distributed's, else RANK and WORLD_SIZE)"
        )
    return rank, world_size


def _ambient_rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    texts = {"RANK": os.environ.get("RANK", "0"), "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1")}
    for name, text in texts.items():
        if not text.strip().isdecimal():
            raise ValueError(f"environment variable {name} must be a whole number, found {text!r}")
    return int(texts["RANK"]), int(texts["WORLD_SIZE"])


def _check_head(state: Any, rank: int, world_size: int, stacklevel: int) -> None:
    if not isinstance(state, Mapping):
        refuse("state", f"found a {type(state).__name__}", "the dict that capture_rng_state gave")
    if state.get("schema") != SCHEMA:
        refuse("schema", f"found {short(state.get('schema'))}", f"{SCHEMA!r}, the one this version reads")
    missing, unknown = _KEYS - state.keys(), state.keys() - _KEYS
    if missing or unknown:
        name = sorted(map(str, missing or unknown))[0]
        refuse(name, "the stream is missing" if missing else "an unknown stream", f"exactly {sorted(_KEYS)}")
    for key in ("rank", "world_size"):
        if type(state[key]) is not int or not 0 <= state[key] < 2**31:
            refuse(key, f"found {short(state[key])}", "an int from 0 to 2**31 - 1")
    if state["rank"] != rank:
        refuse(
            "rank",
            f"the state is of rank {state['rank']} of {state['world_size']}, this process is rank {rank} of "
            f"{world_size}",
            "a rank's own state: two ranks with one state would draw the same numbers",
        )
    if state["world_size"] != world_size:
        warnings.warn(
            f"RNG state of rank {rank} was captured in a job of {state['world_size']} processes and is "
            f"restored in one of {world_size}: this rank continues its own streams; ranks that are new have "
            "none to continue.",
            stacklevel=stacklevel,
        )


def _name_unknown_accelerator() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type in DEVICE_KINDS or device.type in _named_accelerators:
        return
    _named_accelerators.add(device.type)
    warnings.warn(
        f"The random stream of the active accelerator {device.type!r} cannot be captured; a resumed run "
        f"draws other numbers there. Captured are cpu, {', '.join(DEVICE_KINDS)}.",
        stacklevel=3,
    )
