"""The training script, `train.py` as it is, in a process that waits at the place where it is to be killed.

The driver kills from outside, with SIGKILL. To do so at a certain place, inside a save say, it asks for that
place on the command line; the process says on standard output that it is there, and waits.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.manager import CheckpointManager
from resumable_data.demo import train
from resumable_data.demo.kills import Kill, in_window
from resumable_data.loader import ResumableLoader

_CALLS = ("fsync", "rename", "unlink")


class Watch:
    """Stands between the training script and the package, and holds the process at the place of its kill."""

    def __init__(self, kill: Kill | None) -> None:
        self._kill = kill
        self._step = 0
        self._began = time.perf_counter()  # of the restore
        self._count: dict[str, int] | None = None  # system calls of the save under way

    def at(self, kind: str) -> bool:
        """Whether a kill of this kind is due."""
        return self._kill is not None and self._kill.kind == kind and self._step >= self._kill.step

    def hold(self, where: str) -> NoReturn:
        """Report the place and wait there: for SIGKILL, or for the end of a driver that is itself killed."""
        driver = os.getppid()
        train.say(held=where)
        while os.getppid() == driver:
            time.sleep(0.05)
        raise SystemExit("the driver is gone")

    def restoring(self) -> None:
        """The restore begins."""
        self._began = time.perf_counter()

    def restored(self, found: Any) -> None:
        """The restore is over: report the step of the checkpoint that was used, 0 for none."""
        self._step = found.step if found else 0
        train.say(restored=self._step)

    def first_batch(self) -> None:
        """The loader has delivered: report the seconds since the restore began."""
        train.say(first_batch=time.perf_counter() - self._began)

    def stepped(self, step: int) -> None:
        """The script has trained on a batch and asks whether to save."""
        self._step = step
        if self.at("window") and in_window(train.SAVE_EVERY, train.ACCUMULATE)(step):
            inside = step % train.ACCUMULATE
            self.hold(f"{inside} of {train.ACCUMULATE} batches accumulated")

    def saving(self) -> None:
        """A save begins."""
        self._count = dict.fromkeys(_CALLS, 0) if self.at("save") else None

    def saved(self) -> None:
        """The save is over. One that made fewer system calls than the plan supposed is killed here."""
        if self._count is not None:
            self.hold("save: at its very end")

    def called(self, name: str, path: str) -> None:
        """A save is about to make a system call."""
        if self._count is None or self._kill is None:
            return
        self._count[name] += 1
        if name == self._kill.call and self._count[name] == self._kill.nth:
            self.hold(f"save: before {name} of {_what(path)}")


def _what(path: str) -> str:
    """What a path of the checkpoint directory is to a reader."""
    name = Path(path).name
    if name.endswith(".dead"):
        return "an old checkpoint"
    if "latest" in name:
        return "latest.json"
    return "the index" if ".json" in name else "the data"


def watched(watch: Watch) -> ExitStack:
    """A context in which the training script runs under watch."""

    class Manager(CheckpointManager):
        def restore(self, *args: Any, **kwargs: Any) -> Any:
            watch.restoring()
            found = super().restore(*args, **kwargs)
            watch.restored(found)
            return found

        def should_save(self, step: int) -> bool:
            watch.stepped(step)
            return super().should_save(step)

        def save(self, *args: Any, **kwargs: Any) -> Any:
            watch.saving()
            path = super().save(*args, **kwargs)
            watch.saved()
            return path

    class Loader(ResumableLoader):
        def enumerate(self) -> Iterator[tuple[int, Any]]:
            for first, numbered in enumerate(super().enumerate()):
                if first == 0:
                    watch.first_batch()
                yield numbered

    def evaluate(model: Any, loader: Any) -> float:
        if watch.at("boundary"):
            watch.hold("epoch over, not yet evaluated")
        return original(model, loader)

    original = train.evaluate
    stack = ExitStack()
    stack.enter_context(patch.object(train, "CheckpointManager", Manager))
    stack.enter_context(patch.object(train, "ResumableLoader", Loader))
    stack.enter_context(patch.object(train, "evaluate", evaluate))
    for name in _CALLS:
        stack.enter_context(patch.object(FsOps, name, _calling(name, getattr(FsOps, name), watch)))
    return stack


def _calling(name: str, call: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def wrapper(ops: FsOps, first: int | str, *rest: str) -> Any:
        # an fsync is given a descriptor, a rename two paths, an unlink one
        path = (
            str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else (first, *rest)[-1]
        )
        watch.called(name, path)
        return call(ops, first, *rest)

    return wrapper


def main(argv: list[str] | None = None) -> None:
    """The command line: the training script's, and where to wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=train.EPOCHS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill", type=Kill.from_json, default=None)
    options = parser.parse_args(argv)
    with watched(Watch(options.kill)):
        train.train(options.directory, epochs=options.epochs, workers=options.workers)


if __name__ == "__main__":
    main()
