"""Datasets whose every draw shows, and small tools, shared by the tests of the loader."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from resumable_data import ResumableLoader


def draws():
    """One draw from each global stream that a dataset may use."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


class Noted:
    """Item i is i and one draw from each library: equal batches mean equal indices and augmentations."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return (index, *draws())


class Plain:
    """Item i is i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Batched(Noted):
    """Hands out whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def as_is(samples):
    return samples


def noted(samples):
    """A collate function that draws too."""
    return samples, *draws()


def indices_of(batch):
    """The indices in a batch that ``noted`` made from ``Noted`` items."""
    return [item[0] for item in batch[0]]


def position(loader):
    return loader.epoch, loader.batch_in_epoch


def through_json(state):
    return json.loads(json.dumps(state))


def make(n=10, batch_size=2, **options):
    """A shuffled loader over ``Noted(n)`` with seed 7, unless told otherwise."""
    options = {"shuffle": True, "seed": 7, "collate_fn": noted, **options}
    return ResumableLoader(Noted(n), batch_size, **options)


def whole_epochs(count, **options):
    """The batches of the first epochs of ``make(**options)``, computed without workers."""
    loader = make(**{**options, "num_workers": 0, "persistent_workers": False})
    return [list(loader) for _ in range(count)]


def global_streams():
    """The process's own random streams, comparable with ==."""
    numpy_state = np.random.get_state()
    return (
        random.getstate(),
        (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
        torch.get_rng_state().tolist(),
    )


def error_from(kind, call):
    """The error that a call raises, as (message, fields), with no traceback kept.

    A traceback kept in a frame that also holds a loader makes a cycle, and torch's iterator, when it is
    collected out of a cycle, waits five seconds for each of its workers.
    """
    try:
        call()
    except kind as error:
        return str(error), getattr(error, "fields", None)
    raise AssertionError(f"did not raise {kind.__name__}")
