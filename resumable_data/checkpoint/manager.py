"""CheckpointManager: when to save, what to keep, and which checkpoint a run goes on from."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from resumable_data.checkpoint import arguments, layout, pruning, transfer
from resumable_data.checkpoint.atomic import named_errors
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS, FsOps
from resumable_data.checkpoint.payload import apply_all, collect
from resumable_data.checkpoint.retention import Policy
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.store import Entry, Loaded, Store
from resumable_data.checkpoint.transfer import FoundCheckpoint, Report, Which
from resumable_data.checkpoint.writer import Writer
from resumable_data.errors import CheckpointError


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
        keep_best: Name of a metric and ``"min"`` or ``"max"``: the best by it is kept besides.
        enabled: False makes all that writes do nothing, for ranks that do not write.
        shards: None: one data file. A number from 1 to 999: a directory, the model's tensors dealt over so
            many files; or a function from their keys to numbers from 0 to 999. Any layout is read.
        durability: ``"full"``: a checkpoint survives a power cut; ``"process"``: a killed process only.
        hmac_key: At least 16 bytes that sign every index; a checkpoint without the signature is refused.
        config: Plain values that must be the same when the run resumes; saved with it, compared unless None.
        generators: RNGs besides the global ones, captured and restored: see `capture_rng_state`.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of its range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        enabled: bool = True,
        shards: int | Callable[[str], int] | None = None,
        durability: str = "full",
        hmac_key: bytes | None = None,
        config: Any = None,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        arguments.check_count("every_steps", every_steps)
        if keep_last is not None:
            arguments.check_count("keep_last", keep_last)
        arguments.check_best(keep_best)
        arguments.check_flag("enabled", enabled)
        arguments.check_shards(shards)
        arguments.check_choice("durability", durability, ("full", "process"))
        arguments.check_key(hmac_key)
        self.directory = Path(directory).absolute()  # the program may change its directory
        self.every_steps = every_steps
        self.keep_last = keep_last
        self.keep_best = None if keep_best is None else (keep_best[0], keep_best[1])
        self.enabled = enabled
        self._form = Form(shards, durability, hmac_key)
        self._config = config
        self._generators = generators
        self._ops: FsOps = FS
        self._writer = Writer(self.directory)
        self._ledger = pruning.Ledger()
        self._run: tuple[str, int] | None = None  # id and ordinal, once begun or continued
        self._resumed: str | None = None  # name of the checkpoint that the run went on from
        self._last: layout.Index | None = None  # of the newest checkpoint of this run

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
        """Where a step's newest committed generation is; where there is none, where its first would be."""
        number = arguments.check_step(step)
        first = layout.checkpoint_name(number, 0, sharded=self._form.shards is not None)
        return self.directory / (transfer.newest_generation(self._store(), number) or first)

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> Path | None:
        """Commit a checkpoint; returns once it survives what `durability` says. Then prune.

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
            The data file, or the directory of a sharded checkpoint; None when disabled.

        Raises:
            TypeError: Something that cannot be saved, by its key path; no file has been made.
            CheckpointWriteError: The save failed, or another process writes here; nothing was committed and
                the older checkpoints are as they were. Its errno is set.
        """
        if blocking is not True:
            raise NotImplementedError("blocking=False is not available yet; leave it out")
        number = arguments.check_step(step)
        clean = layout.clean_metrics(metrics)
        if not self.enabled:
            return None
        payload = prepare(collect(objects, number, state, self._config, self._generators))
        return self._write(payload, number, clean)

    def _write(self, payload: Any, step: int, metrics: Mapping[str, int | float | None]) -> Path:
        with self._writer.turn(self._ops):
            store = self._store()
            with named_errors(self.directory):
                store.sweep()
                index = self._commit(store, payload, step, metrics)
            self._after_commit(store, index)
        return self.directory / index.name

    def _commit(
        self, store: Store, payload: Any, step: int, metrics: Mapping[str, int | float | None]
    ) -> layout.Index:
        run = self._run
        if run is None or (self._last is not None and step < self._last.step):
            run = secrets.token_hex(16), store.largest_ordinal() + 1
        generation = max(store.generations(step, store.names()), default=-1) + 1
        entry = store.commit(payload, layout.Stamp(*run, step, generation, metrics))
        if entry.index is None:  # the store gives what it has written
            raise CheckpointError(f"{entry.name}: committed without an index")
        self._run = run
        self._last = entry.index
        self._ledger.enter(entry.index, store.seen(entry))
        return entry.index

    def _after_commit(self, store: Store, index: layout.Index) -> None:
        """The pointer, then pruning. A failure here undoes no commit: it is a warning, not an error."""
        try:
            store.point_to(index)
            if self.keep_last is not None or index.generation:
                self._prune(store)
        except (OSError, CheckpointError) as error:
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
            The data file or directory of the step, or None when disabled.
        """
        number = arguments.check_step(step)
        if self.enabled and self._last is not None and number == self._last.step:
            store = self._store()
            name = self._last.name
            if any(
                e.name == name and e.marked is None and self._ledger.holds(store, e) for e in store.entries()
            ):
                return self.directory / name
        return self.save(step, objects, state=state, metrics=metrics, blocking=blocking)

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────

    def prune(self) -> None:
        """Delete what `keep_last` and `keep_best` do not ask for; `save` does it by itself.

        Raises:
            CheckpointWriteError: Another process writes here, or a file cannot be deleted.
        """
        if self.enabled and self.directory.is_dir():
            with self._writer.turn(self._ops), named_errors(self.directory):
                store = self._store()
                self._prune(store)
                store.sync()

    def _prune(self, store: Store) -> None:
        last = None if self._last is None else self._last.name
        held = {name for name in (self._resumed, last) if name is not None}
        pruning.prune(store, self._ledger, self._policy, held)

    @property
    def _policy(self) -> Policy:
        return Policy(self.keep_last, self.keep_best)

    def mark_bad(self, step: Which, reason: str) -> None:
        """Mark a checkpoint so that it is never chosen again: one of a run that had gone wrong by then.

        It stays on the disk until its age has it pruned, is named in `skipped`, is never the best, and takes
        no place among `keep_last`. Restore afterwards: the run goes on from the one before.

        Args:
            step: Its step, of which the newest generation is meant, or its path.
            reason: Why, for people; at most 2000 characters are kept.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointWriteError: Another process writes here, or the mark cannot be written.
        """
        arguments.check_reason(reason)
        if not self.enabled:
            return
        store = self._store()
        with named_errors(self.directory):
            entry = transfer.select(store, step)
        with self._writer.turn(self._ops), named_errors(self.directory):
            store.mark_bad(entry, reason)
            self._ledger.forget(entry.name)
            newest = self._newest(store)
            if newest is not None and newest.index is not None:
                store.point_to(newest.index)

    def copy_to(self, directory: str | os.PathLike[str], step: Which | None = None) -> Path | None:
        """Copy a checkpoint into another directory, bytes and names unchanged, by the protocol of a save.

        It is verified before and while it is copied. Nothing is deleted there and no ``latest.json`` is
        written. Where it is there already, nothing is done.

        Args:
            directory: Created with its parents.
            step: The step, of which the newest generation is meant, or the path of the checkpoint; None for
                the newest that is whole.

        Returns:
            The copy's data file or directory; None when disabled.

        Raises:
            CheckpointNotFoundError: There is nothing to copy.
            CheckpointCorruptError, CheckpointSecurityError, CheckpointLimitError: None is whole, or the
                one asked for is not or is marked as bad.
            CheckpointWriteError: The copy failed, or another process writes there, or another checkpoint
                has its name there (errno EEXIST). Nothing was committed.
        """
        if not self.enabled:
            return None
        with named_errors(self.directory):
            return transfer.copy_to(self._store(), Path(directory).absolute(), step)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────

    def latest_path(self) -> Path | None:
        """Where the newest committed checkpoint is that is not marked as bad; None where none is; not verified."""
        entry = self._newest(self._store())
        return None if entry is None else self.directory / entry.name

    def _newest(self, store: Store) -> Entry | None:
        usable = (entry for entry in store.entries() if entry.index is not None and entry.marked is None)
        return next(usable, None)

    def best_path(self) -> Path | None:
        """Where the best checkpoint is, by the metric of `keep_best`; None where none has it; not verified.

        Of several that are as good it is the newest. All runs in the directory count.

        Raises:
            ValueError: The manager was made without `keep_best`.
        """
        if self.keep_best is None:
            raise ValueError(
                "best_path needs keep_best, such as CheckpointManager(..., keep_best=('loss', 'min'))"
            )
        entry = pruning.best(self._store(), self._policy)
        return None if entry is None else self.directory / entry.name

    def verify(self, step: Which | None = None) -> tuple[Report, ...]:
        """Read checkpoints through every check that a restore makes, and apply nothing.

        Those that are whole count for `keep_last` from then on.

        Args:
            step: A step, of which the newest generation is meant, or a path; None for all.

        Returns:
            A report for each, the newest first: ``path``, ``step``, ``generation``, ``ok``, ``reason``.

        Raises:
            CheckpointNotFoundError: The one asked for is not there.
            CheckpointMismatchError: The directory was written by a newer version.
        """
        return transfer.verify(self._store(), self._ledger, step)

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
        self._resumed = loaded.index.name
        self._last = loaded.index
        return found

    def _found(self, loaded: Loaded) -> FoundCheckpoint:
        self._ledger.enter(loaded.index, loaded.seen)
        return transfer.found(loaded, self.directory)

    def close(self) -> None:
        """Let other processes write; a later save asks for the right again. Twice is as good as once.

        It waits for a save in another thread. Called by a signal handler during one, it takes effect when
        that save ends.
        """
        self._writer.close()

    def _store(self) -> Store:
        return Store(self.directory, self._ops, self._form)
