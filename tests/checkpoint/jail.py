"""Loads in a process of their own, with little memory and ten seconds: a hostile file must cost neither.

``Jail`` starts a process that has imported torch (it takes seconds) and forks one for each load.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS
from resumable_data.checkpoint.store import Store

TESTS = Path(__file__).resolve().parent.parent
MEMORY = 2 << 30  # bytes of address space above what the process had
SECONDS = 10


class Jail:
    """The process that forks; a context manager."""

    def __enter__(self):
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checkpoint.jail"],
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

    def load(self, directory, *, key=None, cut=None):
        """(class of the error, its message) of loading the checkpoint in a directory; ("", sum) of one that loads.

        Args:
            directory: With one checkpoint, which must be of step 1.
            key: The hmac_key, as a str.
            cut: A file to truncate to nothing after the load, before the model's numbers are added up.
        """
        request = {"directory": str(directory), "key": key, "cut": cut and str(cut)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        kind, text = json.loads(self._process.stdout.readline())
        return kind, text


def outcome(directory, key, cut):
    try:
        store = Store(Path(directory), FS, Form(hmac_key=key and key.encode()))
        (entry,) = store.entries()
        payload = store.load(entry).payload
        if cut:
            os.truncate(cut, 0)
        return "", str(sum(value.sum().item() for value in payload["model"].values()))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told its name
        return type(error).__name__, str(error)


def jailed(write, directory, key, cut):
    """In the fork: the outcome, to a pipe."""
    status = Path("/proc/self/status").read_text()
    size = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + MEMORY,) * 2)
    os.chdir(Path(directory).parent)
    os.write(write, json.dumps(outcome(directory, key, cut)).encode())
    os._exit(0)


def one_load(directory, key, cut):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        jailed(write, directory, key, cut)
    os.close(write)
    end = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed", f"after {SECONDS} s"
        time.sleep(0.005)
    with os.fdopen(read, "rb") as file:
        return json.loads(file.read() or b'["killed", "by the system"]')


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    for line in sys.stdin:
        print(json.dumps(one_load(**json.loads(line))), flush=True)
