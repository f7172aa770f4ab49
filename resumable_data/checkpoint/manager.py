"""CheckpointManager: when to save, what to keep, and which checkpoint a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from resumable_data.checkpoint import arguments, layout, pruning, transfer
from resumable_data.checkpoint.atomic import named_errors
from resumable_data.checkpoint.background import Background
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS, FsOps
from resumable_data.checkpoint.payload import apply_all, collect
from resumable_data.checkpoint.retention import Policy
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.session import Session, newest
from resumable_data.checkpoint.staging import Staging
from resumable_data.checkpoint.store import Loaded, Store
from resumable_data.checkpoint.transfer import FoundCheckpoint, Report, Which


class CheckpointManager:
    """Saves a run into a directory and finds the newest checkpoint that is whole.

    A save is durable when it returns (unless it runs in the background), and nothing committed is ever
    overwritten. One process writes a directory at a time; managers of one process share the right. It is
    taken at the first save and given back by `close`. Reading needs no right and changes nothing on the disk.

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
        when_busy: What ``save(..., blocking=False)`` does while an earlier one still runs: ``"wait"`` for it,
            or ``"skip"`` this one, with a warning in the log.

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
        when_busy: str = "wait",
    ) -> None:
        arguments.check_count("every_steps", every_steps)
        if keep_last is not None:
            arguments.check_count("keep_last", keep_last)
        arguments.check_best(keep_best)
        arguments.check_flag("enabled", enabled)
        arguments.check_shards(shards)
        arguments.check_choice("durability", durability, ("full", "process"))
        arguments.check_key(hmac_key)
        arguments.check_choice("when_busy", when_busy, ("wait", "skip"))
        self.directory = Path(directory).absolute()  # the program may change its directory
        self.every_steps = every_steps
        self.keep_last = keep_last
        self.keep_best = None if keep_best is None else (keep_best[0], keep_best[1])
        self.enabled = enabled
        self.when_busy = when_busy
        self._form = Form(shards, durability, hmac_key)
        self._config = config
        self._generators = generators
        self._ops: FsOps = FS
        self._session = Session(self.directory)
        self._background = Background()
        self._staging = Staging()

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
            blocking: False returns once everything is copied aside, as it was at the call; a thread commits it,
                one at a time. Its error is raised, once, by the next call that writes, loads or verifies.

        Returns:
            The data file, or the directory of a sharded checkpoint, or where it will be; None when disabled,
            or when skipped.

        Raises:
            TypeError: Something that cannot be saved, by its key path; no file has been made.
            CheckpointWriteError: The save failed, or another process writes here; nothing was committed and
                the older checkpoints are as they were. Its errno is set.
        """
        arguments.check_flag("blocking", blocking)
        number = arguments.check_step(step)
        clean = layout.clean_metrics(metrics)
        if not self.enabled:
            return None

        def collected() -> Any:
            return prepare(collect(objects, number, state, self._config, self._generators))

        store = self._store()
        if blocking:
            self._background.settle()
            return self._session.save(store, self._policy, collected(), number, clean)
        announced: list[Path] = []

        def stage() -> Callable[[], object]:
            payload = self._staging.copy(collected())
            announced.append(self._session.announce(store, number))
            return lambda: self._session.save(store, self._policy, payload, number, clean)

        begun = self._background.submit(stage, f"the checkpoint of step {number}", self.when_busy)
        return announced[0] if begun else None

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
        self._background.settle()
        there = self._session.saved(self._store(), number) if self.enabled else None
        if there is not None:
            return there
        return self.save(step, objects, state=state, metrics=metrics, blocking=blocking)

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────

    def prune(self) -> None:
        """Delete what `keep_last` and `keep_best` do not ask for; `save` does it by itself.

        Raises:
            CheckpointWriteError: Another process writes here, or a file cannot be deleted.
        """
        self._background.settle()
        if self.enabled and self.directory.is_dir():
            self._session.prune(self._store(), self._policy)

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
        self._background.settle()
        store = self._store()
        with named_errors(self.directory):
            entry = transfer.select(store, step)
        self._session.mark_bad(store, entry, reason)

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
        self._background.settle()
        with named_errors(self.directory):
            return transfer.copy_to(self._store(), Path(directory).absolute(), step)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────

    def latest_path(self) -> Path | None:
        """Where the newest committed checkpoint is that is not marked as bad; None where none is; not verified."""
        index = newest(self._store())
        return None if index is None else self.directory / index.name

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
        self._background.settle()
        entry = pruning.best(self._store(), self._policy)
        return None if entry is None else self.directory / entry.name

    def verify(self, step: Which | None = None) -> tuple[Report, ...]:
        """Read checkpoints through every check that a restore makes, and apply nothing.

        Those that are whole count for `keep_last` from then on.

        Args:
            step: A step, of which the newest generation is meant, or a path; None for all.

        Returns:
            A report for each: ``path``, ``step``, ``generation``, ``ok``, ``reason``. Those whose index cannot
            be used come first, then the newest.

        Raises:
            CheckpointNotFoundError: The one asked for is not there.
            CheckpointMismatchError: The directory was written by a newer version.
        """
        self._background.settle()
        return transfer.verify(self._store(), self._session.ledger, step)

    def load_latest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is whole, read and not applied; None where there is none at all.

        Raises:
            CheckpointCorruptError: There are checkpoints and none is whole; each is named with its reason.
            CheckpointSecurityError: Likewise, where each was refused as unsafe.
            CheckpointMismatchError: The directory was written by a newer version.
        """
        self._background.settle()
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
        self._background.settle()
        loaded = self._store().newest_good()
        if loaded is None:
            return None
        found = self._found(loaded)
        apply_all(loaded.payload, objects, override, strict_rng, self._config, self._generators)
        self._session.resume(loaded.index)
        return found

    def _found(self, loaded: Loaded) -> FoundCheckpoint:
        self._session.ledger.enter(loaded.index, loaded.seen)
        return transfer.found(loaded, self.directory)

    def close(self) -> None:
        """End the save in flight and let other processes write; a later save asks for the right again.

        Twice is as good as once. It waits for a save in another thread. Called by a signal handler during a
        save in its own, it takes effect when that ends.

        Raises:
            BaseException: What a save in the background failed with, if no call has raised it.
        """
        self._background.wait()  # an interrupt here leaves it running, and the right with it
        try:
            self._background.raise_pending()
        finally:
            self._staging.release()
            self._session.writer.close()

    def _store(self) -> Store:
        return Store(self.directory, self._ops, self._form)
