"""The works of a loader: position, order, seed and engine, moved together.

``ResumableLoader`` is the face: it checks what it is given and calls in here. Nothing else does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from resumable_data.cursor import Cursor, Place, Standing
from resumable_data.dealers import PositionDealer, SamplerDealer
from resumable_data.deals import Coordinates, Deal, Feed
from resumable_data.engines import Engine, MapEngine
from resumable_data.errors import StateMismatchError
from resumable_data.fetch import Fetcher
from resumable_data.notices import Notices
from resumable_data.options import Choice
from resumable_data.passes import Pass
from resumable_data.resume import Accepted, Identity, check_state, make_state
from resumable_data.seeding import draw_base_seed, initial_seed, streams_kept, worker_generator
from resumable_data.state import LoaderState, mismatch


class Run:
    """One loader's moving parts.

    Args:
        template: A DataLoader that was built from the user's arguments and is never iterated.
        choice: Where the order comes from.
    """

    def __init__(self, template: DataLoader[Any], choice: Choice) -> None:
        self.options = options = choice.options
        self._seed = _Seed(choice.seed())
        self.dealer = choice.dealer(self._seed.get)
        self.cursor: Cursor[Deal] = Cursor(self.dealer.deal, self.dealer.leave)
        self._dataset: Any = template.dataset
        self._workers, self._in_order = template.num_workers, template.in_order
        self._identity = Identity(
            dealer=self.dealer,
            options=options,
            dataset_size=_size(self._dataset),
            batch_size=choice.batch_size,
            num_replicas=choice.num_replicas,
            drop_last=choice.drop_last,
            tail=choice.tail,
        )
        self._rank = choice.rank

        def make_fetcher(aside: bool) -> Fetcher:
            return Fetcher(
                template.dataset,
                template.collate_fn,
                options.seeding,
                choice.rank,
                aside=aside,
                single=choice.single,
                reseed=options.reseed,
            )

        self._engine: Engine = MapEngine(template, make_fetcher)
        self._newest: weakref.ref[Pass] | None = None
        self.notices = Notices(self._identity, shared=choice.shared, dataset=self._dataset)

    def indices(self) -> list[int]:
        """What a sampler would give this rank in the present epoch: repeats included, nothing dropped."""
        dealer = self.dealer
        if not isinstance(dealer, PositionDealer):
            raise TypeError("the indices of a user's sampler are the sampler's to list")
        order = dealer.order.look(self.epoch, self._seed.get())
        mine: list[int] = order.take(self._rank, self.samples(), dealer.plan.num_replicas).tolist()
        return mine

    def samples(self) -> int:
        """How many indices a sampler would give this rank; it does not drop incomplete batches."""
        if not isinstance(self.dealer, PositionDealer):
            raise TypeError("the length of a user's sampler is the sampler's to tell")
        return replace(self.dealer.plan, drop_last=False, limit=None).samples

    def length(self) -> int | None:
        """Batches in a whole epoch on this rank under the present topology; None where nobody knows."""
        deal = self.cursor.deal
        return deal.batches if deal.start == (0, 0) else self.dealer.deal(self.cursor.place.epoch).batches

    # -- passes ---------------------------------------------------------------------------------

    def begin(self, *, counted: bool = False) -> Pass:
        """A new pass from the position; an earlier one goes stale and lets go of its workers."""
        self._check_size()
        self.notices.counted |= counted
        told = self.dealer.told()
        if told is not None:
            self.set_epoch(told)
        begun = self.cursor.begin()
        self._retire_newest()
        self.notices.pass_begins(self.cursor, begun)
        place, deal = self.cursor.place, self.cursor.deal
        try:
            feed, stream = self._start(place)
        except BaseException:
            self.cursor.fail()
            self._engine.drop()
            raise
        newest = Pass(
            self.cursor,
            begun.serial,
            deal,
            feed,
            stream,
            in_order=self._in_order or not self._workers,
            on_error=self._engine.failed,
        )
        # a strong reference would keep a pass's workers alive after a break
        self._newest = weakref.ref(newest)
        return newest

    def _start(self, place: Place) -> tuple[Feed, Iterator[tuple[int, Any]]]:
        deal = self.cursor.deal
        self.dealer.prepare(place.epoch)
        deal.open()
        self.cursor.opened()
        if deal.counted and place.batch == deal.batches:
            return Feed(iter(())), iter(())  # an epoch without a rest needs no workers
        generator = self._worker_generator(place.epoch)
        where = Coordinates(place.epoch, self._seed.get(), draw_base_seed(generator.clone_state()))
        feed = Feed(deal.tickets(place.prefix, place.ahead, where))
        return feed, self._engine.start(feed, generator)

    def _worker_generator(self, epoch: int) -> torch.Generator:
        theirs = self.dealer.draws.worker_generator() if self.dealer.draws is not None else None
        if theirs is not None and self.options.seeding == "none":
            return theirs
        return worker_generator(self._seed.get(), epoch, self._rank)

    def epochs(self, stop: int) -> Iterator[int]:
        """See ``ResumableLoader.epochs``."""
        if self.cursor.place.standing is Standing.OPEN:  # a pass that an earlier loop left: it is over
            left = self.cursor.place if self.cursor.unfinished else None
            batches = self.cursor.deal.batches
            self._close_epoch()
            self.notices.left_behind(left, batches)
        while self.cursor.place.epoch < stop:
            epoch, moves = self.cursor.place.epoch, self.cursor.moves
            self.notices.counted = True
            yield epoch
            if self.cursor.moves == moves and self.cursor.place.epoch == epoch:
                self._close_epoch()

    def end_epoch(self) -> None:
        """See ``ResumableLoader.end_epoch``."""
        if self.cursor.place.batch > 0:
            self._close_epoch()

    def _close_epoch(self) -> None:
        self.cursor.close_epoch()
        self._retire_newest()

    def _retire_newest(self) -> None:
        newest = self._newest() if self._newest is not None else None
        if newest is not None:
            newest.retire()
        self._newest = None

    # -- single batches -------------------------------------------------------------------------

    def peek(self) -> Any:
        """See ``ResumableLoader.peek``."""
        place, deal = self.cursor.place, self.cursor.deal
        if self._workers and (self.options.seeding == "none" or not self._in_order):
            raise ValueError(
                "peek() with workers and seeding=None or in_order=False: the workers decide which batch comes "
                "next; use seeding='batch' and in_order=True, or num_workers=0"
            )
        deal.settle(place.prefix)
        deal.open()
        self.cursor.opened()
        past = deal.counted and place.batch == deal.batches
        ticket = None if past else deal.ticket(place.prefix, self._coordinates(place.epoch))
        if ticket is None:
            raise IndexError(f"peek past the end: epoch {place.epoch} has {place.batch} batches")
        if self.options.seeding != "none":
            return self._engine.fetch_one(ticket)
        with streams_kept():
            return self._engine.fetch_one(ticket)

    def batch_at(self, epoch: int, batch: int) -> Any:
        """See ``ResumableLoader.batch_at``."""
        if not self.dealer.random_access:
            raise ValueError(
                f"batch_at() over an order of kind {self.dealer.name!r}: only the orders that are functions of "
                "the position can be looked up; use shuffle= and seed="
            )
        if self.options.seeding == "none":
            raise ValueError(
                "batch_at() with seeding=None: augmentations are not a function of the position; "
                "use seeding='batch'"
            )
        deal = self.cursor.deal if epoch == self.epoch else self.dealer.deal(epoch)
        if deal.batches is None or batch >= deal.batches:
            raise IndexError(
                f"batch_in_epoch must be in [0, {deal.batches}), found {batch}: past the epoch's end"
            )
        if batch < deal.start[1]:
            self._refuse_before(batch)
        ticket = deal.ticket(batch, self._coordinates(epoch))
        if ticket is None:
            raise IndexError(f"batch_in_epoch {batch} is past the epoch's end")
        return self._engine.fetch_one(ticket)

    def _refuse_before(self, batch: int) -> NoReturn:
        raise ValueError(
            f"batch {batch} of epoch {self.epoch} was delivered under another num_replicas or batch_size (up to "
            f"batch {self.cursor.deal.start[1]}): build the loader as it was then, and without the state"
        )

    def _coordinates(self, epoch: int) -> Coordinates:
        return Coordinates(epoch, self._seed.get(), 0)

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self.cursor.place.epoch

    # -- moves ----------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """See ``ResumableLoader.set_epoch``."""
        place, drawn = self.cursor.place, self._drawn
        if drawn and epoch != place.epoch:
            over = place.standing is Standing.OPEN or self.cursor.at_end
            if epoch != place.epoch + 1 or not over:
                self._refuse_epoch("set_epoch", epoch)
        if not drawn or epoch != place.epoch:
            self.cursor.set_epoch(epoch)
        self.notices.counted = True
        if not self.cursor.live:
            self._retire_newest()

    def seek(self, epoch: int, batch: int) -> None:
        """See ``ResumableLoader.seek``."""
        if self._drawn and epoch != self.epoch:
            self._refuse_epoch("seek", epoch)
        self.cursor.seek(epoch, batch, self._deal_sought(epoch, batch))
        self._retire_newest()

    def _deal_sought(self, epoch: int, batch: int) -> Deal:
        if isinstance(self.dealer, SamplerDealer):
            if self.dealer.stateful:
                raise ValueError(
                    "seek() over a sampler with a state of its own: only the sampler knows its positions"
                )
            return self.dealer.deal_sought(epoch, batch, self.cursor.place)
        here = epoch == self.epoch and batch > 0
        deal = self.cursor.deal if here else self.dealer.deal(epoch)
        if deal.batches is not None and batch > deal.batches:
            raise IndexError(
                f"batch_in_epoch must be in [0, {deal.batches}], found {batch}: past the epoch's end"
            )
        if batch < deal.start[1]:
            self._refuse_before(batch)
        return deal

    @property
    def _drawn(self) -> bool:
        """Whether the order is a stream of draws, which only goes forward."""
        return self.dealer.name == "generator"

    def _refuse_epoch(self, verb: str, epoch: int) -> NoReturn:
        raise ValueError(
            f"{verb} to epoch {epoch} from epoch {self.epoch} over an order drawn from a generator: its draws "
            "only go forward, an epoch at a time; use seed= instead of generator="
        )

    # -- state ----------------------------------------------------------------------------------

    def state(self, in_flight: int) -> LoaderState:
        """The state as of the last delivered batch, or as it was ``in_flight`` batches ago."""
        return make_state(self._identity, self.cursor.ago(in_flight), self.cursor.skipped, self._seed.get())

    def check(self, state: Mapping[str, Any], override: Iterable[str]) -> Accepted:
        """Whether a saved state may be loaded here; nothing is changed."""
        return check_state(state, self._identity, self._seed.explicit, override)

    def load(self, accepted: Accepted) -> None:
        """Continue from a checked state."""
        self.notices.loading(accepted.saved)
        self._seed.value = accepted.seed
        self.dealer.restore(accepted.draws)
        self.cursor.load(accepted.place, accepted.deal, accepted.saved.skipped)
        self.dealer.announce(accepted.place.epoch)
        self._retire_newest()
        self.notices.loaded(self.cursor, accepted.saved)

    def _check_size(self) -> None:
        known, size = self._identity.dataset_size, _size(self._dataset)
        if size != known:
            error = mismatch({"dataset_size": (known, size)})
            raise StateMismatchError(
                f"the dataset has {size} items now and had {known} when the loader was built: an order cannot "
                "change length; build a new loader",
                fields=error.fields,
            )


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None  # only an order of the user's own can do without


class _Seed:
    """A run's seed, held apart from the run so that what needs it does not hold the run."""

    def __init__(self, explicit: int | None) -> None:
        self.explicit = explicit
        self.value = explicit

    def get(self) -> int:
        """The seed; torch's initial seed is adopted the first time it is asked for."""
        if self.value is None:
            self.value = initial_seed()
        return self.value
