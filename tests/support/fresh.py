"""Fresh interpreters for the second half of a test: whatever a resume needs must be in what was saved.

``Fresh`` calls a function of a test module, by name, in another interpreter in which every global random
stream has been drawn from, a different number of times for each call. Arguments and result travel as JSON.
To save the seconds that importing torch takes, one interpreter serves many calls.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
#: Seconds a call may take; a hang is then a failure with the stacks of all threads.
PATIENCE = 60
#: Likewise where workers are spawned: each of them imports torch, pass after pass.
PATIENCE_SPAWN = 900


class CallFailedError(AssertionError):
    """The function raised in the fresh interpreter, or the interpreter hung or died."""


class Interpreter:
    """A python process that serves calls until it is closed."""

    def __init__(self):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        path = os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fresh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def call(self, function, arguments):
        """The function's result, having been through JSON."""
        patience = PATIENCE_SPAWN if '"spawn"' in json.dumps(arguments) else PATIENCE
        request = {
            "module": function.__module__,
            "name": function.__name__,
            "arguments": arguments,
            "patience": patience,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], patience + 30)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise CallFailedError(f"{function.__name__}: the fresh interpreter hung or died:\n{self.close()}")
        answer = json.loads(line)
        if "error" in answer:
            raise CallFailedError(f"{function.__name__} raised in a fresh interpreter:\n{answer['error']}")
        return answer["result"]

    @property
    def closed(self):
        return self._errors.closed

    def close(self):
        """End the process; what it printed last is returned."""
        with contextlib.suppress(BrokenPipeError):
            # said, not meant by closing the pipe: worker processes of this one may hold it open too
            self._process.stdin.write("null\n")
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        with self._errors:
            self._errors.seek(0)
            return self._errors.read()[-6000:]


class Fresh:
    """Calls in an interpreter that is started when first needed, and anew after it died."""

    def __init__(self):
        self._interpreter = None

    def __call__(self, function, **arguments):
        if self._interpreter is None:
            self._interpreter = Interpreter()
        try:
            return self._interpreter.call(function, arguments)
        finally:
            if self._interpreter.closed:
                self._interpreter = None

    def close(self):
        if self._interpreter is not None:
            self._interpreter.close()


# ── in the fresh interpreter ─────────────────────────────────────────────────────────────────────────


def _disturb(calls):
    """Draw from every global stream, so that nothing can depend on where a new process stands."""
    random.seed(os.urandom(8))
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
    for _ in range(calls % 5 + 1):
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.rand(3)


def _answer(request):
    function = getattr(importlib.import_module(request["module"]), request["name"])
    try:
        return {"result": function(**request["arguments"])}
    except BaseException:  # noqa: BLE001  # the asking side raises it again, whatever it is
        return {"error": traceback.format_exc()}


def serve():
    """Read a request a line, write an answer a line; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # as pyproject.toml has it for the tests
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes in total", UserWarning)
    warnings.filterwarnings("ignore", ".*set_vital.*")
    for calls, line in enumerate(sys.stdin):
        request = json.loads(line)
        if request is None:
            break
        _disturb(calls)
        faulthandler.dump_traceback_later(request["patience"], exit=True)
        print(json.dumps(_answer(request)), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def no_hang(seconds=PATIENCE):
    """In this process: a hang ends the whole run with the stacks of all threads, rather than going on."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    began = time.monotonic()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert time.monotonic() - began < seconds


if __name__ == "__main__":
    serve()
