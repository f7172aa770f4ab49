"""The works of a loader: position, order, seed and engine, moved together.

``ResumableLoader`` is the face: it checks what it is given and calls in here. Nothing else does.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler

from resumable_data.cursor import Cursor, Place, Standing
from resumable_data.engines import Engine, MapEngine
from resumable_data.errors import StateMismatchError
from resumable_data.fetch import Ticket
from resumable_data.options import Options, build_order, build_plan, choose_seed
from resumable_data.passes import Pass, make_ticket, make_tickets
from resumable_data.resume import Accepted, Identity, check_state, make_state
from resumable_data.seeding import draw_base_seed, initial_seed, streams_kept, worker_generator
from resumable_data.state import LoaderState, mismatch

logger = logging.getLogger("resumable_data")


class Run:
    """One loader's moving parts.

    Args:
        template: A DataLoader that was built from the user's arguments and is never iterated.
        sampler: The user's sampler, or None.
        shuffle: Whether the user asked for a shuffled order.
        options: The arguments that DataLoader does not have.
    """

    def __init__(self, template: DataLoader[Any], sampler: Any, shuffle: bool, options: Options) -> None:
        self._dataset = cast("Sized", template.dataset)
        self.options = options
        self.order = build_order(template, sampler, shuffle, options)
        self.plan = build_plan(template, self.order, sampler, options)
        self.explicit_seed = choose_seed(sampler, options, self.plan)
        self.cursor = Cursor(self.plan, self.order.close)
        self._seed = self.explicit_seed
        self._workers = template.num_workers
        shared = type(sampler) is DistributedSampler
        tail = "drop" if shared and sampler.drop_last else options.tail
        self._identity = Identity(self.order, self.plan, options, len(self._dataset), tail)
        self._engine: Engine = MapEngine(template, options.seeding, self.plan.rank)
        self._newest: weakref.ref[Pass] | None = None
        self._warned: set[str] = set()
        self._counted = False  # the caller reads the epoch from us, or tells us

    @property
    def seed(self) -> int:
        """The run's seed; torch's initial seed is adopted the first time it is asked for."""
        if self._seed is None:
            self._seed = initial_seed()
        return self._seed

    @property
    def samples(self) -> int:
        """How many indices a sampler would give this rank; it does not drop incomplete batches."""
        return replace(self.plan, drop_last=False).samples

    # -- passes ---------------------------------------------------------------------------------

    def begin(self, *, counted: bool = False) -> Pass:
        """A new pass from the position; an earlier one goes stale and lets go of its workers."""
        self._check_size()
        self._counted = self._counted or counted
        told = self.order.told()
        if told is not None:
            self.set_epoch(told)
        begun = self.cursor.begin()
        self._retire_newest()
        if begun.left is not None:
            self._warn_left(begun.left)
        self._log_empty_rest(self.cursor.place)
        try:
            stream = self._start(self.cursor.place)
        except BaseException:
            self.cursor.fail()
            self._engine.drop()
            raise
        newest = Pass(self.cursor, begun.serial, stream, self._engine.failed)
        # a strong reference would keep a pass's workers alive after a break
        self._newest = weakref.ref(newest)
        return newest

    def _start(self, place: Place) -> Iterator[tuple[int, Any]]:
        order = self.order.open(place.epoch, self.seed)
        self.order.announce(place.epoch)
        if place.batch >= self.plan.batches:
            return iter(())  # an epoch without a rest needs no workers
        generator = self._worker_generator(place.epoch)
        base_seed = draw_base_seed(generator.clone_state())
        tickets = make_tickets(
            self.plan, order, place.batch, epoch=place.epoch, seed=self.seed, base_seed=base_seed
        )
        return self._engine.start(tickets, generator)

    def _worker_generator(self, epoch: int) -> torch.Generator:
        theirs = self.order.draws.worker_generator() if self.order.draws is not None else None
        if theirs is not None and self.options.seeding == "none":
            return theirs
        return worker_generator(self.seed, epoch, self.plan.rank)

    def epochs(self, stop: int) -> Iterator[int]:
        """See ``ResumableLoader.epochs``."""
        if self.cursor.place.standing is Standing.OPEN:  # a pass that an earlier loop left: it is over
            left = self.cursor.place
            self._close_epoch()
            if left.batch < self.plan.batches:
                self._warn_left(left)
        while self.cursor.place.epoch < stop:
            epoch, moves = self.cursor.place.epoch, self.cursor.moves
            self._counted = True
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
        place = self.cursor.place
        if place.batch >= self.plan.batches:
            raise IndexError(
                f"peek at batch {place.batch} of epoch {place.epoch}, which has {self.plan.batches} batches"
            )
        ticket = self._ticket(place.epoch, place.batch)
        if self.options.seeding != "none":
            return self._engine.fetch_one(ticket)
        if self._workers:
            raise ValueError(
                "peek() with seeding=None and workers: the workers' own streams decide the batch; "
                "use seeding='batch' or num_workers=0"
            )
        with streams_kept():
            return self._engine.fetch_one(ticket)

    def batch_at(self, epoch: int, batch: int) -> Any:
        """See ``ResumableLoader.batch_at``."""
        if not self.order.random_access:
            raise ValueError("batch_at() with generator=: its draws only go forward; use seed= instead")
        if self.options.seeding == "none":
            raise ValueError(
                "batch_at() with seeding=None: augmentations are not a function of the position; "
                "use seeding='batch'"
            )
        if batch >= self.plan.batches:
            raise IndexError(
                f"batch_in_epoch must be in [0, {self.plan.batches - 1}], found {batch}: past the epoch's end"
            )
        return self._engine.fetch_one(self._ticket(epoch, batch))

    def _ticket(self, epoch: int, batch: int) -> Ticket:
        order = self.order.look(epoch, self.seed)
        return make_ticket(self.plan, order, batch, epoch=epoch, seed=self.seed, base_seed=0)

    def indices(self) -> list[int]:
        """What a sampler would give this rank in the present epoch: repeats included, nothing dropped."""
        order = self.order.look(self.cursor.place.epoch, self.seed)
        mine: list[int] = order.take(self.plan.rank, self.samples, self.plan.num_replicas).tolist()
        return mine

    # -- moves ----------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """See ``ResumableLoader.set_epoch``."""
        place = self.cursor.place
        if not self.order.random_access and epoch != place.epoch:
            over = place.standing is Standing.OPEN or place.batch == self.plan.batches
            if epoch != place.epoch + 1 or not over:
                self._refuse_epoch("set_epoch", epoch)
        if self.order.random_access or epoch != place.epoch:
            self.cursor.set_epoch(epoch)
        self._counted = True
        if not self.cursor.live:
            self._retire_newest()

    def seek(self, epoch: int, batch: int) -> None:
        """See ``ResumableLoader.seek``."""
        if batch > self.plan.batches:
            raise IndexError(
                f"batch_in_epoch must be in [0, {self.plan.batches}], found {batch}: past the epoch's end"
            )
        if not self.order.random_access and epoch != self.cursor.place.epoch:
            self._refuse_epoch("seek", epoch)
        self.cursor.seek(epoch, batch)
        self._retire_newest()

    def _refuse_epoch(self, verb: str, epoch: int) -> NoReturn:
        raise ValueError(
            f"{verb} to epoch {epoch} from epoch {self.cursor.place.epoch} over an order drawn from a "
            "generator: its draws only go forward, an epoch at a time; use seed= instead of generator="
        )

    # -- state ----------------------------------------------------------------------------------

    def state(self) -> LoaderState:
        """The state as of the last delivered batch."""
        return make_state(self._identity, self.cursor, self.seed)

    def check(self, state: Mapping[str, Any], override: Iterable[str]) -> Accepted:
        """Whether a saved state may be loaded here; nothing is changed."""
        return check_state(state, self._identity, self.explicit_seed, override)

    def load(self, accepted: Accepted) -> None:
        """Continue from a checked state."""
        saved = accepted.state
        self._seed = accepted.seed
        self.order.forget()
        if self.order.draws is not None:
            self.order.draws.forget()
            if accepted.draws is not None:
                self.order.draws.restore(accepted.draws)
        self.cursor.load(saved.epoch, saved.batch_in_epoch, saved.consumed_samples or 0, saved.skipped)
        self.order.announce(saved.epoch)
        self._counted = False
        self._retire_newest()
        self._log_resume(saved)

    # -- what is said ---------------------------------------------------------------------------

    def _check_size(self) -> None:
        size = len(self._dataset)
        if size != self._identity.dataset_size:
            error = mismatch({"dataset_size": (self._identity.dataset_size, size)})
            raise StateMismatchError(
                f"the dataset has {size} items now and had {self._identity.dataset_size} when the loader was "
                "built: an order cannot change length; build a new loader",
                fields=error.fields,
            )

    def _warn_left(self, left: Place) -> None:
        if "left" in self._warned:
            return
        self._warned.add("left")
        warnings.warn(
            f"a new pass begins although epoch {left.epoch} stood at batch {left.batch} of "
            f"{self.plan.batches}: the rest of that epoch is left out, as with DataLoader. If an epoch is "
            "meant to be shorter use batches_per_epoch or end_epoch(); to number batches enumerate(); to "
            "look at a batch peek(); to go on elsewhere seek()",
            UserWarning,
            stacklevel=4,
        )

    def _log_empty_rest(self, place: Place) -> None:
        if place.standing is not Standing.PENDING or not self.cursor.resumed or self._counted:
            return
        if place.batch == self.plan.batches > 0:
            logger.warning(
                "resumed at the end of epoch %d: this pass yields nothing and closes the epoch; a loop that "
                "counts epochs itself must use loader.epochs(stop) or set_epoch()",
                place.epoch,
            )

    def _log_resume(self, saved: LoaderState) -> None:
        logger.info(
            "resumed at epoch %d, batch %d of %d (%s of %d samples), %d x %s saved -> %d x %d now, order %s",
            saved.epoch,
            saved.batch_in_epoch,
            self.plan.batches,
            saved.samples_in_epoch,
            self.order.real,
            saved.num_replicas,
            saved.batch_size,
            self.plan.num_replicas,
            self.plan.batch_size,
            self.order.name,
        )
        if saved.seeding == "none" and "seeding" not in self._warned:
            self._warned.add("seeding")
            warnings.warn(
                "resumed with seeding=None: the order of the data continues exactly, augmentations are not "
                "promised to; use seeding='batch' or 'sample'",
                UserWarning,
                stacklevel=4,
            )
