"""What stands on the stack of a pickle that is only read, for the values that it would make.

None, bools, ints, strings, dtypes and tuples stand for themselves; every float is one float.
"""

from __future__ import annotations

from typing import Any

import torch


class Leaf:
    """A plain value of a kind that holds no other: bytes, a device, a size; `size` is what it copies."""

    __slots__ = ("kind", "size")

    def __init__(self, kind: str, size: int = 0) -> None:
        self.kind = kind
        self.size = size


class Box:
    """A container that can still change.

    Attributes:
        kind: "list", "dict", "OrderedDict", "Counter" or "set".
        items: What it holds; keys and values in turn for the kinds of dict.
        hung: Attributes that state_dict() hangs on an OrderedDict, names and values in turn.
        sealed: It is part of a tensor; to change it now would change the tensor.
    """

    __slots__ = ("hung", "items", "kind", "sealed")

    def __init__(self, kind: str, items: list[Any]) -> None:
        self.kind = kind
        self.items = items
        self.hung: tuple[Any, ...] = ()
        self.sealed = False


class Function:
    """A global that the pickle may call, by the name that it is written under."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class StorageType:
    """A global that says of which dtype a storage is."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Storage:
    """The bytes of one record of the archive."""

    __slots__ = ("dtype", "nbytes")

    def __init__(self, dtype: torch.dtype, nbytes: int) -> None:
        self.dtype = dtype
        self.nbytes = nbytes


class Tensor:
    """A tensor whose place in its storage has been checked."""

    __slots__ = ()


PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str, torch.dtype, Leaf})
DICTS = frozenset({"dict", "OrderedDict", "Counter"})
