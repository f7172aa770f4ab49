"""Every error this package raises on purpose.

::

    ResumableDataError
    ├── StateError
    │   ├── StateVersionError
    │   └── StateMismatchError
    ├── StaleIteratorError
    ├── RNGRestoreError
    ├── RankDisagreementError
    └── CheckpointError (also a RuntimeError)
        ├── CheckpointNotFoundError
        ├── CheckpointCorruptError      hash, size, parse
        ├── CheckpointSecurityError     names, links, unsafe pickles, signature
        ├── CheckpointLimitError        resources
        ├── CheckpointMismatchError     keys, shapes, dtypes, version
        └── CheckpointWriteError        also an OSError, its errno set

A message says what was found, what was expected and what to do about it; ``found`` and ``expected``
carry the first two as values, for programs. Mistakes in arguments are plain ``ValueError`` and
``TypeError``, as torch's ``DataLoader`` raises them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ResumableDataError(Exception):
    """Base of the tree.

    Args:
        message: What was found, what was expected, what to do.
        expected: The value (or a description of the values) that would have been right.
        found: The value that was met instead.
    """

    expected: Any
    found: Any

    def __init__(self, message: str, *, expected: Any = None, found: Any = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class StateError(ResumableDataError):
    """A loader state that cannot be read: missing keys, wrong types, impossible values."""


class StateVersionError(StateError):
    """A loader state written under a schema that this version does not know."""


class StateMismatchError(StateError):
    """A readable state of another loader.

    Attributes:
        fields: Every differing field: its name -> (saved value, current value).
    """

    fields: dict[str, tuple[Any, Any]]

    def __init__(self, message: str, *, fields: Mapping[str, tuple[Any, Any]]) -> None:
        self.fields = dict(fields)
        super().__init__(
            message,
            expected={name: current for name, (_, current) in self.fields.items()},
            found={name: saved for name, (saved, _) in self.fields.items()},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_mismatch, (str(self), self.fields)


def _rebuild_mismatch(message: str, fields: dict[str, tuple[Any, Any]]) -> StateMismatchError:
    return StateMismatchError(message, fields=fields)


class StaleIteratorError(ResumableDataError):
    """An iterator of an earlier pass was asked for a batch after the loader had moved elsewhere."""


class RNGRestoreError(ResumableDataError):
    """An RNG state that cannot be restored; every stream is as it was before the attempt."""


class RankDisagreementError(ResumableDataError):
    """The ranks of one job hold different values where they must agree."""


class CheckpointError(ResumableDataError, RuntimeError):
    """Base of what goes wrong with checkpoints."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint where one was asked for."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint whose bytes are not those that were written: hash, size or parse failure."""


class CheckpointSecurityError(CheckpointError):
    """A checkpoint that might do harm: odd names, links, special files, unsafe pickles."""


class CheckpointLimitError(CheckpointError):
    """A checkpoint that asks for more memory, depth or entries than any honest one."""


class CheckpointMismatchError(CheckpointError):
    """An intact checkpoint of another model, optimizer, configuration or a newer schema."""


class CheckpointWriteError(CheckpointError, OSError):
    """A save that failed; nothing of it was committed and the older checkpoints are untouched.

    Attributes:
        errno: The operating system's error number (``errno.ENOSPC`` and so on).
        filename: The path that could not be written.
        needed: Bytes the save had to write, where known.
        free: Bytes free on the file system when it failed, where known.
    """

    needed: int | None
    free: int | None

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        needed: int | None = None,
        free: int | None = None,
    ) -> None:
        super().__init__(message, expected=needed, found=free)
        # OSError fills these from two positional arguments only; the tree's constructor has one.
        self.errno = errno
        self.strerror = message
        self.filename = path
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_write, (self.strerror, self.errno, self.filename, self.needed, self.free)


def _rebuild_write(
    message: str, errno: int | None, path: str | None, needed: int | None, free: int | None
) -> CheckpointWriteError:
    return CheckpointWriteError(message, errno=errno, path=path, needed=needed, free=free)
