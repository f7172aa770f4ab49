"""What runs beside the dataset, in a worker or in this process: ticket -> seeded samples -> collated batch.

One ticket stands for one batch and carries everything that varies, so a worker keeps no state between
batches and any worker can serve any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert, get_worker_info

from resumable_data.seeding import (
    TAG_BATCH,
    TAG_COLLATE,
    SampleWords,
    StreamsAside,
    Words,
    batch_words,
    epoch_words,
    seed_streams,
    set_user_word,
)


class Ticket(NamedTuple):
    """One batch to fetch.

    ``keys`` are the dataset's: little-endian int64 bytes, 8 for each sample, or what a sampler gave. The i-th
    sample stands at position ``first + i * stride`` of the epoch's global order.
    """

    number: int
    epoch: int
    seed: int
    base_seed: int
    first: int
    stride: int
    keys: Any


class Fetcher:
    """The dataset that torch's DataLoader is given: a ticket goes in, (number, batch) comes out.

    Args:
        dataset: The user's map-style dataset.
        collate_fn: The user's, or torch's default.
        seeding: "batch.v1", "sample.v1" or "none".
        rank: This rank; a coordinate of the batch seeds.
        aside: Whether this runs in the training process, whose own streams then have to be set aside.
        single: Every ticket is one sample that is not batched (the user's ``batch_size=None``).
        reseed: Called with (dataset, word) wherever the streams are seeded, or None.

    Raises:
        ValueError: ``seeding="sample"`` with a dataset that only hands out whole batches.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        seeding: str,
        rank: int,
        *,
        aside: bool,
        single: bool = False,
        reseed: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._seeding = seeding
        self._rank = rank
        self._aside = aside
        self._single = single
        self._reseed = reseed
        self._batched = not single and _whole_batches(dataset)
        if seeding == "sample.v1" and self._batched:
            _refuse_batched(dataset)
            self._batched = False
        # torch's own collate functions draw nothing: seeding for them could not be noticed
        self._collate_draws = collate_fn not in (default_collate, default_convert) or reseed is not None
        whole = type(dataset) is TensorDataset and collate_fn is default_collate and reseed is None
        self._whole_tensors = whole and not single and _plain(dataset)
        self._epoch_told: int | None = None
        self._streams: StreamsAside | None = None  # made on first use: a worker never needs it

    def __getitem__(self, plain: tuple[Any, ...]) -> tuple[int, Any]:
        """The batch of a ticket; called by torch in a worker, or by the engine in this process."""
        ticket = Ticket._make(plain)
        if self._aside:
            return ticket.number, self.fetch_aside(ticket)
        _keep_worker_seed(ticket.base_seed)
        return ticket.number, self.fetch(ticket)

    def fetch_aside(self, ticket: Ticket) -> Any:
        """The batch of a ticket in this process, whose own random streams stay where they are."""
        if self._seeding == "none" or self._whole_tensors:
            return self.fetch(ticket)  # nothing is seeded, nothing is to be protected
        if self._streams is None:
            self._streams = StreamsAside()
        return self._streams.around(self.fetch, ticket)

    def fetch(self, ticket: Ticket) -> Any:
        """The batch of a ticket; moves this process's streams wherever the seeding says so."""
        if self._whole_tensors and type(ticket.keys) is bytes:
            return _select(self.dataset, ticket.keys)
        try:
            if ticket.epoch != self._epoch_told:
                self._tell_epoch(ticket)
            samples = self._samples(ticket)
            if self._collate_draws:
                self._seed_batch(TAG_COLLATE, ticket)
            return self._collate_fn(samples[0] if self._single else samples)
        finally:
            if self._seeding != "none":
                set_user_word(None)

    def _tell_epoch(self, ticket: Ticket) -> None:
        """Tell the dataset the epoch, also the copies that live workers hold; it may draw an order of its own."""
        if hasattr(self.dataset, "set_epoch"):
            if self._seeding != "none":
                self._seed(epoch_words(ticket.seed, ticket.epoch))
            self.dataset.set_epoch(ticket.epoch)
        self._epoch_told = ticket.epoch

    def _samples(self, ticket: Ticket) -> Any:
        keys = ticket.keys
        if type(keys) is bytes:
            keys = np.frombuffer(keys, dtype="<i8").tolist()
        if self._seeding == "sample.v1":
            return self._samples_each_seeded(keys, ticket)
        self._seed_batch(TAG_BATCH, ticket)
        if self._batched:
            return self.dataset.__getitems__(keys.copy() if type(keys) is list else keys)
        return [self.dataset[key] for key in keys]

    def _samples_each_seeded(self, keys: Iterable[Any], ticket: Ticket) -> list[Any]:
        words = SampleWords(ticket.seed, ticket.epoch)
        samples = []
        for offset, key in enumerate(keys):
            self._seed(words.at(ticket.first + offset * ticket.stride))
            samples.append(self.dataset[key])
        return samples

    def _seed_batch(self, tag: int, ticket: Ticket) -> None:
        if self._seeding != "none":
            self._seed(batch_words(tag, ticket.seed, ticket.epoch, ticket.first, self._rank))

    def _seed(self, words: Words) -> None:
        seed_streams(words)
        set_user_word(words.user)
        if self._reseed is not None:
            self._reseed(self.dataset, words.user)


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


def _refuse_batched(dataset: Any) -> None:
    if not isinstance(dataset, Subset):
        raise ValueError(  # noqa: TRY004  # the two arguments do not go together
            f"seeding='sample' seeds before each sample, but {type(dataset).__name__} fetches whole batches by "
            "__getitems__: use seeding='batch', or a dataset without __getitems__"
        )


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


def _select(dataset: TensorDataset, keys: bytes) -> list[torch.Tensor]:
    # one copy of the keys: torch wants to own writable memory
    index = torch.frombuffer(bytearray(keys), dtype=torch.int64)
    return [torch.index_select(tensor, 0, index) for tensor in dataset.tensors]
