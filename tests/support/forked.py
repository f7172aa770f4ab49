"""Processes that save checkpoints until they are killed, each forked from one that has imported torch already.

``Parent`` starts that one (it takes seconds) and asks it for rounds (they take milliseconds): a fork that
saves step after step into a directory, its death by SIGKILL, and another fork that never knew it and looks
at what it has left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from resumable_data.checkpoint.fsops import FsOps
from support.checkpoints import LAYOUTS, debris, managed, names, objects_of, seen

TESTS = Path(__file__).resolve().parent.parent
SIZE = 20_000  # elements of each tensor: 240 KB a checkpoint
KEEP = 2


class Parent:
    """The process that forks; a context manager."""

    def __enter__(self):
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def ask(self, **request):
        """One round; see `kill` and `save_on`."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Slow(FsOps):
    """Takes its time over names, so that a kill meets a prune."""

    def rename(self, source, target):
        super().rename(source, target)
        time.sleep(0.002)

    def unlink(self, path):
        super().unlink(path)
        time.sleep(0.002)


class Deadly(FsOps):
    """Kills its process before call number `left`, counted once it is `armed`."""

    def __init__(self, left):
        self.left, self.armed = left, False

    def __getattribute__(self, name):
        if not name.startswith("_") and name in vars(FsOps) and self.armed:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return super().__getattribute__(name)


def saver(directory, options, report, *, slow=False, at=None, background=False):
    """Save from where the directory stands and report each step; for ever, or until call `at` = [saves, call].

    A step saved in the background is reported once it has begun, and what was saved is changed at once.
    """
    ops = Slow() if slow else FsOps() if at is None else Deadly(at[1])
    manager = managed(directory, ops, keep_last=KEEP, **options)
    found = manager.restore({})
    step = found.step if found else 0
    saves = 0
    while at is None or saves <= at[0]:
        if at is not None:
            ops.armed = saves == at[0]
        step += 1
        objects = objects_of(step, size=SIZE)
        manager.save(step, objects, blocking=not background)
        saves += 1
        if background:
            objects["list"].append(-1)
            for tensor in objects["model"].tensors.values():
                tensor.fill_(-1)
        os.write(report, f"{step}\n".encode())


def looker(directory, options, report):
    """Load what is there, save once more, and tell how the directory is then."""
    answer = {"error": None}
    try:
        found, skipped = seen(directory)
        answer |= {"found": found, "skipped": [skip.reason for skip in skipped]}
        step = found[0] + 1 if found else 1
        with managed(directory, FsOps(), keep_last=KEEP, **options) as manager:
            reports = manager.verify()
            answer |= {"whole": sum(report.ok for report in reports)}
            answer |= {"damaged": [report.reason for report in reports if not report.ok]}
            manager.restore({})
            manager.save(step, objects_of(step, size=SIZE))
        answer |= {"after": seen(directory)[0], "wanted": [step, step], "debris": debris(directory)}
    except Exception:  # noqa: BLE001 - whatever a look raises is the finding
        answer["error"] = traceback.format_exc()
    os.write(report, json.dumps(answer).encode())


def fork(function, *arguments, **options):
    """(pid, descriptor of its reports) of a fork that runs a function and ends."""
    source, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(source)
            function(*arguments, report, **options)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must not return into its parent's loop
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(report)
    return pid, source


def ended(pid, source):
    """All its reports, and how it ended: minus the signal, or the exit status."""
    with os.fdopen(source, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    return said.decode(), os.waitstatus_to_exitcode(status)


def kill(directory, layout, *, durability="full", slow=False, delay=None, at=None, background=False):
    """One death and what came of it.

    Args:
        directory: Where it saves.
        layout: A key of `LAYOUTS`.
        durability: As for the manager.
        slow: With `Slow` calls.
        delay: Seconds after which it is killed; or
        at: [saves, call]: it kills itself before this call of the save after so many.
        background: It saves in the background; the delay begins with its first report.
    """
    options = LAYOUTS[layout] | {"durability": durability}
    place = Path(directory)
    pid, source = fork(saver, place, options, slow=slow, at=at, background=background)
    first = os.read(source, 100).decode() if background else ""
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    said, status = ended(pid, source)
    left = names(place) if place.exists() else []
    looked, _ = ended(*fork(looker, place, options))
    return {"reported": (first + said).split(), "status": status, "left": left} | json.loads(looked)


def save_on(directory, layout):
    """Start a process that saves until `kill_all`."""
    return fork(saver, Path(directory), LAYOUTS[layout])


def main():
    """Serve rounds, a line of JSON each, until the input ends."""
    torch.set_num_threads(1)
    random.seed(0)
    running = []
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("do")
        if kind == "kill":
            answer = kill(**request)
        elif kind == "start":
            running.append(save_on(**request))
            answer = running[-1][0]
        else:
            pid, source = running.pop()
            os.kill(pid, signal.SIGKILL)
            said, status = ended(pid, source)
            answer = {"reported": said.split(), "status": status}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
