"""A training run small enough to be killed dozens of times, with everything that makes a resume hard.

``python trainer.py DIRECTORY`` trains in this interpreter. ``python trainer.py --zygote`` imports once and
then forks a trainer for each order on its standard input, and kills it where asked to: a process that is new
but for its imports, and whose random streams are elsewhere than those of any other. Reports are JSON lines on
standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.loader import ResumableLoader
from resumable_data.rng import capture_rng_state, restore_rng_state

SAMPLES, BATCH, ACCUMULATE = 22, 4, 4  # 6 batches an epoch, the last of 2: windows span epochs


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.linspace(-1, 1, SAMPLES * 6).reshape(SAMPLES, 6)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + torch.randn(6) * 0.1
        return self.rows[index] + noise, float(index % 3)


def say(**values):
    os.write(1, (json.dumps(values) + "\n").encode())  # one write: a kill leaves no half of a line


def scramble():
    """Put every global stream somewhere nobody has been before."""
    random.seed(os.urandom(8))
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def die_at(save, call):
    """SIGKILL this process just before the call-th system call of its save-th save."""
    seen = {"saves": 0, "calls": 0}
    original = CheckpointManager.save

    def counted(self, *args, **kwargs):
        seen["saves"] += 1
        seen["calls"] = 0
        return original(self, *args, **kwargs)

    def before(method):
        def wrapper(self, *args):
            if seen["saves"] == save:
                seen["calls"] += 1
                if seen["calls"] == call:
                    say(dies=method.__name__)
                    os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args)

        return wrapper

    CheckpointManager.save = counted
    for name, method in list(vars(FsOps).items()):
        if not name.startswith("_"):
            setattr(FsOps, name, before(method))


def debris(directory):
    """What no save may leave: temps, tombstones, an index without its data or data without an index."""
    names = [path.name for path in Path(directory).iterdir()]
    stems = {
        kind: {n[: -len(kind)] for n in names if n.startswith("step_") and n.endswith(kind)}
        for kind in (".pt", ".json")
    }
    return [n for n in names if n.endswith((".tmp", ".dead"))] + sorted(stems[".pt"] ^ stems[".json"])


def train(directory, *, epochs, workers, every, die, forget_rng):
    scramble()
    if die:
        die_at(*die)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    loader = ResumableLoader(Noisy(), BATCH, shuffle=True, num_workers=workers, seed=5)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    manager = CheckpointManager(directory, every_steps=every, keep_last=2)
    before = capture_rng_state()
    found = manager.restore(objects)
    if forget_rng:
        restore_rng_state(before)  # what a checkpoint without the RNG would have left it at
    step, losses = (found.step, found.state["losses"]) if found else (0, [])
    say(restored=step, skipped=len(found.skipped) if found else 0)
    for _ in loader.epochs(epochs):
        for rows, targets in loader:
            loss = (model(rows).squeeze(1) - targets).square().mean()
            (loss / ACCUMULATE).backward()
            step += 1
            if step % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            say(step=step, loss=loss.item())
            if manager.should_save(step):
                manager.save(step, objects, state={"losses": losses})
                say(saved=step, left=debris(directory))
        scheduler.step()
    manager.finish(step, objects, state={"losses": losses})
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    say(done=step, losses=losses, weights=hashlib.sha256(weights).hexdigest(), left=debris(directory))
    manager.close()


def run(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--die", type=int, nargs=2, metavar=("SAVE", "CALL"))
    parser.add_argument("--forget-rng", action="store_true")
    options = vars(parser.parse_args(arguments))
    train(options.pop("directory"), **options)


def zygote():
    torch.set_num_threads(1)
    torch.optim.AdamW(
        [torch.zeros(1, requires_grad=True)]
    )  # imports half of torch, here and not in each fork
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                run(order["arguments"])
            except BaseException:  # noqa: BLE001 - the fork must not return into the zygote's loop
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        say(gone=wait_and_kill(pid, order["kill_after"]))


def wait_and_kill(pid, seconds):
    """The exit status of a child, SIGKILLed after so many seconds unless None; it is not reaped before."""
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    while time.monotonic() < deadline:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    zygote() if sys.argv[1:] == ["--zygote"] else run(sys.argv[1:])
