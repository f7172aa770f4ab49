"""Samplers and batch samplers as people write them; all of them pickle, and each name is a kind."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumable_data import ResumableLoader
from support.datasets import Augmented
from support.runs import plainly

N = 23


class Python(Sampler):
    """Draws from python's global stream."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        yield from order

    def __len__(self):
        return self.n


class Anywhere(Python):
    """Draws from all three global streams as it goes, with replacement."""

    def __iter__(self):
        for _ in range(self.n):
            which = random.randrange(3)
            if which == 0:
                yield random.randrange(self.n)
            else:
                yield int(np.random.randint(self.n)) if which == 1 else int(torch.randint(self.n, (1,)))


class Lengthless(Anywhere):
    """Does not know its length."""

    __len__ = None


class ByEpoch(Python):
    """Seeds a numpy generator from its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from np.random.default_rng((11, self.epoch)).permutation(self.n).tolist()


class Hidden(Python):
    """Keeps a private generator, whose history no seed gives back."""

    def __init__(self, n):
        super().__init__(n)
        self.random = random.Random(0)

    def __iter__(self):
        for _ in range(self.n):
            yield self.random.randrange(self.n)


class Buckets:
    """A batch sampler with batches of any length, drawn as it goes."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        at = 0
        while at < self.n:
            count = random.randint(1, 5)
            yield list(range(at, min(self.n, at + count)))
            at += count


class ByLength:
    """Sorts windows of an inner sampler by length, shuffles the batches: the usual bucketing. No set_epoch."""

    def __init__(self, sampler, batch_size, window=3):
        self.sampler, self.batch_size, self.window = sampler, batch_size, window

    def __iter__(self):
        keys = list(self.sampler)
        size = self.batch_size * self.window
        batches = []
        for at in range(0, len(keys), size):
            near = sorted(keys[at : at + size], key=lambda key: key * 7 % 5)
            batches += [near[b : b + self.batch_size] for b in range(0, len(near), self.batch_size)]
        order = torch.randperm(len(batches)).tolist()
        yield from (batches[at] for at in order)

    def __len__(self):
        return -(-len(self.sampler) // self.batch_size)


class Skipping:
    """A wrapper around a batch sampler that hides it under ``batch_sampler``, as trainers' shards do."""

    def __init__(self, batch_sampler, every=2):
        self.batch_sampler, self.every = batch_sampler, every

    def __iter__(self):
        for number, batch in enumerate(self.batch_sampler):
            if number % self.every == 0:
                yield batch

    def __len__(self):
        return -(-len(self.batch_sampler) // self.every)


class Pairs:
    """A batch sampler whose keys are no numbers."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for at in random.sample(range(self.n), self.n):
            yield [(at, random.choice(["left", "right"])) for _ in range(2)]

    def __len__(self):
        return self.n


class Arrays:
    """A batch sampler that yields numpy arrays."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for at in range(0, self.n, 5):
            yield np.random.permutation(self.n)[: min(5, self.n - at)]

    def __len__(self):
        return -(-self.n // 5)


class Stateful(Python):
    """Knows where it is, as torchdata's samplers do; one epoch follows another by itself."""

    def __init__(self, n):
        super().__init__(n)
        self.at, self.epoch_of_its_own = 0, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 + self.epoch_of_its_own)
        order = torch.randperm(self.n, generator=generator).tolist()
        while self.at < self.n:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0
        self.epoch_of_its_own += 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch_of_its_own, "weights": torch.tensor([0.5, float("inf")])}

    def load_state_dict(self, state):
        assert torch.equal(state["weights"], torch.tensor([0.5, float("inf")]))
        self.at, self.epoch_of_its_own = state["at"], state["epoch"]


class StatefulDrawing(Stateful):
    """Has a state and draws from python's global stream besides."""

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield random.randrange(self.n)
        self.at = 0


class StatefulBatches:
    """A batch sampler with a state."""

    def __init__(self, n):
        self.inner = Stateful(n)

    def __iter__(self):
        batch = []
        for key in self.inner:
            batch.append(key)
            if len(batch) == 3:
                yield batch
                batch = []
        if batch:
            yield batch

    def __len__(self):
        return -(-len(self.inner) // 3)

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])


class Named(Augmented):
    """As ``Augmented``, for keys that are no numbers too."""

    def __getitem__(self, index):
        if isinstance(index, tuple):
            return (*super().__getitem__(index[0]), index[1])
        return super().__getitem__(index)


def _torchs_stateful():
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(range(2 * N), 2, 1, shuffle=True, seed=5)


def _nested():
    return ByLength(DistributedSampler(range(N), 2, 1, seed=9), 4)


#: Arguments of a loader, by name; each call makes new samplers, as another process would.
CASES = {
    "python": lambda: {"sampler": Python(N), "batch_size": 4},
    "anywhere": lambda: {"sampler": Anywhere(N), "batch_size": 4},
    "anywhere_drop_last": lambda: {"sampler": Anywhere(N), "batch_size": 4, "drop_last": True},
    "lengthless": lambda: {"sampler": Lengthless(N), "batch_size": 4},
    "lengthless_limited": lambda: {"sampler": Lengthless(100), "batch_size": 3, "batches_per_epoch": 4},
    "by_epoch": lambda: {"sampler": ByEpoch(N), "batch_size": 4},
    "a_list": lambda: {"sampler": list(range(3, N)), "batch_size": 4},
    "sequential": lambda: {"sampler": SequentialSampler(range(N)), "batch_size": 4},
    "random": lambda: {"sampler": RandomSampler(range(N)), "batch_size": 4},
    "replacement": lambda: {
        "sampler": RandomSampler(range(N), replacement=True, num_samples=45),
        "batch_size": 4,
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, *[0.1] * (N - 1)], 30), "batch_size": 4},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, 20)), "batch_size": 4},
    "random_generator": lambda: {
        "sampler": RandomSampler(range(N), True, 45, generator=torch.Generator().manual_seed(3)),
        "batch_size": 4,
    },
    "weighted_generator": lambda: {
        "sampler": WeightedRandomSampler([0.1] * N, 30, generator=torch.Generator().manual_seed(3)),
        "batch_size": 4,
    },
    "subset_generator": lambda: {
        "sampler": SubsetRandomSampler(range(3, 20), generator=torch.Generator().manual_seed(3)),
        "batch_size": 4,
    },
    "buckets": lambda: {"batch_sampler": Buckets(N)},
    "nested": lambda: {"batch_sampler": _nested()},
    "nested_twice": lambda: {"batch_sampler": Skipping(_nested())},
    "torchs_own_around_python": lambda: {"batch_sampler": BatchSampler(Python(N), 4, False)},
    "torchs_own_around_distributed": lambda: {
        "batch_sampler": BatchSampler(DistributedSampler(range(N), 2, 1, seed=9), 4, True)
    },
    "pairs": lambda: {"batch_sampler": Pairs(9)},
    "arrays": lambda: {"batch_sampler": Arrays(N)},
    "single": lambda: {"batch_size": None, "shuffle": True},
    "single_sampler": lambda: {"batch_size": None, "sampler": Anywhere(9)},
    "stateful": lambda: {"sampler": Stateful(N), "batch_size": 4},
    "stateful_limited": lambda: {"sampler": Stateful(N), "batch_size": 4, "batches_per_epoch": 3},
    "stateful_drawing": lambda: {"sampler": StatefulDrawing(N), "batch_size": 4},
    "stateful_batches": lambda: {"batch_sampler": StatefulBatches(N)},
    "torchs_stateful_limited": lambda: {
        "sampler": _torchs_stateful(),
        "batch_size": 4,
        "batches_per_epoch": 3,
    },
    "torchs_stateful": lambda: {"sampler": _torchs_stateful(), "batch_size": 4},
    "hidden": lambda: {"sampler": Hidden(N), "batch_size": 4},
}


def make(case, seeding="batch", **crew):
    """The loader of a case, with seed 3."""
    arguments = CASES[case]()
    data = Named(2 * N if case.startswith("torchs_stateful") else N)
    return ResumableLoader(data, seed=3, seeding=seeding, **arguments, **crew)


def course(loader, epochs):
    """What a training loop sees, as plain values: [epoch, number, batch] for each batch, and each end."""
    for epoch in loader.epochs(epochs):
        for number, batch in loader.enumerate():
            yield [epoch, number, plainly(batch)]
        yield [epoch, "end"]


def saves(case, seeding, epochs, **crew):
    """The whole course, and the state before each event of it and at its end."""
    loader = make(case, seeding, **crew)
    states, events = [loader.state_dict()], []
    for event in course(loader, epochs):
        events.append(event)
        states.append(loader.state_dict())
    # "end" is seen inside the last epoch's body: the loader has closed the epoch by then
    return events, states


def legs(case, seeding, jobs, epochs, crew):
    """For each job, (state, how many events or null for all): the events, and the state after them."""
    results = []
    for state, count in jobs:
        loader = make(case, seeding, **crew)
        loader.load_state_dict(state)
        assert loader.state_dict() == state, "load then state_dict is the identity"
        running, seen = course(loader, epochs), []
        while count is None or len(seen) < count:
            event = next(running, None)
            if event is None:
                break
            seen.append(event)
        results.append([seen, loader.state_dict()])
        running.close()
    return results
