"""Loaders from plain values, and what they deliver as plain values.

A recipe is a dict that JSON carries, so that another interpreter can build the same loader from it.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from resumable_data import ResumableLoader
from support import datasets

DATA = {
    "indices": datasets.Indices,
    "augmented": datasets.Augmented,
    "located": datasets.Located,
    "logged": datasets.Logged,
    "raising": datasets.Raising,
    "deadly": datasets.Deadly,
    "owning": datasets.Owning,
    "owning_torch": datasets.OwningTorch,
    "slow": datasets.Slow,
    "holed": datasets.Holed,
    "images": datasets.Images,
}


def recipe(n, batch_size, *, data="indices", data_args=(), **arguments):
    """A loader as plain values: seed 7 and shuffled, unless told otherwise."""
    return {
        "data": [data, n, *data_args],
        "batch_size": batch_size,
        "shuffle": True,
        "seed": 7,
        **arguments,
    }


def build(plain, kind=ResumableLoader):
    """The loader of a recipe; ``kind=DataLoader`` gives torch's, without the arguments it does not know."""
    arguments = dict(plain)
    name, *rest = arguments.pop("data")
    dataset = DATA[name](*rest)
    if "sampler" in arguments:
        arguments["sampler"] = sampler(dataset, arguments["sampler"])
        del arguments["shuffle"]
    if arguments.get("generator") is not None:
        arguments["generator"] = torch.Generator().manual_seed(arguments["generator"])
    if "collate_fn" in arguments:
        arguments["collate_fn"] = getattr(datasets, arguments["collate_fn"])
    if kind is DataLoader:
        for ours in ("seed", "num_replicas", "rank", "seeding", "dataset_id"):
            arguments.pop(ours, None)
    return kind(dataset, **arguments)


def sampler(dataset, plain):
    """``{"random": seed}`` or ``{"distributed": {...}}``."""
    if "random" in plain:
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(plain["random"]))
    return DistributedSampler(dataset, **plain["distributed"])


def plainly(value):
    """Tensors, arrays and tuples as lists, numbers as python's: what JSON gives back unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def take(iterator, count):
    """The next ``count`` batches, exactly; nothing is asked for beyond them."""
    return [plainly(next(iterator)) for _ in range(count)]


def rest(iterator):
    """The batches up to StopIteration."""
    return [plainly(batch) for batch in iterator]


def collect(iterator, seen):
    """``rest`` into a list that keeps what came before an error."""
    for batch in iterator:
        seen.append(plainly(batch))


def passes(loader, count):
    """The next ``count`` passes."""
    return [rest(iter(loader)) for _ in range(count)]


def run_to(loader, epoch, batch):
    """Deliver everything before the position; the iterator of the epoch is returned, live."""
    for _ in range(epoch):
        rest(iter(loader))
    live = iter(loader)
    take(live, batch)
    return live


def saves(plain, batch, epochs=3):
    """States of one run, each after ``batch`` batches of an epoch: epochs 0, 1, 2, ..."""
    loader, states = build(plain), []
    for _ in range(epochs):
        live = iter(loader)
        take(live, batch)
        states.append(loader.state_dict())
        rest(live)
    return states


def without_crew(plain):
    """The same recipe without workers: they must not matter, and starting them takes its time."""
    crew = ("num_workers", "persistent_workers", "multiprocessing_context", "prefetch_factor")
    return {name: value for name, value in plain.items() if name not in crew}


def uninterrupted(plain, count):
    """The passes of a run that was never killed and has no workers: full, each in an order of its own."""
    whole = passes(build(without_crew(plain)), count)
    assert all(len(one) == len(whole[0]) > 0 for one in whole)
    assert all(one != other for at, one in enumerate(whole) for other in whole[:at])
    return whole


def samples(batches):
    """Default-collated batches of tuples as one list of tuples."""
    return [sample for batch in batches for sample in zip(*batch, strict=True)]


def streams():
    """The global random streams of this process, as plain values."""
    legacy = np.random.get_state(legacy=False)
    return plainly(
        [random.getstate(), {**legacy, "state": dict(legacy["state"])}, torch.default_generator.get_state()]
    )


def resumed(plain, state, count):
    """In a fresh interpreter: the next ``count`` passes of a loaded state."""
    loader = build(plain)
    loader.load_state_dict(state)
    return passes(loader, count)


def resumed_each(plain, states, count):
    """In a fresh interpreter: ``resumed`` for each of several states."""
    return [resumed(plain, state, count) for state in states]
