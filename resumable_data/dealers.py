"""Who deals the epochs of a loader: an order by position, or a user's sampler as it is read.

The loader asks one of these for everything that depends on where its order comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resumable_data.bucketing import BatchPlanner
from resumable_data.cursor import Place
from resumable_data.dealing import restore_draws
from resumable_data.deals import PlannedDeal, PositionDeal, SamplerDeal
from resumable_data.draws import GeneratorDraws, SavedDraws
from resumable_data.orders import Order, fingerprint_digest
from resumable_data.plan import Plan
from resumable_data.sampled import START, Extent, Mark, Reading, chain_of, encode_mark, is_stateful


class PositionDealer:
    """Deals an order that is a function of the position.

    Args:
        order: The order.
        plan: Its arithmetic from an epoch's start.
        seed: The run's seed, asked for when it is needed.
    """

    comparable = True

    def __init__(self, order: Order, plan: Plan, seed: Callable[[], int]) -> None:
        self.order = order
        self.plan = plan
        self.name = order.name
        self.random_access = order.random_access
        self.draws = order.draws
        self.elastic = True
        self._seed = seed

    def deal(self, epoch: int, start: tuple[int, int] = (0, 0)) -> PositionDeal:
        """See ``Dealer``."""
        plan = self.plan.starting(start)
        return PositionDeal(plan, lambda: self.order.look(epoch, self._seed()))

    def deal_at(self, place: Place, start: tuple[int, int], seed: int, *, trusted: bool) -> PositionDeal:
        """See ``Dealer``."""
        return self.deal(place.epoch, start)

    def prepare(self, epoch: int) -> None:
        """See ``Dealer``."""
        if self.draws is not None:
            self.draws.open(epoch)
        self.order.announce(epoch)

    def announce(self, epoch: int) -> None:
        """See ``Dealer``."""
        self.order.announce(epoch)

    def told(self) -> int | None:
        """See ``Dealer``."""
        return self.order.told()

    def leave(self) -> None:
        """See ``Dealer``."""
        if self.draws is not None:
            self.draws.close()

    def restore(self, saved: SavedDraws | None) -> None:
        """See ``Dealer``."""
        self.order.forget()
        restore_draws(self.draws, saved)

    def digest(self, place: Place) -> str:
        """See ``Dealer``."""
        return self.order.digest(place.epoch, place.samples or 0, self._seed())

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """See ``Dealer``."""
        return self.order.digest_saved(epoch, samples, seed, draws)

    def sampler_state(self, place: Place) -> None:
        """See ``Dealer``: its state is its numbers."""


class PlannedDealer:
    """Deals the batches of a planner, whole: rank r of W takes batches r, r + W, ... of what is left.

    Args:
        planner: Gives any epoch's batches as a function of (seed, epoch).
        plan: The arithmetic over batches: a position of the plan is a batch of the planner.
        seed: The run's seed, asked for when it is needed; a seed of the planner's own goes before it.
        draws: The loader's ``generator=``, from which only worker seeds are drawn; may be None.
    """

    name = "batch_sampler"
    random_access = True
    elastic = True
    comparable = True

    def __init__(
        self, planner: BatchPlanner, plan: Plan, seed: Callable[[], int], draws: GeneratorDraws | None
    ) -> None:
        self.planner = planner
        self.plan = plan
        self.draws = draws
        self._seed = seed
        self._announced = 0

    def deal(self, epoch: int, start: tuple[int, int] = (0, 0)) -> PlannedDeal:
        """See ``Dealer``."""
        return self._deal(epoch, start, self._seed)

    def deal_at(self, place: Place, start: tuple[int, int], seed: int, *, trusted: bool) -> PlannedDeal:
        """See ``Dealer``."""
        return self._deal(place.epoch, start, lambda: seed)

    def _deal(self, epoch: int, start: tuple[int, int], seed: Callable[[], int]) -> PlannedDeal:
        own = self.planner.seed
        return PlannedDeal(self.plan, start, lambda: self.planner.plan(seed() if own is None else own, epoch))

    def prepare(self, epoch: int) -> None:
        """See ``Dealer``."""
        if self.draws is not None:
            self.draws.open(epoch)
        self.announce(epoch)

    def announce(self, epoch: int) -> None:
        """See ``Dealer``."""
        if hasattr(self.planner, "set_epoch"):
            self.planner.set_epoch(epoch)
            self._announced = epoch

    def told(self) -> int | None:
        """See ``Dealer``."""
        known = getattr(self.planner, "epoch", self._announced)
        return None if known == self._announced else int(known)

    def leave(self) -> None:
        """See ``Dealer``."""
        if self.draws is not None:
            self.draws.close()

    def restore(self, saved: SavedDraws | None) -> None:
        """See ``Dealer``."""
        restore_draws(self.draws, saved)

    def digest(self, place: Place) -> str:
        """See ``Dealer``."""
        return fingerprint_digest(self.planner)

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """See ``Dealer``."""
        return fingerprint_digest(self.planner)

    def sampler_state(self, place: Place) -> None:
        """See ``Dealer``: its state is its numbers."""


class SamplerDealer:
    """Deals what a user's sampler or batch sampler gives to this rank.

    Args:
        sampler: The sampler, or the batch sampler.
        name: "sampler" or "batch_sampler".
        batch_size: Keys in a batch; None where the sampler gives batches.
        drop_last: Leave out an incomplete last batch.
        limit: An epoch is at most so many batches, or None.
        width: (num_replicas, rank): coordinates of the seeds.
        seed: The run's seed, asked for when it is needed.
        draws: The loader's ``generator=``, from which only worker seeds are drawn; may be None.
    """

    random_access = False
    elastic = False
    comparable = False

    def __init__(
        self,
        sampler: Any,
        name: str,
        *,
        batch_size: int | None,
        drop_last: bool,
        limit: int | None,
        width: tuple[int, int],
        seed: Callable[[], int],
        draws: GeneratorDraws | None,
    ) -> None:
        self.sampler = sampler
        self.name = name
        self.draws = draws
        self.stateful = is_stateful(sampler)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._limit, self._width = limit, width
        self._seed = seed
        self._reading: Reading | None = None  # the newest, and the epoch it is of
        self._reading_epoch = 0
        self._previous: Extent | None = None
        self._left_at: Mark | None = None
        self._after_end = False  # the sampler was iterated to its end
        self._announced: dict[int, int] = {}  # id of a sampler in the chain -> the epoch it was told

    def deal(self, epoch: int, start: tuple[int, int] = (0, 0)) -> SamplerDeal:
        """See ``Dealer``."""
        return self._deal(epoch, (0, 0, self._start()), None)

    def deal_at(self, place: Place, start: tuple[int, int], seed: int, *, trusted: bool) -> SamplerDeal:
        """See ``Dealer``."""
        mark = place.mark or START
        known = None if trusted else (place.prefix, mark.digest)
        return self._deal(place.epoch, (place.prefix, place.samples, mark), known, trusted=trusted)

    def deal_sought(self, epoch: int, batch: int, place: Place) -> SamplerDeal:
        """The epoch from a batch of which nothing is known but its number: the sampler is read up to there.

        Args:
            epoch: Where to.
            batch: Where to in it.
            place: The present place: the digest of what was delivered of this epoch is compared on the way.

        Raises:
            IndexError: The sampler ends before that batch.
            StateMismatchError: It gives another order than it gave.
        """
        here = epoch == place.epoch and place.prefix > 0 and place.mark is not None
        known = (place.prefix, place.mark.digest) if here else None
        deal = self._deal(epoch, (batch, None if batch else 0, START), known)
        deal.open()
        return deal

    def _deal(
        self,
        epoch: int,
        begin: tuple[int, int | None, Mark],
        known: tuple[int, bytes] | None,
        *,
        trusted: bool = False,
    ) -> SamplerDeal:
        def read(number: int, samples: int | None, mark: Mark) -> Reading:
            # a sampler that raised is read anew, under the eye of what it gave before
            seen = (number, mark.digest) if mark.digest and not trusted else None
            if mark.previous is not None and mark.previous != self._previous:
                self._reread(mark.previous)
            self._reading = self._read(epoch, number, samples, mark, known or seen)
            self._reading_epoch = epoch
            return self._reading

        return SamplerDeal(read, self._batches(), self._limit, self._width, begin)

    def _read(
        self,
        epoch: int,
        number: int,
        samples: int | None,
        mark: Mark,
        known: tuple[int, bytes] | None,
    ) -> Reading:
        self.announce(epoch)
        return Reading(
            self.sampler,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
            coordinates=(self._seed(), epoch),
            number=number,
            samples=samples,
            mark=mark,
            known=known,
            after_end=self._after_end,
        )

    def _reread(self, extent: Extent) -> None:
        """Read the epoch before once more: a sampler with a history gives another order, or gets its history."""
        known = (extent.batches, extent.digest)
        self._read(extent.epoch, extent.batches, None, START, known).reread(extent.ended)
        self._previous = extent

    def _start(self) -> Mark:
        if self._left_at is not None:
            return self._left_at
        return START if self._previous is None else Mark(b"", previous=self._previous)

    def _batches(self) -> int | None:
        try:
            length = len(self.sampler)
        except (TypeError, NotImplementedError):
            return None  # a sampler need not know; torch's base class raises one or the other
        if self._batch_size is None:
            return length
        return length // self._batch_size if self._drop_last else -(-length // self._batch_size)

    def prepare(self, epoch: int) -> None:
        """See ``Dealer``; the sampler is told when it is opened."""
        if self.draws is not None:
            self.draws.open(epoch)

    def announce(self, epoch: int) -> None:
        """See ``Dealer``; also through a batch sampler to the sampler inside it."""
        for sampler in chain_of(self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
                self._announced[id(sampler)] = epoch

    def told(self) -> int | None:
        """See ``Dealer``; found by a sampler's attribute ``epoch``."""
        for sampler in chain_of(self.sampler):
            known = getattr(sampler, "epoch", None)
            if (
                type(known) is int
                and hasattr(sampler, "set_epoch")
                and known != self._announced.get(id(sampler), 0)
            ):
                return known
        return None

    def leave(self) -> None:
        """See ``Dealer``; what was read ahead of a stateful sampler and not delivered will be taken back."""
        ahead = self._reading.ahead if self._reading is not None else None
        # a state that was loaded need not be what state_dict() gives before the next iter(): it is kept here
        self._left_at = Mark(b"", ahead.state) if self.stateful and ahead is not None else None
        if self._reading is not None:
            self._previous = self._reading.extent(self._reading_epoch)
            self._after_end = self._reading.ended
        self._reading = None
        if self.draws is not None:
            self.draws.close()

    def restore(self, saved: SavedDraws | None) -> None:
        """See ``Dealer``."""
        self._reading = self._previous = self._left_at = None
        restore_draws(self.draws, saved)

    def digest(self, place: Place) -> str:
        """See ``Dealer``."""
        return (place.mark or START).digest.hex()

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """See ``Dealer``: never asked, the sampler would have to be read."""
        raise NotImplementedError("a user's sampler is compared while it is skipped forward")

    def sampler_state(self, place: Place) -> str | None:
        """See ``Dealer``."""
        mark = place.mark or self._start()
        if not self.stateful:
            return encode_mark(mark)
        if mark.state is None:  # an epoch's start that was not opened
            mark = Mark(mark.digest, self.sampler.state_dict(), ended=self._after_end)
        return encode_mark(mark)
