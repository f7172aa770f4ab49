"""One save in flight, in a thread of its own: starting it, waiting for it, its error, and the process's end.

A save runs in a daemon thread, and a second thread, which is none, keeps the interpreter alive until the
first is done or `DRAIN_SECONDS` have passed since the main thread ended. ``atexit`` would be too late for
that: from Python 3.12 on no thread can be started by then, and a save may start some.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

from resumable_data.errors import CheckpointWriteError

DRAIN_SECONDS = 60.0  # how long the end of the process waits for a save
_QUIET_SECONDS = 1.0  # of these, how long without a word
_TICK = 0.1  # seconds between looks at whether the main thread has ended

_log = logging.getLogger("resumable_data")


class Background:
    """At most one save in flight. Its error is raised once, by the first call that asks for it.

    A copy in a forked process knows of no save: the thread is the parent's. Waiting can be interrupted, and
    leaves the save running; signal handlers may call every method, though `submit` refuses to be entered
    from within itself.

    How a manager uses it, with the right to write taken by the thread that commits::

        def save(self, step, objects, ...):
            def stage():  # in the caller's thread, while nothing is in flight
                payload = self._staging.copy(prepare(collect(objects, ...)))
                return lambda: self._commit(payload, step, metrics)  # with self._writer.turn(...) in there

            if blocking:
                self._background.settle()
                self._commit(prepare(collect(objects, ...)), step, metrics)
            elif not self._background.submit(stage, f"the checkpoint of step {step}", when_busy):
                return None  # skipped

    Every other method that writes or chooses a checkpoint calls `settle` first, and so does ``close``, always
    before it takes a lock that the commit needs.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._save: _Save | None = None  # the last one begun
        self._turn = threading.RLock()  # held from looking whether a save is in flight to starting one
        self._submitter: int | None = None  # the thread that does so

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        save = self._current()
        return save is not None and not save.finished

    def submit(self, stage: Callable[[], Callable[[], object]], what: str, when_busy: str = "wait") -> bool:
        """Begin a save; with one in flight, wait for that first, or do not begin.

        Where no thread can be had, as at the very end of the process, the save is done before this returns.

        Args:
            stage: Called in this thread when no save is in flight; gives the job for the other one.
            what: What is saved, for messages: "the checkpoint of step 7".
            when_busy: ``"wait"`` or ``"skip"``, with a warning in the log.

        Returns:
            Whether the save was begun.

        Raises:
            CheckpointWriteError: A signal handler calls this while its thread is in here; errno is EBUSY.
            BaseException: Whatever `stage` raises, nothing having begun; or the error of an earlier save.
        """
        with self._own_turn(what):
            self.raise_pending()
            if when_busy == "skip" and self.busy:
                _log.warning("%s was skipped: an earlier save is still running", what)
                return False
            self.settle()
            self._start(_Save(stage(), what))
        return True

    def wait(self) -> None:
        """Return when no save is in flight. Its error is left for the next call to raise."""
        save, here = self._current(), threading.get_ident()
        if save is None or (self._submitter == here and not save.claimed):
            return  # a signal handler came between, and the save begins only when it returns
        # the job itself may come here, by a destructor or a log handler
        while save.thread != here and not save.wait(_TICK):
            continue

    def raise_pending(self) -> None:
        """Raise the error of the last save, if it failed and nobody has been told yet."""
        save = self._current()
        if save is None or not save.finished or save.error is None:
            return
        try:
            _untold.remove(save)
        except KeyError:  # another thread was told first
            return
        self._save = None
        raise save.error

    def settle(self) -> None:
        """`wait`, then `raise_pending`."""
        self.wait()
        self.raise_pending()

    def _current(self) -> _Save | None:
        if self._pid != os.getpid():
            self._forget()
        return self._save

    @contextlib.contextmanager
    def _own_turn(self, what: str) -> Iterator[None]:
        self._current()  # in a fork, the lock may be held by a thread that is not there
        with self._turn:
            if self._submitter is not None:  # the lock lets its own thread in
                raise CheckpointWriteError(
                    f"{what} was not saved: this thread is in the midst of beginning a save; a signal handler "
                    "must not begin another. Let it set a flag, and save after the step.",
                    errno=errno.EBUSY,
                )
            self._submitter = threading.get_ident()
            try:
                yield
            finally:
                self._submitter = None

    def _start(self, save: _Save) -> None:
        self._save = save
        try:
            started = threading.main_thread().is_alive() and save.start()
        except BaseException:
            if save.claim():  # else it runs, and was interrupted only here
                self._save = None
            raise
        if not started:
            save.run()
            self.raise_pending()


class _Save:
    """A job and what became of it."""

    def __init__(self, job: Callable[[], object], what: str) -> None:
        self.what = what
        self.pid = os.getpid()
        self.thread: int | None = None  # that runs the job
        self.error: BaseException | None = None
        self.finished = False
        self._job: Callable[[], object] | None = job
        self._claim = threading.Lock()
        self._running = threading.Lock()  # no Event or join: a signal handler would wait for its own thread
        self._running.acquire()

    def claim(self) -> bool:
        """True for the first caller: the thread that is to run it, or the one that takes it back."""
        return self._claim.acquire(blocking=False)

    @property
    def claimed(self) -> bool:
        """Whether a thread is about to run it, or does, or did."""
        return self._claim.locked()

    def start(self) -> bool:
        """Whether a thread was to be had."""
        try:
            threading.Thread(target=self._keep, name="resumable-data waits for a save", daemon=False).start()
        except RuntimeError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Whether it has finished, looking for at most so long."""
        # finished is set first: who finds it unset waits for the runner, and not for another who waits
        if not self.finished and self._running.acquire(timeout=seconds):
            self._running.release()
        return self.finished

    def run(self) -> None:
        """Do the job in this thread; an error is kept."""
        self.thread = threading.get_ident()
        try:
            if self._job is not None:
                self._job()
        except BaseException as error:  # noqa: BLE001 - kept whatever it is: another thread raises it
            self.error = error
            _untold.add(self)
        finally:
            self._job = None  # and with it the payload
            self.finished = True
            self._running.release()

    def _keep(self) -> None:
        if not self.claim():
            return
        try:
            threading.Thread(target=self.run, name=f"resumable-data saves {self.what}", daemon=True).start()
        except RuntimeError:
            self.run()
        main = threading.main_thread()
        while not self.wait(_TICK):
            if not main.is_alive():
                self._drain()
                break
        if self.error is not None:  # not logged by the job's thread: who waits for it may hold the log's lock
            _log.error("%s was not saved: %r", self.what, self.error)

    def _drain(self) -> None:
        if self.wait(_QUIET_SECONDS):
            return
        _say(f"waiting up to {DRAIN_SECONDS:g} s for {self.what}, which is still being saved")
        if not self.wait(DRAIN_SECONDS - _QUIET_SECONDS):
            _say(
                f"gave up {self.what} after {DRAIN_SECONDS:g} s: it is lost, the older ones are as they were"
            )


_untold: set[_Save] = set()  # failed, and nobody has been told


@atexit.register
def _report() -> None:
    for save in list(_untold):
        if save.pid == os.getpid():
            _say(
                f"{save.what} was lost: {save.error!r}\nNothing was called after it failed that could have raised "
                "this: end with close(), or use the manager in a with statement."
            )


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed: there is nobody to be told
            print(f"resumable_data: {text}", file=sys.stderr, flush=True)
