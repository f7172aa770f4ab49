"""A child process: what it reports, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds a child may take in all, many times what it needs


class ChildError(RuntimeError):
    """A child process ended by itself with an error, or not at all."""


class Child:
    """A Python module running in a fresh interpreter, in a session of its own.

    Args:
        module: The module, run as ``python -m``.
        arguments: Its command line.
        errors: The file that takes its standard error.
    """

    def __init__(self, module: str, arguments: list[str], errors: Path) -> None:
        self.began = time.perf_counter()
        self.killed = False
        self._errors = errors
        errors.parent.mkdir(parents=True, exist_ok=True)
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - this package's own modules, by this interpreter
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._overdue = False
        self._timer = threading.Timer(PATIENCE, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON lines of its standard output, as they come, until it ends.

        Raises:
            ChildError: It ended by itself with another status than 0.
        """
        stdout = self._process.stdout
        if stdout is None:  # never: the constructor asked for a pipe
            raise ChildError("the child has no standard output")
        with stdout:
            for line in stdout:
                if line.endswith("\n"):  # a line that was cut short by the kill was never reported
                    yield json.loads(line)
        status = self._process.wait()
        self._timer.cancel()
        if self._overdue or (status != 0 and not self.killed):
            what = (
                f"was still running after {PATIENCE:g} s" if self._overdue else f"ended with status {status}"
            )
            raise ChildError(f"{self._errors.stem} {what}; its last words in {self._errors}:\n{self._tail()}")

    def kill(self) -> None:
        """SIGKILL: to the process, then to the workers that it leaves behind; nothing if it has ended."""
        if self._process.poll() is not None:
            return
        self.killed = True
        self._process.kill()
        # a machine that goes away takes the workers too; before wait(), while the group is still ours
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _give_up(self) -> None:
        self._overdue = True
        self.kill()

    def _tail(self) -> str:
        return self._errors.read_text(errors="replace")[-2000:]


class Children:
    """All children of one demonstration, so that none outlives it; a context manager."""

    def __init__(self) -> None:
        self._started: list[Child] = []
        self._closed = False
        self._lock = threading.Lock()

    def start(self, module: str, arguments: list[str], errors: Path) -> Child:
        """A new child; see `Child`.

        Raises:
            ChildError: The demonstration is being given up.
        """
        with self._lock:
            if self._closed:
                raise ChildError("no child is started any more: the demonstration has been given up")
            self._started.append(Child(module, arguments, errors))
            return self._started[-1]

    def close(self) -> None:
        """Kill those that still run; no other can be started."""
        with self._lock:
            self._closed = True
            for child in self._started:
                child.kill()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
