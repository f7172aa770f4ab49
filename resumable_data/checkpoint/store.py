"""A directory of checkpoints: what is in it, committing one more, deleting old ones, reading the newest.

Nothing committed is ever overwritten: a second save of a step is its next generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from resumable_data.checkpoint import committing, gate, layout
from resumable_data.checkpoint.atomic import sweep, sync_directory
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
)

_log = logging.getLogger("resumable_data")
_DAMAGE = (CheckpointCorruptError, CheckpointSecurityError, CheckpointLimitError)
_RESCANS = 20  # a writer may prune what a reader has just listed, but not for ever


class Skipped(NamedTuple):
    """A checkpoint that was passed over: its data file or directory, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the directory.

    Attributes:
        step: As its name says.
        generation: Likewise.
        sharded: Whether it is a directory.
        index: What its index says; None where that cannot be used.
        problem: Then, why.
        marked: Why `mark_bad` was called for it; None where it was not.
        refusal: The error that a problem is.
    """

    step: int
    generation: int
    sharded: bool
    index: layout.Index | None
    problem: str = ""
    marked: str | None = None
    refusal: type[CheckpointError] = CheckpointCorruptError

    @property
    def name(self) -> str:
        """The name of its data file or directory."""
        return layout.checkpoint_name(self.step, self.generation, sharded=self.sharded)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that passed the gate."""

    index: layout.Index
    payload: Any
    seen: gate.Fingerprints
    skipped: tuple[Skipped, ...] = ()


class Store:
    """The files of one directory; the caller holds the writer's lock around every method that writes.

    Args:
        directory: May not exist yet; readers never create it.
        ops: The system calls of writing.
        form: How checkpoints are written. Its key is asked for when reading, too; what is on the disk, and
            not the number of shards, decides how it is read.
    """

    def __init__(self, directory: Path, ops: FsOps, form: Form | None = None) -> None:
        self.directory = directory
        self.ops = ops
        self.form = form or Form()

    def names(self) -> list[str]:
        """All names in the directory, [] where there is none."""
        try:
            return self.ops.listdir(str(self.directory))
        except FileNotFoundError:
            return []

    def generations(self, step: int, names: list[str]) -> list[int]:
        """Generations of a step that have a file of any kind, or a directory."""
        parsed = [found for name in names if (found := layout.parse_name(name)) is not None]
        return sorted({generation for number, generation, _ in parsed if number == step})

    def committed(self, step: int) -> str | None:
        """The name of a step's newest generation that has both data and index; not verified."""
        names = set(self.names())
        for generation in reversed(self.generations(step, list(names))):
            stem = layout.file_name(step, generation, "dir")
            if (self.directory / stem / layout.INDEX).is_file():
                return stem
            if {f"{stem}.pt", f"{stem}.json"} <= names:
                return f"{stem}.pt"
        return None

    def entries(self) -> list[Entry]:
        """Every checkpoint: those with an unusable index first, then the newest first.

        Raises:
            CheckpointMismatchError: An intact index of a newer schema.
            CheckpointNotFoundError: A writer deletes faster than this can read.
        """
        for _ in range(_RESCANS):
            with self._opened() as fd:
                if fd is None:
                    return []
                parsed = [layout.parse_name(name) for name in self.names()]
                data = [found for found in parsed if found is not None and found[2] in ("pt", "dir")]
                entries = [self._entry(fd, step, number, kind == "dir") for step, number, kind in data]
            if None not in entries:  # else one was deleted meanwhile, perhaps after a newer one was written
                return sorted((e for e in entries if isinstance(e, Entry)), key=_order, reverse=True)
        raise self._vanishing()

    def _entry(self, directory: int, step: int, generation: int, sharded: bool) -> Entry | str | None:
        """The checkpoint of that name; None where it is gone, its name where it is none."""
        entry = Entry(step, generation, sharded, None)
        with contextlib.suppress(CheckpointNotFoundError):
            entry = replace(entry, marked=gate.read_mark(directory, step, generation))
        try:
            index = gate.read_index(directory, step, generation, sharded=sharded, hmac_key=self.form.hmac_key)
            return replace(entry, index=index)
        except CheckpointNotFoundError:
            members = gate.members(directory, entry.name, sharded=sharded)
            if members is None:  # pruned since it was listed
                return None
            if not members:
                return entry.name
            own = layout.INDEX if sharded else layout.file_name(step, generation, "json")
            return replace(entry, problem=f"its index {own} is missing")
        except _DAMAGE as error:
            return replace(entry, problem=str(error), refusal=type(error))

    def largest_ordinal(self) -> int:
        """Of the runs in the directory, those signed with another key included; 0 where there is none."""
        ordinals = [0]
        with self._opened() as fd:
            for entry in self.entries() if fd is not None else ():
                index = entry.index
                if index is None and fd is not None:
                    with contextlib.suppress(CheckpointError):  # an index that says nothing
                        index = gate.read_index(fd, entry.step, entry.generation, sharded=entry.sharded)
                ordinals.append(0 if index is None else index.run_ordinal)
        return max(ordinals)

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
                    return replace(loaded, skipped=reasons)
                vanished |= not self._is_there(entry.name)
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
        if entry.marked is not None:
            skipped.append((Skipped(path, f"marked as bad: {entry.marked}"), None))
            return None
        try:
            return self.load(entry)
        except CheckpointNotFoundError as error:
            if self._is_there(entry.name):  # pruning takes all of it away at once: a part of it is missing
                skipped.append((Skipped(path, f"not all of it is there: {error}"), error))
            return None
        except _DAMAGE as error:
            skipped.append((Skipped(path, str(error)), error))
            return None

    def load(self, entry: Entry) -> Loaded:
        """One checkpoint through the gate, marked or not.

        Raises:
            CheckpointNotFoundError: A file of it is not there.
            CheckpointCorruptError, CheckpointSecurityError, CheckpointLimitError: It does not pass.
        """
        if entry.index is None:
            raise entry.refusal(entry.problem)
        with self._opened() as fd:
            if fd is None:
                raise CheckpointNotFoundError(f"{self.directory}: no such directory")
            payload, seen = gate.load_verified(fd, entry.index)
        state = payload.get("state") if isinstance(payload, dict) else None
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is not int or step != entry.step:
            raise CheckpointCorruptError(
                f"{entry.name}: holds step {repr(step)[:40]}, its index says {entry.step}",
                expected=entry.step,
                found=step,
            )
        return Loaded(entry.index, payload, seen)

    def check(self, entry: Entry) -> str | None:
        """Verify a checkpoint in full, by reading it; what is wrong with it, None where nothing is."""
        try:
            self.load(entry)
        except (CheckpointNotFoundError, *_DAMAGE) as error:
            return str(error)
        return None

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

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(self.directory / name)

    def seen(self, entry: Entry) -> gate.Fingerprints | None:
        """Of a checkpoint's data files as they are now; None where one is missing or the index is unusable."""
        if entry.index is None:
            return None
        home = self.directory / entry.name if entry.sharded else self.directory
        try:
            return tuple(gate.fingerprint((home / file.name).lstat()) for file in entry.index.files)
        except (FileNotFoundError, NotADirectoryError):
            return None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────

    def commit(self, payload: Any, stamp: layout.Stamp) -> Entry:
        """Write a checkpoint and rename it into place; see `committing.commit`.

        Raises:
            CheckpointWriteError: Nothing was committed.
        """
        index = committing.commit(self.directory, self.ops, self.form, payload, stamp)
        return Entry(index.step, index.generation, index.layout == "sharded", index)

    def point_to(self, index: layout.Index) -> None:
        """Write latest.json, a hint for people and scripts; nothing here depends on it."""
        content = layout.canonical(
            {
                "file": index.name,
                "generation": index.generation,
                "run": {"id": index.run_id, "ordinal": index.run_ordinal},
                "step": index.step,
            }
        )
        committing.write_file(self.directory, self.ops, self.form, layout.LATEST, content)

    def mark_bad(self, entry: Entry, reason: str) -> None:
        """Mark a checkpoint: it stays on the disk, and is never chosen again."""
        name = layout.file_name(entry.step, entry.generation, "bad.json")
        content = layout.bad_bytes(entry.step, entry.generation, reason)
        committing.write_file(self.directory, self.ops, self.form, name, content)

    def sweep(self) -> None:
        """Remove what killed writers have left: temps, tombstones, indexes and marks without data."""
        sweep(self.directory, self.ops, ours=layout.is_ours, alone=True, is_member=layout.is_member)
        names = set(self.names())
        for name in names:
            if layout.entombed(name) is not None:
                committing.bury(self.directory, self.ops, name)
            elif self._is_lone(name, names):
                self.ops.unlink(str(self.directory / name))

    def _is_lone(self, name: str, names: set[str]) -> bool:
        parsed = layout.parse_name(name)
        if parsed is None or parsed[2] not in ("json", "bad.json"):
            return False
        step, generation, kind = parsed
        owners = {layout.file_name(step, generation)}
        if kind == "bad.json":
            owners.add(layout.file_name(step, generation, "dir"))
        return not owners & names

    def delete(self, entry: Entry) -> None:
        """Delete a checkpoint, its data first; its mark goes last, so that it never looks good again."""
        committing.remove(self.directory, self.ops, entry.name)
        kinds = [] if entry.sharded else ["json"]
        # a directory that was put together by hand may hold the other layout of it, under the same mark
        other = layout.checkpoint_name(entry.step, entry.generation, sharded=not entry.sharded)
        kinds += [] if entry.marked is None or self._is_there(other) else ["bad.json"]
        for kind in kinds:
            path = self.directory / layout.file_name(entry.step, entry.generation, kind)
            with contextlib.suppress(FileNotFoundError):  # a damaged checkpoint may have none
                self.ops.unlink(str(path))

    def sync(self) -> None:
        """Make deletions durable."""
        if self.form.durable:
            sync_directory(self.directory, self.ops)


def _order(entry: Entry) -> tuple[bool, tuple[int, int, int]]:
    unusable = entry.index is None
    return unusable, (0, entry.step, entry.generation) if entry.index is None else entry.index.order
