"""What runs beside the dataset, in a worker or in this process: ticket -> seeded samples -> collated batch.

One ticket stands for one batch and carries everything that varies, so a worker keeps no state between
batches and any worker can serve any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info

from resumable_data.seeding import (
    TAG_BATCH,
    TAG_COLLATE,
    SampleWords,
    StreamsAside,
    batch_words,
    seed_streams,
)


class Ticket(NamedTuple):
    """One batch to fetch.

    ``indices`` are the dataset's keys as little-endian int64 bytes, 8 for each sample. The i-th sample stands
    at position ``first + i * stride`` of the epoch's global order.
    """

    number: int
    epoch: int
    seed: int
    base_seed: int
    first: int
    stride: int
    indices: bytes


class Fetcher:
    """The dataset that torch's DataLoader is given: a ticket goes in, (number, batch) comes out.

    Args:
        dataset: The user's map-style dataset.
        collate_fn: The user's, or torch's default.
        seeding: "batch.v1", "sample.v1" or "none".
        rank: This rank; a coordinate of the batch seeds.
        aside: Whether this runs in the training process, whose own streams then have to be set aside.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], seeding: str, rank: int, *, aside: bool
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._seeding = seeding
        self._rank = rank
        self._aside = aside
        self._samples = choose_samples(dataset, collate_fn, seeding)
        self._streams: StreamsAside | None = None  # made on first use: a worker never needs it

    def __getitem__(self, ticket: Ticket) -> tuple[int, Any]:
        """The batch of a ticket; called by torch in a worker, or by the engine in this process."""
        if self._aside:
            return ticket.number, self.fetch_aside(ticket)
        _keep_worker_seed(ticket.base_seed)
        return ticket.number, self.fetch(ticket)

    def fetch_aside(self, ticket: Ticket) -> Any:
        """The batch of a ticket in this process, whose own random streams stay where they are."""
        if self._seeding == "none" or self._samples is _tensors:
            return self.fetch(ticket)  # nothing is seeded, nothing is to be protected
        if self._streams is None:
            self._streams = StreamsAside()
        return self._streams.around(self.fetch, ticket)

    def fetch(self, ticket: Ticket) -> Any:
        """The batch of a ticket; moves this process's streams wherever the seeding says so."""
        samples = self._samples(self.dataset, ticket, self._rank)
        if self._samples is _tensors:
            return samples
        if self._seeding != "none":
            seed_streams(batch_words(TAG_COLLATE, ticket.seed, ticket.epoch, ticket.first, self._rank))
        return self._collate_fn(samples)


def register_generators() -> None:
    """Let a ``torch.Generator`` that a dataset holds reach workers that are spawned.

    torch pickles its state as a tensor that is gone before the worker asks for it; here it goes as bytes.
    """
    ForkingPickler.register(torch.Generator, _reduce_generator)


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    return _rebuild_generator, (str(generator.device), bytes(generator.get_state().numpy()))


def _rebuild_generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


class WorkerInit:
    """torch's ``worker_init_fn``: shows the user's dataset in ``get_worker_info()``, then calls theirs."""

    def __init__(self, theirs: Callable[[int], None] | None) -> None:
        self._theirs = theirs

    def __call__(self, worker_id: int) -> None:
        """Called by torch once in each new worker process."""
        info = get_worker_info()
        if info is not None:
            # WorkerInfo is frozen; this is the one adapter that reaches behind it (tested against upstream)
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # a Fetcher
        if self._theirs is not None:
            self._theirs(worker_id)


def _keep_worker_seed(base_seed: int) -> None:
    """``get_worker_info().seed`` of this epoch, also in a worker that was started in an earlier one."""
    info = get_worker_info()
    if info is not None and info.seed != base_seed + info.id:
        object.__setattr__(info, "seed", base_seed + info.id)


Samples = Callable[[Any, Ticket, int], Any]


def choose_samples(dataset: Any, collate_fn: Callable[[Any], Any], seeding: str) -> Samples:
    """How the samples of a ticket are had from this dataset.

    Raises:
        ValueError: ``seeding="sample"`` with a dataset that only hands out whole batches.
    """
    if seeding == "none":
        batched = _whole_batches(dataset)
        return _getitems_unseeded if batched else _items_unseeded
    if type(dataset) is TensorDataset and collate_fn is default_collate and _plain(dataset):
        return _tensors
    if seeding == "sample.v1":
        if _whole_batches(dataset) and not isinstance(dataset, Subset):
            raise ValueError(
                f"seeding='sample' seeds before each sample, but {type(dataset).__name__} fetches whole "
                "batches by __getitems__: use seeding='batch', or a dataset without __getitems__"
            )
        return _items_each_seeded
    return _getitems_seeded if _whole_batches(dataset) else _items_seeded


def _whole_batches(dataset: Any) -> bool:
    # torch's own test, in torch/utils/data/_utils/fetch.py
    return bool(getattr(dataset, "__getitems__", None))


def _plain(dataset: TensorDataset) -> bool:
    """Whether indexing the whole tensors gives bit for bit what stacking their items gives."""
    return all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.requires_grad
        and tensor.device.type == "cpu"
        and _selectable(tensor)
        for tensor in dataset.tensors
    )


def _selectable(tensor: torch.Tensor) -> bool:
    """Whether ``index_select`` takes this dtype; it lacks some that stacking has."""
    try:
        torch.index_select(tensor[:1], 0, torch.zeros(min(1, len(tensor)), dtype=torch.int64))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _keys(ticket: Ticket) -> list[int]:
    keys: list[int] = np.frombuffer(ticket.indices, dtype="<i8").tolist()
    return keys


def _tensors(dataset: TensorDataset, ticket: Ticket, rank: int) -> list[torch.Tensor]:
    # one copy of the keys: torch wants to own writable memory
    index = torch.frombuffer(bytearray(ticket.indices), dtype=torch.int64)
    return [torch.index_select(tensor, 0, index) for tensor in dataset.tensors]


def _items_unseeded(dataset: Any, ticket: Ticket, rank: int) -> list[Any]:
    return [dataset[key] for key in _keys(ticket)]


def _getitems_unseeded(dataset: Any, ticket: Ticket, rank: int) -> Any:
    return dataset.__getitems__(_keys(ticket))


def _items_seeded(dataset: Any, ticket: Ticket, rank: int) -> list[Any]:
    seed_streams(batch_words(TAG_BATCH, ticket.seed, ticket.epoch, ticket.first, rank))
    return [dataset[key] for key in _keys(ticket)]


def _getitems_seeded(dataset: Any, ticket: Ticket, rank: int) -> Any:
    seed_streams(batch_words(TAG_BATCH, ticket.seed, ticket.epoch, ticket.first, rank))
    return dataset.__getitems__(_keys(ticket))


def _items_each_seeded(dataset: Any, ticket: Ticket, rank: int) -> list[Any]:
    words = SampleWords(ticket.seed, ticket.epoch)
    samples = []
    for offset, key in enumerate(_keys(ticket)):
        seed_streams(words.at(ticket.first + offset * ticket.stride))
        samples.append(dataset[key])
    return samples
