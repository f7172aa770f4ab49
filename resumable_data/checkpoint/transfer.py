"""Looking through checkpoints without applying them: verifying each, and copying one somewhere else."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from resumable_data.checkpoint import committing, gate, layout
from resumable_data.checkpoint.arguments import check_step
from resumable_data.checkpoint.atomic import Commit, Written, named_errors
from resumable_data.checkpoint.pruning import Ledger
from resumable_data.checkpoint.sink import Sink
from resumable_data.checkpoint.store import Entry, Loaded, Skipped, Store
from resumable_data.checkpoint.writer import Writer
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)

_CHUNK = 1 << 20
_RETRIES = 20  # a writer may prune what is being copied, but not for ever

Which = int | str | os.PathLike[str]  # a step, or a path


@dataclass(frozen=True)
class FoundCheckpoint:
    """What `CheckpointManager.restore` and `load_latest` found.

    Attributes:
        step: Steps done when it was saved.
        state: The caller's values, with ``step``, ``epoch`` and ``batch_in_epoch``.
        extra: Plain values and the states of further objects, by name.
        payload: All of it, in the shape of `build_payload`; tensors are on the CPU.
        path: The data file, or the directory of a sharded checkpoint.
        skipped: Newer checkpoints that were not used, and why; empty as a rule.
    """

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    payload: dict[str, Any]
    path: Path
    skipped: tuple[Skipped, ...]


class Report(NamedTuple):
    """What `CheckpointManager.verify` found of one checkpoint.

    Attributes:
        path: The data file, or the directory of a sharded one.
        step: As its name says.
        generation: Likewise; 0 for a step's first save.
        ok: Whether it may be used: it passes every check, and is not marked as bad.
        reason: Why not; empty where it may.
    """

    path: Path
    step: int
    generation: int
    ok: bool
    reason: str


def found(loaded: Loaded, directory: Path) -> FoundCheckpoint:
    """A checkpoint of a directory as its manager gives it."""
    payload = loaded.payload
    return FoundCheckpoint(
        loaded.index.step,
        payload["state"],
        payload.get("extra", {}),
        payload,
        directory / loaded.index.name,
        loaded.skipped,
    )


def newest_generation(store: Store, step: int) -> str | None:
    """The name of a step's newest committed checkpoint, by the names in the directory; None without one."""
    names = set(store.names())
    committed = {}
    for name in names:
        number, generation, kind = layout.parse_name(name) or (None, 0, "")
        sealed = {
            "pt": layout.file_name(step, generation, "json") in names,
            "dir": (store.directory / name / layout.INDEX).exists(),
        }
        if number == step and sealed.get(kind, False):
            committed[generation] = name
    return committed[max(committed)] if committed else None


def select(store: Store, which: Which) -> Entry:
    """The newest generation of a step, or the checkpoint of a path that a manager gave.

    Raises:
        TypeError: Neither a step nor a path.
        ValueError: A step out of range, or a path outside the directory.
        CheckpointNotFoundError: There is no such checkpoint.
    """
    entries = store.entries()
    if isinstance(which, (str, os.PathLike)):
        path = Path(which).absolute()
        if path.parent != store.directory:
            raise ValueError(f"{path} is not in {store.directory}, the directory of this manager")
        found = [entry for entry in entries if entry.name == path.name]
        what = path.name
    else:
        step = check_step(which)
        found = [entry for entry in entries if entry.step == step]
        what = f"step {step}"
    if not found:
        there = sorted({entry.step for entry in entries})
        raise CheckpointNotFoundError(
            f"{store.directory}: no checkpoint of {what}; there are those of the steps {there}",
            expected=what,
            found=there,
        )
    return max(found, key=lambda entry: entry.generation)


def verify(store: Store, ledger: Ledger, which: Which | None) -> tuple[Report, ...]:
    """Read one checkpoint or all of them through the gate, in the order of entries; what is whole is remembered."""
    reports = []
    for entry in store.entries() if which is None else [select(store, which)]:
        path = store.directory / entry.name
        reason = ""
        try:
            loaded = store.load(entry)
            ledger.enter(loaded.index, loaded.seen)
        except CheckpointMismatchError:
            raise
        except CheckpointError as error:
            if not os.path.lexists(path):
                continue  # pruned since it was listed
            reason = str(error)
        if not reason and entry.marked is not None:
            reason = f"marked as bad: {entry.marked}"
        reports.append(Report(path, entry.step, entry.generation, not reason, reason))
    return tuple(reports)


# ── copying ──────────────────────────────────────────────────────────────────────────────────────────


def copy_to(store: Store, target: Path, which: Which | None) -> Path:
    """Copy a checkpoint into another directory, bytes and names unchanged; see the manager's method."""
    for last in (*[False] * (_RETRIES - 1), True):
        index = _chosen(store, which)
        try:
            return _copy(store, index, target)
        except CheckpointNotFoundError:
            if last or which is not None:
                raise
    raise CheckpointNotFoundError(f"{store.directory}: its checkpoints are deleted faster than copied")


def _chosen(store: Store, which: Which | None) -> layout.Index:
    """The index of a checkpoint that has just passed the gate."""
    if which is None:
        loaded = store.newest_good()
        if loaded is None:
            raise CheckpointNotFoundError(f"{store.directory}: there is no checkpoint to copy")
        return loaded.index
    entry = select(store, which)
    if entry.marked is not None:
        raise CheckpointCorruptError(
            f"{entry.name} is marked as bad ({entry.marked}); its copy would not be. Name another checkpoint."
        )
    return store.load(entry).index


def _copy(store: Store, index: layout.Index, target: Path) -> Path:
    writer = Writer(target)
    there = Store(target, store.ops, store.form)
    try:
        with writer.turn(store.ops), named_errors(target):
            there.sweep()
            path = _present(there, index)
            return path if path is not None else _commit(store, index, target)
    finally:
        writer.close()


def _present(there: Store, index: layout.Index) -> Path | None:
    """The path of the same checkpoint, where it is in the target already.

    Raises:
        CheckpointWriteError: What is there under its step and generation is something else, errno EEXIST.
    """
    if not there.generations(index.step, there.names()).count(index.generation):
        return None
    why = "another checkpoint"
    for entry in there.entries():
        if entry.name == index.name and entry.index == index:
            why = f"the same checkpoint, marked as bad ({entry.marked})"
            if entry.marked is None:
                damage = there.check(entry)
                if damage is None:
                    return there.directory / index.name
                why = f"a damaged copy of it ({damage})"
    raise CheckpointWriteError(
        f"{there.directory / index.name}: {why} has this step and generation already, and nothing is ever "
        "overwritten. Move it away, or copy into another directory.",
        errno=errno.EEXIST,
        path=str(there.directory / index.name),
    )


def _commit(store: Store, index: layout.Index, target: Path) -> Path:
    sharded = index.layout == "sharded"
    source = os.open(store.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with (
            gate.open_directory(source, index.name) if sharded else contextlib.nullcontext(source) as home,
            Commit(target, store.ops, durable=store.form.durable) as files,
        ):
            inside = files.temp_directory(index.name) if sharded else None
            written = [_copy_data(home, entry, files, inside) for entry in index.files]
            sealed = _copy_index(home, index, store.form.hmac_key, files, inside)
            if inside is None:
                committing.place_files(files, store.ops, written[0], sealed)
            else:
                committing.place_directory(files, store.ops, inside, index.name)
    finally:
        os.close(source)
    return target / index.name


def _copy_data(home: int, entry: layout.FileEntry, files: Commit, inside: Path | None) -> Written:
    with gate.open_regular(home, entry.name) as file:
        written = files.write(entry.name, lambda sink: _pour(file, entry.name, sink), inside=inside)
    if (written.size, written.sha256) != (entry.size, entry.sha256):
        raise CheckpointCorruptError(
            f"{entry.name}: {written.size} bytes of sha256 {written.sha256} were copied, the index says "
            f"{entry.size} and {entry.sha256}; it has changed since it was verified",
            expected=entry.sha256,
            found=written.sha256,
        )
    return written


def _pour(file: IO[bytes], name: str, sink: Sink) -> None:
    try:
        while part := file.read(_CHUNK):
            sink.write(part)
    except OSError as error:  # of reading: the sink keeps its own until it is closed
        raise CheckpointCorruptError(f"{name}: cannot be read ({error.strerror})") from error


def _copy_index(
    home: int, index: layout.Index, key: bytes | None, files: Commit, inside: Path | None
) -> Written:
    sharded = inside is not None
    name = layout.INDEX if sharded else layout.file_name(index.step, index.generation, "json")
    with gate.open_regular(home, name) as file:
        data = file.read(layout.MAX_INDEX_BYTES + 1)
    found = layout.parse_index(
        data, name, step=index.step, generation=index.generation, sharded=sharded, hmac_key=key
    )
    if found != index:
        raise CheckpointCorruptError(f"{name}: has changed since it was verified")
    return files.write(name, lambda sink: _put(sink, data), inside=inside)


def _put(sink: Sink, data: bytes) -> None:
    sink.write(data)
