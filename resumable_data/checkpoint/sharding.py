"""A payload in several files: the model's tensors dealt over shards, everything else in one more file.

Keys whose tensors share storage stay together, so that ties and views are as they were when read back; so
do those that share it with something outside the model, which stay with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from resumable_data.checkpoint.layout import MAX_SHARDS, META, shard_name
from resumable_data.errors import CheckpointCorruptError

Shards = int | Callable[[str], int]

_Place = tuple[torch.device, int]


def split(payload: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """The values of the data files by their names, meta.pt first.

    Args:
        payload: As prepared for saving; not changed.
        shards: A number of shards, over which groups of tensors are dealt in turn (fewer are written where
            there are fewer groups), or a function from the model's keys to numbers from 0 to 999, which are
            numbered anew without gaps.

    Raises:
        ValueError: The function splits keys that share storage, or gives a number out of range.
        TypeError: The function gives something that is no int.
    """
    model = payload["model"]
    groups = _alias_groups(payload) if isinstance(model, Mapping) else []
    numbers = _numbers(groups, shards)
    contents: list[dict[str, Any]] = [{} for _ in range(max(numbers.values(), default=-1) + 1)]
    for key, number in numbers.items():
        contents[number][key] = model[key]
    meta = dict(payload) | {"shards": numbers}
    if isinstance(model, Mapping):
        meta["model"] = {key: None if key in numbers else value for key, value in model.items()}
    return {META: meta} | {shard_name(i): content for i, content in enumerate(contents)}


def join(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The payload that `split` took apart.

    Args:
        values: What the data files hold, by their names.
        name: The checkpoint's, for messages.

    Raises:
        CheckpointCorruptError: Files that do not belong together, or that `split` did not make.
    """
    meta = values[META]
    if not isinstance(meta, dict) or type(meta.get("shards")) is not dict:
        raise _odd(name, f"{META} has no table of shards")
    payload = dict(meta)
    numbers: dict[str, int] = payload.pop("shards")
    if not numbers:
        if len(values) > 1:
            raise _odd(name, f"{META} has no key for any shard")
        return payload
    model = payload.get("model")
    if not isinstance(model, dict) or not numbers.keys() <= model.keys():
        raise _odd(name, f"{META} deals keys that its model does not have")
    found: dict[str, int] = {}
    joined = dict(model)
    for number in range(len(values) - 1):
        content = values[shard_name(number)]
        if type(content) is not dict or any(type(item) not in _TENSORS for item in content.values()):
            raise _odd(name, f"{shard_name(number)} is not a dict of tensors")
        if not found.keys().isdisjoint(content):
            raise _odd(name, f"{shard_name(number)} holds a key that an earlier shard holds too")
        found.update(dict.fromkeys(content, number))
        joined.update(content)
    if found != numbers or any(type(number) is not int for number in numbers.values()):
        raise _odd(name, f"its shards do not hold the keys that {META} deals to them")
    if any(model[key] is not None for key in numbers):
        raise _odd(name, f"{META} holds a value that a shard holds too")
    payload["model"] = joined
    return payload


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _odd(name: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{name}: {what}; the files were not written together")


def _alias_groups(payload: Mapping[str, Any]) -> list[list[str]]:
    """The model's tensor keys, grouped by storage in the order of their first key."""
    outside = {_place(t) for key, value in payload.items() if key != "model" for t in _tensors(value)}
    groups: dict[Any, list[str]] = {}
    for key, value in payload["model"].items():
        if type(value) in _TENSORS and _place(value) not in outside:
            groups.setdefault(_place(value) or key, []).append(key)
    # what hangs on other values of the model itself (a module's extra state) stays with those
    nested = {
        _place(t)
        for value in payload["model"].values()
        if type(value) not in _TENSORS
        for t in _tensors(value)
    }
    return [keys for place, keys in groups.items() if place not in nested]


def _place(tensor: torch.Tensor) -> _Place | None:
    """What tensors share when they share storage; None for one without elements, which shares none."""
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr()) if storage.nbytes() else None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a prepared tree, which holds no cycle."""
    stack = [tree]
    while stack:
        value = stack.pop()
        if type(value) in _TENSORS:
            if _place(value) is not None:
                yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
            stack.extend(getattr(value, "__dict__", {}).values())
        elif isinstance(value, (list, tuple, set)):
            stack.extend(item for item in value if type(item) not in (int, float))


def _numbers(groups: list[list[str]], shards: Shards) -> dict[str, int]:
    if isinstance(shards, int):
        return {key: i % shards for i, keys in enumerate(groups) for key in keys}
    asked: dict[str, int] = {}
    for keys in groups:
        own = {key: _number(shards(key), key) for key in keys}
        if len(set(own.values())) > 1:
            raise ValueError(
                f"shards puts {own} into different files, but these keys share storage; expected one number "
                "for all of them"
            )
        asked.update(own)
    dense = {number: i for i, number in enumerate(sorted(set(asked.values())))}
    return {key: dense[number] for key, number in asked.items()}


def _number(value: Any, key: str) -> int:
    if type(value) is not int:
        raise TypeError(f"shards({key!r}) gives {value!r}; expected an int")
    if not 0 <= value < MAX_SHARDS:
        raise ValueError(f"shards({key!r}) gives {value}; expected 0 to {MAX_SHARDS - 1}")
    return value
