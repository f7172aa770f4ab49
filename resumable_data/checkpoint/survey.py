"""A walk over stand-ins: what the tree would be for those who walk over it later, before it exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from resumable_data.checkpoint.limits import Limits
from resumable_data.checkpoint.standins import DICTS, PLAIN, Box, Tensor
from resumable_data.errors import CheckpointLimitError, CheckpointSecurityError

_ENDS = PLAIN | {Tensor}


def survey(root: Any, limits: Limits) -> int:
    """Check depth, size and kinds of a tree; no recursion, and each object is looked at once.

    Returns:
        How many values it has, those that are in several places counted at each.

    Raises:
        CheckpointLimitError: A tree that contains itself, is too deep, or has too many values.
        CheckpointSecurityError: A storage or a function where a value should be.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of the containers that are done: values, levels
    open_ones: set[int] = set()
    stack: list[tuple[Any, list[Any] | None]] = [(root, None)]
    while stack:
        value, inside = stack.pop()
        if type(value) in _ENDS or id(value) in sizes:
            continue
        if inside is not None:
            open_ones.discard(id(value))
            sizes[id(value)] = _measure(value, inside, sizes, limits)
            continue
        if id(value) in open_ones:
            raise CheckpointLimitError("its values contain themselves; no walk over them would end")
        inside = [item for item in _items(value) if type(item) not in _ENDS]
        open_ones.add(id(value))
        if len(open_ones) > limits.depth:  # here already: a chain of millions need not be followed to its end
            _too_deep(limits)
        stack.append((value, inside))
        stack.extend((item, None) for item in inside)
    return 1 if type(root) in _ENDS else sizes[id(root)][0]


def _items(value: Any) -> Iterable[Any]:
    if type(value) is tuple:
        return value
    if type(value) is not Box:
        raise CheckpointSecurityError(
            f"it holds a bare {type(value).__name__.lower()}; expected plain values"
        )
    if value.kind in DICTS:
        return (*value.items[1::2], *value.hung[1::2])  # keys hold nothing
    return value.items


def _measure(
    value: Any, inside: list[Any], sizes: dict[int, tuple[int, int]], limits: Limits
) -> tuple[int, int]:
    """Values and levels of a container, from those of the containers in it."""
    own = len(value) if type(value) is tuple else len(value.items) + len(value.hung)
    count = 1 + own - len(inside) + sum(sizes[id(item)][0] for item in inside)
    levels = 1 + max((sizes[id(item)][1] for item in inside), default=0)
    if levels > limits.depth:
        _too_deep(limits)
    if count > limits.values:
        raise CheckpointLimitError(
            f"it has more than {limits.values} values, where those in several places count at each",
            expected=limits.values,
        )
    return count, levels


def _too_deep(limits: Limits) -> NoReturn:
    raise CheckpointLimitError(f"its values nest deeper than {limits.depth} levels", expected=limits.depth)
