"""Optimizers: groups and per-parameter state checked by type, and set exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from resumable_data.checkpoint import slots
from resumable_data.checkpoint.mismatch import (
    Rules,
    is_finite,
    is_number,
    label,
    raise_differences,
    value_differences,
)
from resumable_data.checkpoint.models import bare_names
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.undo import is_torchs
from resumable_data.errors import CheckpointMismatchError
from resumable_data.rng_values import short

_ADVICE = "Build the optimizer as when the checkpoint was saved, or start another directory."
_STRICT, _ANY_NUMBER = Rules(), Rules(finite=False)
_SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})  # by schedulers


def check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Compare groups, parameter ids, the types of group values, and the state of every parameter.

    The state of torch's own optimizers is known field by field; of others, what their present state tells.
    Values are not compared, but numbers must be finite; tensors may hold NaN, and come back bit by bit.

    Raises:
        CheckpointMismatchError: Listing what differs.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise CheckpointMismatchError(
            f"{name}: the file holds a {type(saved).__name__}, no optimizer's state. Nothing was changed. "
            f"{_ADVICE}"
        )
    groups, current = saved["param_groups"], optimizer.param_groups
    if type(groups) is not list or len(groups) != len(current):
        count = len(groups) if type(groups) is list else f"a {type(groups).__name__} for the"
        raise_differences(name, [f"{count} parameter groups in the file, {len(current)} here"], _ADVICE)
    differences: list[str] = []
    for i, (group, here) in enumerate(zip(groups, current, strict=True)):
        differences += _group_differences(f"group {i}", group, here, optimizer)
    raise_differences(name, differences, _ADVICE)
    ids = [number for group in groups for number in group["params"]]
    raise_differences(name, _id_differences(ids), _ADVICE)
    parameters = dict(zip(ids, (p for here in current for p in here["params"]), strict=True))
    raise_differences(name, _state_differences(saved["state"], parameters, optimizer, groups), _ADVICE)


def _group_differences(
    where: str, saved: Any, current: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> list[str]:
    ids = saved.get("params") if isinstance(saved, Mapping) else None
    if type(ids) is not list or any(type(number) is not int for number in ids):
        return [f"{where} of the file has no list of parameters"]
    if len(ids) != len(current["params"]):
        return [f"{where} has {len(ids)} parameters in the file, {len(current['params'])} here"]
    found = []
    for key in (saved.keys() & current.keys()) - {"params"}:
        known = key in optimizer.defaults or key in _SCHEDULED  # what else there is, is the caller's own
        rules = _STRICT if known else _ANY_NUMBER
        found += value_differences(f"{where}.{label(key)}", saved[key], current[key], rules)
    for key in (saved.keys() - current.keys()) & _SCHEDULED:
        number = saved[key]
        if (not isinstance(number, torch.Tensor) and not is_number(number)) or not is_finite(number):
            found.append(f"{where}.{key} is {short(number)} in the file, a finite number is expected")
    return found


def _id_differences(ids: list[int]) -> list[str]:
    if len(set(ids)) != len(ids):
        return ["a parameter stands in two groups of the file"]
    if ids and (min(ids) < 0 or max(ids) >= len(ids)):
        odd = next(number for number in ids if not 0 <= number < len(ids))
        return [f"parameter id {short(odd)} in the file, ids from 0 to {len(ids) - 1} are expected"]
    return []


def _state_differences(
    state: Any,
    parameters: Mapping[int, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    groups: list[Any],
) -> list[str]:
    if not isinstance(state, Mapping):
        return [f"the per-parameter state is a {type(state).__name__}"]
    # some optimizers keep state of their own beside that of parameters, under names
    free = () if slots.is_torchs_own(optimizer) else [key for key in state if type(key) is str]
    nobodys = state.keys() - parameters.keys() - set(free)
    differences = [f"state of parameter {label(key)}, which no group has" for key in nobodys]
    total = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters.values())
    for group in groups:
        for key in group["params"]:
            if key not in state:
                continue
            where = f"of parameter {key}"
            if not isinstance(state[key], Mapping):
                differences.append(f"state {where} is a {type(state[key]).__name__}")
            elif slots.is_torchs_own(optimizer):
                place = slots.Place(where, parameters[key], group, total)
                differences += slots.own_differences(type(optimizer).__name__, state[key], place)
            else:
                present = optimizer.state.get(parameters[key], {})
                differences += slots.foreign_differences(where, state[key], present, parameters[key])
    return differences


def place_names(optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> list[list[str]]:
    """For each group the names of its parameters, in order; "" for one that is in none of the modules."""
    names: dict[int, str] = {}
    for owner, module in sorted(modules.items()):
        bare = bare_names(module)
        for key, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{owner}.{bare(key)}")
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def check_places(
    name: str, optimizer: torch.optim.Optimizer, saved: Any, modules: Mapping[str, torch.nn.Module]
) -> None:
    """Each saved state must be of the parameter that stands in its place now: torch goes by place alone.

    Places whose names either side does not know are not compared.
    """
    current = place_names(optimizer, modules)
    if not _is_names(saved) or list(map(len, saved)) != list(map(len, current)):
        raise CheckpointMismatchError(
            f"{name}: the file does not name the parameters of its groups. {_ADVICE}"
        )
    differences = [
        f"place {j} of group {i} is {label(old)}'s in the file, {new}'s here"
        for i, (was, now) in enumerate(zip(saved, current, strict=True))
        for j, (old, new) in enumerate(zip(was, now, strict=True))
        if old and new and old != new
    ]
    raise_differences(name, differences, "Give the optimizer its parameters in the order of the save.")


def _is_names(saved: Any) -> bool:
    return type(saved) is list and all(
        type(names) is list and all(type(name) is str for name in names) for names in saved
    )


def load_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Set a checked state, in copies of its own.

    torch casts state to its parameter's dtype; what was kept in another one is put back to it exactly.

    Raises:
        CheckpointMismatchError: A group of the file lacks a value that the optimizer needs.
    """
    own = prepare(dict(saved), copy=True)
    needed = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    optimizer.load_state_dict(own)
    for i, group in enumerate(optimizer.param_groups):
        missing = needed[i] - group.keys()  # torch's own fill in what is new to them
        if missing:
            raise CheckpointMismatchError(
                f"{name}: group {i} of the file lacks {sorted(map(label, missing))}, which this optimizer "
                f"needs. Nothing was changed. {_ADVICE}",
                found=sorted(map(label, missing)),
            )
    if is_torchs(optimizer.load_state_dict):
        for key, parameter in _pairs(own, optimizer):
            here = optimizer.state.get(parameter, {})
            for field, value in own["state"].get(key, {}).items():
                if field in here:
                    here[field] = _uncast(value, here[field])


def _pairs(own: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    for group, here in zip(own["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(group["params"], here["params"], strict=True)


def _uncast(value: Any, there: Any) -> Any:
    """What torch made of a value, with the value's own dtype where torch has cast it, also in containers.

    Text comes back as it was: torch rebuilds it as the text of an iterator.
    """
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        return there if there.dtype == value.dtype else value.to(there.device)
    if isinstance(value, dict) and isinstance(there, dict):
        return {key: _uncast(item, there[key]) for key, item in value.items() if key in there}
    if type(value) in (list, tuple) and type(there) is type(value):
        return type(value)(_uncast(a, b) for a, b in zip(value, there, strict=True))
    return value if isinstance(value, (str, bytes, bytearray)) else there
