"""One pass over the data: the iterator that ``iter(loader)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from resumable_data.cursor import Cursor
from resumable_data.deals import Deal, Feed


class Pass:
    """An iterator over the rest of one epoch.

    Args:
        cursor: The loader's position, which every delivered batch moves.
        serial: What ``Cursor.begin`` gave this pass.
        deal: The epoch that is passed over.
        feed: The tickets on their way to the engine.
        stream: The engine's (number, batch) pairs, beginning at the position.
        in_order: Whether batches are to come in the order of their numbers.
        on_error: Called with what the stream raised; the position stands at the batch that failed.
    """

    def __init__(
        self,
        cursor: Cursor[Deal],
        serial: int,
        deal: Deal,
        feed: Feed,
        stream: Iterator[tuple[int, Any]],
        *,
        in_order: bool,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._cursor = cursor
        self._serial = serial
        self._deal = deal
        self._feed = feed
        self._stream: Iterator[tuple[int, Any]] | None = stream
        self._in_order = in_order and not cursor.place.ahead  # a resumed pass may have gaps
        self._on_error = on_error
        self._next = cursor.place.prefix
        self._received = 0
        self._exhausted = False

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        cursor = self._cursor
        cursor.check(self._serial)
        try:
            place = cursor.place
            self._deal.settle(place.prefix)
            arrived = None if self._complete(place.batch) else self._pull()
            if arrived is not None:
                number, batch = arrived
                after = cursor.delivered(number)
                cursor.history.append(place)
        except BaseException as error:
            self.retire()
            cursor.fail()
            self._on_error(error)
            raise
        if arrived is None:
            self._exhausted = True
            self.retire()
            cursor.exhaust()
            raise StopIteration
        # CPython runs signal handlers (torch's for a dead worker, ^C) after calls and backward jumps only:
        # from this assignment until the caller holds the batch there is neither, so both happen or none
        cursor.place = after
        return batch

    def retire(self) -> None:
        """Let go of the batches in flight, and of the workers that make them unless they are persistent."""
        self._stream = None

    def _complete(self, delivered: int) -> bool:
        return self._deal.counted and delivered == self._deal.batches

    def _pull(self) -> tuple[int, Any] | None:
        """The next (number, batch); None at the end of an order whose length only iterating tells."""
        if self._stream is None:
            raise RuntimeError("this pass has let go of its batches: begin a new one with iter(loader)")
        try:
            number, batch = next(self._stream)
        except StopIteration as error:
            if self._feed.exhausted and self._received == self._feed.issued and not self._deal.counted:
                return None
            # taken at its word it would end the epoch early, in silence
            raise RuntimeError(
                f"the dataset or collate_fn raised StopIteration, {self._received} batches into this pass: "
                "raise IndexError or another error instead"
            ) from error
        self._received += 1
        if self._in_order:
            self._check_number(number)
        return number, batch

    def _check_number(self, number: int) -> None:
        if number != self._next:
            raise RuntimeError(
                f"batch {number} arrived where batch {self._next} was due: this is a defect of "
                "resumable_data, please report it"
            )
        self._next += 1
