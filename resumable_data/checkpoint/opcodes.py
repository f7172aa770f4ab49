"""A pickle is read, step by step as the safe unpickler would, and nothing in it is made: stand-ins are."""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from collections import OrderedDict
from typing import Any, NoReturn

from resumable_data.checkpoint.calls import CALLS, resolve, storage
from resumable_data.checkpoint.limits import Limits
from resumable_data.checkpoint.standins import DICTS, PLAIN, Box, Function, Leaf, Storage
from resumable_data.errors import CheckpointCorruptError, CheckpointLimitError, CheckpointSecurityError

_PROTOCOL = b"\x80\x02"
_INT4, _UINT4, _UINT2 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")
_FLOAT = 0.0
_FLOATS = re.compile(rb"(?:G.{8})+", re.DOTALL)  # a list of a million losses is a few thousand of these
_LONGEST_GLOBAL = 300
_MOST_ALIKE = 1000  # keys of one dict with a hash that another one has; honest ones have hardly any
_INTS = frozenset({int})
_MISREAD = (IndexError, KeyError, struct.error, UnicodeDecodeError)


def scan(data: bytes, records: dict[str, int], limits: Limits) -> Any:
    """The stand-in of the value that a pickle makes.

    Args:
        data: The pickle.
        records: Size in bytes of the archive's storages, by key.
        limits: What it may ask for.

    Raises:
        CheckpointSecurityError: Globals, calls or opcodes that torch.save never writes.
        CheckpointLimitError: More steps, containers or copies than `limits` has, or memory without content.
        CheckpointCorruptError: It ends too early, or refers to what is not there.
    """
    if data[:2] != _PROTOCOL:
        raise CheckpointSecurityError(f"its pickle begins with {data[:2]!r}; expected protocol 2")
    try:
        return _Machine(data, records, limits).run()
    except _MISREAD as error:
        raise CheckpointCorruptError(
            "its pickle cannot be read: it is cut, or its parts do not fit"
        ) from error


class _Machine:
    def __init__(self, data: bytes, records: dict[str, int], limits: Limits) -> None:
        self._data, self._pos = data, len(_PROTOCOL)
        self._records, self._limits = records, limits
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each open mark
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}
        self._hashed: list[Box] = []  # dicts and sets
        self._containers = self._copied = 0
        self._table = {getattr(pickle, name)[0]: getattr(self, f"_{name.lower()}") for name in _OPCODES}

    def run(self) -> Any:
        data, table, stop = self._data, self._table, pickle.STOP[0]
        for _ in range(self._limits.opcodes):
            opcode = data[self._pos]
            self._pos += 1
            if opcode == stop:
                return self._result()
            act = table.get(opcode)
            if act is None:
                self._refuse(opcode)
            act()
        raise CheckpointLimitError(f"its pickle has more than {self._limits.opcodes} steps")

    def _result(self) -> Any:
        if self._pos != len(self._data) or self._below or len(self._stack) != 1:
            raise CheckpointCorruptError("its pickle goes on behind its end, or leaves something over")
        for box in self._hashed:
            _check_hashes(box)
        return self._stack[0]

    def _refuse(self, opcode: int) -> NoReturn:
        name = next((known.name for known in pickletools.opcodes if ord(known.code) == opcode), hex(opcode))
        if name == "LONG4":
            raise CheckpointLimitError("its pickle holds an int of more than 255 bytes")
        raise CheckpointSecurityError(f"its pickle uses the opcode {name}, which torch.save never writes")

    def _take(self, count: int) -> bytes:
        part = self._data[self._pos : self._pos + count]
        if len(part) != count:
            raise IndexError(count)
        self._pos += count
        return part

    def _byte(self) -> int:
        value = self._data[self._pos]
        self._pos += 1
        return value

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._pos)
        self._pos += form.size
        return int(value)

    def _since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _make(self, value: Any) -> None:
        self._containers += 1
        if self._containers > self._limits.containers:
            raise CheckpointLimitError(f"it makes more than {self._limits.containers} containers")
        if type(value) is Box and value.kind != "list":
            self._hashed.append(value)
        self._stack.append(value)

    def _changing(self, *kinds: str) -> Box:
        box = self._stack[-1]
        if type(box) is not Box or box.kind not in kinds:
            raise CheckpointSecurityError(f"it changes something that is no {' or '.join(sorted(kinds))}")
        if box.sealed:
            raise CheckpointSecurityError("it changes a part of a tensor that has been made")
        return box

    # plain values

    def _none(self) -> None:
        self._stack.append(None)

    def _newtrue(self) -> None:
        self._stack.append(True)

    def _newfalse(self) -> None:
        self._stack.append(False)

    def _binint(self) -> None:
        self._stack.append(self._number(_INT4))

    def _binint1(self) -> None:
        self._stack.append(self._byte())

    def _binint2(self) -> None:
        self._stack.append(self._number(_UINT2))

    def _long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._byte()), "little", signed=True))

    def _binfloat(self) -> None:
        run = _FLOATS.match(self._data, self._pos - 1)
        if run is None:
            raise IndexError(self._pos)
        self._pos = run.end()
        self._stack.extend([_FLOAT] * ((run.end() - run.start()) // 9))

    def _binunicode(self) -> None:
        self._stack.append(str(self._take(self._number(_UINT4)), "utf-8", "surrogatepass"))

    # containers

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _empty_list(self) -> None:
        self._make(Box("list", []))

    def _empty_dict(self) -> None:
        self._make(Box("dict", []))

    def _empty_tuple(self) -> None:
        self._make(())

    def _tuple(self) -> None:
        items = self._since_mark()
        self._make(tuple(items))

    def _tuple1(self) -> None:
        self._tuple_of(1)

    def _tuple2(self) -> None:
        self._tuple_of(2)

    def _tuple3(self) -> None:
        self._tuple_of(3)

    def _tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise IndexError(count)
        del self._stack[-count:]
        self._make(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._changing("list").items.append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        self._changing("list").items.extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise IndexError(len(items))
        for key in items[::2]:
            if type(key) not in PLAIN and (type(key) is not tuple or not PLAIN.issuperset(map(type, key))):
                raise CheckpointSecurityError("it has a dict key that is no plain value, nor a tuple of some")
        self._changing(*DICTS).items.extend(items)

    # the memo

    def _binput(self) -> None:
        self._memo[self._byte()] = self._stack[-1]

    def _long_binput(self) -> None:
        self._memo[self._number(_UINT4)] = self._stack[-1]

    def _binget(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def _long_binget(self) -> None:
        self._stack.append(self._memo[self._number(_UINT4)])

    # globals, and what is done with them

    def _global(self) -> None:
        lines = self._data[self._pos : self._pos + _LONGEST_GLOBAL].split(b"\n", 2)
        if len(lines) < 3:
            raise CheckpointSecurityError("its pickle asks for a global whose name does not end")
        self._pos += len(lines[0]) + len(lines[1]) + 2
        self._stack.append(resolve(lines[0].decode(), lines[1].decode()))

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Function or type(args) is not tuple:
            raise CheckpointSecurityError("it calls something that is no function")
        made = CALLS[function.name](args, self._limits)
        self._copied += made.size if type(made) is Leaf else len(made.items) if type(made) is Box else 0
        if self._copied > 2 * len(self._data):  # twice: a bytearray is made of a bytes object
            raise CheckpointLimitError("it copies one value again and again, to more than its own size")
        self._make(made)

    def _build(self) -> None:
        state = self._stack.pop()
        box = self._changing("OrderedDict")
        if (
            type(state) is not Box
            or state.kind != "dict"
            or not {str}.issuperset(map(type, state.items[::2]))
            or any(hasattr(OrderedDict, name) for name in state.items[::2])  # would hide its methods
        ):
            raise CheckpointSecurityError("it gives an OrderedDict a state that is no dict of names")
        self._copied += len(state.items)
        box.hung += tuple(state.items)

    def _binpersid(self) -> None:
        self._stack.append(storage(self._stack.pop(), self._records, self._storages))


def _check_hashes(box: Box) -> None:
    """Refuse keys chosen to have one hash, among which a dict searches one by one: days for a small file."""
    keys = box.items if box.kind == "set" else box.items[::2]
    if len(keys) <= _MOST_ALIKE:
        return
    # floats have stand-ins, and strings a hash that nobody can know beforehand
    hashes = [
        hash(key)
        for key in keys
        if type(key) is int or (type(key) is tuple and _INTS.issuperset(map(type, key)))
    ]
    alike = len(hashes) - len(set(hashes))
    if alike > _MOST_ALIKE:
        raise CheckpointLimitError(f"{alike} keys of one dict or set have a hash that others have, too")


_OPCODES = (
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"),
    *("MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
)
