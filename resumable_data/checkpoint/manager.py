"""CheckpointManager: when to save, what to keep, and which checkpoint a run goes on from."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import secrets
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from resumable_data.checkpoint import layout
from resumable_data.checkpoint.atomic import FS, FsOps, make_directory, named_errors
from resumable_data.checkpoint.gate import Fingerprint
from resumable_data.checkpoint.lock import DirectoryLock, acquire, is_current, release
from resumable_data.checkpoint.payload import apply_all, collect
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.store import Entry, Loaded, Skipped, Store
from resumable_data.errors import CheckpointWriteError


@dataclass(frozen=True)
class FoundCheckpoint:
    """What `CheckpointManager.restore` and `load_latest` found.

    Attributes:
        step: Steps done when it was saved.
        state: The caller's values, with ``step``, ``epoch`` and ``batch_in_epoch``.
        extra: Plain values and the states of further objects, by name.
        payload: All of it, in the shape of `build_payload`; tensors are on the CPU.
        path: The data file.
        skipped: Newer checkpoints that did not pass verification, and why; empty as a rule.
    """

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    payload: dict[str, Any]
    path: Path
    skipped: tuple[Skipped, ...]


class CheckpointManager:
    """Saves a run into a directory and finds the newest checkpoint that is whole.

    A save is durable when it returns, and nothing committed is ever overwritten. One process writes a
    directory at a time; managers of one process share the right. It is taken at the first save and given
    back by `close`. Reading needs no right and changes nothing on the disk.

    Args:
        directory: Created with its parents at the first save.
        every_steps: `should_save` is true at multiples of it; at least 1.
        keep_last: Checkpoints to keep, at least 1; None keeps all. Counted are those that this manager has
            written or verified and that have not changed since; the one resumed from is kept besides.
        keep_best: Not available yet.
        enabled: False makes `save` and `finish` do nothing, for ranks that do not write.
        shards: Not available yet.
        durability: ``"full"``.
        hmac_key: Not available yet.
        config: Plain values that must be the same when the run resumes; saved with it, compared unless None.
        generators: RNGs besides the global ones, captured and restored: see `capture_rng_state`.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of its range.
        NotImplementedError: An argument that is not available yet, by its name.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        enabled: bool = True,
        shards: int | None = None,
        durability: str = "full",
        hmac_key: bytes | None = None,
        config: Any = None,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        _check_count("every_steps", every_steps)
        if keep_last is not None:
            _check_count("keep_last", keep_last)
        if type(enabled) is not bool:
            raise TypeError(f"enabled must be a bool, found {enabled!r}")
        if durability not in ("full", "process"):
            raise ValueError(f"durability must be 'full', found {durability!r}")
        for name, value in (("keep_best", keep_best), ("shards", shards), ("hmac_key", hmac_key)):
            if value is not None:
                raise NotImplementedError(f"{name} is not available yet; leave it out")
        if durability != "full":
            raise NotImplementedError("durability other than 'full' is not available yet")
        self.directory = Path(directory).absolute()  # the program may change its directory
        self.every_steps = every_steps
        self.keep_last = keep_last
        self.enabled = enabled
        self._config = config
        self._generators = generators
        self._ops: FsOps = FS
        self._guard = threading.RLock()  # held while this manager writes or gives its right back
        self._lock: DirectoryLock | None = None
        self._closing = False  # `close` was called by a signal handler in the midst of a save
        self._run: tuple[str, int] | None = None  # id and ordinal, once begun or continued
        self._resumed: str | None = None  # name of the data file that the run went on from
        self._last_step: int | None = None  # of the newest checkpoint of this run
        self._verified: dict[str, Fingerprint] = {}

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────

    def should_save(self, step: int) -> bool:
        """Whether `every_steps` asks for a save after `step` steps; never at 0, never when disabled."""
        return self.enabled and step > 0 and step % self.every_steps == 0

    def path_for(self, step: int) -> Path:
        """The data file of a step's newest committed generation; where there is none, of its first."""
        number = _check_step(step)
        names = set(self._store().names())
        committed = [
            generation
            for generation in self._store().generations(number, list(names))
            if {layout.file_name(number, generation, kind) for kind in ("pt", "json")} <= names
        ]
        return self.directory / layout.file_name(number, max(committed, default=0))

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> Path | None:
        """Commit a checkpoint; returns once it survives a power cut. Then prune.

        Called by the one process that writes, at any step: `should_save` is not asked. A second save of a
        step is its next generation. The first save without a `restore` begins a run, which is newer than
        every other run in the directory, whatever their steps; so does a step below the last one saved.
        From a signal handler it is refused while a save is under way: let the handler set a flag instead.

        Args:
            step: Steps done, 0 to 999,999,999,999.
            objects: As for `build_payload`.
            state: The caller's own values, as for `build_payload`.
            metrics: Numbers by name, for the index; those not finite are kept as null.
            blocking: True.

        Returns:
            The data file, or None when disabled.

        Raises:
            TypeError: Something that cannot be saved, by its key path; no file has been made.
            CheckpointWriteError: The save failed, or another process writes here; nothing was committed and
                the older checkpoints are as they were. Its errno is set.
        """
        if blocking is not True:
            raise NotImplementedError("blocking=False is not available yet; leave it out")
        number = _check_step(step)
        clean = layout.clean_metrics(metrics)
        if not self.enabled:
            return None
        payload = prepare(collect(objects, number, state, self._config, self._generators))
        with self._writing() as store:
            with named_errors(self.directory):
                store.sweep()
                index = self._commit(store, payload, number, clean)
            self._after_commit(store, index)
        return self.directory / layout.file_name(number, index.generation)

    def _commit(
        self, store: Store, payload: Any, step: int, metrics: Mapping[str, int | float | None]
    ) -> layout.Index:
        back = self._last_step is not None and step < self._last_step
        run = self._new_run(store) if self._run is None or back else self._run
        generation = max(store.generations(step, store.names()), default=-1) + 1
        name = layout.file_name(step, generation)
        index = store.commit(
            payload, lambda entry: layout.Index(*run, step, generation, metrics, (entry,)), name
        )
        self._run = run
        self._last_step = step
        seen = store.fingerprint(name)
        if seen is not None:
            self._verified[name] = seen
        return index

    def _new_run(self, store: Store) -> tuple[str, int]:
        ordinals = [entry.index.run_ordinal for entry in store.entries() if entry.index is not None]
        return secrets.token_hex(16), max(ordinals, default=0) + 1

    def _after_commit(self, store: Store, index: layout.Index) -> None:
        """The pointer, then pruning. A failure here undoes no commit: it is a warning, not an error."""
        try:
            store.point_to(index)
            if self.keep_last is not None or index.generation:
                self._prune(store)
        except OSError as error:
            warnings.warn(
                f"The checkpoint of step {index.step} is committed, but tidying up after it failed: {error}",
                stacklevel=4,
            )

    def finish(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> Path | None:
        """Save the last step of a run, unless its checkpoint is there already; arguments as for `save`.

        Returns:
            The data file of the step, or None when disabled.
        """
        if self.enabled and _check_step(step) == self._last_step:
            path = self.path_for(step)
            if self._is_verified(self._store(), path.name):
                return path
        return self.save(step, objects, state=state, metrics=metrics, blocking=blocking)

    def prune(self) -> None:
        """Delete what `keep_last` does not ask for; `save` does it by itself.

        Raises:
            CheckpointWriteError: Another process writes here, or a file cannot be deleted.
        """
        if self.enabled and self.directory.is_dir():
            with self._writing() as store, named_errors(self.directory):
                self._prune(store)
                store.sync()

    def _prune(self, store: Store) -> None:
        counted: set[tuple[int, int]] = set()  # (ordinal, step) of good checkpoints, the newest first
        doomed: list[Entry] = []
        for entry in store.entries():
            if entry.index is None:
                continue  # of which run it is nobody knows
            place = (entry.index.run_ordinal, entry.step)
            enough = self.keep_last is not None and len(counted) >= self.keep_last
            if (enough or place in counted) and entry.name != self._resumed:
                doomed.append(entry)
            elif self._is_verified(store, entry.name):
                counted.add(place)
        for entry in reversed(doomed):  # the oldest first
            store.delete(entry)
            self._verified.pop(entry.name, None)  # durable with the next commit, if not before

    def _is_verified(self, store: Store, name: str) -> bool:
        return name in self._verified and store.fingerprint(name) == self._verified[name]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────

    def latest_path(self) -> Path | None:
        """The data file of the newest committed checkpoint, None where there is none; not verified."""
        for entry in self._store().entries():
            if entry.index is not None:
                return self.directory / entry.name
        return None

    def load_latest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is whole, read and not applied; None where there is none at all.

        Raises:
            CheckpointCorruptError: There are checkpoints and none is whole; each is named with its reason.
            CheckpointSecurityError: Likewise, where each was refused as unsafe.
            CheckpointMismatchError: The directory was written by a newer version.
        """
        loaded = self._store().newest_good()
        return None if loaded is None else self._found(loaded)

    def restore(
        self, objects: Mapping[str, Any], *, override: Iterable[str] = (), strict_rng: bool = True
    ) -> FoundCheckpoint | None:
        """Set objects, training flags, gradients and RNGs to the newest checkpoint that is whole.

        Every rank calls it, before the first batch. Damaged checkpoints are passed over, and named in the
        result; one that is whole and does not fit is an error, never an older one instead.

        Args:
            objects: As at the save, or fewer; plain values come back in the result's ``extra``.
            override: Differences to accept: ``"config"``, and names that the loader knows.
            strict_rng: As for `apply_payload`.

        Returns:
            What was found, or None where there is no checkpoint: a fresh start.

        Raises:
            CheckpointMismatchError: Another model, optimizer, configuration or schema; nothing was changed.
            CheckpointCorruptError: There are checkpoints and none is whole; each is named with its reason.
            CheckpointSecurityError: Likewise, where each was refused as unsafe.
            StateMismatchError, RNGRestoreError: From the loader and the RNG, unchanged.
        """
        loaded = self._store().newest_good()
        if loaded is None:
            return None
        found = self._found(loaded)
        apply_all(loaded.payload, objects, override, strict_rng, self._config, self._generators)
        self._run = (loaded.index.run_id, loaded.index.run_ordinal)
        self._resumed = found.path.name
        self._last_step = found.step
        return found

    def _found(self, loaded: Loaded) -> FoundCheckpoint:
        name = layout.file_name(loaded.index.step, loaded.index.generation)
        self._verified[name] = loaded.seen
        payload = loaded.payload
        return FoundCheckpoint(
            loaded.index.step,
            payload["state"],
            payload.get("extra", {}),
            payload,
            self.directory / name,
            loaded.skipped,
        )

    # ── the right to write ───────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Let other processes write; a later save asks for the right again. Twice is as good as once.

        It waits for a save in another thread. Called by a signal handler during one, it takes effect when
        that save ends.
        """
        with self._guard:
            lock = self._lock
            self._closing = lock is not None and lock.writer is self
            if lock is not None and not self._closing:
                self._lock = None
                release(lock)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Store]:
        """The right to write, and the turn of this manager among those of the process."""
        with self._guard:
            make_directory(self.directory, self._ops)
            lock = self._held_lock()
            with lock.mutex:
                if lock.writer is not None:  # the mutex lets its own thread in
                    raise CheckpointWriteError(
                        f"{self.directory}: this thread is in the midst of a save; a signal handler must not "
                        "begin another. Let it set a flag, and save after the step.",
                        errno=errno.EBUSY,
                        path=str(self.directory),
                    )
                try:
                    lock.writer = self
                    yield self._store()
                finally:
                    lock.writer = None
                    if self._closing:
                        self.close()

    def _held_lock(self) -> DirectoryLock:
        with named_errors(self.directory):
            lock = self._lock
            if lock is not None and lock.writer is not self and not is_current(lock, self.directory):
                self.close()
            if self._lock is None:
                self._lock = acquire(self.directory, self._ops)
            return self._lock

    def _store(self) -> Store:
        return Store(self.directory, self._ops)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, found {value}")


def _check_step(step: Any) -> int:
    if isinstance(step, bool):
        raise TypeError(f"step must be an int, found {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, found {step!r}") from None
    if not 0 <= number <= layout.MAX_STEP:
        raise ValueError(f"step must be from 0 to {layout.MAX_STEP}, found {number}")
    return number
