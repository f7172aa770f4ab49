"""The commit protocol for files: a temp beside the target, fsync, rename, fsync of the directory.

Every system call that changes the disk goes through one `FsOps` object, so that tests can make each of them
fail. A `Commit` writes any number of temps and renames them one by one; whatever has not been renamed when
it ends, by whatever exception, is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from resumable_data.checkpoint.fsops import FS, FsOps
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.sink import Sink, torch_save
from resumable_data.checkpoint.temps import is_dead, shortened, temp_name
from resumable_data.errors import CheckpointWriteError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # what file systems without directory fsync answer
_warned_directories: set[str] = set()


@dataclass(frozen=True)
class Written:
    """A temp on the disk, synced: its final name, its path, its bytes and their sha256 in hex."""

    name: str
    temp: Path
    size: int
    sha256: str


class Commit:
    """Temps of one save; a context manager that removes those not renamed and gives OSErrors their name.

    Args:
        directory: Where temps and targets are; must exist.
        ops: The system calls.
        durable: False leaves out every fsync, of files and of directories.

    Raises:
        CheckpointWriteError: For every OSError inside the block, with its errno, the path, and the bytes
            that the save needs and the file system has left.
    """

    def __init__(self, directory: Path, ops: FsOps, *, durable: bool = True) -> None:
        self.directory = directory
        self._ops = ops
        self._durable = durable
        self._temps: set[Path] = set()
        self._directories: set[Path] = set()
        self._needed = 0

    def __enter__(self) -> Commit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for temp in self._temps:
            # one that cannot be removed is swept by the next save; the first error is the one to report
            with contextlib.suppress(OSError):
                self._ops.unlink(str(temp))
        for place in self._directories:
            with contextlib.suppress(OSError):
                self._ops.rmdir(str(place))
        if isinstance(error, OSError) and not isinstance(error, CheckpointWriteError):
            raise write_error(error, self.directory, needed=self._needed or None) from error

    def temp_directory(self, name: str) -> Path:
        """A new directory under a temp's name, for files that get their place together."""
        place = self.directory / temp_name(name)
        self._directories.add(place)  # before it is made, so that no interrupt in between leaves it
        self._ops.mkdir(str(place))
        return place

    def write(self, name: str, produce: Callable[[Sink], None], *, inside: Path | None = None) -> Written:
        """Write a temp for the file `name`, sync and close it; under its own name `inside` a temp directory."""
        temp = self.directory / temp_name(name) if inside is None else inside / name
        self._temps.add(temp)  # before it is made, so that no interrupt in between leaves it
        fd = self._ops.open(str(temp), _CREATE, 0o666)
        sink = Sink(self._ops, fd, durable=self._durable)
        try:
            try:
                produce(sink)
            finally:
                self._needed += sink.size
                sink.release()
            sha256 = sink.finish()
        except BaseException:
            with contextlib.suppress(OSError):  # the error under way is the one to report
                self._ops.close(fd)
            raise
        self._ops.close(fd)
        return Written(name, temp, sink.size, sha256)

    def rename(self, written: Written) -> Path:
        """Give a temp its final name; visible at once, durable after `sync`."""
        target = self.directory / written.name
        self._ops.rename(str(written.temp), str(target))
        self._temps.discard(written.temp)
        return target

    def rename_directory(self, temp: Path, name: str) -> Path:
        """Give a temp directory and all in it their place; visible at once, durable after `sync`."""
        target = self.directory / name
        self._ops.rename(str(temp), str(target))
        self._directories.discard(temp)
        self._temps = {path for path in self._temps if path.parent != temp}
        return target

    def sync_inside(self, temp: Path) -> None:
        """Make the entries of a temp directory durable."""
        if self._durable:
            sync_directory(temp, self._ops, home=self.directory)

    def sync(self) -> None:
        """Make the renames so far durable."""
        if self._durable:
            sync_directory(self.directory, self._ops)


def sync_directory(directory: Path, ops: FsOps, *, home: Path | None = None) -> None:
    """Fsync a directory; where its file system has no such thing, one warning says what that means.

    Args:
        directory: To be synced.
        ops: The system calls.
        home: For a temp directory the one it is in, so that the warning comes once and not with every save.
    """
    try:
        ops.dirsync(str(directory))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        place = str(home or directory)
        if place not in _warned_directories:
            _warned_directories.add(place)
            warnings.warn(
                f"The file system of {place} cannot sync directories ({error.strerror}): a checkpoint "
                "survives a killed process, but perhaps not a power cut.",
                stacklevel=2,
            )


def write_error(error: OSError, path: Path, *, needed: int | None = None) -> CheckpointWriteError:
    """The CheckpointWriteError for an OSError met while writing below `path`."""
    free = None
    with contextlib.suppress(OSError):  # a file system that has gone away has no free space to tell
        stat = os.statvfs(path if path.is_dir() else path.parent)
        free = stat.f_bavail * stat.f_frsize
    where = error.filename if isinstance(error.filename, str) else str(path)
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    space = f" The save needs {needed} bytes, {free} are free." if needed is not None else ""
    return CheckpointWriteError(
        f"Could not write {where}: {error.strerror or error} ({name}).{space} The temporary file was removed "
        "and earlier files are as they were; free space or fix the directory, then save again.",
        errno=error.errno,
        path=where,
        needed=needed,
        free=free,
    )


@contextlib.contextmanager
def named_errors(directory: Path) -> Iterator[None]:
    """Within it, every OSError becomes a CheckpointWriteError with its errno."""
    try:
        yield
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise write_error(error, directory) from error


def _no_member(_: str) -> bool:
    return False


def sweep(
    directory: Path,
    ops: FsOps,
    *,
    ours: Callable[[str], bool],
    alone: bool,
    is_member: Callable[[str], bool] = _no_member,
) -> None:
    """Remove temps that writers killed in mid-save have left, files and directories.

    Args:
        directory: Where to look.
        ops: The system calls.
        ours: Whether a target's name is the caller's business; other temps are left alone.
        alone: The caller holds the lock under which all such temps are written, so that those of other
            processes are known to be dead even where they ran on other hosts.
        is_member: Whether a writer puts files of this name into a temp directory; one that holds others stays.
    """
    for name in ops.listdir(str(directory)):
        if is_dead(name, ours=ours, alone=alone):
            with contextlib.suppress(FileNotFoundError):  # swept by another process meanwhile
                _sweep_one(directory / name, ops, is_member)


def _sweep_one(temp: Path, ops: FsOps, is_member: Callable[[str], bool]) -> None:
    if temp.is_symlink() or not temp.is_dir():
        ops.unlink(str(temp))
        return
    names = ops.listdir(str(temp))
    for name in filter(is_member, names):
        ops.unlink(str(temp / name))
    if all(map(is_member, names)):
        ops.rmdir(str(temp))


def make_directory(directory: Path, ops: FsOps) -> None:
    """Create a directory and its parents, each durable in the one above it."""
    with named_errors(directory):
        missing = []
        place = directory
        while not place.exists():
            missing.append(place)
            place = place.parent
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # made by another process meanwhile
                ops.mkdir(str(place))
            sync_directory(place.parent, ops)
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))


def atomic_torch_save(state: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` that leaves the old file or the new one, whole, whenever the machine stops.

    Returns once the file survives a power cut. Parent directories are created; a temp beside the target is
    removed on every failure, and those of killed writers by the next save of the same path. Views are saved
    at their own size, tied tensors stay tied. One process writes a path at a time.

    Args:
        state: Tensors, numbers, strings and bytes in lists, tuples, dicts and sets: what
            ``torch.load(weights_only=True)`` reads back.
        path: The file to write or replace.

    Raises:
        TypeError: Something that could not be read back, by its key path; no file has been made.
        CheckpointWriteError: The write failed; errno, path, bytes needed and free are set.
    """
    ready = prepare(state)
    _replace(Path(path), lambda sink: torch_save(ready, sink))


def atomic_json_dump(value: Any, path: str | os.PathLike[str]) -> None:
    """`json.dump` with the guarantees of `atomic_torch_save`: ASCII, one line, one newline at the end.

    Args:
        value: What JSON can hold: finite numbers, strings, bools, None, lists (tuples come back as lists),
            dicts with string keys.
        path: The file to write or replace.

    Raises:
        TypeError: A value or a dict key that JSON does not have; no file has been made.
        ValueError: A float that is not finite; no file has been made.
        CheckpointWriteError: The write failed; errno, path, bytes needed and free are set.
    """
    _check_json_keys(value, "value")
    data = (json.dumps(value, allow_nan=False) + "\n").encode("ascii")
    _replace(Path(path), lambda sink: _write_all(sink, data))


def _write_all(sink: Sink, data: bytes) -> None:
    sink.write(data)


def _check_json_keys(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, which JSON would turn into a string")
            _check_json_keys(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(item, (dict, list, tuple)):
                _check_json_keys(item, f"{path}[{i}]")


def _replace(path: Path, produce: Callable[[Sink], None]) -> None:
    make_directory(path.parent, FS)
    with Commit(path.parent, FS) as commit:
        sweep(path.parent, FS, ours=lambda name: name == shortened(path.name), alone=False)
        commit.rename(commit.write(path.name, produce))
        commit.sync()
