"""The file object that `torch.save` writes to: hashed beside the writing, and with errors that keep their errno."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from resumable_data.checkpoint.fsops import FsOps

_BUFFER = 256 * 1024  # small writes are gathered up to this many bytes
_LARGE = 2 << 20  # bytes from which a piece is worth the hand-over to the hashing thread
_PIECE = 8 << 20  # bytes after which the disk is told to begin


class Sink:
    """A file that `torch.save` writes to: counts, hashes, completes short writes and never raises.

    An exception must not pass through torch's C++ frames, where its errno is lost. So the first one is kept,
    the bytes after it are counted but not written, and `finish` raises it.

    The hash is of the bytes that were handed over, not of what the disk says of them. Large pieces are hashed
    in a thread while they are written, and the disk is told to begin with each, so that the fsync at the end finds
    little left to do. Nothing is copied: a piece is written and hashed before `write` returns.
    """

    def __init__(self, ops: FsOps, fd: int, *, durable: bool = True) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self._durable = durable
        self._ops, self._fd = ops, fd
        self._hash = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._buffer = bytearray()
        self._written = 0

    def write(self, data: Any) -> int:
        """Take all of `data`; memoryviews are used during the call only, as torch requires."""
        view = memoryview(data).cast("B")
        try:
            self.size += len(view)
            if self.error is None:
                if len(self._buffer) + len(view) > _BUFFER:
                    self._drain()
                if len(view) > _BUFFER:
                    self._put(view)
                else:
                    self._buffer += view
        except BaseException as error:  # noqa: BLE001 - kept, and raised by `finish`; see the class
            self.error = error
        return len(view)

    def flush(self) -> None:
        """Nothing: `finish` drains the buffer and syncs; torch.save calls this at its end."""

    def finish(self) -> str:
        """Drain and, where durable, fsync; the sha256 of all bytes, in hex. Raises what `write` met."""
        if self.error is not None:
            raise self.error
        self._drain()
        if self._durable:
            self._ops.fsync(self._fd)
        return self._hash.hexdigest()

    def release(self) -> None:
        """Let go of the thread; the sink takes no more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)  # idle: every piece was waited for

    def _drain(self) -> None:
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._put(memoryview(data))

    def _put(self, view: memoryview) -> None:
        hashing = self._begin_hashing(view) if len(view) >= _LARGE else None
        if hashing is None:
            self._hash.update(view)
            self._write_all(view)
            return
        try:
            self._write_all(view)
        finally:
            _outwait(hashing)  # the memory is torch's again once `write` returns

    def _begin_hashing(self, view: memoryview) -> Future[None] | None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "resumable_data-sha256")
        try:
            return self._thread.submit(self._hash.update, view)
        except RuntimeError:  # no thread to be had, or the interpreter ends: a save in the background goes on
            self._thread = None  # it may have queued the piece
            return None

    def _write_all(self, view: memoryview) -> None:
        while len(view):
            count = self._ops.write(self._fd, view[:_PIECE])
            if self._durable and count == _PIECE:
                self._ops.writeback(self._fd, self._written, count)
            self._written += count
            view = view[count:]


def _outwait(hashing: Future[None]) -> None:
    """Wait until a thread is through, also where a signal handler raises meanwhile; raise that afterwards."""
    interrupt: BaseException | None = None
    while not hashing.done():
        try:
            wait([hashing])
        except BaseException as error:  # noqa: BLE001 - raised below, once nobody reads the memory any more
            interrupt = error
    if interrupt is not None:
        raise interrupt
    hashing.result()


_checksums = threading.Lock()
_off: dict[int, list[Any]] = {}  # [saves under way, how the switch stood before], by whose switch it is


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Without torch's own CRC-32 of each record: the sha256 covers it, at a fraction of the wait.

    torch's switch is one for the process, or one for each thread in newer versions. It is put back when the last
    of the saves that share it has ended; a `torch.save` beside them writes files that torch reads as well.
    """
    with _checksums:
        owner = threading.get_ident() if _switch_is_per_thread() else 0
        under_way = _off.setdefault(owner, [0, torch.serialization.get_crc32_options()])
        torch.serialization.set_crc32_options(False)
        under_way[0] += 1
    try:
        yield
    finally:
        with _checksums:
            under_way[0] -= 1
            if under_way[0] == 0:
                torch.serialization.set_crc32_options(under_way[1])
                del _off[owner]


@functools.lru_cache(maxsize=1)
def _switch_is_per_thread() -> bool:
    """Whether another thread's setting is its own; found by trying."""
    before = torch.serialization.get_crc32_options()
    thread = threading.Thread(target=torch.serialization.set_crc32_options, args=(not before,))
    thread.start()
    thread.join()
    found = torch.serialization.get_crc32_options() is before
    torch.serialization.set_crc32_options(before)
    return found


def torch_save(value: Any, sink: Sink) -> None:
    """`torch.save` into a sink; an interrupt in the midst of it comes out as itself."""
    ambient = sys.exc_info()[1]
    try:
        with _without_checksums():
            torch.save(value, sink)  # type: ignore[arg-type]  # torch asks for a file's write and flush only
    except RuntimeError as error:
        # one that met `Sink.write` outside its try is behind torch's complaint about the bytes missing
        first = error.__context__
        missing = not isinstance(first, Exception) or "unexpected pos" in str(error)
        if first is not None and first is not ambient and missing:
            raise first from None
        raise
