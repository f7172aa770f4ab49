"""An existing loader taken apart into the arguments it was built from."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdatas

_KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def take_apart(loader: Any) -> dict[str, Any]:
    """The constructor's arguments that give the same loader.

    Args:
        loader: A ``DataLoader`` or ``StatefulDataLoader`` that was built from a map-style dataset.

    Raises:
        TypeError: Something else, or a subclass with an ``__iter__`` of its own.
    """
    if not isinstance(loader, (DataLoader, StatefulDataLoader)):
        raise TypeError(
            f"wrap() takes a DataLoader or StatefulDataLoader, found {type(loader).__name__}: build a "
            "ResumableLoader from the dataset instead"
        )
    if type(loader).__iter__ not in (DataLoader.__iter__, StatefulDataLoader.__iter__):
        raise TypeError(
            f"{type(loader).__name__} has an __iter__ of its own, which a ResumableLoader would not call: build a "
            "ResumableLoader from its dataset and do in collate_fn or the training loop what __iter__ does"
        )
    arguments = {name: getattr(loader, name) for name in _KEPT}
    arguments["prefetch_factor"] = loader.prefetch_factor if loader.num_workers else None
    if isinstance(loader, StatefulDataLoader):
        arguments["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    return {**arguments, **_order(loader)}


def _order(loader: Any) -> dict[str, Any]:
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    if batch_sampler is not None and loader.batch_size is None:
        return {"batch_sampler": batch_sampler}
    if batch_sampler is not None and not isinstance(batch_sampler, BatchSampler):
        return {"batch_sampler": batch_sampler}
    batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset):
        return batches  # what stands as its sampler is torch's placeholder
    if _is_default(sampler, SequentialSampler):
        return {**batches, "shuffle": False}
    if _is_default(sampler, RandomSampler) and _plain_random(sampler, loader):
        return {**batches, "shuffle": True}
    return {**batches, "sampler": sampler}


def _is_default(sampler: Any, kind: type) -> bool:
    # torchdata's RandomSampler, which it makes where none was given, does not descend from torch's
    return type(sampler) is kind or (kind is RandomSampler and type(sampler) is torchdatas.RandomSampler)


def _plain_random(sampler: Any, loader: Any) -> bool:
    """Whether ``shuffle=True`` would have made this sampler."""
    whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    # torchdata's makes itself a generator where none was given
    theirs = type(sampler) is not RandomSampler and loader.generator is None
    given = sampler.generator is loader.generator or theirs
    return whole and sampler.data_source is loader.dataset and given
