"""What a loader says to its user besides errors: one log line a resume, and warnings, each once a loader."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any

import torch.distributed

from resumable_data.cursor import Begun, Cursor, Place, Standing
from resumable_data.deals import Deal
from resumable_data.reseeders import find_generators
from resumable_data.resume import Identity
from resumable_data.state import LoaderState

logger = logging.getLogger("resumable_data")


class Notices:
    """The voice of one loader.

    Args:
        identity: What the loader is.
        shared: Whether a DistributedSampler deals the data out.
        dataset: The user's dataset.
    """

    def __init__(self, identity: Identity, *, shared: bool, dataset: Any) -> None:
        self.counted = False  # the caller reads the epoch from the loader, or tells it
        self._identity = identity
        self._shared = shared
        self._dataset = dataset
        self._said: set[str] = set()

    def pass_begins(self, cursor: Cursor[Deal], begun: Begun) -> None:
        """Before a pass: batches left behind, an empty rest, data every process reads, unseeded generators."""
        self.left_behind(begun.left, begun.batches)
        self._log_empty_rest(cursor)
        self._warn_unshared()
        self._warn_generators()

    def left_behind(self, left: Place | None, batches: int | None) -> None:
        """A pass was left before its end."""
        if left is not None:
            self._warn_once(
                "left",
                f"a new pass begins although epoch {left.epoch} stood at batch {left.batch} of {batches}: the rest of "
                "that epoch is left out, as with DataLoader. If an epoch is meant to be shorter use "
                "batches_per_epoch or end_epoch(); to number batches enumerate(); to look at a batch peek(); "
                "to go on elsewhere seek()",
            )

    def loaded(self, cursor: Cursor[Deal], saved: LoaderState) -> None:
        """A state was loaded."""
        self.counted = False
        identity = self._identity
        logger.info(
            "resumed at epoch %d, batch %d of %s (%s of %s samples), %d x %s saved -> %d x %s now, order %s",
            saved.epoch,
            saved.batch_in_epoch,
            cursor.deal.batches,
            saved.samples_in_epoch,
            identity.dataset_size,
            saved.num_replicas,
            saved.batch_size,
            identity.num_replicas,
            identity.batch_size,
            identity.dealer.name,
        )

    def loading(self, saved: LoaderState) -> None:
        """A checked state is about to be loaded; a warning that is made an error must find nothing changed."""
        if saved.seeding == "none":
            self._warn_once(
                "seeding",
                "resumed with seeding=None: the order of the data continues exactly, augmentations are not "
                "promised to; use seeding='batch' or 'sample'",
            )

    def _log_empty_rest(self, cursor: Cursor[Deal]) -> None:
        place = cursor.place
        loaded = place.standing is Standing.PENDING and cursor.resumed
        if loaded and cursor.at_end and place.batch > 0 and not self.counted:
            logger.warning(
                "resumed at the end of epoch %d: this pass yields nothing and closes the epoch; a loop that "
                "counts epochs itself must use loader.epochs(stop) or set_epoch()",
                place.epoch,
            )

    def _warn_unshared(self) -> None:
        unshared = not self._shared and self._identity.num_replicas == 1
        if not unshared or self._identity.dealer.name not in ("shuffled.v1", "generator"):
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
            if world_size > 1:
                self._warn_once(
                    "unshared",
                    f"each of {world_size} processes reads the whole dataset: pass process_group= (or "
                    "num_replicas= and rank=) to deal it out, or a DistributedSampler",
                )

    def _warn_generators(self) -> None:
        options = self._identity.options
        if "generators" in self._said or options.seeding == "none" or options.reseed is not None:
            return
        self._said.add("generators")
        found = find_generators(self._dataset)
        if found:
            names = ", ".join(f"dataset{path} ({type(held).__name__})" for path, held in found)
            self._said.discard("generators")
            self._warn_once(
                "generators",
                f"nothing reseeds {names}: its draws depend on workers and are lost when the run is killed. Pass "
                "reseed=resumable_data.reseeders.reseed_held, or seed a generator from sample_seed() in "
                "__getitem__",
            )

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(message, UserWarning, stacklevel=_outside())


def _outside() -> int:
    """The ``stacklevel`` that makes a warning of the function that asks point at the user's own line."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_globals.get("__name__", "").startswith("resumable_data."):
        level, frame = level + 1, frame.f_back
    return level
