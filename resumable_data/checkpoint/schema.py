"""The payload's keys (``ckpt.v1``), and the checks of what no object of the caller's checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from resumable_data.checkpoint.mismatch import is_finite, is_number, label
from resumable_data.errors import CheckpointMismatchError
from resumable_data.rng_values import short

SCHEMA = "ckpt.v1"
OWN_PLACES = ("model", "optimizer", "scheduler", "data")  # top-level keys; other objects go to "extra"

_DICTS = ("state", "extra", "modes", "grads", "wiring", "rng")
_OPTIONAL = {"grads", "wiring", "config"}  # a payload of another maker may lack them
_KEYS = {"schema", *OWN_PLACES, *_DICTS, "config", "wall_saved_at"}


def check_shape(payload: Any) -> None:
    """Check schema, keys, their types and the counts of the state; CheckpointMismatchError names the first."""
    found = payload.get("schema") if isinstance(payload, Mapping) else type(payload).__name__
    if type(found) is not str or found != SCHEMA:
        raise CheckpointMismatchError(
            f"The payload's schema is {short(found)}, this version reads {SCHEMA!r}; load it with the "
            "version that wrote it",
            expected=SCHEMA,
            found=found,
        )
    differing = (payload.keys() - _KEYS) | (_KEYS - _OPTIONAL - payload.keys())
    if differing:
        raise CheckpointMismatchError(
            f"The payload's keys differ from {SCHEMA}'s in {sorted(map(label, differing))[:8]}; load a "
            "checkpoint that build_payload made",
            found=differing,
        )
    for key in _DICTS:
        value = payload.get(key, {})
        if not isinstance(value, Mapping):
            refuse(key, f"a {type(value).__name__}", "a dict")
        if key != "state" and any(type(name) is not str for name in value):  # the state is the caller's own
            refuse(key, "a dict with odd keys", "a dict with names for keys")
    shadowed = payload["extra"].keys() & set(OWN_PLACES)
    if shadowed:
        refuse("extra", f"a dict with the names {sorted(shadowed)}", "names without a place of their own")
    step = payload["state"].get("step")
    if type(step) is not int or step < 0:
        refuse("state.step", short(step), "an int of at least 0")
    saved_at = payload["wall_saved_at"]
    if not is_number(saved_at) or not is_finite(saved_at):
        refuse("wall_saved_at", short(saved_at), "seconds since 1970")


def refuse(key: str, found: str, expected: str) -> NoReturn:
    """Raise CheckpointMismatchError for a value of the payload."""
    raise CheckpointMismatchError(
        f"The payload's {key!r} is {found}, expected {expected}. Nothing was changed. Load a checkpoint that "
        "build_payload made.",
        expected=expected,
        found=found,
    )
