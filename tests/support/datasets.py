"""Datasets and collate functions that name what went wrong by what they deliver; all of them pickle."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Indices(Dataset):
    """Item i is i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Augmented(Indices):
    """Item i is (i, a draw from torch, one from numpy, one from python)."""

    def __getitem__(self, index):
        return index, torch.rand(1, dtype=torch.float64).item(), np.random.rand(), random.random()


class Located(Indices):
    """Item i is (i, the worker that fetched it, that worker's seed); -1 where there is no worker."""

    def __getitem__(self, index):
        info = get_worker_info()
        return (index, -1, -1) if info is None else (index, info.id, info.seed)


class Logged(Indices):
    """Item i is i; every access, in whatever process, leaves a line in a file."""

    def __init__(self, n, log):
        super().__init__(n)
        self.log = log

    def __getitem__(self, index):
        # one short write to a file opened for appending is not torn between processes
        with Path(self.log).open("a") as file:
            file.write(f"{index}\n")
        return index


class Raising(Indices):
    """Item i is i, but item ``bad`` raises as long as the file ``fuse`` is there."""

    def __init__(self, n, bad, fuse):
        super().__init__(n)
        self.bad, self.fuse = bad, fuse

    def __getitem__(self, index):
        if index == self.bad and Path(self.fuse).exists():
            raise KeyError(f"item {index} cannot be read")
        return index


class Deadly(Raising):
    """Item i is i, but the worker that is asked for ``bad`` kills itself as long as ``fuse`` is there."""

    def __getitem__(self, index):
        if index == self.bad and Path(self.fuse).exists():
            Path(self.fuse).write_text(str(os.getpid()))
            # what it made before has left by then: dying with the queue's lock held would stall the others
            time.sleep(0.3)
            os.kill(os.getpid(), 9)
        return index


class Owning(Indices):
    """Item i is (i, draws from generators of the dataset's own: they stand where the item puts them)."""

    def __init__(self, n):
        super().__init__(n)
        self.numpy = np.random.Generator(np.random.PCG64(0))
        self.python = random.Random(0)

    def __getitem__(self, index):
        self.numpy.bit_generator.state = np.random.PCG64(index).state
        self.python.seed(index)
        return index, self.numpy.random(), self.python.random()


class OwningTorch(Indices):
    """As ``Owning``, with a generator of torch's."""

    def __init__(self, n):
        super().__init__(n)
        self.generator = torch.Generator()

    def __getitem__(self, index):
        self.generator.manual_seed(index)
        return index, torch.rand(1, generator=self.generator, dtype=torch.float64).item()


class Slow(Indices):
    """Item i is i, after a while."""

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


class Holed(Indices):
    """Data with a None in the middle of it."""

    def __getitem__(self, index):
        return None if index % 3 == 1 else index


class Images(Indices):
    """Item i is a 3x224x224 float tensor, normalised by its own mean and deviation."""

    def __getitem__(self, index):
        image = torch.rand((3, 224, 224), generator=torch.Generator().manual_seed(index)) * (index + 1)
        return (image - image.mean()) / image.std()


def keep(samples):
    """A collate function that leaves the samples as they are."""
    return samples


def nothing(samples):
    """A collate function that returns None."""


def mixup(samples):
    """A collate function that draws from all three libraries: pairs, weights and a mask."""
    order = torch.randperm(len(samples)).tolist()
    weight = np.random.beta(0.4, 0.4)
    mask = [random.random() < 0.5 for _ in samples]
    return {"samples": samples, "pairs": order, "weight": float(weight), "mask": mask}


def mask(samples):
    """As ``mixup``, by draws that are the same bits on every machine."""
    order = torch.randperm(len(samples)).tolist()
    return {"samples": samples, "pairs": order, "weight": np.random.rand(), "mask": random.random()}
