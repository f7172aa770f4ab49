"""A payload copied into host memory that is kept from one save to the next, so that training can go on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import ENOMEM
from typing import Any

import numpy as np
import torch

from resumable_data.checkpoint.saveable import like, rebuild, tensors_of
from resumable_data.errors import CheckpointWriteError

_PIECE = 16 << 20  # bytes one thread copies at a time; pieces of 4 MB and of 128 MB measured slower

_Kind = tuple[int, str]  # of a buffer: its bytes, and the home of what is copied into it
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Copy = tuple[_Bytes, _Bytes]  # target, source


@dataclass
class _Group:
    """Tensors over one storage, by the id of each tensor that they stand for."""

    storage: torch.UntypedStorage
    members: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def kind(self) -> _Kind:
        return self.storage.nbytes(), _home(self.storage.device)


class Staging:
    """Copies payloads into buffers of its own, which the next copy uses again.

    What `copy` gave is overwritten by the next `copy`, so there is one save at a time. The buffers take as
    much host memory as the payload; pinned memory where it is on a GPU. `release` gives it back.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Kind, list[torch.Tensor]] = {}

    def copy(self, prepared: Any) -> Any:
        """The payload as it is now, on the CPU: tensors in the buffers, containers of its own.

        Ties and views are between the copies what they are between the originals. Buffers of sizes that the
        payload no longer has are freed. On a failure nothing but the buffers has been touched, and they are
        all given back.

        Args:
            prepared: What `prepare` gives: each storage is held whole by its tensors.

        Raises:
            CheckpointWriteError: There is no memory for it; errno is ENOMEM.
        """
        try:
            groups, replaced = _by_storage(tensors_of(prepared))
            for group, buffer in zip(groups, self._fill(groups), strict=True):
                replaced.update(_over(group, buffer.untyped_storage()))
            return rebuild(prepared, replaced)
        except BaseException as error:
            self.release()
            if isinstance(error, MemoryError):
                raise _no_memory(error, 0) from error
            raise

    def release(self) -> None:
        """Free the buffers, once nobody holds what `copy` gave."""
        self._buffers = {}

    def _fill(self, groups: list[_Group]) -> list[torch.Tensor]:
        wanted = Counter(group.kind for group in groups)
        self._buffers = {kind: self._buffers.get(kind, [])[:count] for kind, count in wanted.items()}
        for kind, count in wanted.items():
            for _ in range(count - len(self._buffers[kind])):
                self._buffers[kind].append(_allocate(kind))
        left = {kind: iter(buffers) for kind, buffers in self._buffers.items()}
        filled = [next(left[group.kind]) for group in groups]
        _copy_all(filled, groups)
        return filled


def _by_storage(tensors: Iterable[torch.Tensor]) -> tuple[list[_Group], dict[int, torch.Tensor]]:
    """The groups of tensors that share storage; and of those without any, what stands in their place."""
    groups: dict[tuple[torch.device, int, int], _Group] = {}
    empty: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():  # lazy views, which would read their storage as it is
            plain = plain.resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        if not storage.nbytes():
            own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="cpu")
            empty[id(tensor)] = like(tensor, own)
            continue
        # the size too: numpy's memory may be under two storages that begin at one address
        place = (storage.device, storage.data_ptr(), storage.nbytes())
        groups.setdefault(place, _Group(storage)).members[id(tensor)] = tensor, plain
    return list(groups.values()), empty


def _over(group: _Group, storage: torch.UntypedStorage) -> dict[int, torch.Tensor]:
    """The tensors of a group over another storage."""
    moved = {}
    for key, (tensor, plain) in group.members.items():
        own = torch.empty(0, dtype=plain.dtype, device="cpu")
        own = own.set_(storage, plain.storage_offset(), plain.shape, plain.stride())
        moved[key] = like(tensor, own)
    return moved


def _allocate(kind: _Kind) -> torch.Tensor:
    nbytes, home = kind
    try:
        return _empty(nbytes, pinned=home == "cuda")
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise the latter
        raise _no_memory(error, nbytes) from error


def _home(device: torch.device) -> str:
    return device.type


def _empty(nbytes: int, *, pinned: bool) -> torch.Tensor:
    # named: the program may have set another default device
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _no_memory(error: BaseException, nbytes: int) -> CheckpointWriteError:
    size = f" of {nbytes} bytes" if nbytes else ""
    return CheckpointWriteError(
        f"There is no memory to copy the checkpoint aside: a buffer{size} cannot be had ({error}). A save in "
        "the background takes as much host memory as the state; save with blocking=True, which takes none. "
        "Nothing was saved, and the older checkpoints are as they were.",
        errno=ENOMEM,
        needed=nbytes or None,
    )


def _copy_all(buffers: list[torch.Tensor], groups: list[_Group]) -> None:
    """The bytes of each group's storage into its buffer; complete when it returns."""
    host: list[_Copy] = []
    devices = set()
    for buffer, group in zip(buffers, groups, strict=True):
        device, home = group.storage.device, group.kind[1]
        source = torch.empty(0, dtype=torch.uint8, device=device)
        source = source.set_(group.storage, 0, (group.storage.nbytes(),), (1,))
        if home == "cpu":
            host.append((buffer.numpy(), source.numpy()))
        else:
            # from cuda (and ROCm, its namesake) into pinned memory, one beside the other; else one by one
            buffer.copy_(source, non_blocking=home == "cuda")
            devices.add(device)
    _copy_host(host)
    for device in devices:
        _synchronize(device)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).current_stream(device).synchronize()


def _copy_host(copies: list[_Copy]) -> None:
    """Copy host memory with as many threads as torch may use.

    Not by `Tensor.copy_`: its threads meet after each tensor, which took five times as long as this for a
    state of a thousand tensors on a machine with other work, and its loop reads the target, too.
    """
    batches = list(_batches(copies))
    threads = min(torch.get_num_threads(), len(batches))
    # at the interpreter's exit pools take no more work
    if threads < 2 or not threading.main_thread().is_alive():
        for batch in batches:
            _copy_batch(batch)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="resumable-data-staging") as pool:
        for _ in pool.map(_copy_batch, batches):
            pass


def _batches(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """The same copies, cut into pieces and gathered into batches of about one piece each."""
    batch: list[_Copy] = []
    size = 0
    for target, source in copies:
        for start in range(0, len(target), _PIECE):
            piece = slice(start, start + _PIECE)
            batch.append((target[piece], source[piece]))
            size += len(target[piece])
            if size >= _PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _copy_batch(batch: list[_Copy]) -> None:
    for target, source in batch:
        np.copyto(target, source)
