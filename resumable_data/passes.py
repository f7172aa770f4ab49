"""One pass over the data: the iterator that ``iter(loader)`` returns, and the tickets behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from resumable_data.cursor import Cursor
from resumable_data.fetch import Ticket
from resumable_data.orders import EpochOrder
from resumable_data.plan import Plan

#: Positions computed at once; the first chunk is one batch, so that a resume does not wait for the rest.
CHUNK = 8192


def make_ticket(
    plan: Plan, order: EpochOrder, batch: int, *, epoch: int, seed: int, base_seed: int
) -> Ticket:
    """The ticket of one batch of this rank."""
    first, stride = plan.first(batch), plan.num_replicas
    indices = order.take(first, plan.count(batch), stride)
    return Ticket(batch, epoch, seed, base_seed, first, stride, indices.astype("<i8", copy=False).tobytes())


def make_tickets(
    plan: Plan, order: EpochOrder, begin: int, *, epoch: int, seed: int, base_seed: int
) -> Iterator[Ticket]:
    """The tickets of this rank's batches from ``begin`` to the epoch's end, made as they are asked for."""
    chunk, batch = 1, begin
    while batch < plan.batches:
        stop = min(batch + chunk, plan.batches)
        count = (stop - 1 - batch) * plan.batch_size + plan.count(stop - 1)
        data = order.take(plan.first(batch), count, plan.num_replicas).astype("<i8", copy=False).tobytes()
        size = plan.batch_size * 8
        for number in range(batch, stop):
            at = (number - batch) * size
            yield Ticket(
                number, epoch, seed, base_seed, plan.first(number), plan.num_replicas, data[at : at + size]
            )
        batch = stop
        chunk = min(chunk * 4, max(1, CHUNK // plan.batch_size))


class Pass:
    """An iterator over the rest of one epoch.

    Args:
        cursor: The loader's position, which every delivered batch moves.
        serial: What ``Cursor.begin`` gave this pass.
        stream: The engine's (number, batch) pairs, beginning at the position.
        on_error: Called with what the stream raised; the position stands at the batch that failed.
    """

    def __init__(
        self,
        cursor: Cursor,
        serial: int,
        stream: Iterator[tuple[int, Any]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._cursor = cursor
        self._serial = serial
        self._number = cursor.place.batch
        self._stop = cursor.plan.batches
        self._stream: Iterator[tuple[int, Any]] | None = stream
        self._on_error = on_error
        self._exhausted = False

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        self._cursor.check(self._serial)
        if self._number == self._stop:
            self._exhausted = True
            self.retire()
            self._cursor.exhaust()
            raise StopIteration
        try:
            batch = self._pull()
            self._number += 1
            after = self._cursor.delivered()
        except BaseException as error:
            self.retire()
            self._cursor.fail()
            self._on_error(error)
            raise
        # CPython runs signal handlers (torch's for a dead worker, ^C) after calls and backward jumps only:
        # from this assignment until the caller holds the batch there is neither, so both happen or none
        self._cursor.place = after
        return batch

    def retire(self) -> None:
        """Let go of the batches in flight, and of the workers that make them unless they are persistent."""
        self._stream = None

    def _pull(self) -> Any:
        if self._stream is None:
            raise RuntimeError("this pass has let go of its batches: begin a new one with iter(loader)")
        try:
            number, batch = next(self._stream)
        except StopIteration as error:
            # taken at its word it would end the epoch early, in silence
            raise RuntimeError(
                f"the dataset or collate_fn raised StopIteration at batch {self._number} of {self._stop}: "
                "raise IndexError or another error instead"
            ) from error
        if number != self._number:
            raise RuntimeError(
                f"batch {number} arrived where batch {self._number} was due: this is a defect of "
                "resumable_data, please report it"
            )
        return batch
