"""The right to write a directory: taken at the first write, kept until it is given back."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from resumable_data.checkpoint.atomic import make_directory, named_errors
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.lock import DirectoryLock, acquire, is_current, release
from resumable_data.errors import CheckpointWriteError


class Writer:
    """One manager's hold on its directory's lock, and its turns among the managers of the process.

    Args:
        directory: Created with its parents at the first turn.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._guard = threading.RLock()  # held during a turn, and while the right is given back
        self._lock: DirectoryLock | None = None
        self._closing = False  # `close` was called by a signal handler in the midst of a turn

    @contextlib.contextmanager
    def turn(self, ops: FsOps) -> Iterator[None]:
        """The right to write for the length of a block; other threads wait, in a signal handler it is refused.

        Args:
            ops: The system calls.

        Raises:
            CheckpointWriteError: Another process writes here, or this thread is in the midst of a turn.
        """
        self._leave_parent()
        with self._guard:
            make_directory(self._directory, ops)
            lock = self._held_lock(ops)
            with lock.mutex:
                if lock.writer is not None:  # the mutex lets its own thread in
                    raise CheckpointWriteError(
                        f"{self._directory}: this thread is in the midst of a save; a signal handler must not "
                        "begin another. Let it set a flag, and save after the step.",
                        errno=errno.EBUSY,
                        path=str(self._directory),
                    )
                try:
                    lock.writer = self
                    yield
                finally:
                    lock.writer = None
                    if self._closing:
                        self.close()

    def close(self) -> None:
        """Give the right back; a later turn asks for it again. Twice is as good as once.

        It waits for a turn in another thread. Called by a signal handler during one, it takes effect when
        that turn ends.
        """
        self._leave_parent()
        with self._guard:
            lock = self._lock
            self._closing = lock is not None and lock.writer is self
            if lock is not None and not self._closing:
                self._lock = None
                release(lock)

    def _leave_parent(self) -> None:
        """In a fork: forget the parent's right, and a guard that a thread of the parent may hold for ever."""
        if self._pid != os.getpid():
            self._begin()

    def _held_lock(self, ops: FsOps) -> DirectoryLock:
        with named_errors(self._directory):
            lock = self._lock
            if lock is not None and lock.writer is not self and not is_current(lock, self._directory):
                self.close()
            if self._lock is None:
                self._lock = acquire(self._directory, ops)
            return self._lock
