"""What differs between a file and the object that takes it, in words: typed comparison of plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from resumable_data.errors import CheckpointMismatchError
from resumable_data.rng_values import short

_MOST_SHOWN = 8  # differences that one message lists
_LARGEST = 2**63  # no honest count or rate is beyond it, and arithmetic on longer ints never ends


@dataclass(frozen=True)
class Rules:
    """How closely values are compared.

    Attributes:
        strict: None where a value stands, lists of another length and dicts with other keys are differences.
            Without it only kinds are compared, for objects whose state may grow.
        finite: Numbers must be finite, unless the very same non-finite one stands there now.
        unbounded: Keys below which numbers need not be finite.
        numbers: Keys of dicts from numbers to numbers, whose keys are data themselves.
        loose: Keys below which `LOOSE` rules hold.
    """

    strict: bool = True
    finite: bool = True
    unbounded: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()

    def below(self, key: Any) -> Rules:
        """The rules for the value under a key."""
        if key in self.loose:
            return LOOSE
        return replace(self, finite=False) if key in self.unbounded else self


LOOSE = Rules(strict=False, finite=False)


def label(key: Any) -> str:
    """A key of a file as messages show it: names as they are, anything odd quoted and cut."""
    return key if type(key) is str and len(key) <= 200 and key.isprintable() else short(key)


def raise_differences(name: str, differences: list[str], advice: str) -> None:
    """Raise CheckpointMismatchError listing the first differences, if there are any."""
    if not differences:
        return
    shown = "; ".join(sorted(differences)[:_MOST_SHOWN])
    more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
    raise CheckpointMismatchError(f"{name}: {shown}{more}. Nothing was changed. {advice}", found=differences)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, which stand for each other; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a number, or every element of a tensor, is finite and of a size that arithmetic takes."""
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    return -_LARGEST < value < _LARGEST if isinstance(value, int) else math.isfinite(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape and dtype; a NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    flat, again = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(flat, again)


def kind_of(dtype: torch.dtype) -> str:
    """complex, float or int: within a kind a value keeps its meaning in another dtype."""
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def value_differences(where: str, saved: Any, current: Any, rules: Rules) -> list[str]:
    """What keeps a saved value from standing where `current` stands; [] if nothing does.

    Types must agree, but for int with float. Nothing is known about a place that holds None now.
    """
    if current is None:
        return []
    if saved is None:
        wrong = rules.strict and (is_number(current) or isinstance(current, (torch.Tensor, list, tuple)))
        return [f"{where} is None in the file, a {type(current).__name__} here"] if wrong else []
    if isinstance(saved, torch.Tensor) and isinstance(current, torch.Tensor):
        return _tensor_differences(where, saved, current, rules)
    if is_number(saved) and is_number(current):
        bad = rules.finite and not is_finite(saved) and not _same(saved, current)
        return [f"{where} is {short(saved)} in the file, a finite number is expected"] if bad else []
    if (
        isinstance(saved, dict)
        and isinstance(current, dict)
        and (type(saved) is type(current) or not rules.strict)
    ):
        return _dict_differences(where, saved, current, rules)
    if type(saved) is not type(current):
        return [f"{where} is a {type(saved).__name__} in the file, a {type(current).__name__} here"]
    if isinstance(saved, (list, tuple)):
        return _list_differences(where, saved, current, rules)
    return []


def _same(saved: float, current: float) -> bool:
    return saved == current or (saved != saved and current != current)


def _tensor_differences(where: str, saved: torch.Tensor, current: torch.Tensor, rules: Rules) -> list[str]:
    if (saved.shape, saved.dtype) != (current.shape, current.dtype):
        found, here = (f"{list(t.shape)} {t.dtype}" for t in (saved, current))
        return [f"{where} is {found} in the file, {here} here"] if rules.strict else []
    if rules.finite and not is_finite(saved) and is_finite(current):
        return [f"{where} is not finite in the file, a finite number is expected"]
    return []


def _dict_differences(where: str, saved: Mapping[Any, Any], current: Any, rules: Rules) -> list[str]:
    if where.rpartition(".")[2] in rules.numbers:
        whole = all(is_number(n) and is_finite(n) for pair in saved.items() for n in pair)
        return [] if whole else [f"{where} holds something else than numbers in the file"]
    found = []
    if rules.strict:
        found += [f"{where}.{label(key)} is only in the file" for key in saved.keys() - current.keys()]
        found += [f"{where}.{label(key)} is missing in the file" for key in current.keys() - saved.keys()]
    for key in saved.keys() & current.keys():
        found += value_differences(f"{where}.{label(key)}", saved[key], current[key], rules.below(key))
    return found


def _list_differences(where: str, saved: Any, current: Any, rules: Rules) -> list[str]:
    if rules.strict and len(saved) != len(current):
        return [f"{where} has {len(saved)} items in the file, {len(current)} here"]
    pairs = zip(saved, current, strict=False)  # without strict rules lists may have grown
    return [d for i, (a, b) in enumerate(pairs) for d in value_differences(f"{where}[{i}]", a, b, rules)]
