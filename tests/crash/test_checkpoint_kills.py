"""SIGKILL of a process that saves without pause: at random moments, and at each kind of moment by name."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint.helpers import debris, names

from resumable_data.checkpoint import CheckpointManager

ROOT = Path(__file__).parents[2]

# Saves step after step, each a function of its number. With a third argument the process kills itself at
# the n-th call of the named kind after so many saves.
SAVER = """
import os, signal, sys
import torch
from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.fsops import FsOps

class Deadly(FsOps):
    left = int(sys.argv[4]) if len(sys.argv) > 3 else -1
    def __getattribute__(self, name):
        if len(sys.argv) > 3 and name == sys.argv[3] and saved >= int(sys.argv[2]):
            if Deadly.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            Deadly.left -= 1
        return super().__getattribute__(name)

saved = 0
manager = CheckpointManager(sys.argv[1], keep_last=2)
manager._ops = Deadly()
found = manager.restore({})
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    manager.save(step, {"value": torch.full((50_000,), float(step)), "list": [step] * 10})
    saved += 1
    print(step, flush=True)
"""


def start(directory, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", SAVER, str(directory), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def check(directory, reported):
    """The newest checkpoint is whole and no older than the last save that returned."""
    with CheckpointManager(directory, keep_last=2) as manager:
        found = manager.restore({})
        step = 0 if found is None else found.step
        assert step >= reported
        if found is not None:
            assert found.skipped == ()
            assert torch.equal(found.extra["value"], torch.full((50_000,), float(step)))
            assert found.extra["list"] == [step] * 10
        manager.save(step + 1, {"value": torch.full((50_000,), float(step + 1)), "list": [step + 1] * 10})
    assert debris(directory) == []
    files = [name for name in names(directory) if name.startswith("step_")]
    stems = {name.rpartition(".")[0] for name in files}
    assert sorted(files) == sorted(f"{stem}.{kind}" for stem in stems for kind in ("pt", "json"))
    return step + 1


def test_killed_at_random_moments_of_a_save_loop(tmp_path):
    draw = random.Random(5)
    step = 0
    for _ in range(6):
        process = start(tmp_path)
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].split()
        assert process.returncode == -signal.SIGKILL
        step = check(tmp_path, int(lines[-1]) if lines else step)
    assert step >= 6


# One save calls: listdir (sweep, sweep, names), open+write+fsync+close twice, rename, dirsync, rename,
# dirsync, then the pointer's, then for each pruned one rename, unlink, unlink, and a dirsync.
MOMENTS = {
    "in the very first save, before its temp": (0, "open", 1),
    "in the very first save, while writing": (0, "fsync", 0),
    "in the very first save, before the index's rename": (0, "rename", 0),
    "between the two renames of the very first save": (0, "rename", 1),
    "between the two renames": (3, "rename", 1),
    "before the commit is durable": (3, "dirsync", 1),
    "between commit and pointer": (3, "rename", 2),
    "before the tombstone": (3, "rename", 3),
    "between tombstone and deletion": (3, "unlink", 0),
    "between the deletion of data and index": (3, "unlink", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_named_moment(tmp_path, moment):
    process = start(tmp_path, *MOMENTS[moment])
    lines = process.communicate(timeout=60)[0].split()
    assert process.returncode == -signal.SIGKILL
    saves = MOMENTS[moment][0]
    assert lines == ["ready", *map(str, range(1, saves + 1))]
    committed = CheckpointManager(tmp_path).load_latest()
    if moment in ("between the two renames", "between the two renames of the very first save"):
        assert any(name.endswith(".tmp") for name in names(tmp_path))  # the debris that `check` wants gone
        assert (committed.step if committed else 0) == saves
    if moment in ("between commit and pointer", "between tombstone and deletion"):
        assert committed.step == saves + 1
    check(tmp_path, saves)


def test_a_reader_beside_a_writer_never_fails(tmp_path):
    process = start(tmp_path)
    try:
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "1\n"
        seen = set()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            found = CheckpointManager(tmp_path).load_latest()
            assert found.skipped == ()
            assert found.extra["value"][0] == found.step
            seen.add(found.step)
    finally:
        process.kill()
        process.communicate()
    assert len(seen) > 3
    assert os.waitstatus_to_exitcode(signal.SIGKILL) == process.returncode
