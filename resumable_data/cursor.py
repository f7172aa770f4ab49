"""Where a loader stands, and what each call does to it: the pass table as a pure state machine.

The cursor knows nothing of data. It answers three questions: where does the next pass begin, may this
iterator still deliver, and what does a delivered batch, an exhausted pass, ``set_epoch``, ``seek`` or a
loaded state make of the position. The whole position is one value, moved in one assignment, so that an
exception raised between any two instructions finds it either before or after a batch, never in between.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from resumable_data.errors import StaleIteratorError
from resumable_data.plan import Plan
from resumable_data.state import mismatch


class Standing(enum.Enum):
    """What the next ``iter()`` makes of a position."""

    READY = "ready"  # the next pass continues from here
    PENDING = "pending"  # likewise, and the place was loaded or sought: set_epoch must agree with it
    OPEN = "open"  # a pass has delivered from this epoch: the next pass is the next epoch


class Place(NamedTuple):
    """A position: ``batch`` batches of ``epoch`` delivered; ``consumed`` samples since the run began."""

    epoch: int
    batch: int
    consumed: int
    standing: Standing


class Begun(NamedTuple):
    """What ``Cursor.begin`` answers: the pass's serial number and what it left behind, if anything."""

    serial: int
    left: Place | None


class Cursor:
    """The position of one loader.

    Args:
        plan: The arithmetic of an epoch, the same for every epoch.
        on_leave: Called when an epoch is left, before the position moves.
    """

    def __init__(self, plan: Plan, on_leave: Callable[[], None]) -> None:
        self.plan = plan
        self._on_leave = on_leave
        self.place = Place(0, 0, 0, Standing.READY)
        self.skipped: tuple[int, ...] = ()
        self.resumed = False
        self.moves = 0  # loads and seeks so far: epochs() must not close an epoch that was entered anew
        self._serial = 0  # of the newest pass; an older pass is stale
        self._live = False  # the newest pass may still deliver
        self._pass_epoch: int | None = None  # the epoch the newest pass is or was in
        self._next_epoch: int | None = None  # asked for by set_epoch while its own epoch's pass was live

    @property
    def live(self) -> bool:
        """Whether the newest pass may still deliver."""
        return self._live

    # -- passes ---------------------------------------------------------------------------------

    def begin(self) -> Begun:
        """A new pass begins; earlier ones go stale. ``left`` is set where batches were left undelivered."""
        left = None
        if self.place.standing is Standing.OPEN:
            if self.place.batch < self.plan.batches and self._next_epoch is None:
                left = self.place
            self._close()
        self._serial += 1
        self._live = True
        self._pass_epoch = self.place.epoch
        return Begun(self._serial, left)

    def check(self, serial: int) -> None:
        """Raise StaleIteratorError unless this pass is the newest and still live."""
        if serial != self._serial or not self._live:
            raise StaleIteratorError(
                "this iterator belongs to an earlier pass: the loader has begun another pass, moved "
                "elsewhere or failed since; use the newest iterator, or iter(loader) for a new one",
                expected=self._serial,
                found=serial,
            )

    def delivered(self) -> Place:
        """The position once the live pass has handed over its next batch; assign it to ``place``."""
        place, plan = self.place, self.plan
        batch = place.batch + 1
        fresh = plan.samples_at(batch) - plan.samples_at(place.batch)
        return Place(place.epoch, batch, place.consumed + fresh, Standing.OPEN)

    def exhaust(self) -> None:
        """The live pass was asked for one more after its last batch: the epoch is closed."""
        self._live = False
        self._close()

    def fail(self) -> None:
        """The live pass met an exception: it is stale, and the next pass begins at the failed batch."""
        self._live = False
        self._serial += 1
        if self.place.standing is Standing.OPEN:
            self.place = self.place._replace(standing=Standing.READY)

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
            self.place = Place(epoch, 0, place.consumed, Standing.READY)
            self._retire()

    def _set_epoch_pending(self, epoch: int) -> None:
        place = self.place
        if epoch == place.epoch:
            return
        if epoch == place.epoch + 1 and place.batch == self.plan.batches:
            self.close_epoch()
            return
        error = mismatch({"epoch": (place.epoch, epoch)})
        raise type(error)(
            f"set_epoch({epoch}) while a loaded or sought position stands at epoch {place.epoch}, batch "
            f"{place.batch}, expected {place.epoch}: begin the loop at loader.epoch (for epoch in "
            f"loader.epochs(stop)), or call seek({epoch}, 0) to give the position up",
            fields=error.fields,
        )

    def seek(self, epoch: int, batch: int) -> None:
        """The next pass begins at this position; what a forward seek passes over is recorded."""
        place = self.place
        kept = _before(self.skipped, epoch, batch)
        passed: tuple[int, ...] = ()
        if epoch == place.epoch and batch > place.batch:
            passed = (epoch, place.batch, batch)
        elif epoch > place.epoch:
            if 0 < place.batch < self.plan.batches:
                passed = (place.epoch, place.batch, self.plan.batches)
            if batch > 0:
                passed += (epoch, 0, batch)
        self.skipped = kept + passed
        if epoch != place.epoch:
            self._on_leave()
        self._jump(Place(epoch, batch, place.consumed, Standing.PENDING), resumed=False)

    def load(self, epoch: int, batch: int, consumed: int, skipped: tuple[int, ...]) -> None:
        """The next pass begins at a saved position."""
        self.skipped = skipped
        self._jump(Place(epoch, batch, consumed, Standing.PENDING), resumed=True)

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

    def _close(self) -> None:
        self._on_leave()
        epoch = self.place.epoch + 1 if self._next_epoch is None else self._next_epoch
        self._next_epoch = None
        self.resumed = False
        self.place = Place(epoch, 0, self.place.consumed, Standing.READY)


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
