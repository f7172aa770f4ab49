"""Tiny checkpoints whose every number is the same one, so that a mix of two cannot pass for either."""

from __future__ import annotations

import shutil

import torch

from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.fsops import FsOps

#: Arguments of a manager, by layout.
LAYOUTS = {"single": {}, "sharded": {"shards": 2}}


class Hasty(FsOps):
    """Without a sync: for checks whose directory no crash will ever meet."""

    def fsync(self, fd):
        pass

    def dirsync(self, path):
        pass


class Numbers:
    """A model of three tensors."""

    def __init__(self, number, size):
        self.tensors = {name: torch.full((size,), float(number)) for name in ("a", "b", "c")}

    def state_dict(self):
        return self.tensors


def objects_of(number, size=100):
    """A model of three tensors and plain values, all `number`; `size` is of each tensor."""
    return {"model": Numbers(number, size), "list": [number] * 10}


def managed(directory, ops, **options):
    """A manager whose calls go through `ops`."""
    manager = CheckpointManager(directory, **options)
    manager._ops = ops
    return manager


def seen(directory, **options):
    """(step, number) of the newest checkpoint that loads and what was skipped; (None, ()) where none is.

    Raises:
        AssertionError: Its numbers are of two saves.
    """
    found = CheckpointManager(directory, **options).load_latest()
    if found is None:
        return None, ()
    numbers = {float(value) for tensor in found.payload["model"].values() for value in tensor.unique()}
    numbers |= set(map(float, found.extra["list"]))
    assert len(numbers) == 1
    return (found.step, numbers.pop()), found.skipped


def names(directory):
    """Everything below a directory, sorted."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def debris(directory):
    """Names that a finished save must not leave: temps, tombstones, and halves of checkpoints."""
    found = names(directory)
    left = [name for name in found if name.endswith((".tmp", ".dead"))]
    for name in found:
        if not name.startswith("step_") or "/" in name or name.endswith(".bad.json"):
            continue
        if (directory / name).is_dir():
            other = f"{name}/index.json"
        else:
            stem, _, kind = name.rpartition(".")
            other = f"{stem}.{'json' if kind == 'pt' else 'pt'}"
        left += [] if other in found else [name]
    return left


def cleared(directory):
    """The same path, with nothing there."""
    if directory.exists():
        shutil.rmtree(directory)
    return directory
