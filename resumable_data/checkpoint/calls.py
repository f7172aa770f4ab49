"""The globals that a data file's pickle may name, and what it may call them with: what torch.save writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from resumable_data.checkpoint.limits import Limits
from resumable_data.checkpoint.saveable import READABLE
from resumable_data.checkpoint.standins import Box, Function, Leaf, Storage, StorageType, Tensor
from resumable_data.errors import CheckpointCorruptError, CheckpointLimitError, CheckpointSecurityError

_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(?::[0-9]{1,4})?")
_BIGGEST = 2**63 - 1  # what torch counts elements with


_INT = frozenset({int})

Args = tuple[Any, ...]


def storage(pid: Any, records: dict[str, int], known: dict[str, Storage]) -> Storage:
    """The storage that a persistent id names.

    Args:
        pid: As it stands in the pickle.
        records: Size in bytes of each record of the archive that holds a storage, by its key.
        known: The storages met before, by key; gets this one.

    Raises:
        CheckpointSecurityError: An id that torch.save never writes.
        CheckpointCorruptError: No such record, or one of another size or dtype.
    """
    if (
        type(pid) is not tuple
        or [type(part) for part in pid] != [str, StorageType, str, str, int]
        or pid[0] != "storage"
        or not _DEVICE.fullmatch(pid[3])
    ):
        raise CheckpointSecurityError("it refers to something that is no tensor's storage")
    _, kind, key, _, numel = pid
    if key not in records:
        raise CheckpointCorruptError(
            f"it refers to the storage {key[:40]!r}, which the archive does not hold"
        )
    nbytes = numel * kind.dtype.itemsize
    if nbytes != records[key]:
        raise CheckpointCorruptError(
            f"storage {key} should have {numel} elements of {kind.dtype}, its record has {records[key]} bytes"
        )
    found = known.setdefault(key, Storage(kind.dtype, nbytes))
    if found.dtype is not kind.dtype:
        raise CheckpointCorruptError(f"storage {key} is of {found.dtype} and of {kind.dtype}")
    return found


def resolve(module: str, name: str) -> Function | StorageType | torch.dtype:
    """What stands for a global.

    Raises:
        CheckpointSecurityError: One that torch.save writes for no value that is saved here.
    """
    full = f"{module}.{name}"
    if full in CALLS:
        return Function(full)
    if module == "torch":
        if name in _STORAGES:
            return StorageType(_STORAGES[name])
        dtype = vars(torch).get(name)
        if type(dtype) is torch.dtype:
            return dtype
    if full == "torch.storage.UntypedStorage":
        return StorageType(torch.uint8)
    raise CheckpointSecurityError(f"its pickle asks for the unsafe global {full[:200]}", found=full)


def _tensor(args: Args, dtype: torch.dtype, metadata: Args, limits: Limits) -> Tensor:
    place, offset, size, stride, grad, hooks = args
    if not (
        type(place) is Storage
        and type(grad) is bool
        and _are_ints((offset,))
        and _are_ints(size)
        and _are_ints(stride)
        and _seal_hooks(hooks)
        and _is_metadata(metadata)
    ):
        _odd("a tensor")
    if dtype not in READABLE:
        raise CheckpointSecurityError(f"it holds a tensor of {dtype}; expected a dense one of a plain dtype")
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise CheckpointCorruptError(f"a tensor of shape {size[:8]} has strides {stride[:8]} from {offset}")
    _check_span(offset, size, stride, dtype.itemsize, place.nbytes, limits)
    return Tensor()


def _check_span(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], item: int, nbytes: int, limits: Limits
) -> None:
    """A tensor lies within its storage, and does not pretend to be much larger than what it takes up."""
    if 0 in size:
        return
    span, logical = 1, item
    for length, step in zip(size, stride, strict=True):
        span += (length - 1) * step
        logical *= length
        if logical > _BIGGEST or span > _BIGGEST:
            raise CheckpointLimitError(f"it holds a tensor of shape {size[:8]}, more than any memory")
    if (offset + span) * item > nbytes:
        raise CheckpointCorruptError(
            f"a tensor of shape {size[:8]} and strides {stride[:8]} from {offset} is beyond its {nbytes} bytes"
        )
    if logical > max(span * item, limits.expanded_bytes):
        raise CheckpointLimitError(
            f"a tensor of shape {size[:8]} over {span * item} bytes would have {logical} if it were copied, "
            f"expected at most {limits.expanded_bytes}",
            expected=limits.expanded_bytes,
            found=logical,
        )


def _are_ints(values: Any) -> bool:
    return type(values) is tuple and _INT.issuperset(map(type, values))


def _seal_hooks(hooks: Any) -> bool:
    """Whether these are the hooks of a tensor that has none; they can get none later either."""
    if type(hooks) is not Box or hooks.kind != "OrderedDict" or hooks.items or hooks.hung:
        return False
    hooks.sealed = True
    return True


def _is_metadata(metadata: Args) -> bool:
    if not metadata:
        return True
    (table,) = metadata
    if type(table) is not Box or table.kind != "dict":
        return False
    keys, values = table.items[::2], table.items[1::2]
    return all(type(v) is bool for v in values) and all(type(k) is str and k in ("conj", "neg") for k in keys)


def _tensor_v2(args: Args, limits: Limits) -> Tensor:
    if len(args) not in (6, 7) or type(args[0]) is not Storage:
        _odd("a tensor")
    return _tensor(args[:6], args[0].dtype, args[6:], limits)


def _tensor_v3(args: Args, limits: Limits) -> Tensor:
    if len(args) not in (7, 8) or type(args[6]) is not torch.dtype:
        _odd("a tensor")
    return _tensor(args[:6], args[6], args[7:], limits)


def _parameter(args: Args, _: Limits) -> Tensor:
    if len(args) != 3 or type(args[0]) is not Tensor or type(args[1]) is not bool or not _seal_hooks(args[2]):
        _odd("a parameter")
    return args[0]


def _ordered_dict(args: Args, _: Limits) -> Box:
    if args:
        _odd("an OrderedDict")
    return Box("OrderedDict", [])


def _counter(args: Args, _: Limits) -> Box:
    if len(args) != 1 or type(args[0]) is not Box or args[0].kind != "dict":
        _odd("a Counter")
    return Box("Counter", list(args[0].items))


def _set(args: Args, _: Limits) -> Box:
    if len(args) != 1 or type(args[0]) is not Box or args[0].kind != "list":
        _odd("a set")
    return Box("set", list(args[0].items))


def _encode(args: Args, _: Limits) -> Leaf:
    if [type(arg) for arg in args] != [str, str] or args[1] != "latin1":
        _odd("a bytes object")
    return Leaf("bytes", len(args[0]))


def _bytearray(args: Args, _: Limits) -> Leaf:
    if len(args) == 1 and type(args[0]) is int:
        raise CheckpointLimitError(f"it asks for bytearray({args[0]}), memory without any content")
    if not args:
        return Leaf("bytearray")
    first = args[0]
    if len(args) == 1 and type(first) is Leaf and first.kind == "bytes":
        return Leaf("bytearray", first.size)
    if [type(arg) for arg in args] != [str, str] or args[1] != "latin-1":
        _odd("a bytearray")
    return Leaf("bytearray", len(first))


def _complex(args: Args, _: Limits) -> Leaf:
    if [type(arg) for arg in args] != [float, float]:
        _odd("a complex number")
    return Leaf("complex")


def _size(args: Args, _: Limits) -> Leaf:
    if len(args) != 1 or not _are_ints(args[0]):
        _odd("a torch.Size")
    return Leaf("Size", len(args[0]))


def _device(args: Args, _: Limits) -> Leaf:
    if [type(arg) for arg in args] not in ([str], [str, int]) or not _DEVICE.fullmatch(args[0]):
        _odd("a torch.device")
    return Leaf("device")


def _layout(args: Args, _: Limits) -> Leaf:
    if [type(arg) for arg in args] != [str] or not re.fullmatch(r"torch\.[a-z_]{1,32}", args[0]):
        _odd("a torch.layout")
    return Leaf("layout")


def _odd(what: str) -> NoReturn:
    raise CheckpointSecurityError(f"it makes {what} in a way in which torch.save never does")


# by the names that protocol 2 writes, which are Python 2's for what is built in
CALLS: dict[str, Callable[[Args, Limits], Any]] = {
    "__builtin__.bytearray": _bytearray,
    "__builtin__.complex": _complex,
    "__builtin__.set": _set,
    "_codecs.encode": _encode,
    "collections.Counter": _counter,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
