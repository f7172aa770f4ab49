"""What may be saved: the exact types that a safe load reads back, and tensors cut to size."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from resumable_data.checkpoint.limits import CONTAINERS, DEEPEST, EXPANDED_BYTES, INT_BITS

_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray}
    | {torch.Size, torch.dtype, torch.device, torch.layout}
)
_IMMUTABLE = _LEAVES - {bytearray}
_DICTS = (dict, collections.OrderedDict, collections.Counter)
_LISTS = (list, tuple, set)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# torch.save writes these and torch.load has no storage for them
_NARROW = {f"torch.{sign}{bits}" for bits in range(1, 8) for sign in ("int", "uint")}
_QUANTIZED = {f"torch.{name}" for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")}
READABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and str(dtype) not in _NARROW | _QUANTIZED
)

_CONTAINERS_OF_TENSOR = 4  # at least: its size, its strides and what it is made with are tuples in the file

_Met = tuple[torch.Tensor, str]  # a tensor and its key path


def prepare(tree: Any, *, copy: bool = False) -> Any:
    """The tree as it is to be saved.

    Tensors that are small views of large buffers get storage of their own, of the size of what they span,
    with their strides kept; views that overlap (ties included) go on sharing. Everything else is the very
    same object, unless `copy` asks for new storage and containers throughout.

    Raises:
        TypeError: A value that could not be read back, by its key path. Types must match exactly: numpy's
            float64 is a float to isinstance, and is refused.
    """
    tensors = _collect(tree)
    owned = _own_storage(tensors, copy)
    return rebuild(tree, owned) if owned or copy else tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a prepared tree, each object once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in _TENSORS:
            found[id(value)] = value
        elif (kind in _DICTS or kind in _LISTS) and id(value) not in seen:
            seen.add(id(value))
            items = value if kind in _LISTS else value.values()
            if not set(map(type, items)) <= _LEAVES:
                stack.extend(items)
            stack.extend(getattr(value, "__dict__", {}).values())
    return list(found.values())


def rebuild(tree: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """A prepared tree with containers of its own, and bytearrays; what is in two places stays one object.

    Args:
        tree: As `prepare` gives it.
        replacements: Tensors to put in place of others, by the id of those; other tensors are shared.
    """
    return _rebuild(tree, replacements, {})


def _collect(tree: Any) -> list[_Met]:
    """Check every value; the tensors met, each object once, with its key path."""
    tensors: dict[int, _Met] = {}
    seen: dict[int, int] = {}  # the deepest place of each container
    stack: list[tuple[Any, str, tuple[int, ...]]] = [(tree, "", ())]
    while stack:
        value, path, above = stack.pop()
        kind = type(value)
        if _is_plain(value):
            continue
        if kind in _LEAVES:
            raise TypeError(
                f"state{path} is {_odd(value)}, which a safe load (weights_only=True) cannot read"
            )
        if kind in _TENSORS:
            if id(value) not in tensors:
                _check_tensor(value, path)
                tensors[id(value)] = value, path
            continue
        if kind not in _DICTS and kind not in _LISTS:
            raise TypeError(_message(value, path))
        if id(value) in above or len(above) >= DEEPEST:
            raise TypeError(f"state{path} contains itself, or nests deeper than {DEEPEST} levels")
        if seen.get(id(value), -1) >= len(above):
            continue
        seen[id(value)] = len(above)
        for step, item in _children(value, path):
            stack.append((item, path + step, (*above, id(value))))
    if len(seen) + _CONTAINERS_OF_TENSOR * len(tensors) > CONTAINERS:
        raise TypeError(
            f"state has more than {CONTAINERS} lists, tuples, dicts and parts of tensors, which a load would "
            "refuse; put numbers into tensors, and small tensors into larger ones"
        )
    return list(tensors.values())


def _is_plain(value: Any) -> bool:
    """Whether a value is a leaf that can be read back."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= INT_BITS)
    return kind in _LEAVES and not (kind is bytes and not value)


def _odd(value: Any) -> str:
    return f"an int of {value.bit_length()} bits" if type(value) is int else "an empty bytes object"


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if type(value) in _LISTS:
        if set(map(type, value)) <= _LEAVES - {int, bytes}:  # a list of a million losses is done in one line
            return []
        return [(f"[{i}]", item) for i, item in enumerate(value) if not _is_plain(item)]
    for key in value:
        if not _is_plain(key) and not (type(key) is tuple and all(map(_is_plain, key))):
            what = _message(key, path) if type(key) not in _LEAVES else _odd(key)
            raise TypeError(f"state{path} has a key that cannot be saved: {what}")
    # state_dict() hangs its metadata on the OrderedDict; pickle saves that too
    named = getattr(value, "__dict__", {})
    if shadowing := sorted(name for name in named if hasattr(type(value), name)):
        raise TypeError(f"state{path} has attributes that hide its methods: {shadowing}; delete them")
    hung = [(f".{name}", item) for name, item in named.items()]
    return [(f"[{key!r}]", item) for key, item in value.items() if not _is_plain(item)] + hung


def _message(value: Any, path: str) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"state{path} is a {kind}, which a safe load (weights_only=True) would refuse. Save tensors, plain "
        "numbers, strings and bytes in lists, tuples, dicts and sets: float(x) or x.tolist() for numpy's, "
        "state_dict() for objects"
    )


def _check_tensor(value: torch.Tensor, path: str) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise TypeError(
            f"state{path} is a {value.layout} {value.dtype} tensor; only dense strided ones are saved. "
            "A sparse gradient is gone after optimizer.zero_grad()"
        )
    if value.dtype not in READABLE:
        raise TypeError(f"state{path} is a {value.dtype} tensor, which torch.load cannot read; save a view")
    if vars(value):  # pickled with the tensor, unchecked
        raise TypeError(f"state{path} is a tensor with attributes {sorted(vars(value))}; save its detach()")
    if value.device.type == "meta":
        raise TypeError(f"state{path} is a tensor on the meta device, which holds no values to save")
    logical = value.numel() * value.element_size()
    if logical > EXPANDED_BYTES:
        start, end = _span(value)
        if logical > end - start:
            raise TypeError(
                f"state{path} is an expanded tensor of {logical} bytes over {end - start}, which a load would "
                "refuse; save it as it was before"
            )


def _own_storage(tensors: list[_Met], copy: bool) -> dict[int, torch.Tensor]:
    """Replacements, by id, of the tensors whose storage is larger than what is saved of it."""
    groups: dict[tuple[torch.device, int, int], list[_Met]] = {}
    owned: dict[int, torch.Tensor] = {}
    # torch saves the memory at one address under one dtype
    seen_as = {_typed_address(tensor) for tensor, _ in tensors}
    several = {place for place, count in Counter(place for place, _ in seen_as).items() if count > 1}
    for tensor, path in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0:
            if copy or storage.nbytes():
                shape, stride = tensor.shape, tensor.stride()
                empty = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
                owned[id(tensor)] = like(tensor, empty)
        elif tensor.is_conj() or tensor.is_neg():  # lazy views: torch.save takes their storage whole
            if copy or _typed_address(tensor)[0] in several:
                owned[id(tensor)] = like(tensor, tensor.detach().resolve_conj().resolve_neg().clone())
        else:  # the size too: numpy's memory may be under two storages that begin at one address
            place = (tensor.device, storage.data_ptr(), storage.nbytes())
            groups.setdefault(place, []).append((tensor, path))
    for group in groups.values():
        clusters = _clusters(group)
        kept = sum(end - start for start, end, _ in clusters)
        whole = kept == group[0][0].untyped_storage().nbytes()
        if copy or not whole or _typed_address(group[0][0])[0] in several:
            for start, end, members in clusters:
                owned.update(_move(members, start, end))
    return owned


def _typed_address(tensor: torch.Tensor) -> tuple[tuple[torch.device, int], torch.dtype | None]:
    """Where a tensor's storage begins, and as what torch saves it; None without elements, which is saved anew."""
    dtype = tensor.dtype if tensor.numel() else None
    return (tensor.device, tensor.untyped_storage().data_ptr() if tensor.numel() else 0), dtype


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that a tensor's elements take up in its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _clusters(group: list[_Met]) -> list[tuple[int, int, list[torch.Tensor]]]:
    """The tensors of one storage, joined where their spans overlap: [(start, end, members)] in bytes."""
    clusters: list[tuple[int, int, list[torch.Tensor]]] = []
    for tensor, path in sorted(group, key=lambda met: _span(met[0])):
        start, end = _span(tensor)
        if clusters and start < clusters[-1][1]:
            first, last, members = clusters[-1]
            if members[0].dtype != tensor.dtype:
                raise TypeError(
                    f"state{path} is a {tensor.dtype} view of memory that is saved as {members[0].dtype}; "
                    "torch cannot save both. Save one of them, or a clone"
                )
            clusters[-1] = (first, max(last, end), [*members, tensor])
        else:
            clusters.append((start, end, [tensor]))
    return clusters


def _move(members: list[torch.Tensor], start: int, end: int) -> dict[int, torch.Tensor]:
    """The same tensors over a copy of the bytes from `start` to `end` of their storage."""
    device = members[0].device
    source = members[0].detach().untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=device).set_(source, start, (end - start,), (1,))
    storage = raw.clone().untyped_storage()
    moved: dict[int, torch.Tensor] = {}
    for tensor in members:
        offset = tensor.storage_offset() - start // tensor.element_size()
        own = torch.empty(0, dtype=tensor.dtype, device=device)
        own = own.set_(storage, offset, tensor.shape, tensor.stride())
        moved[id(tensor)] = like(tensor, own)
    return moved


def like(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`own` as a parameter, and asking for gradients, where `tensor` is one and does."""
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(own, requires_grad=tensor.requires_grad)
    return own.requires_grad_() if tensor.requires_grad else own


def _rebuild(value: Any, owned: Mapping[int, torch.Tensor], memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        return owned.get(id(value), value)
    if kind not in _DICTS and kind not in _LISTS and kind is not bytearray:
        return value
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if kind in _DICTS:
        new = kind()
        for key, item in value.items():
            new[key] = _rebuild(item, owned, memo)
        for name, item in getattr(value, "__dict__", {}).items():
            setattr(new, name, _rebuild(item, owned, memo))
    elif kind is bytearray or set(map(type, value)) <= _IMMUTABLE:
        new = kind(value)
    else:
        new = kind(_rebuild(item, owned, memo) for item in value)
    memo[id(value)] = new
    return new
