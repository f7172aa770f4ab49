"""One writer a directory: a POSIX record lock that the kernel drops with the process that held it.

``fcntl.lockf`` and not ``flock``: a flock is inherited by forked data loader workers, and an orphaned one
would hold it after its trainer was killed. A record lock belongs to the process, so the managers of one
process share it through the registry here, and the lock file is never opened a second time by its holder:
closing any descriptor of it would give the lock up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from resumable_data.checkpoint.atomic import write_error
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import CheckpointWriteError

LOCK_NAME = ".writer.lock"

_TAKEN = (errno.EACCES, errno.EAGAIN)  # POSIX allows either

_Key = tuple[int, int]


@dataclass
class DirectoryLock:
    """A held lock; one for all managers of this process that write to one directory.

    Attributes:
        key: Device and inode of the directory.
        fd: The lock file's descriptor.
        pid: Of the process that took it: a fork inherits the object, not the lock.
        holders: How many managers hold it.
        mutex: Held while one of them writes.
        writer: The manager that is writing; a second one in the same thread was called by a signal handler.
    """

    key: _Key
    fd: int
    pid: int
    holders: int = 0
    mutex: threading.RLock = field(default_factory=threading.RLock)
    writer: object = None


_held: dict[_Key, DirectoryLock] = {}
_registry = threading.Lock()


def directory_key(directory: Path) -> _Key:
    """What tells a directory from another one of the same name."""
    found = directory.stat()
    return found.st_dev, found.st_ino


def is_current(lock: DirectoryLock, directory: Path) -> bool:
    """Whether a lock is this process's and still the directory's: it may have been deleted and made anew.

    The kernel drops a record lock when its process closes any descriptor of the file, as copying the whole
    directory does; so it is taken once more, which does nothing where it is still held.
    """
    try:
        there = (directory / LOCK_NAME).stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(lock.fd)
    same_file = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
    if not same_file or lock.pid != os.getpid() or lock.key != directory_key(directory):
        return False
    try:
        fcntl.lockf(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def acquire(directory: Path, ops: FsOps) -> DirectoryLock:
    """Take the directory's lock for one more manager of this process; `release` it once.

    Raises:
        CheckpointWriteError: Another process holds it: its pid and host are named, errno is EAGAIN. Or the
            lock file cannot be written.
    """
    with _registry:
        try:
            key = directory_key(directory)
            lock = _held.get(key)
            if lock is None or not is_current(lock, directory):
                lock = DirectoryLock(key, _take(directory / LOCK_NAME, ops), os.getpid())
                _held[key] = lock
        except CheckpointWriteError:
            raise
        except OSError as error:
            raise write_error(error, directory) from error
        lock.holders += 1
        return lock


def release(lock: DirectoryLock) -> None:
    """Give the lock back; the last manager of the process to do so lets other writers in."""
    with _registry:
        if lock.pid != os.getpid():
            return  # a fork's copy: the lock is the parent's
        lock.holders -= 1
        if lock.holders == 0:
            if _held.get(lock.key) is lock:  # not so where the directory was made anew meanwhile
                del _held[lock.key]
            os.close(lock.fd)


def _take(path: Path, ops: FsOps) -> int:
    fd = ops.open(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _refused(path, os.pread(fd, 4096, 0)) from error
            raise
        who = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        os.ftruncate(fd, 0)
        os.pwrite(fd, who.encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refused(path: Path, content: bytes) -> CheckpointWriteError:
    pid: object = "unknown"
    host: object = "unknown"
    # the holder may be about to write its name: the refusal stands without it
    with contextlib.suppress(ValueError, KeyError, TypeError):
        who = json.loads(content)
        pid, host = who["pid"], who["host"]
    return CheckpointWriteError(
        f"{path.parent} is being written to by process {pid} on host {host}. Two runs in one directory would "
        "prune each other's checkpoints: give this run a directory of its own, or stop the other one.",
        errno=errno.EAGAIN,
        path=str(path.parent),
    )
