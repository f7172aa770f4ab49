"""A small run with all that a checkpoint holds, a loader stand-in, and a file system that fails on demand."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import StateMismatchError


class FakeLoader:
    """The loader's state methods, and nothing else of it."""

    KNOWN = frozenset({"dataset_size"})

    def __init__(self, size=10):
        self.epoch, self.batch_in_epoch, self.dataset_size = 0, 0, size
        self.overrides = []

    def state_dict(self):
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "dataset_size": self.dataset_size,
        }

    def check_state_dict(self, state, *, override=()):
        unknown = set(override) - self.KNOWN
        if unknown:
            raise ValueError(f"unknown override {sorted(unknown)}")
        if state["dataset_size"] != self.dataset_size and "dataset_size" not in override:
            pair = (state["dataset_size"], self.dataset_size)
            raise StateMismatchError("dataset_size differs", fields={"dataset_size": pair})

    def load_state_dict(self, state, *, override=()):
        self.check_state_dict(state, override=override)
        self.overrides.append(set(override))
        self.epoch, self.batch_in_epoch = state["epoch"], state["batch_in_epoch"]


class Run:
    """Dropout, batch norm, AdamW, a scheduler, accumulation over two steps, draws from every library."""

    def __init__(self, width=6, seed=0):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(width, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.data = FakeLoader()
        self.losses = []

    @property
    def objects(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
        }

    def train(self, stop, manager=None):
        for step in range(len(self.losses) + 1, stop + 1):
            noise = random.random() + np.random.rand()
            loss = self.model(torch.randn(5, 4) + noise).square().mean()
            loss.backward()
            if step % 2 == 0:
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.data.batch_in_epoch = step
            self.losses.append(loss.item())
            if manager is not None and manager.should_save(step):
                manager.save(step, self.objects, state={"losses": self.losses})
        return self.losses

    def resume(self, manager, **options):
        found = manager.restore(self.objects, **options)
        self.losses = list(found.state["losses"]) if found else []
        return found


class FailingOps(FsOps):
    """Raises OSError(code) at call number `at` (from 0) and counts all calls; `only` narrows it to some."""

    def __init__(self, at=None, code=5, only=None):
        self.at, self.code, self.only = at, code, only
        self.calls = []

    def _count(self, name):
        if self.only is not None and name not in self.only:
            return
        self.calls.append(name)
        if self.at == len(self.calls) - 1:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags, mode=0o666):
        self._count("open")
        return super().open(path, flags, mode)

    def write(self, fd, data):
        self._count("write")
        return super().write(fd, data)

    def fsync(self, fd):
        self._count("fsync")
        super().fsync(fd)

    def close(self, fd):
        super().close(fd)
        self._count("close")

    def rename(self, source, target):
        self._count("rename")
        super().rename(source, target)

    def unlink(self, path):
        self._count("unlink")
        super().unlink(path)

    def listdir(self, path):
        self._count("listdir")
        return super().listdir(path)

    def dirsync(self, path):
        self._count("dirsync")
        super().dirsync(path)


def debris(directory):
    """Names that a finished save must not leave behind."""
    return [name for name in names(directory) if name.endswith((".tmp", ".dead"))]


def names(directory):
    """Everything in a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def flip(path, position=-1000):
    """Change one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
