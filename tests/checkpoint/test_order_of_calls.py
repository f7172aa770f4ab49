"""In which order deletions reach the disk, call by call."""

from pathlib import Path

import pytest
import torch

from checkpoint.helpers import FailingOps
from resumable_data.checkpoint import CheckpointManager

OBJECTS = {"weights": torch.ones(3)}
LAYOUTS = pytest.mark.parametrize("shards", [None, 2], ids=["single", "sharded"])


class Recorded(FailingOps):
    """Renames, deletions and syncs, with the names."""

    def __init__(self):
        super().__init__()
        self.done = []

    def rename(self, source, target):
        super().rename(source, target)
        self.done.append(("rename", Path(source).name))

    def unlink(self, path):
        super().unlink(path)
        self.done.append(("unlink", Path(path).name))

    def rmdir(self, path):
        super().rmdir(path)
        self.done.append(("rmdir", Path(path).name))

    def dirsync(self, path):
        super().dirsync(path)
        self.done.append(("dirsync", Path(path).name))


def managed(directory, **options):
    manager = CheckpointManager(directory, **options)
    manager._ops = Recorded()
    return manager


@LAYOUTS
def test_what_prune_deletes_is_gone_for_good_when_it_returns(tmp_path, shards):
    manager = managed(tmp_path / "run", keep_last=None, shards=shards)
    for step in (1, 2):
        manager.save(step, OBJECTS)
    manager.keep_last = 1
    manager._ops.done.clear()
    manager.prune()
    done = manager._ops.done
    assert len(done) > 1
    assert done[-1] == ("dirsync", "run")


@LAYOUTS
def test_a_marked_checkpoint_never_loses_its_mark_before_its_data(tmp_path, shards):
    manager = managed(tmp_path / "run", keep_last=1, shards=shards)
    manager.save(1, OBJECTS)
    manager.mark_bad(1, "its loss is not a number")
    manager._ops.done.clear()
    manager.save(2, OBJECTS)
    name = "step_000000000001"
    own = [call for call in manager._ops.done if name in call[1]]
    assert own[0] == ("rename", name if shards else f"{name}.pt")
    assert own[-1] == ("unlink", f"{name}.bad.json")
