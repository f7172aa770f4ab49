"""What optimizers keep for a parameter: torch's own field by field, others' by what stands there now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from resumable_data.checkpoint.mismatch import is_finite, is_number, kind_of, label
from resumable_data.rng_values import short

# fields in the shape of their parameter
_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg"}
    | {"grad_avg", "acc_delta", "sum", "ax", "prev", "step_size", "variance"}
)
_COUNTS = frozenset({"step", "n_iter", "func_evals"})
_SCALARS = frozenset({"eta", "mu", "mu_product"})
_FLAT = frozenset({"d", "prev_flat_grad"})  # LBFGS: over all parameters at once
_FLAT_LISTS = frozenset({"old_dirs", "old_stps"})

_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq"})
# what a step reads without asking, once there is any state
_NEEDED = {
    "Adadelta": frozenset({"step", "square_avg", "acc_delta"}),
    "Adafactor": frozenset({"step"}),
    "Adagrad": frozenset({"step", "sum"}),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": frozenset({"step", "exp_avg", "exp_inf"}),
    "ASGD": frozenset({"step", "eta", "mu", "ax"}),
    "NAdam": _ADAM | {"mu_product"},
    "RAdam": _ADAM,
    "RMSprop": frozenset({"step", "square_avg"}),
    "Rprop": frozenset({"step", "prev", "step_size"}),
    "SparseAdam": _ADAM,
}
# and what it reads where the group says so
_NEEDED_IF = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"momentum": "momentum_buffer", "centered": "grad_avg"},
}


@dataclass(frozen=True)
class Place:
    """Where a state stands.

    Attributes:
        where: As messages name it.
        parameter: Whose state it is.
        group: The saved values of its group.
        total: Elements of all parameters together.
    """

    where: str
    parameter: torch.Tensor
    group: Mapping[str, Any]
    total: int


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a class of torch's itself, whose state is known."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def own_differences(kind: str, saved: Mapping[Any, Any], place: Place) -> list[str]:
    """What is wrong with one parameter's state of an optimizer of torch's; fields torch has not are free."""
    found = [
        difference
        for field, value in saved.items()
        if (difference := _field_difference(kind, field, value, place))
    ]
    if saved:
        wanted = set(_NEEDED.get(kind, ()))
        wanted |= {field for key, field in _NEEDED_IF.get(kind, {}).items() if place.group.get(key)}
        if kind == "Adafactor":
            wanted |= {"row_var", "col_var"} if place.parameter.dim() > 1 else {"variance"}
        found += [f"state {field} {place.where} is missing in the file" for field in wanted - saved.keys()]
    return found


def _field_difference(kind: str, field: Any, value: Any, place: Place) -> str:
    parameter = place.parameter
    shape: list[int] | None = None
    if field in _COUNTS or field in _SCALARS:
        return _number_difference(field, value, place.where)
    if field in _SHAPED:
        shape = list(parameter.shape)
    elif kind == "Adafactor" and field in ("row_var", "col_var"):
        axis = -1 if field == "row_var" else -2
        shape = list(parameter.shape)
        shape[axis:] = [1, *shape[axis:][1:]]
    elif kind == "LBFGS" and field in _FLAT:
        shape = [place.total]
    elif kind == "LBFGS" and field in _FLAT_LISTS:
        return _list_difference(field, value, place)
    if shape is None or value is None:  # None: SGD before its first step with momentum
        return ""
    return _tensor_difference(field, value, shape, kind, place)


def _number_difference(field: str, value: Any, where: str) -> str:
    number = value
    if isinstance(value, torch.Tensor):
        if value.dim() or kind_of(value.dtype) == "complex":
            return f"state {field} {where} is {list(value.shape)} {value.dtype} in the file, a number is expected"
        number = value.item()
    if not is_number(number) or not is_finite(number) or (number < 0 and field in _COUNTS):
        least = " of at least 0" if field in _COUNTS else ""
        found = short(number) if is_number(number) else f"a {type(number).__name__}"
        return f"state {field} {where} is {found} in the file, a finite number{least} is expected"
    return ""


def _list_difference(field: str, value: Any, place: Place) -> str:
    if type(value) is not list:
        return f"state {field} {place.where} is a {type(value).__name__} in the file, a list is expected"
    for item in value:
        difference = _tensor_difference(field, item, [place.total], "LBFGS", place)
        if difference:
            return difference
    return ""


def _tensor_difference(field: str, value: Any, shape: list[int], kind: str, place: Place) -> str:
    if not isinstance(value, torch.Tensor):
        return f"state {field} {place.where} is a {type(value).__name__} in the file, a tensor is expected"
    if list(value.shape) != shape:
        return f"state {field} {place.where} has shape {list(value.shape)} in the file, {shape} is expected"
    wanted = kind_of(place.parameter.dtype)
    if kind == "LBFGS" and wanted == "complex":  # it works on the real view
        wanted = "float"
    # another precision is honest: it comes back in its own
    if kind_of(value.dtype) != wanted:
        return f"state {field} {place.where} is {value.dtype} in the file, a {wanted} dtype is expected"
    return ""


def foreign_differences(
    where: str, saved: Mapping[Any, Any], present: Any, parameter: torch.Tensor
) -> list[str]:
    """What the state an optimizer has now tells of the saved one; nothing where it has none.

    A tensor stays a tensor of its kind of dtype, and one in the shape of the parameter keeps that shape.
    """
    found = []
    for field in saved.keys() & present.keys() if isinstance(present, Mapping) else ():
        value, here = saved[field], present[field]
        name = f"state {label(field)} {where}"
        if value is None or here is None:
            continue
        if isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor):
            if kind_of(value.dtype) != kind_of(here.dtype):
                found.append(f"{name} is {value.dtype} in the file, {here.dtype} here")
            elif here.shape == parameter.shape != value.shape and parameter.dim():
                found.append(f"{name} has shape {list(value.shape)} in the file, {list(here.shape)} here")
        elif type(value) is not type(here) and not (_counts(value) and _counts(here)):
            found.append(f"{name} is a {type(value).__name__} in the file, a {type(here).__name__} here")
    return found


def _counts(value: Any) -> bool:
    """Whether a value may be a counter, which is a number in one place and a tensor in another."""
    return is_number(value) or isinstance(value, torch.Tensor)
