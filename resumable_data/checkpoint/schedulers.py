"""Schedulers, gradient scalers and whatever else stands at "scheduler": their state checked by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from resumable_data.checkpoint.mismatch import (
    LOOSE,
    Rules,
    is_finite,
    is_number,
    label,
    raise_differences,
    value_differences,
)
from resumable_data.rng_values import short

_ADVICE = "Build the scheduler as when the checkpoint was saved, or start another directory."
_SCALER_ADVICE = "Give a GradScaler that is enabled, or not, as at the save."

# A plateau's best value begins infinite. The lambdas hold the attributes of objects of the caller's.
_LAMBDAS = frozenset({"lr_lambdas", "_scale_fn_custom"})
_TORCH = Rules(unbounded=frozenset({"best", "mode_worse"}), numbers=frozenset({"milestones"}), loose=_LAMBDAS)
_EVERY_SCHEDULERS = ("base_lrs", "_last_lr", "last_epoch", "_step_count")


def is_scheduler(name: str, value: Any) -> bool:
    """Whether an object is checked and set as a scheduler is."""
    return isinstance(value, (LRScheduler, torch.amp.GradScaler)) or name == "scheduler"


def check_scheduler(name: str, value: Any, saved: Any) -> None:
    """Compare keys, types and lengths; numbers must be finite in torch's own classes.

    Of other classes the keys and types are compared, and strictly what every scheduler has.

    Raises:
        CheckpointMismatchError: Listing what differs.
    """
    current = value.state_dict()
    if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
        raise_differences(name, [f"the file holds a {type(saved).__name__}, no state of it"], _ADVICE)
    if isinstance(value, torch.amp.GradScaler):
        _check_scaler(name, current, saved)
        return
    own = type(value).__module__.startswith("torch.optim.")
    differences = [f"{label(key)} is missing in the file" for key in current.keys() - saved.keys()]
    for key in saved.keys() - current.keys():
        # torch sets these as attributes: a step or an optimizer from a file would take the place of ours
        if own or not isinstance(value, LRScheduler) or hasattr(value, label(key)):
            differences.append(f"{label(key)} is only in the file")
    for key in current.keys() & saved.keys():
        if key in _LAMBDAS:
            differences += _lambda_differences(str(key), saved[key], current[key])
        else:
            rules = _TORCH if own or key in _EVERY_SCHEDULERS else LOOSE
            differences += value_differences(str(key), saved[key], current[key], rules.below(key))
    raise_differences(name, differences, _ADVICE)


def _lambda_differences(where: str, saved: Any, current: Any) -> list[str]:
    """None for a function, the attributes of an object that is called; those may come and go."""
    pairs = [(where, saved, current)]
    if isinstance(current, list):
        if type(saved) is not list or len(saved) != len(current):
            return [f"{where} is not a list of {len(current)} in the file, as it is here"]
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(saved, current, strict=True))]
    found = []
    for place, attributes, here in pairs:
        if (attributes is None) is not (here is None):
            kinds = [f"{'a function' if side is None else 'an object'}" for side in (attributes, here)]
            found.append(f"{place} is {kinds[0]} in the file, {kinds[1]} here")
        elif attributes is not None:
            if not isinstance(attributes, dict) or any(type(key) is not str for key in attributes):
                found.append(f"{place} holds no attributes of an object in the file")
            else:
                found += value_differences(place, attributes, here, LOOSE)
    return found


def _check_scaler(name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """A scaler that is disabled has an empty state, and refuses it itself."""
    if bool(saved) is not bool(current):
        sides = ["enabled" if side else "disabled" for side in (saved, current)]
        raise_differences(name, [f"the file's scaler was {sides[0]}, this one is {sides[1]}"], _SCALER_ADVICE)
    differences = [f"{label(key)} is missing in the file" for key in current.keys() - saved.keys()]
    differences += [f"{label(key)} is only in the file" for key in saved.keys() - current.keys()]
    for key in saved.keys() & current.keys():
        number = saved[key]
        whole = type(current[key]) is not int or type(number) is int
        if not is_number(number) or not is_finite(number) or number < 0 or not whole:
            wanted = "a finite number" if whole else "an int"
            found = short(number) if is_number(number) else f"a {type(number).__name__}"
            differences.append(f"{key} is {found} in the file, {wanted} of at least 0 is expected")
    raise_differences(
        name, differences, "Use an earlier checkpoint: this scaler's state is of no honest run."
    )
