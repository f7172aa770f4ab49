"""What one manager does in its directory: the run it writes, what it knows to be whole, its saves, its pruning."""

from __future__ import annotations

import errno
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resumable_data.checkpoint import layout, pruning
from resumable_data.checkpoint.atomic import named_errors
from resumable_data.checkpoint.retention import Policy
from resumable_data.checkpoint.store import Entry, Store
from resumable_data.checkpoint.writer import Writer
from resumable_data.errors import CheckpointError, CheckpointWriteError

Metrics = Mapping[str, "int | float | None"]


class Session:
    """The state of one manager between its calls; every method that writes takes the right to, and its turn.

    Args:
        directory: Created with its parents at the first turn.

    Attributes:
        writer: The right to write.
        ledger: The checkpoints that are known to be whole.
        last: Index of the newest checkpoint of the run, None before the first.
    """

    def __init__(self, directory: Path) -> None:
        self.writer = Writer(directory)
        self.ledger = pruning.Ledger()
        self.last: layout.Index | None = None
        self._run: tuple[str, int] | None = None  # id and ordinal, once begun or continued
        self._resumed: str | None = None  # name of the checkpoint that the run went on from

    def resume(self, index: layout.Index) -> None:
        """Continue the run of a checkpoint that has been applied."""
        self._run = index.run_id, index.run_ordinal
        self._resumed = index.name
        self.last = index

    def save(self, store: Store, policy: Policy, payload: Any, step: int, metrics: Metrics) -> Path:
        """Commit a checkpoint as the next generation of its step, then prune.

        Raises:
            CheckpointWriteError: Nothing was committed.
        """
        with self.writer.turn(store.ops):
            with named_errors(store.directory):
                store.sweep()
                index = self._commit(store, payload, step, metrics)
            self._after_commit(store, policy, index)
        return store.directory / index.name

    def announce(self, store: Store, step: int) -> Path:
        """Take the right to write, and say where the next checkpoint of a step will be.

        Raises:
            CheckpointWriteError: Another process writes here, or nobody can.
        """
        with self.writer.turn(store.ops), named_errors(store.directory):
            sharded = store.form.shards is not None
            name = layout.checkpoint_name(step, _next_generation(store, step), sharded=sharded)
        return store.directory / name

    def _commit(self, store: Store, payload: Any, step: int, metrics: Metrics) -> layout.Index:
        run = self._run
        if run is None or (self.last is not None and step < self.last.step):
            run = secrets.token_hex(16), store.largest_ordinal() + 1
            if run[1] > layout.MAX_ORDINAL:
                raise _used_up(
                    store, f"an index there says it is of run {run[1] - 1}, so that none can be newer"
                )
        stamp = layout.Stamp(*run, step, _next_generation(store, step), metrics)
        entry = store.commit(payload, stamp)
        if entry.index is None:  # for the type: what was just written has one
            raise CheckpointError(f"{entry.name}: committed without an index")
        self._run = run
        self.last = entry.index
        self.ledger.enter(entry.index, store.seen(entry))
        return entry.index

    def _after_commit(self, store: Store, policy: Policy, index: layout.Index) -> None:
        """The pointer, then pruning. A failure here undoes no commit: it is a warning, not an error."""
        try:
            store.point_to(index)
            if policy.keep_last is not None or index.generation:
                self._prune(store, policy)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"The checkpoint of step {index.step} is committed, but tidying up after it failed: {error}",
                stacklevel=4,
            )

    def prune(self, store: Store, policy: Policy) -> None:
        """Delete what the policy does not keep, durably.

        Raises:
            CheckpointWriteError: Another process writes here, or a file cannot be deleted.
        """
        with self.writer.turn(store.ops), named_errors(store.directory):
            self._prune(store, policy)
            store.sync()

    def _prune(self, store: Store, policy: Policy) -> None:
        last = None if self.last is None else self.last.name
        held = [name for name in (self._resumed, last) if name is not None]
        pruning.prune(store, self.ledger, policy, held)

    def mark_bad(self, store: Store, entry: Entry, reason: str) -> None:
        """Mark a checkpoint, and point at the newest that is not marked.

        Raises:
            CheckpointWriteError: Another process writes here, or the mark cannot be written.
        """
        with self.writer.turn(store.ops), named_errors(store.directory):
            store.mark_bad(entry, reason)
            self.ledger.forget(entry.name)
            index = newest(store)
            if index is not None:
                store.point_to(index)

    def saved(self, store: Store, step: int) -> Path | None:
        """Where the run's last checkpoint is, if it is of this step, whole and not marked; else None."""
        if self.last is None or step != self.last.step:
            return None
        for entry in store.entries():
            if entry.name == self.last.name and entry.marked is None and self.ledger.holds(store, entry):
                return store.directory / entry.name
        return None


def newest(store: Store) -> layout.Index | None:
    """The index of the newest checkpoint that has one and is not marked; not verified."""
    return next((entry.index for entry in store.entries() if entry.index and entry.marked is None), None)


def _next_generation(store: Store, step: int) -> int:
    generation = max(store.generations(step, store.names()), default=-1) + 1
    if generation > layout.MAX_GENERATION:
        raise _used_up(store, f"a file of step {step} there has the last generation that a name can have")
    return generation


def _used_up(store: Store, why: str) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"{store.directory}: {why}, and what is saved now would never be found. No run comes that far; find out "
        "who put it there and move it away, or save into another directory. Nothing was written.",
        errno=errno.EOVERFLOW,
        path=str(store.directory),
    )
