"""Optimizers and what has a dict for its state: schedulers, gradient scalers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from resumable_data.checkpoint.models import bare_names, raise_differences
from resumable_data.checkpoint.saveable import prepare
from resumable_data.errors import CheckpointMismatchError

_ADVICE = "Build the optimizer and scheduler as when the checkpoint was saved."

# State that torch's own optimizers keep in the shape of its parameter; others' is not checked for shape.
_PARAMETER_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg"}
    | {"grad_avg", "acc_delta", "sum", "ax", "prev", "step_size"}
)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Compare groups, parameter counts, types of shared group keys and shapes of per-parameter state.

    Raises:
        CheckpointMismatchError: Listing what differs.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise CheckpointMismatchError(
            f"{name}: the file holds a {type(saved).__name__}, no optimizer's state"
        )
    groups, current = saved["param_groups"], optimizer.param_groups
    if type(groups) is not list or len(groups) != len(current):
        count = len(groups) if type(groups) is list else type(groups).__name__
        raise_differences(name, [f"{count} parameter groups in the file, {len(current)} here"], _ADVICE)
    differences: list[str] = []
    parameters: dict[Any, torch.Tensor] = {}
    for i, (group, here) in enumerate(zip(groups, current, strict=True)):
        differences += _group_differences(f"group {i}", group, here)
        if not differences:
            parameters.update(zip(group["params"], here["params"], strict=True))
    raise_differences(name, differences, _ADVICE)
    if len(parameters) != sum(len(group["params"]) for group in groups):
        raise_differences(name, ["a parameter stands in two groups of the file"], _ADVICE)
    raise_differences(name, _state_differences(saved["state"], parameters), _ADVICE)


def _group_differences(label: str, saved: Any, current: Mapping[str, Any]) -> list[str]:
    ids = saved.get("params") if isinstance(saved, Mapping) else None
    if type(ids) is not list or any(type(number) is not int for number in ids):
        return [f"{label} of the file has no list of parameters"]
    if len(ids) != len(current["params"]):
        return [f"{label} has {len(ids)} parameters in the file, {len(current['params'])} here"]
    shared = (saved.keys() & current.keys()) - {"params"}
    nan = [key for key in shared if type(saved[key]) is float and math.isnan(saved[key])]
    if nan:
        return [f"{label}.{nan[0]} is nan in the file"]
    return [d for key in shared for d in _value_differences(f"{label}.{key}", saved[key], current[key])]


def _value_differences(label: str, saved: Any, current: Any) -> list[str]:
    """Types must agree; None goes with any, int with float."""
    if saved is None or current is None:
        return []
    if isinstance(saved, torch.Tensor) and isinstance(current, torch.Tensor):
        return [] if saved.shape == current.shape else [f"{label}: shape {list(saved.shape)} in the file"]
    numbers = (int, float)
    if type(saved) in numbers and type(current) in numbers:
        return []
    if type(saved) is not type(current):
        return [f"{label} is a {type(saved).__name__} in the file, a {type(current).__name__} here"]
    if type(saved) in (list, tuple):
        if len(saved) != len(current):
            return [f"{label} has {len(saved)} items in the file, {len(current)} here"]
        pairs = zip(saved, current, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in _value_differences(f"{label}[{i}]", a, b)]
    return []


def _state_differences(state: Any, parameters: Mapping[Any, torch.Tensor]) -> list[str]:
    if not isinstance(state, Mapping):
        return [f"the per-parameter state is a {type(state).__name__}"]
    differences = [
        f"state of parameter {key}, which no group has" for key in state.keys() - parameters.keys()
    ]
    for key in state.keys() & parameters.keys():
        if not isinstance(state[key], Mapping):
            differences.append(f"state of parameter {key} is a {type(state[key]).__name__}")
            continue
        for field in state[key].keys() & _PARAMETER_SHAPED:
            value, parameter = state[key][field], parameters[key]
            if value is None:  # SGD before its first step with momentum
                continue
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                differences.append(f"state {field} of parameter {key}: {found}, here {list(parameter.shape)}")
            elif value.is_complex() != parameter.is_complex() or value.dtype in _INTEGERS:
                differences.append(f"state {field} of parameter {key} is {value.dtype}")
    return differences


def place_names(optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> list[list[str]]:
    """For each group the names of its parameters, in order; "" for one that is in none of the modules."""
    names: dict[int, str] = {}
    for label, module in sorted(modules.items()):
        bare = bare_names(module)
        for key, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{label}.{bare(key)}")
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def check_places(
    name: str, optimizer: torch.optim.Optimizer, saved: Any, modules: Mapping[str, torch.nn.Module]
) -> None:
    """Each saved state must be of the parameter that stands in its place now: torch goes by place alone.

    Places whose names either side does not know are not compared.
    """
    current = place_names(optimizer, modules)
    if type(saved) is not list or list(map(len, saved)) != list(map(len, current)):
        raise CheckpointMismatchError(f"{name}: the file does not name the parameters of its groups")
    differences = [
        f"place {j} of group {i} is {old}'s in the file, {new}'s here"
        for i, (was, now) in enumerate(zip(saved, current, strict=True))
        for j, (old, new) in enumerate(zip(was, now, strict=True))
        if old and new and old != new
    ]
    raise_differences(name, differences, "Give the optimizer its parameters in the order of the save.")


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Set a checked state, in copies of its own.

    torch casts state to its parameter's dtype; what was kept in another one is put back to it exactly.
    """
    own = prepare(dict(saved), copy=True)
    optimizer.load_state_dict(own)
    pairs = (
        (number, parameter)
        for group, here in zip(own["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(group["params"], here["params"], strict=True)
    )
    for number, parameter in pairs:
        for field, value in own["state"].get(number, {}).items():
            optimizer.state[parameter][field] = _uncast(value, optimizer.state[parameter][field])


def _uncast(value: Any, there: Any) -> Any:
    """What torch made of a value, with the value's own dtype where torch has cast it, also in containers."""
    if isinstance(value, torch.Tensor):
        return there if there.dtype == value.dtype else value.to(there.device)
    if isinstance(value, dict):
        return {key: _uncast(item, there[key]) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_uncast(a, b) for a, b in zip(value, there, strict=True))
    return there


def optimizer_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that puts back state and groups as they are now.

    Loading replaces these objects and writes into none of their tensors, so references are enough.
    """
    state = {parameter: dict(fields) for parameter, fields in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)

    return undo


def check_dict_state(name: str, current: Any, saved: Any) -> None:
    """Compare a scheduler's or scaler's state by keys and types; raises CheckpointMismatchError."""
    if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
        raise CheckpointMismatchError(f"{name}: the file holds a {type(saved).__name__}, no state of it")
    differences = [f"{key} is missing in the file" for key in current.keys() - saved.keys()]
    differences += [f"{key} is only in the file" for key in saved.keys() - current.keys()]
    for key in current.keys() & saved.keys():
        differences += _value_differences(str(key), saved[key], current[key])
    raise_differences(name, differences, _ADVICE)
