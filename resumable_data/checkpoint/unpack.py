"""From a data file, verified from its name to its last byte, to what was saved.

The archive is read first, then the pickle in it over stand-ins, and only what has passed both is given to
`torch.load`: it makes values only where their number, their size and what makes them are known.
"""

from __future__ import annotations

import pickle
import re
from typing import IO, Any

import torch

from resumable_data.checkpoint.archive import read_archive
from resumable_data.checkpoint.limits import DEFAULT, Limits
from resumable_data.checkpoint.opcodes import scan
from resumable_data.checkpoint.survey import survey
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointSecurityError,
)

_OLDEST_TORCH = (2, 10)  # before it, storages of another size than declared were read
# what torch.load raises at bytes that are no checkpoint; MemoryError and the like pass on
_UNREADABLE = (RuntimeError, EOFError, KeyError, IndexError, TypeError, ValueError, AttributeError)
_ADVICE: dict[type[CheckpointError], str] = {
    CheckpointSecurityError: "Nothing of it was run; find out who wrote the file before using it.",
    CheckpointLimitError: "Nothing of it was loaded; find out who wrote the file before using it.",
    CheckpointCorruptError: "The file is damaged, though it has the hash that its index says.",
}


def load_archive(file: IO[bytes], name: str, *, limits: Limits = DEFAULT) -> Any:
    """What `torch.save` wrote to a file, on the CPU.

    Args:
        file: The open file, unbuffered; everything is read from its descriptor.
        name: The file's, for messages.
        limits: What it may ask for.

    Raises:
        CheckpointSecurityError: Not an archive as torch.save writes it, or a pickle that asks for more than data.
        CheckpointLimitError: One that asks for more memory, depth or entries than any honest one.
        CheckpointCorruptError: Parts that do not fit together.
        CheckpointError: This torch is too old to load safely.
    """
    require_torch(torch.__version__)
    try:
        _check(file, limits)
    except CheckpointError as error:
        message = f"{name}: {error}. {_ADVICE[type(error)]}"
        raise type(error)(message, expected=error.expected, found=error.found) from error
    except MemoryError as error:
        message = f"{name}: memory ran out before anything was loaded. {_ADVICE[CheckpointLimitError]}"
        raise CheckpointLimitError(message) from error
    return _load(file, name)


def require_torch(version: str) -> None:
    """Refuse a torch whose safe load is not one.

    Raises:
        CheckpointError: Older than 2.10.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        raise CheckpointError(
            f"torch {version} is too old to load checkpoints safely; expected 2.10 or newer. Upgrade torch.",
            expected="2.10",
            found=version,
        )


def _check(file: IO[bytes], limits: Limits) -> None:
    try:
        archive = read_archive(file.fileno(), limits)
    except OSError as error:
        raise CheckpointCorruptError(f"it cannot be read ({error.strerror})") from error
    survey(scan(archive.pickled, archive.storages, limits), limits)


def _load(file: IO[bytes], name: str) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        text = str(error).partition("\n")[0][:200]
        raise CheckpointSecurityError(
            f"{name}: torch's safe load refuses it ({text}). {_ADVICE[CheckpointSecurityError]}"
        ) from error
    except _UNREADABLE as error:
        text = str(error).partition("\n")[0][:200]
        raise CheckpointCorruptError(f"{name}: torch cannot read it ({text})") from error
