"""The retention policy applied to a directory: what a manager knows of its checkpoints, and what goes."""

from __future__ import annotations

from collections.abc import Iterable

from resumable_data.checkpoint.gate import Fingerprints
from resumable_data.checkpoint.layout import Index
from resumable_data.checkpoint.retention import Policy, Record
from resumable_data.checkpoint.store import Entry, Store


class Ledger:
    """The checkpoints that one manager wrote or verified, and how their files looked then."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Index, Fingerprints]] = {}

    def enter(self, index: Index, seen: Fingerprints | None) -> None:
        """Remember a checkpoint that is whole; `seen` is None where its files are gone already."""
        if seen is not None:
            self._known[index.name] = index, seen

    def forget(self, name: str) -> None:
        """Count a checkpoint no longer."""
        self._known.pop(name, None)

    def holds(self, store: Store, entry: Entry) -> bool:
        """Whether a checkpoint was found whole, and neither index nor data have changed since."""
        known = self._known.get(entry.name)
        return known is not None and known == (entry.index, store.seen(entry))


def records(
    entries: Iterable[Entry], store: Store, ledger: Ledger, policy: Policy, held: Iterable[str] = ()
) -> list[Record]:
    """What the policy is asked about, in the order of the entries.

    Args:
        entries: From the store.
        store: Where their files are.
        ledger: What is known of them.
        policy: Names the metric.
        held: Names of checkpoints that are kept whatever their age.
    """
    keep = set(held)
    return [
        Record(
            entry.name,
            0 if entry.index is None else entry.index.run_ordinal,
            entry.step,
            entry.generation,
            metric=_metric(entry.index, policy),
            counted=ledger.holds(store, entry),
            readable=entry.index is not None,
            marked=entry.marked is not None,
            held=entry.name in keep,
        )
        for entry in entries
    ]


def _metric(index: Index | None, policy: Policy) -> float | None:
    value = None if index is None or policy.keep_best is None else index.metrics.get(policy.keep_best[0])
    try:
        return None if value is None else float(value)
    except OverflowError:  # an int of another writer's that no float can hold
        return None


def prune(store: Store, ledger: Ledger, policy: Policy, held: Iterable[str]) -> None:
    """Delete what the policy does not keep, the oldest first; durable with the next sync of the directory.

    Raises:
        OSError: Something could not be deleted; what is older is gone.
    """
    entries = store.entries()
    by_name = {entry.name: entry for entry in entries}
    for record in policy.doomed(records(entries, store, ledger, policy, held)):
        store.delete(by_name[record.name])
        ledger.forget(record.name)


def best(store: Store, policy: Policy) -> Entry | None:
    """The best checkpoint by its index, None where there is none; not verified."""
    entries = store.entries()
    found = policy.best(records(entries, store, Ledger(), policy))
    return next((entry for entry in entries if found is not None and entry.name == found.name), None)
