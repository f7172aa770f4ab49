"""Which checkpoints of a directory may go: a policy over plain records, which touches no file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """What the policy knows of a checkpoint.

    Attributes:
        name: What it is called; one of a kind.
        ordinal: Number of its run in the directory; 0 where it is unknown.
        step: Of the checkpoint.
        generation: 0 for a step's first save, 1 for its second.
        metric: The one that the best is chosen by; None where it has none.
        counted: Known to be whole: written or fully verified by this manager, and unchanged since.
        readable: Its index can be used. One that cannot is left alone: of which run it is nobody knows.
        marked: Marked as bad.
        held: The one that the run went on from, or wrote last.
    """

    name: str
    ordinal: int
    step: int
    generation: int
    metric: float | None = None
    counted: bool = False
    readable: bool = True
    marked: bool = False
    held: bool = False

    @property
    def order(self) -> tuple[int, int, int, str]:
        """By which one is newer than another: as numbers, and never by file times."""
        return self.ordinal, self.step, self.generation, self.name


@dataclass(frozen=True)
class Policy:
    """What is asked of the directory.

    Attributes:
        keep_last: Checkpoints known to be whole that are kept, at least 1; None for all.
        keep_best: Name of a metric and "min" or "max", None for no best.
    """

    keep_last: int | None = None
    keep_best: tuple[str, str] | None = None

    def best(self, records: Iterable[Record]) -> Record | None:
        """The best by its metric, the newest of several; None where none has the metric."""
        if self.keep_best is None:
            return None
        sign = -1 if self.keep_best[1] == "min" else 1
        rated = [
            (sign * record.metric, record.order, record)
            for record in records
            if record.readable
            and not record.marked
            and record.metric is not None
            and math.isfinite(record.metric)
        ]
        return max(rated, key=lambda entry: entry[:2])[2] if rated else None

    def doomed(self, records: Iterable[Record]) -> list[Record]:
        """What is to be deleted, the oldest first.

        Walking from the newest, checkpoints known to be whole are counted by (run, step). What is older than
        the `keep_last` newest of them goes, and so does a generation of a step of which a newer one is
        counted. Kept besides are the best; the best that is counted, since the best itself may turn out to
        be damaged; and the held one. Damaged and unverified ones take no place of a counted one, and go by
        their age like all others; so do those marked as bad. Unreadable ones are never deleted.
        """
        readable = sorted((r for r in records if r.readable), key=lambda record: record.order, reverse=True)
        kept = {self.best(readable), self.best(r for r in readable if r.counted)}
        places: set[tuple[int, int]] = set()
        gone = []
        for record in readable:
            place = record.ordinal, record.step
            enough = self.keep_last is not None and len(places) >= self.keep_last
            held = record in kept or (record.held and not record.marked)
            if (enough or place in places) and not held:
                gone.append(record)
            elif record.counted and not record.marked:
                places.add(place)
        return gone[::-1]
