"""Where a loader stands, and what each call does to it: the pass table as a pure state machine.

The cursor knows nothing of data. It answers three questions: where does the next pass begin, may this
iterator still deliver, and what does a delivered batch, an exhausted pass, ``set_epoch``, ``seek`` or a
loaded state make of the position. The whole position is one value, moved in one assignment, so that an
exception raised between any two instructions finds it either before or after a batch, never in between.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from resumable_data.errors import StaleIteratorError
from resumable_data.state import mismatch

#: How many batches back a state can be had; wrappers that read ahead hold a few dozen at most.
HISTORY = 256


class Dealt(Protocol):
    """What the cursor asks of an epoch as it is dealt to this rank."""

    @property
    def batches(self) -> int | None:
        """Batches in the epoch on this rank; None where only iterating tells."""
        ...

    def samples_at(self, batch: int) -> int | None:
        """Positions delivered over all ranks after so many batches; None where that is unknowable."""
        ...

    def mark_at(self, batch: int) -> Any:
        """What else belongs to the position after so many batches (a sampler's digest and state)."""
        ...


class Standing(enum.Enum):
    """What the next ``iter()`` makes of a position."""

    READY = "ready"  # the next pass continues from here
    PENDING = "pending"  # likewise, and the place was loaded or sought: set_epoch must agree with it
    OPEN = "open"  # a pass has delivered from this epoch: the next pass is the next epoch


class Place(NamedTuple):
    """A position.

    ``batch`` counts the batches delivered in ``epoch``; ``samples`` and ``mark`` are as of the gap-free prefix
    of them; ``ahead`` are the numbers delivered beyond that prefix, ascending; ``start`` is where in the epoch,
    in (samples, batches), the present topology began.
    """

    epoch: int
    batch: int
    samples: int | None
    consumed: int | None
    standing: Standing
    ahead: tuple[int, ...] = ()
    mark: Any = None
    start: tuple[int, int] = (0, 0)

    @property
    def prefix(self) -> int:
        """Batches delivered without a gap: the number of the first undelivered batch."""
        return self.batch - len(self.ahead)


class Begun(NamedTuple):
    """What ``Cursor.begin`` answers: the pass's serial number, what it left behind if anything, and of how many."""

    serial: int
    left: Place | None
    batches: int | None


D = TypeVar("D", bound=Dealt)


class Cursor(Generic[D]):
    """The position of one loader.

    Args:
        deal_of: Gives an epoch as dealt to this rank, from its start under the present topology.
        on_leave: Called when an epoch is left, before the position moves.
    """

    def __init__(self, deal_of: Callable[[int], D], on_leave: Callable[[], None]) -> None:
        self._deal_of = deal_of
        self._on_leave = on_leave
        self.deal = deal_of(0)
        self.place = Place(0, 0, 0, 0, Standing.READY)
        self.skipped: tuple[int, ...] = ()
        self.resumed = False
        self.moves = 0  # loads and seeks so far: epochs() must not close an epoch that was entered anew
        self.history: deque[Place] = deque(maxlen=HISTORY)  # the places before the latest deliveries
        self._serial = 0  # of the newest pass; an older pass is stale
        self._live = False  # the newest pass may still deliver
        self._pass_epoch: int | None = None  # the epoch the newest pass is or was in
        self._next_epoch: int | None = None  # asked for by set_epoch while its own epoch's pass was live

    @property
    def live(self) -> bool:
        """Whether the newest pass may still deliver."""
        return self._live

    @property
    def at_end(self) -> bool:
        """Whether every batch of the present epoch was delivered, as far as that can be told."""
        return self.place.batch == self.deal.batches

    # -- passes ---------------------------------------------------------------------------------

    def begin(self) -> Begun:
        """A new pass begins; earlier ones go stale. ``left`` is set where batches were left undelivered."""
        left, batches = None, self.deal.batches
        if self.place.standing is Standing.OPEN:
            if self.unfinished and self._next_epoch is None:
                left = self.place
            self._close()
        self._serial += 1
        self._live = True
        self._pass_epoch = self.place.epoch
        return Begun(self._serial, left, batches)

    @property
    def unfinished(self) -> bool:
        """Whether batches of the present epoch are known to be undelivered."""
        return self.deal.batches is not None and self.place.batch < self.deal.batches

    def check(self, serial: int) -> None:
        """Raise StaleIteratorError unless this pass is the newest and still live."""
        if serial != self._serial or not self._live:
            raise StaleIteratorError(
                "this iterator belongs to an earlier pass: the loader has begun another pass, moved "
                "elsewhere or failed since; use the newest iterator, or iter(loader) for a new one",
                expected=self._serial,
                found=serial,
            )

    def delivered(self, number: int) -> Place:
        """The position once the live pass has handed over batch ``number``; assign it to ``place``."""
        place, deal = self.place, self.deal
        before, after = deal.samples_at(number), deal.samples_at(number + 1)
        known = place.consumed is not None and before is not None and after is not None
        # the three are known together: `known` only tells the type checker so
        consumed = place.consumed + after - before if known else None  # type: ignore[operator]  # see above
        batch = place.batch + 1
        if not place.ahead and number == place.batch:
            mark = deal.mark_at(batch)
            return Place(place.epoch, batch, after, consumed, Standing.OPEN, (), mark, place.start)
        numbers = sorted({*place.ahead, number})
        prefix = place.prefix
        while numbers and numbers[0] == prefix:
            prefix += 1
            numbers.pop(0)
        samples, mark = deal.samples_at(prefix), deal.mark_at(prefix)
        return Place(place.epoch, batch, samples, consumed, Standing.OPEN, tuple(numbers), mark, place.start)

    def opened(self) -> None:
        """The epoch was opened at the position, whose mark may be known only now."""
        self.place = self.place._replace(mark=self.deal.mark_at(self.place.prefix))

    def exhaust(self) -> None:
        """The live pass was asked for one more after its last batch: the epoch is closed."""
        self._live = False
        self._close()

    def fail(self) -> None:
        """The live pass met an exception: it is stale, and the next pass begins at the failed batch."""
        self._live = False
        self._serial += 1
        if self.history and self.history[-1] is self.place:
            self.history.pop()  # it was noted for a delivery that did not come about
        if self.place.standing is Standing.OPEN:
            self.place = self.place._replace(standing=Standing.READY)

    def ago(self, batches: int) -> Place:
        """The position as it was so many delivered batches ago.

        Raises:
            ValueError: So many were not delivered since the last load or move, or are remembered no more.
        """
        if not batches:
            return self.place
        if batches > len(self.history):
            raise ValueError(
                f"in_flight must be in [0, {len(self.history)}], the batches delivered since the last load or "
                f"move (at most {HISTORY} are remembered), found {batches}"
            )
        return self.history[-batches]

    # -- moves ----------------------------------------------------------------------------------

    def close_epoch(self) -> None:
        """Leave the epoch, begun or not."""
        self._close()
        self._retire()

    def set_epoch(self, epoch: int) -> None:
        """The pass table's rows on ``set_epoch``.

        Raises:
            StateMismatchError: A loaded or sought position stands in another epoch.
        """
        place = self.place
        if place.standing is Standing.PENDING:
            self._set_epoch_pending(epoch)
        elif self._live and epoch == self._pass_epoch:
            # that pass is left alone; the next one begins this epoch again, if this one has begun to deliver
            self._next_epoch = epoch if place.standing is Standing.OPEN else None
        elif epoch != place.epoch:
            self._on_leave()
            self._enter(epoch)
            self._retire()

    def _set_epoch_pending(self, epoch: int) -> None:
        place = self.place
        if epoch == place.epoch:
            return
        if epoch == place.epoch + 1 and self.at_end:
            self.close_epoch()
            return
        error = mismatch({"epoch": (place.epoch, epoch)})
        raise type(error)(
            f"set_epoch({epoch}) while a loaded or sought position stands at epoch {place.epoch}, batch "
            f"{place.batch}, expected {place.epoch}: begin the loop at loader.epoch (for epoch in "
            f"loader.epochs(stop)), or call seek({epoch}, 0) to give the position up",
            fields=error.fields,
        )

    def seek(self, epoch: int, batch: int, deal: D) -> None:
        """The next pass begins at this position; what a forward seek passes over is recorded.

        Args:
            epoch: Where to.
            batch: Where to in it.
            deal: That epoch, dealt so that this batch can be had.
        """
        place = self.place
        passed: tuple[int, ...] = ()
        if epoch == place.epoch:
            passed = _gaps(epoch, place.prefix, batch, place.ahead)
        elif epoch > place.epoch:
            if place.batch > 0 and self.deal.batches is not None:
                passed = _gaps(place.epoch, place.prefix, self.deal.batches, place.ahead)
            if batch > 0:
                passed += (epoch, 0, batch)
        if epoch != place.epoch:
            self._on_leave()
        self.deal = deal
        self.skipped = _before(self.skipped, epoch, batch) + passed
        samples, mark = deal.samples_at(batch), deal.mark_at(batch)
        start = place.start if epoch == place.epoch and batch > 0 else (0, 0)
        sought = Place(epoch, batch, samples, place.consumed, Standing.PENDING, (), mark, start)
        self._jump(sought, resumed=False)

    def load(self, place: Place, deal: D, skipped: tuple[int, ...]) -> None:
        """The next pass begins at a saved position, in an epoch dealt as ``deal`` says."""
        self.skipped = skipped
        self.deal = deal
        self._jump(place, resumed=True)

    def _jump(self, place: Place, *, resumed: bool) -> None:
        self.place = place
        self.moves += 1
        self._retire()
        self.resumed = resumed

    def _retire(self) -> None:
        self._serial += 1
        self._live = False
        self._pass_epoch = None
        self._next_epoch = None
        self.resumed = False
        self.history.clear()

    def _close(self) -> None:
        self._on_leave()
        epoch = self.place.epoch + 1 if self._next_epoch is None else self._next_epoch
        self._next_epoch = None
        self.resumed = False
        self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        deal = self._deal_of(epoch)
        place = Place(epoch, 0, 0, self.place.consumed, Standing.READY)
        self.deal, self.place = deal, place


def _gaps(epoch: int, begin: int, end: int, ahead: tuple[int, ...]) -> tuple[int, ...]:
    """The record of what lies in [begin, end) and was not delivered: three ints for each run of batches."""
    gaps: list[int] = []
    for number in (*(number for number in ahead if number < end), end):
        if begin < number:
            gaps += (epoch, begin, number)
        begin = number + 1
    return tuple(gaps)


def _before(skipped: tuple[int, ...], epoch: int, batch: int) -> tuple[int, ...]:
    """The part of the record that lies before a position: what comes after will be delivered after all."""
    kept: list[int] = []
    for at in range(0, len(skipped), 3):
        where, low, high = skipped[at : at + 3]
        if where == epoch:
            high = min(high, batch)
        if where <= epoch and low < high:
            kept += (where, low, high)
    return tuple(kept)
