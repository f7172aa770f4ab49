"""What a checkpoint passes before a byte of it reaches a model.

In order: the index (size, canonical form, signature, schema, names), each data file opened beside it without
following links, regular files only, its size, its hash, and what `unpack` asks of its inside, all from one
descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from resumable_data.checkpoint import unpack
from resumable_data.checkpoint.layout import (
    INDEX,
    MAX_INDEX_BYTES,
    FileEntry,
    Index,
    file_name,
    is_member,
    parse_bad,
    parse_index,
)
from resumable_data.checkpoint.sharding import join
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
)

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a FIFO must not hang the open
_CHUNK = 1 << 20


class Fingerprint(NamedTuple):
    """By which a file that was verified once is known to be still the same file, unchanged."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


Fingerprints = tuple[Fingerprint, ...]  # of a checkpoint's data files, in the order of its index


def fingerprint(result: os.stat_result) -> Fingerprint:
    """The part of a stat that changes whenever a file's bytes do."""
    return Fingerprint(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns)


def open_regular(directory: int, name: str) -> IO[bytes]:
    """Open a plain file for reading, relative to an open directory, without following a link.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CheckpointSecurityError: A link, a FIFO, a device, a socket or a directory.
        CheckpointCorruptError: The disk cannot read it.
    """
    try:
        fd = os.open(name, _READ, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointNotFoundError(f"{name}: no such file") from error
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise CheckpointSecurityError(f"{name}: {_special(directory, name)}; expected a file") from error
        if error.errno in (errno.EIO, errno.ESTALE):
            raise CheckpointCorruptError(f"{name}: cannot be read ({error.strerror})") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointSecurityError(f"{name}: {_special(directory, name)}; expected a file")
    return os.fdopen(fd, "rb", buffering=0)


def _special(directory: int, name: str) -> str:
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((text for test, text in kinds if test(mode)), "a special file")


@contextlib.contextmanager
def open_directory(directory: int, name: str) -> Iterator[int]:
    """A descriptor of a directory in an open directory, no link followed.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        CheckpointSecurityError: A link, or anything that is no directory.
    """
    try:
        fd = os.open(name, _READ | os.O_DIRECTORY, dir_fd=directory)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{name}: no such directory") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV):
            what = _special(directory, name)
            raise CheckpointSecurityError(f"{name}: {what}; expected a directory") from error
        if error.errno in (errno.EIO, errno.ESTALE):
            raise CheckpointCorruptError(f"{name}: cannot be read ({error.strerror})") from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def home(directory: int, step: int, generation: int, sharded: bool) -> Iterator[int]:
    """The directory in which a checkpoint's data files are."""
    if not sharded:
        yield directory
        return
    with open_directory(directory, file_name(step, generation, "dir")) as fd:
        yield fd


def read_index(
    directory: int, step: int, generation: int, *, sharded: bool = False, hmac_key: bytes | None = None
) -> Index:
    """The index of a checkpoint; errors as `open_regular`, `open_directory` and `parse_index` give."""
    name = INDEX if sharded else file_name(step, generation, "json")
    with home(directory, step, generation, sharded) as place, open_regular(place, name) as file:
        data = _read_at_most(file, MAX_INDEX_BYTES + 1)
    shown = f"{file_name(step, generation, 'dir')}/{name}" if sharded else name
    if len(data) > MAX_INDEX_BYTES:
        raise CheckpointCorruptError(f"{shown}: larger than {MAX_INDEX_BYTES} bytes, which no index is")
    return parse_index(data, shown, step=step, generation=generation, sharded=sharded, hmac_key=hmac_key)


def members(directory: int, name: str, *, sharded: bool) -> list[str] | None:
    """What of a checkpoint is in an open directory, judged by names; None where nothing has its name."""
    if not sharded:
        return [name] if _exists(directory, name) else None
    try:
        with open_directory(directory, name) as fd:
            return [own for own in os.listdir(fd) if is_member(own)]  # noqa: PTH208 - a Path has no descriptor
    except CheckpointNotFoundError:
        return None


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def read_mark(directory: int, step: int, generation: int) -> str:
    """Why a checkpoint was marked as bad.

    Raises:
        CheckpointNotFoundError: It was not.
    """
    try:
        with open_regular(directory, file_name(step, generation, "bad.json")) as file:
            return parse_bad(_read_at_most(file, MAX_INDEX_BYTES))
    except (CheckpointSecurityError, CheckpointCorruptError):
        return "by a mark that cannot be read"  # whoever put it there wanted it not to be used


def _read_at_most(file: IO[bytes], limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit
    while left and (part := file.read(min(left, _CHUNK))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def load_verified(directory: int, index: Index) -> tuple[Any, Fingerprints]:
    """Verify a checkpoint's data files and read them.

    Returns:
        What was saved, on the CPU, and the fingerprints of the files that were verified.

    Raises:
        CheckpointNotFoundError: A data file is not there.
        CheckpointCorruptError: Size, hash or archive are not what was written.
        CheckpointSecurityError: Not a plain file, or a pickle that asks for more than data.
        CheckpointLimitError: A file that asks for more than any honest one.
    """
    sharded = index.layout == "sharded"
    values: dict[str, Any] = {}
    seen = []
    with home(directory, index.step, index.generation, sharded) as place:
        for entry in index.files:
            values[entry.name], found = _load_file(place, entry)
            seen.append(found)
    payload = join(values, index.name) if sharded else values[index.name]
    return payload, tuple(seen)


def _load_file(place: int, entry: FileEntry) -> tuple[Any, Fingerprint]:
    with open_regular(place, entry.name) as file:
        before = fingerprint(os.fstat(file.fileno()))
        verify_bytes(file, entry)
        value = unpack.load_archive(file, entry.name)
        seen = fingerprint(os.fstat(file.fileno()))
        if seen != before:  # renamed by a writer's pruning, or written to
            verify_bytes(file, entry)
    return value, seen


def verify_bytes(file: IO[bytes], entry: FileEntry) -> None:
    """Compare a file's size, then its sha256, with the index."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        raise CheckpointCorruptError(
            f"{entry.name}: {size} bytes, the index says {entry.size}; the file was cut or extended",
            expected=entry.size,
            found=size,
        )
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    file.seek(0)
    try:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # a raw file has it
            digest.update(view[:count])
    except OSError as error:
        raise CheckpointCorruptError(f"{entry.name}: cannot be read ({error.strerror})") from error
    if digest.hexdigest() != entry.sha256:
        raise CheckpointCorruptError(
            f"{entry.name}: sha256 {digest.hexdigest()}, the index says {entry.sha256}; bytes have changed",
            expected=entry.sha256,
            found=digest.hexdigest(),
        )
