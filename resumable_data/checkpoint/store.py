"""A directory of checkpoints: what is in it, committing one more, deleting old ones, reading the newest.

Nothing committed is ever overwritten: a second save of a step is its next generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from resumable_data.checkpoint import gate, layout
from resumable_data.checkpoint.atomic import Commit, FsOps, Sink, sweep, sync_directory, torch_save
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointLimitError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
)

_log = logging.getLogger("resumable_data")
_DAMAGE = (CheckpointCorruptError, CheckpointSecurityError, CheckpointLimitError)
_RESCANS = 20  # a writer may prune what a reader has just listed, but not for ever


class Skipped(NamedTuple):
    """A checkpoint that was passed over: its data file and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Entry:
    """A data file in the directory, with its index, or with what is wrong with that."""

    step: int
    generation: int
    index: layout.Index | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The data file's name."""
        return layout.file_name(self.step, self.generation)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that passed the gate."""

    index: layout.Index
    payload: Any
    seen: gate.Fingerprint
    skipped: tuple[Skipped, ...]


class Store:
    """The files of one directory; the caller holds the writer's lock around `commit`, `sweep` and `delete`.

    Args:
        directory: May not exist yet; readers never create it.
        ops: The system calls of writing.
    """

    def __init__(self, directory: Path, ops: FsOps) -> None:
        self.directory = directory
        self.ops = ops

    def names(self) -> list[str]:
        """All names in the directory, [] where there is none."""
        try:
            return self.ops.listdir(str(self.directory))
        except FileNotFoundError:
            return []

    def generations(self, step: int, names: list[str]) -> list[int]:
        """Generations of a step that have a data file or an index."""
        parsed = [found for name in names if (found := layout.parse_name(name)) is not None]
        return sorted({generation for number, generation, _ in parsed if number == step})

    def entries(self) -> list[Entry]:
        """Every data file: those with an unreadable index first, then the newest first.

        Raises:
            CheckpointMismatchError: An intact index of a newer schema.
            CheckpointNotFoundError: A writer deletes faster than this can read.
        """
        for _ in range(_RESCANS):
            with self._opened() as fd:
                if fd is None:
                    return []
                parsed = [layout.parse_name(name) for name in self.names()]
                data = [found for found in parsed if found is not None and found[2] == "pt"]
                entries = [_entry(fd, step, generation) for step, generation, _ in data]
            if None not in entries:  # else one was deleted meanwhile, perhaps after a newer one was written
                return sorted(filter(None, entries), key=_order, reverse=True)
        raise self._vanishing()

    def _vanishing(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"{self.directory}: its checkpoints are deleted faster than they can be read; try again"
        )

    def newest_good(self) -> Loaded | None:
        """The newest checkpoint that passes the gate, None where there is none at all.

        Raises:
            CheckpointCorruptError: There are checkpoints, and none passes; each is named with its reason.
            CheckpointSecurityError: Likewise, and each was refused as unsafe.
        """
        for _ in range(_RESCANS):
            skipped: list[tuple[Skipped, Exception | None]] = []
            vanished = False
            for entry in self.entries():
                loaded = self._try(entry, skipped)
                if loaded is not None:
                    for skip, _error in skipped:
                        _log.warning("checkpoint %s skipped: %s", skip.path, skip.reason)
                    reasons = tuple(skip for skip, _error in skipped)
                    return Loaded(loaded.index, loaded.payload, loaded.seen, reasons)
                vanished |= self.fingerprint(entry.name) is None
                if vanished:
                    break  # its deletion may have followed a newer commit
            if vanished:
                continue
            if skipped:
                raise self._none_good(skipped)
            return None
        raise self._vanishing()

    def _try(self, entry: Entry, skipped: list[tuple[Skipped, Exception | None]]) -> Loaded | None:
        path = self.directory / entry.name
        if entry.index is None:
            skipped.append((Skipped(path, entry.problem), None))
            return None
        try:
            with self._opened() as fd:
                if fd is None:
                    return None
                payload, seen = gate.load_verified(fd, entry.index)
        except CheckpointNotFoundError:
            return None  # pruned since it was listed
        except _DAMAGE as error:
            skipped.append((Skipped(path, str(error)), error))
            return None
        step = payload.get("state", {}).get("step") if isinstance(payload, dict) else None
        if step != entry.step:
            reason = f"{entry.name}: holds step {step!r}, its index says {entry.step}"
            skipped.append((Skipped(path, reason), None))
            return None
        return Loaded(entry.index, payload, seen, ())

    def _none_good(self, skipped: list[tuple[Skipped, Exception | None]]) -> Exception:
        unsafe = all(isinstance(error, CheckpointSecurityError) for _, error in skipped)
        kind = CheckpointSecurityError if unsafe else CheckpointCorruptError
        each = "\n".join(f"  {skip.path}: {skip.reason}" for skip, _ in skipped)
        return kind(
            f"None of the {len(skipped)} checkpoint(s) in {self.directory} can be used, and a run that has "
            f"some must not start afresh unasked:\n{each}\nRepair or move them, or name another directory. "
            "Nothing was overwritten.",
            found=[skip for skip, _ in skipped],
        )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of the directory, None where it does not exist."""
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def fingerprint(self, name: str) -> gate.Fingerprint | None:
        """Of a file as it is now, None where there is no such file."""
        try:
            return gate.fingerprint((self.directory / name).lstat())
        except FileNotFoundError:
            return None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, payload: Any, make_index: Callable[[layout.FileEntry], layout.Index], name: str
    ) -> layout.Index:
        """Write data and index, and rename them into place; returns once both survive a power cut.

        Args:
            payload: What `torch.save` writes.
            make_index: The index for the data file's entry.
            name: The data file's name, not in the directory yet.

        Returns:
            The index that was written.

        Raises:
            CheckpointWriteError: Nothing was committed.
        """
        placed: list[Path] = []
        with Commit(self.directory, self.ops) as commit:
            try:
                data = commit.write(name, lambda sink: torch_save(payload, sink))
                index = make_index(layout.FileEntry(name, data.size, data.sha256))
                content = layout.index_bytes(index)
                index_name = layout.file_name(index.step, index.generation, "json")
                written = commit.write(index_name, lambda sink: _put(content, sink))
                # the index first: alone it counts as nothing, so the data's rename is the commit point
                placed.append(self.directory / index_name)
                commit.rename(written)
                commit.sync()
                placed.append(self.directory / name)
                commit.rename(data)
                commit.sync()
            except BaseException:
                self._take_back(placed)
                raise
        return index

    def _take_back(self, placed: list[Path]) -> None:
        """Remove what a failed save has already renamed, the data before its index."""
        for path in reversed(placed):
            # what cannot be removed is whole: a data file with its index is a checkpoint, a lone index none
            with contextlib.suppress(OSError):
                self.ops.unlink(str(path))

    def point_to(self, index: layout.Index) -> None:
        """Write latest.json, a hint for people and scripts; nothing here depends on it."""
        content = layout.canonical(
            {
                "file": layout.file_name(index.step, index.generation),
                "generation": index.generation,
                "run": {"id": index.run_id, "ordinal": index.run_ordinal},
                "step": index.step,
            }
        )
        with Commit(self.directory, self.ops) as commit:
            commit.rename(commit.write(layout.LATEST, lambda sink: _put(content, sink)))
            commit.sync()

    def sweep(self) -> None:
        """Remove what killed writers have left: temps, tombstones, and indexes without data."""
        sweep(self.directory, self.ops, ours=layout.is_ours, alone=True)
        names = set(self.names())
        for name in names:
            parsed = layout.parse_name(name)
            lone = parsed is not None and parsed[2] == "json" and f"{name[:-5]}.pt" not in names
            if lone or layout.is_tombstone(name):
                self.ops.unlink(str(self.directory / name))

    def delete(self, entry: Entry) -> None:
        """Delete a checkpoint: its data is renamed away first, so that it is whole or gone at any moment."""
        grave = layout.tombstone_name(entry.name, secrets.token_hex(6))
        self.ops.rename(str(self.directory / entry.name), str(self.directory / grave))
        self.ops.unlink(str(self.directory / grave))
        with contextlib.suppress(FileNotFoundError):  # a damaged checkpoint may have none
            self.ops.unlink(str(self.directory / layout.file_name(entry.step, entry.generation, "json")))

    def sync(self) -> None:
        """Make deletions durable."""
        sync_directory(self.directory, self.ops)


def _order(entry: Entry) -> tuple[bool, tuple[int, int, int]]:
    unreadable = entry.index is None
    return unreadable, (0, entry.step, entry.generation) if entry.index is None else entry.index.order


def _entry(directory: int, step: int, generation: int) -> Entry | None:
    try:
        return Entry(step, generation, gate.read_index(directory, step, generation))
    except CheckpointNotFoundError:
        try:  # pruned since it was listed, or damaged?
            os.stat(layout.file_name(step, generation), dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        name = layout.file_name(step, generation, "json")
        return Entry(step, generation, None, f"its index {name} is missing")
    except _DAMAGE as error:
        return Entry(step, generation, None, str(error))


def _put(content: bytes, sink: Sink) -> None:
    sink.write(content)
