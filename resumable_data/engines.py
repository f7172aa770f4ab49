"""One small interface to what fetches batches: tickets go in, (number, batch) pairs come out in order.

``MapEngine`` drives map-style datasets through torch's ``DataLoader``, one ticket a batch, by public
hooks only. Without workers and without pinning there is nothing for torch to do, and the fetcher is
called directly.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from resumable_data.fetch import Fetcher, Ticket, WorkerInit, register_generators

#: Seconds to wait for the signal that says which worker died.
REAPING = 1.0


class Engine(Protocol):
    """What the loader asks of an engine."""

    def start(self, tickets: Iterator[Ticket], generator: torch.Generator) -> Iterator[tuple[int, Any]]:
        """The batches of these tickets, in order; ``generator`` is where worker seeds are drawn from."""
        ...

    def fetch_one(self, ticket: Ticket) -> Any:
        """One batch, computed in this process; no pass is disturbed and no stream moved."""
        ...

    def drop(self) -> None:
        """Let go of all workers: the next start begins with fresh ones."""
        ...

    def failed(self, error: BaseException) -> None:
        """The stream raised this: let go of all workers, and raise a better error where there is one."""
        ...


class MapEngine:
    """Batches of a map-style dataset.

    Args:
        template: A DataLoader that was built from the user's arguments and is never iterated.
        make_fetcher: Gives the fetcher for this dataset, for this process (``aside=True``) or for workers.

    Raises:
        ValueError: The dataset does not go with the seeding.
    """

    def __init__(self, template: DataLoader[Any], make_fetcher: Callable[[bool], Fetcher]) -> None:
        self._template = template
        here = template.num_workers == 0
        self._direct = here and not template.pin_memory
        self._fetcher = make_fetcher(here)
        self._nearby = self._fetcher if here else make_fetcher(True)
        self._source = _Source()
        self._inner: DataLoader[Any] | None = None

    def start(self, tickets: Iterator[Ticket], generator: torch.Generator) -> Iterator[tuple[int, Any]]:
        """See ``Engine``. With persistent workers, batches in flight are computed and thrown away."""
        if self._direct:
            return map(self._fetcher.__getitem__, tickets)
        if self._inner is None:
            register_generators()
            self._inner = self._build()
        self._source.tickets = map(tuple, tickets)  # half as long to pickle as a class of ours
        self._inner.generator = generator
        return iter(self._inner)

    def fetch_one(self, ticket: Ticket) -> Any:
        """See ``Engine``."""
        batch = self._nearby.fetch_aside(ticket)
        if not self._template.pin_memory:
            return batch
        done: list[Any] = [batch]
        pinning: DataLoader[Any] = DataLoader(
            done,  # type: ignore[arg-type]  # a list is a map-style dataset
            batch_size=None,
            collate_fn=_identity,
            pin_memory=True,
            generator=torch.Generator(),
        )
        return next(iter(pinning))

    def drop(self) -> None:
        """See ``Engine``."""
        self._inner = None
        self._source.tickets = iter(())

    def failed(self, error: BaseException) -> None:
        """See ``Engine``."""
        if self._direct:
            return
        self.drop()
        # torch's frames hold the iterator, and the error its frames: a cycle that keeps the workers alive
        # until the garbage collector stumbles over it and waits for each. The text of the traceback stays.
        inner: BaseException | None = error
        while inner is not None:
            traceback.clear_frames(inner.__traceback__)
            inner = inner.__cause__ or inner.__context__
        if isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and not _from_worker(error):
            # a worker died while a batch of its was being received; torch's SIGCHLD handler names it, in here
            time.sleep(REAPING)

    def _build(self) -> DataLoader[Any]:
        theirs = self._template
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]  # map-style by duck typing: it has no length of its own
            batch_size=None,
            sampler=self._source,
            collate_fn=_identity,
            num_workers=theirs.num_workers,
            pin_memory=theirs.pin_memory,
            timeout=theirs.timeout,
            worker_init_fn=WorkerInit(theirs.worker_init_fn),
            multiprocessing_context=theirs.multiprocessing_context,
            prefetch_factor=theirs.prefetch_factor if theirs.num_workers else None,
            persistent_workers=theirs.persistent_workers,
            in_order=theirs.in_order,
            pin_memory_device=theirs.pin_memory_device,
        )


class _Source:
    """The inner loader's sampler. torch asks for its iterator twice a pass and must get the same one."""

    def __init__(self) -> None:
        self.tickets: Iterator[tuple[Any, ...]] = iter(())

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.tickets


def _from_worker(error: BaseException) -> bool:
    # torch's ExceptionWrapper writes this before the worker's own traceback
    return str(error).startswith("Caught ")


def _identity(batch: Any) -> Any:
    return batch
