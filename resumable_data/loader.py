"""``ResumableLoader``: the class that stands where ``DataLoader`` stood."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from resumable_data import options as _options
from resumable_data.attributes import DataLoaderAttributes
from resumable_data.run import Run
from resumable_data.views import make_view
from resumable_data.wrap import take_apart


class ResumableLoader(DataLoaderAttributes):
    """A ``DataLoader`` whose position, order and augmentations survive the process.

    Takes DataLoader's arguments, in its order, with its defaults and its errors. ``state_dict()`` goes into
    the checkpoint; ``load_state_dict()`` in another process makes the next pass continue with the very batch
    that would have come, augmented as it would have been. The global random streams of the training process
    are never moved by building, iterating, saving or loading (but under ``seeding=None`` without workers,
    where the dataset draws from them as it does with DataLoader).

    Every rank builds its own loader and calls its methods alike; no call communicates.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples in a batch of one rank.
        shuffle: Whether to visit the dataset in an order that is a function of (size, seed, epoch).
        sampler: As DataLoader. A ``DistributedSampler``'s order and sharding hold; torch's samplers with a
            generator draw from it as they do under DataLoader; any other sampler is read under streams seeded
            from (seed, epoch) and skipped forward, or carried by its ``state_dict``. Never sharded again.
        batch_sampler: As DataLoader; read like a sampler.
        num_workers: As DataLoader; free to change when resuming, like the next five.
        collate_fn: As DataLoader; may draw from the global streams, which are seeded for it.
        pin_memory: As DataLoader.
        drop_last: Drop the positions that do not fill a batch on every rank.
        timeout: As DataLoader, seconds.
        worker_init_fn: As DataLoader.
        multiprocessing_context: As DataLoader: fork, spawn or forkserver.
        generator: With ``shuffle=True``, the order is what DataLoader would draw from it, bit for bit.
        prefetch_factor: As DataLoader.
        persistent_workers: As DataLoader.
        pin_memory_device: As DataLoader.
        in_order: As DataLoader.
        snapshot_every_n_steps: As torchdata's StatefulDataLoader; nothing to do for map-style data.
        seed: The run's constant, in [0, 2**64). None: torch's initial seed as it stands at first use (read,
            never drawn from), which gives way to the seed in a loaded state. Needed with several replicas.
        num_replicas: Ranks the epoch is dealt over. None: every process reads everything, as with DataLoader.
        rank: This rank, in [0, num_replicas).
        process_group: A ProcessGroup or a one-dimensional DeviceMesh that gives ``num_replicas`` and ``rank``.
        tail: What becomes of positions that do not go round: "pad" repeats the epoch's start so that all ranks
            end together, "drop" drops fewer than ``num_replicas``, "uneven" does neither: ranks may end one
            batch apart, which under DDP needs ``join()``.
        batches_per_epoch: An epoch is its first so many batches.
        seeding: Before what python's, numpy's and torch's global streams are seeded beside the dataset:
            "batch", "sample", or None for torch's own worker seeds and no promise about augmentations.
        reseed: Called as ``reseed(dataset, seed)`` beside the dataset wherever the streams are seeded, for
            generators of its own; ready-made in ``resumable_data.reseeders``.
        dataset_id: A name of the data; a state of other data of the same size is then refused.

    Raises:
        TypeError, ValueError: As DataLoader does, or naming argument, value and range.
        NotImplementedError: An iterable or stateful dataset, which this version does not support.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int = 1,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        tail: str = "pad",
        batches_per_epoch: int | None = None,
        seeding: str | None = "batch",
        reseed: Callable[[Any, int], None] | None = None,
        dataset_id: str | None = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        # never iterated: it gives DataLoader's own errors, and below its attributes
        template: DataLoader[Any] = DataLoader(
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, **arguments
        )
        chosen = _options.read_options(
            snapshot_every_n_steps=snapshot_every_n_steps,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
            process_group=process_group,
            tail=tail,
            batches_per_epoch=batches_per_epoch,
            seeding=seeding,
            reseed=reseed,
            dataset_id=dataset_id,
        )
        _options.refuse_unsupported(template)
        self._run = Run(template, _options.Choice(template, sampler, batch_sampler, bool(shuffle), chosen))
        if sampler is None and batch_sampler is None:
            view = make_view(self._run, template, bool(shuffle))
            template = DataLoader(dataset, batch_size, sampler=view, drop_last=drop_last, **arguments)
        self._template = template

    # -- iterating --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The pass that continues from the position; the table in the docs says where it begins."""
        return self._run.begin()

    def __len__(self) -> int:
        """Batches in a whole epoch on this rank, under the present topology.

        Raises:
            TypeError: The user's sampler has no length.
        """
        length = self._run.length()
        if length is None:
            raise TypeError("the sampler has no length, so the loader has none: pass batches_per_epoch")
        return length

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """A pass whose batches carry their number in the epoch: after a resume it does not begin at 0."""
        newest = self._run.begin()
        return _numbered(newest, self.batch_in_epoch)

    def cycle(self) -> Iterator[Any]:
        """Batches without end, across epochs.

        Raises:
            ValueError: An epoch has no batches.
        """
        if self._run.length() == 0:
            raise ValueError("cycle() over a loader without batches would never return: its length is 0")
        return _cycle(self._run)

    def epochs(self, stop: int) -> Iterator[int]:
        """The epochs still to do, the present one first.

        ``for epoch in loader.epochs(10): for batch in loader: ...`` is the whole loop, resumed or not.

        A body that leaves its pass early ends the epoch; breaking out of this loop itself does not.

        Args:
            stop: The number of epochs of the whole run, >= 0.
        """
        return self._run.epochs(_options.as_count("stop", stop))

    def peek(self) -> Any:
        """The batch at the position, computed in this process; the position stays and no stream moves.

        Raises:
            IndexError: The epoch has no further batch.
            ValueError: ``seeding=None`` with workers, whose streams cannot be looked ahead into.
        """
        return self._run.peek()

    def batch_at(self, epoch: int, batch_in_epoch: int) -> Any:
        """That very batch, augmentations included, computed in this process; nothing moves.

        Args:
            epoch: Any epoch, past or to come.
            batch_in_epoch: In [0, len(loader)).

        Raises:
            IndexError: Past the end of the epoch.
            ValueError: The order or the augmentations are not a function of these numbers.
        """
        batch = _options.as_count("batch_in_epoch", batch_in_epoch)
        return self._run.batch_at(_options.as_count("epoch", epoch), batch)

    # -- moving -----------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, as with ``DistributedSampler``; epochs count by themselves without it.

        Raises:
            StateMismatchError: A loaded or sought position stands in another epoch.
            ValueError: Another epoch than the present one, over an order drawn from ``generator=``.
        """
        self._run.set_epoch(_options.as_count("epoch", epoch))

    def seek(self, epoch: int, batch_in_epoch: int) -> None:
        """The next pass begins there: back, to look again, or forward, past data to be left out.

        Args:
            epoch: Any epoch.
            batch_in_epoch: In [0, len(loader)].

        Raises:
            IndexError: Past the end of the epoch.
            ValueError: Another epoch than the present one, over an order drawn from ``generator=``.
        """
        self._run.seek(_options.as_count("epoch", epoch), _options.as_count("batch_in_epoch", batch_in_epoch))

    def end_epoch(self) -> None:
        """Leave the present epoch on purpose. Where nothing of it was delivered there is nothing to leave."""
        self._run.end_epoch()

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self, *, in_flight: int = 0) -> dict[str, Any]:
        """Where the loader stands, as a flat dict of leaves. No side effect, at any time, on any rank.

        Args:
            in_flight: As of so many batches ago: those that a wrapper has read ahead and not handed on.

        Raises:
            ValueError: So many batches were not delivered since the last load or move.
        """
        return self._run.state(_options.as_count("in_flight", in_flight)).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, override: Iterable[str] = ()) -> None:
        """The next pass continues where the state was taken. A refused state leaves the loader as it was.

        Args:
            state: What ``state_dict()`` returned, possibly through JSON or ``torch.load``.
            override: Names of differing fields to accept: the present value holds, the position stays.

        Raises:
            StateError: The state cannot be read (StateVersionError: its schema is newer).
            StateMismatchError: It belongs to another run; every differing field is listed.
            ValueError: ``override`` names something that cannot be overridden.
        """
        self._run.load(self._run.check(state, override))

    def check_state_dict(self, state: Mapping[str, Any], *, override: Iterable[str] = ()) -> None:
        """The checks of ``load_state_dict``, with its errors; nothing is changed."""
        self._run.check(state, override)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ResumableLoader can neither be copied nor pickled, since it holds a position and workers: build "
            "another one from the same arguments and give it state_dict()"
        )

    @classmethod
    def wrap(cls, loader: Any, **options: Any) -> ResumableLoader:
        """The same loader, resumable, from an existing ``DataLoader`` or ``StatefulDataLoader``.

        Its own ``RandomSampler`` becomes ``shuffle=True``.

        Args:
            loader: The loader to take apart; it is not iterated.
            options: Arguments that DataLoader does not have, such as ``seed=``.

        Raises:
            TypeError: Not such a loader, or a subclass with an ``__iter__`` of its own.
        """
        return cls(**take_apart(loader), **options)

    # -- where it stands --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """0-based number of the present pass over the data."""
        return self._run.cursor.place.epoch

    @property
    def batch_in_epoch(self) -> int:
        """Batches of this epoch delivered to the caller on this rank."""
        return self._run.cursor.place.batch

    @property
    def samples_in_epoch(self) -> int | None:
        """Positions of the epoch's order delivered so far, over all replicas; padding is not counted."""
        return self._run.cursor.place.samples

    @property
    def consumed_samples(self) -> int | None:
        """Samples delivered since the run began, over all replicas; padding is not counted."""
        return self._run.cursor.place.consumed

    @property
    def batches_remaining(self) -> int | None:
        """Batches of this epoch still to be delivered on this rank; None where the sampler has no length."""
        batches = self._run.cursor.deal.batches
        # a sampler may give more batches than its length says
        return None if batches is None else max(0, batches - self.batch_in_epoch)

    @property
    def resumed(self) -> bool:
        """Whether the coming or current pass began from a loaded state."""
        return self._run.cursor.resumed


def _numbered(newest: Iterator[Any], number: int) -> Iterator[tuple[int, Any]]:
    # no call between a batch's delivery and the yield: a signal handler that raises there would lose it
    for batch in newest:
        yield number, batch
        number += 1


def _cycle(run: Run) -> Iterator[Any]:
    while True:
        yield from run.begin(counted=True)
