"""Bringing a checkpoint's files into the directory and taking them out again, in the order that survives.

Nothing is visible as a checkpoint before all of it is durable, and nothing is half a checkpoint after a part
of it has been deleted: one rename makes it and one rename unmakes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resumable_data.checkpoint import layout
from resumable_data.checkpoint.atomic import Commit, Written
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.sharding import Shards, split
from resumable_data.checkpoint.sink import Sink, torch_save


@dataclass(frozen=True)
class Form:
    """How checkpoints are written.

    Attributes:
        shards: None for one data file; else what `split` takes.
        durability: "full", or "process" for no fsync.
        hmac_key: The key that indexes are signed with, None for no signature.
    """

    shards: Shards | None = None
    durability: str = "full"
    hmac_key: bytes | None = None

    @property
    def durable(self) -> bool:
        """Whether files and directories are synced."""
        return self.durability == "full"


def commit(directory: Path, ops: FsOps, form: Form, payload: Any, stamp: layout.Stamp) -> layout.Index:
    """Write a checkpoint and rename it into place; returns once it survives what its durability says.

    Args:
        directory: Where it goes; nothing of the stamp's step and generation is there.
        ops: The system calls.
        form: How it is written.
        payload: What `torch.save` writes.
        stamp: Run, step, generation and metrics.

    Returns:
        The index that was written.

    Raises:
        CheckpointWriteError: Nothing was committed.
    """
    write = _commit_single if form.shards is None else _commit_sharded
    with Commit(directory, ops, durable=form.durable) as files:
        return write(files, ops, form, payload, stamp)


def _commit_single(files: Commit, ops: FsOps, form: Form, payload: Any, stamp: layout.Stamp) -> layout.Index:
    data = files.write(layout.file_name(stamp.step, stamp.generation), _saving(payload))
    index = _index(stamp, form, [data])
    content = layout.index_bytes(index, form.hmac_key)
    sealed = files.write(layout.file_name(stamp.step, stamp.generation, "json"), _putting(content))
    place_files(files, ops, data, sealed)
    return index


def _commit_sharded(files: Commit, ops: FsOps, form: Form, payload: Any, stamp: layout.Stamp) -> layout.Index:
    contents = split(payload, form.shards if form.shards is not None else 1)
    temp = files.temp_directory(layout.file_name(stamp.step, stamp.generation, "dir"))
    written = [files.write(own, _saving(value), inside=temp) for own, value in contents.items()]
    index = _index(stamp, form, written)
    files.write(layout.INDEX, _putting(layout.index_bytes(index, form.hmac_key)), inside=temp)
    place_directory(files, ops, temp, index.name)
    return index


def place_files(files: Commit, ops: FsOps, data: Written, index: Written) -> None:
    """Commit a data file and its index, both written: after it they are there, or neither is."""
    placed: list[Path] = []
    try:
        # the index first: alone it counts as nothing, so the data's rename is the commit point
        for written in (index, data):
            placed.append(files.directory / written.name)
            files.rename(written)
            files.sync()
    except BaseException:
        # what cannot be removed is whole: a data file with its index is a checkpoint, a lone index none
        for path in reversed(placed):
            with contextlib.suppress(OSError):
                ops.unlink(str(path))
        raise


def place_directory(files: Commit, ops: FsOps, temp: Path, name: str) -> None:
    """Commit a temp directory in which everything is written, the index last."""
    files.sync_inside(temp)
    try:
        files.rename_directory(temp, name)  # the commit point
        files.sync()
    except BaseException:
        if not temp.exists():  # else a rename that failed: what has the name is not ours
            with contextlib.suppress(OSError):  # what cannot be removed is whole
                remove(files.directory, ops, name)
        raise


def _saving(value: Any) -> Callable[[Sink], None]:
    return lambda sink: torch_save(value, sink)


def _index(stamp: layout.Stamp, form: Form, written: list[Written]) -> layout.Index:
    return layout.Index(
        stamp.run_id,
        stamp.run_ordinal,
        stamp.step,
        stamp.generation,
        stamp.metrics,
        tuple(layout.FileEntry(one.name, one.size, one.sha256) for one in written),
        "single" if form.shards is None else "sharded",
        form.durability,
    )


def write_file(directory: Path, ops: FsOps, form: Form, name: str, content: bytes) -> None:
    """Write or replace a small file by the same steps."""
    with Commit(directory, ops, durable=form.durable) as files:
        files.rename(files.write(name, _putting(content)))
        files.sync()


def _putting(content: bytes) -> Callable[[Sink], None]:
    def put(sink: Sink) -> None:
        sink.write(content)

    return put


def remove(directory: Path, ops: FsOps, name: str) -> None:
    """Delete a checkpoint's data: it is renamed away first, so that it is whole or gone at any moment.

    Args:
        directory: Where it is.
        ops: The system calls.
        name: The name of its data file or directory.
    """
    grave = layout.tombstone_name(name, secrets.token_hex(6))
    ops.rename(str(directory / name), str(directory / grave))
    bury(directory, ops, grave)


def bury(directory: Path, ops: FsOps, grave: str) -> None:
    """Finish the deletion of what stands under a tombstone's name.

    Files in a sharded checkpoint's directory that no writer put there are not ours to delete: the directory
    gets its name back with nothing but them in it, which is no checkpoint.
    """
    place = directory / grave
    if not place.is_dir() or place.is_symlink():
        ops.unlink(str(place))
        return
    names = ops.listdir(str(place))
    for name in filter(layout.is_member, names):
        ops.unlink(str(place / name))
    if all(map(layout.is_member, names)):
        ops.rmdir(str(place))
    else:
        own = layout.entombed(grave)
        if own is not None and not os.path.lexists(directory / own):
            ops.rename(str(place), str(directory / own))
