"""An epoch as it is dealt to this rank: what its batches hold, as tickets.

A ``Dealer`` belongs to a loader and deals any epoch; a ``Deal`` is one epoch from one start. Orders that are
a function of the position are dealt by arithmetic alone; a user's sampler is read as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from resumable_data.bucketing import BatchPlan
from resumable_data.fetch import Ticket
from resumable_data.orders import EpochOrder
from resumable_data.plan import Plan
from resumable_data.sampled import START, Mark, Reading

#: Positions computed at once; the first chunk is one batch, so that a resume does not wait for the rest.
CHUNK = 8192


class Coordinates(NamedTuple):
    """What all tickets of an epoch share."""

    epoch: int
    seed: int
    base_seed: int


class Deal(Protocol):
    """One epoch on this rank."""

    @property
    def batches(self) -> int | None:
        """Batches in the epoch, None where only iterating tells."""
        ...

    @property
    def length(self) -> int | None:
        """Positions of the epoch's global order, repeats not counted; None where only reading tells."""
        ...

    @property
    def counted(self) -> bool:
        """Whether ``batches`` is the truth, rather than what a sampler's ``len`` says."""
        ...

    @property
    def start(self) -> tuple[int, int]:
        """(samples, batches) at which the present topology began in this epoch."""
        ...

    def samples_at(self, batch: int) -> int | None:
        """Dataset positions delivered after so many batches, over all ranks; None where unknowable."""
        ...

    def mark_at(self, batch: int) -> Mark | None:
        """What else belongs to the position after so many batches."""
        ...

    def open(self) -> None:
        """A pass or a look begins: a sampler is read up to its position."""
        ...

    def settle(self, batch: int) -> None:
        """Batches below this one are delivered and need not be remembered."""
        ...

    def ticket(self, batch: int, where: Coordinates) -> Ticket | None:
        """The ticket of one batch; None past the end of a sampler."""
        ...

    def tickets(self, begin: int, ahead: Collection[int], where: Coordinates) -> Iterator[Ticket]:
        """The tickets from ``begin`` to the end, but those in ``ahead``, made as they are asked for."""
        ...


class PositionDeal:
    """An epoch of an order that is a function of the position."""

    counted = True

    def __init__(self, plan: Plan, look: Callable[[], EpochOrder]) -> None:
        self.plan = plan
        self.start = plan.start
        self.length = plan.length
        self.batches = plan.batches
        self.samples_at = plan.samples_at
        self._look = look

    def mark_at(self, batch: int) -> None:
        """See ``Deal``: the number says it all."""

    def open(self) -> None:
        """See ``Deal``: there is nothing to read."""

    def settle(self, batch: int) -> None:
        """See ``Deal``: nothing is remembered."""

    def ticket(self, batch: int, where: Coordinates) -> Ticket:
        """See ``Deal``."""
        plan, first = self.plan, self.plan.first(batch)
        indices = self._look().take(first, plan.count(batch), plan.num_replicas)
        keys = indices.astype("<i8", copy=False).tobytes()
        return Ticket(batch, *where, first, plan.num_replicas, keys)

    def tickets(self, begin: int, ahead: Collection[int], where: Coordinates) -> Iterator[Ticket]:
        """See ``Deal``."""
        plan, order = self.plan, self._look()
        chunk, batch, size = 1, begin, self.plan.batch_size * 8
        while batch < self.batches:
            stop = min(batch + chunk, self.batches)
            count = (stop - 1 - batch) * plan.batch_size + plan.count(stop - 1)
            indices = order.take(plan.first(batch), count, plan.num_replicas)
            data = indices.astype("<i8", copy=False).tobytes()
            for number in range(batch, stop):
                if number not in ahead:
                    at = (number - batch) * size
                    keys = data[at : at + size]
                    yield Ticket(number, *where, plan.first(number), plan.num_replicas, keys)
            batch = stop
            chunk = min(chunk * 4, max(1, CHUNK // plan.batch_size))


class PlannedDeal:
    """An epoch of batches that were planned whole; what is dealt out are batches.

    Args:
        plan: The arithmetic from an epoch's start, over batches.
        start: (samples, batches) of this epoch that were delivered under another topology.
        look: Gives the epoch's batches.
    """

    counted = True

    def __init__(self, plan: Plan, start: tuple[int, int], look: Callable[[], BatchPlan]) -> None:
        self.start = start
        self._whole = plan
        self._look = look

    @cached_property
    def _batches(self) -> BatchPlan:
        return self._look()

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Samples before each batch of the epoch's global order, and all of them: shape (batches + 1,)."""
        return np.concatenate(([0], np.cumsum(self._batches.sizes, dtype=np.int64)))

    @cached_property
    def _plan(self) -> Plan:
        begun = int(np.searchsorted(self._ends, self.start[0])) if self.start[0] else 0
        return replace(self._whole, length=len(self._batches), start=(begun, self.start[1]))

    @property
    def batches(self) -> int:
        """See ``Deal``."""
        return self._plan.batches

    @property
    def length(self) -> int:
        """See ``Deal``."""
        return int(self._ends[-1])

    def samples_at(self, batch: int) -> int:
        """See ``Deal``."""
        return int(self._ends[self._plan.samples_at(batch)]) if batch else 0

    def mark_at(self, batch: int) -> None:
        """See ``Deal``: the number says it all."""

    def open(self) -> None:
        """See ``Deal``: there is nothing to read."""

    def settle(self, batch: int) -> None:
        """See ``Deal``: nothing is remembered."""

    def ticket(self, batch: int, where: Coordinates) -> Ticket:
        """See ``Deal``."""
        rounds, number = divmod(self._plan.first(batch), len(self._batches))
        first = rounds * int(self._ends[-1]) + int(self._ends[number])
        keys = self._batches.batch(number).astype("<i8", copy=False).tobytes()
        return Ticket(batch, *where, first, 1, keys)

    def tickets(self, begin: int, ahead: Collection[int], where: Coordinates) -> Iterator[Ticket]:
        """See ``Deal``."""
        for batch in range(begin, self.batches):
            if batch not in ahead:
                yield self.ticket(batch, where)


class SamplerDeal:
    """An epoch of a user's sampler or batch sampler, beginning at a position.

    Args:
        read: Opens the sampler at a position: (number, samples, mark) -> Reading.
        batches: What the sampler's length says, or None.
        limit: An epoch is at most so many batches, or None.
        width: (num_replicas, rank): coordinates of the seeds, the sampler is not dealt out.
        begin: The position: number, samples and mark.
    """

    counted = False
    start = (0, 0)
    length = None

    def __init__(
        self,
        read: Callable[[int, int | None, Mark], Reading],
        batches: int | None,
        limit: int | None,
        width: tuple[int, int],
        begin: tuple[int, int | None, Mark] = (0, 0, START),
    ) -> None:
        self._read = read
        self._limit = limit
        self._width = width
        self._begin = begin
        self._reading: Reading | None = None
        known = [number for number in (batches, limit) if number is not None]
        self.batches = None if batches is None and limit is None else min(known)

    def reading(self) -> Reading:
        """The sampler, opened at the start if it is not open."""
        if self._reading is None or self._reading.broken:
            self._reading = self._read(*self._begin)
        return self._reading

    def open(self) -> None:
        """See ``Deal``."""
        reading = self.reading()
        reading.position()
        self._begin = (self._begin[0], *reading.place_at(self._begin[0]))

    def samples_at(self, batch: int) -> int | None:
        """See ``Deal``; for positions that were read."""
        return self._at(batch)[0]

    def mark_at(self, batch: int) -> Mark:
        """See ``Deal``; for positions that were read."""
        return self._at(batch)[1]

    def _at(self, batch: int) -> tuple[int | None, Mark]:
        if batch == self._begin[0]:
            return self._begin[1], self._begin[2]
        reading = self.reading()
        reading.batch(batch - 1)  # a pass that resumed over gaps counts batches it had no need to read
        return reading.place_at(batch)

    def settle(self, batch: int) -> None:
        """See ``Deal``."""
        if self._reading is not None and not self._reading.broken:
            self._begin = (batch, *self._reading.place_at(batch))
            self._reading.deliver_before(batch)

    def ticket(self, batch: int, where: Coordinates) -> Ticket | None:
        """See ``Deal``."""
        if self._limit is not None and batch >= self._limit:
            return None
        drawn = self.reading().batch(batch)
        if drawn is None:
            return None
        width, rank = self._width
        # a sampler that is not dealt over the ranks still gives each rank positions of its own
        first = (batch if drawn.before is None else drawn.before) * width + rank
        return Ticket(batch, *where, first, width, drawn.keys)

    def tickets(self, begin: int, ahead: Collection[int], where: Coordinates) -> Iterator[Ticket]:
        """See ``Deal``."""
        batch = begin
        while True:
            while batch in ahead:  # delivered in an earlier process, and perhaps forgotten by now
                batch += 1
            ticket = self.ticket(batch, where)
            if ticket is None:
                return
            yield ticket
            batch += 1


class Feed:
    """Tickets on their way to an engine, counted, so that an end can be told from a failure."""

    def __init__(self, tickets: Iterator[Ticket]) -> None:
        self._tickets = tickets
        self.issued = 0
        self.exhausted = False

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Ticket:
        try:
            ticket = next(self._tickets)
        except StopIteration:
            self.exhausted = True
            raise
        self.issued += 1
        return ticket
