"""One save in flight: order, errors, signals, forks, and the ends of a process."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from resumable_data.checkpoint import background
from resumable_data.checkpoint.background import Background
from resumable_data.errors import CheckpointWriteError

ROOT = Path(__file__).parents[2]


class Job:
    """A job that runs until it is let go, and then returns or fails."""

    def __init__(self, error=None):
        self.began, self.go, self.done = threading.Event(), threading.Event(), False
        self.error, self.thread = error, None

    def __call__(self):
        self.thread = threading.current_thread()
        self.began.set()
        if not self.go.wait(30):
            raise TimeoutError("nobody let it go")
        if self.error is not None:
            raise self.error
        self.done = True


@pytest.fixture
def jobs():
    made = []

    def make(error=None, go=False):
        made.append(Job(error))
        if go:
            made[-1].go.set()
        return made[-1]

    yield make
    for job in made:
        job.go.set()


def submit(queue, job, what="it", when_busy="wait"):
    return queue.submit(lambda: job, what, when_busy)


def later(job, seconds=0.1):
    timer = threading.Timer(seconds, job.go.set)
    timer.start()
    return timer


# ── one in flight ────────────────────────────────────────────────────────────────────────────────────


def test_a_job_runs_in_another_thread_after_submit_has_returned(jobs):
    queue, job = Background(), jobs()
    assert not queue.busy
    assert submit(queue, job)
    assert job.began.wait(30)
    assert queue.busy
    assert not job.done
    job.go.set()
    queue.wait()
    assert job.done
    assert not queue.busy
    assert job.thread is not threading.current_thread()
    queue.settle()


def test_the_second_waits_for_the_first_before_it_is_staged(jobs):
    queue, first, second = Background(), jobs(), jobs(go=True)
    seen = []

    def stage():
        seen.append((first.done, threading.current_thread()))
        return second

    submit(queue, first)
    later(first)
    assert queue.submit(stage, "second")
    assert seen == [(True, threading.current_thread())]
    queue.settle()
    assert second.done


def test_the_second_is_skipped_if_asked_and_the_log_says_so(jobs, caplog):
    queue, first = Background(), jobs()
    submit(queue, first)
    with caplog.at_level(logging.WARNING, "resumable_data"):
        assert not queue.submit(lambda: pytest.fail("staged"), "the checkpoint of step 7", "skip")
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint of step 7 was skipped: an earlier save is still running"
    ]
    first.go.set()
    queue.wait()
    assert first.done
    third = jobs(go=True)
    assert submit(queue, third, when_busy="skip")
    queue.settle()
    assert third.done


def test_threads_that_submit_together_are_served_one_by_one():
    queue, running, most = Background(), [], []

    def job():
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()

    def submitter():
        for _ in range(10):
            submit(queue, job)

    threads = [threading.Thread(target=submitter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.settle()
    assert most == [1] * 40


def test_the_payload_is_let_go_when_the_job_is_done():
    class Payload:
        pass

    queue, payload = Background(), Payload()
    gone = weakref.ref(payload)
    submit(queue, lambda payload=payload: None)
    del payload
    queue.settle()
    assert gone() is None


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [OSError("disk"), KeyError("k"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("ask", ["settle", "raise_pending", "submit"])
def test_an_error_is_raised_once_by_the_next_call(jobs, ask, error, caplog):
    queue, job = Background(), jobs(error, go=True)
    submit(queue, job, "the checkpoint of step 7")
    queue.wait()  # tells nobody
    ask_it = {
        "settle": queue.settle,
        "raise_pending": queue.raise_pending,
        "submit": lambda: queue.submit(lambda: pytest.fail("staged"), "next"),
    }[ask]
    with pytest.raises(type(error)) as caught:
        ask_it()
    assert caught.value is error
    until = time.monotonic() + 30
    while not caplog.messages and time.monotonic() < until:
        time.sleep(0.01)
    assert caplog.messages == [f"the checkpoint of step 7 was not saved: {error!r}"]
    queue.settle()
    queue.raise_pending()
    assert background._untold == set()
    good = jobs(go=True)
    assert submit(queue, good)
    queue.settle()
    assert good.done


def test_an_error_met_while_waiting_is_raised_by_the_waiting_submit(jobs):
    queue, bad = Background(), jobs(OSError("disk"))
    submit(queue, bad)
    assert not queue.submit(lambda: pytest.fail("staged"), "second", "skip")  # not failed yet
    later(bad)
    with pytest.raises(OSError, match="disk"):
        queue.submit(lambda: pytest.fail("staged"), "third")


def test_a_skipping_submit_raises_the_error_rather_than_skip(jobs):
    queue, bad = Background(), jobs(OSError("disk"), go=True)
    submit(queue, bad)
    queue.wait()
    with pytest.raises(OSError, match="disk"):
        queue.submit(lambda: pytest.fail("staged"), "second", "skip")


def test_of_many_threads_that_ask_one_is_told(jobs):
    for _ in range(20):
        queue, bad, told = Background(), jobs(OSError("disk"), go=True), []
        submit(queue, bad)

        def ask(queue=queue, told=told):
            try:
                queue.settle()
            except OSError as error:
                told.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == [bad.error]


def test_where_staging_fails_nothing_is_in_flight(jobs):
    queue = Background()

    def stage():
        raise MemoryError

    with pytest.raises(MemoryError):
        queue.submit(stage, "it")
    assert not queue.busy
    good = jobs(go=True)
    submit(queue, good)
    queue.settle()
    assert good.done


@pytest.mark.parametrize("refused", [1, 2])
def test_without_threads_the_save_is_done_all_the_same(jobs, monkeypatch, refused):
    original, count = threading.Thread.start, []

    def start(self):
        count.append(self)
        if len(count) >= refused:
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    queue, job = Background(), jobs(go=True)
    assert submit(queue, job)
    queue.settle()
    assert job.done
    count.clear()
    bad = jobs(OSError("disk"), go=True)

    def fail():
        submit(queue, bad)  # raises it where it was done at once
        queue.settle()

    with pytest.raises(OSError, match="disk"):
        fail()
    queue.settle()


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def alarm():
    """Runs a function in a signal handler of this thread, after some seconds."""
    previous = signal.getsignal(signal.SIGALRM)

    def arm(act, seconds=0.1):
        signal.signal(signal.SIGALRM, lambda *_: act())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_wait_leaves_the_save_running(jobs, alarm):
    queue, job = Background(), jobs()
    submit(queue, job)
    alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.wait()
    assert queue.busy
    job.go.set()
    queue.settle()
    assert job.done


def test_a_submit_interrupted_while_waiting_begins_nothing(jobs, alarm):
    queue, job = Background(), jobs()
    submit(queue, job)
    alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.submit(lambda: pytest.fail("staged"), "second")
    job.go.set()
    queue.settle()
    assert job.done
    third = jobs(go=True)
    assert submit(queue, third)
    queue.settle()
    assert third.done


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_while_the_thread_is_started(jobs, monkeypatch, late):
    original = threading.Thread.start

    def start(self):
        if late and self.daemon is False:
            original(self)
        if self.daemon is False:
            raise KeyboardInterrupt
        original(self)

    queue, job = Background(), jobs()
    monkeypatch.setattr(threading.Thread, "start", start)
    if late:
        job.go.set()
    with pytest.raises(KeyboardInterrupt):
        submit(queue, job)
    monkeypatch.undo()
    queue.settle()  # the save that is under way, or none
    assert not queue.busy
    second = jobs(go=True)
    submit(queue, second)
    queue.settle()
    assert second.done


def test_a_handler_that_submits_within_submit_is_refused(jobs, alarm):
    queue, outer, met = Background(), jobs(go=True), []

    def handler():
        with pytest.raises(CheckpointWriteError, match="signal handler") as caught:
            queue.submit(lambda: pytest.fail("staged"), "inner")
        met.append(caught.value.errno)
        queue.settle()  # nothing is in flight, so this returns

    def stage():
        alarm(handler, 0.05)
        until = time.monotonic() + 30
        while not met and time.monotonic() < until:
            time.sleep(0.01)
        return outer

    assert queue.submit(stage, "outer")
    queue.settle()
    assert met == [errno.EBUSY]
    assert outer.done


def test_a_handler_may_wait_while_its_thread_waits(jobs, alarm):
    queue, job, met = Background(), jobs(), []
    submit(queue, job)

    def handler():
        later(job)
        queue.settle()
        met.append(job.done)

    alarm(handler)
    queue.wait()
    assert met == [True]


def test_a_storm_of_handlers_that_wait_does_not_hang(alarm):
    queue, met, nested = Background(), [], []

    def handler():
        if len(nested) < 3:  # signals arrive within handlers, too
            nested.append(1)
            queue.wait()
            nested.pop()
            met.append(1)

    alarm(handler, 0.0005)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    done = []
    for i in range(200):
        submit(queue, lambda i=i: (time.sleep(0.001), done.append(i)))
    queue.settle()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert done == list(range(200))
    assert met


def test_a_job_that_waits_for_itself_does_not_hang():
    queue, done = Background(), []

    def job():
        queue.settle()  # as a destructor or a log handler may
        done.append(True)

    submit(queue, job)
    queue.settle()
    assert done == [True]


# From Python 3.12 on a fork beside other threads is warned of; a loader that forks its workers does that.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

# ── forks ────────────────────────────────────────────────────────────────────────────────────────────


def in_child(act):
    """What a fork of this process says about `act`; a child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@forks
def test_a_fork_does_not_wait_for_the_thread_of_its_parent(jobs):
    queue, job = Background(), jobs()
    submit(queue, job)
    assert job.began.wait(30)

    def act():
        assert not queue.busy
        queue.settle()
        done = []
        queue.submit(lambda: lambda: done.append(1), "the child's own")
        queue.settle()
        return done == [1]

    assert in_child(act) == 0
    assert queue.busy
    job.go.set()
    queue.settle()
    assert job.done


@forks
def test_a_fork_in_the_midst_of_another_threads_submit(jobs):
    queue, inside, go = Background(), threading.Event(), threading.Event()

    def stage():
        inside.set()
        go.wait(30)
        return jobs(go=True)

    thread = threading.Thread(target=lambda: queue.submit(stage, "it"))
    thread.start()
    assert inside.wait(30)
    assert in_child(lambda: queue.submit(lambda: lambda: None, "the child's own")) == 0
    go.set()
    thread.join()
    queue.settle()


@forks
def test_an_error_of_the_parent_is_not_raised_in_its_fork(jobs):
    queue = Background()
    submit(queue, jobs(OSError("disk"), go=True))
    queue.wait()
    assert in_child(lambda: queue.settle() is None) == 0
    with pytest.raises(OSError, match="disk"):
        queue.settle()


# ── the ends of a process ────────────────────────────────────────────────────────────────────────────

# without torch, whose import takes seconds
EXIT = """
import os, signal, sys, threading, time, types
for name in ("resumable_data", "resumable_data.checkpoint"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [os.path.join(sys.argv[1], *name.split("."))]
from resumable_data.checkpoint import background
queue = background.Background()
background._QUIET_SECONDS = 0.2

def submit(seconds, error=None):
    def job():
        time.sleep(seconds)
        helper = threading.Thread(target=print, args=("helped",), kwargs={"flush": True})
        helper.start()
        helper.join()
        if error is not None:
            raise error
        print("saved", flush=True)
    queue.submit(lambda: job, "the checkpoint of step 7")
"""

WAITING = "resumable_data: waiting up to 60 s for the checkpoint of step 7, which is still being saved\n"
LOG = "the checkpoint of step 7 was not saved: OSError('disk')\n"
LOST = (
    "resumable_data: the checkpoint of step 7 was lost: OSError('disk')\nNothing was called after it failed that could "
    "have raised this: end with close(), or use the manager in a with statement.\n"
)
SAVED = "helped\nsaved\n"
ENDS = {
    "normal": ("submit(0.05)", 0, SAVED, ""),
    "slow": ("submit(0.8)", 0, SAVED, WAITING),
    "sys.exit": ("submit(0.8); sys.exit(3)", 3, SAVED, WAITING),
    "exception": ("submit(0.8); raise ValueError('mine')", 1, SAVED, ("ValueError: mine\n", WAITING)),
    "interrupt": ("submit(0.8); raise KeyboardInterrupt", -signal.SIGINT, SAVED, ("Interrupt\n", WAITING)),
    "failing before the end": (
        "submit(0, OSError('disk')); queue.wait(); print('on')",
        0,
        "helped\non\n",
        LOG + LOST,
    ),
    "failing at the end": ("submit(0.5, OSError('disk'))", 0, "helped\n", WAITING + LOG + LOST),
    "failing at the end of sys.exit": (
        "submit(0.5, OSError('disk')); sys.exit(3)",
        3,
        "helped\n",
        WAITING + LOG + LOST,
    ),
    "failing and told": (
        "submit(0, OSError('disk'))\ntry: queue.settle()\nexcept OSError: print('told')",
        0,
        "helped\ntold\n",
        LOG,
    ),
    "too slow": (
        "background.DRAIN_SECONDS = 0.5; submit(30)",
        0,
        "",
        WAITING.replace("60", "0.5") + "resumable_data: gave up the checkpoint of step 7 after 0.5 s: it is "
        "lost, the older ones are as they were\n",
    ),
    "submitted by an atexit handler": (
        "import atexit; atexit.register(lambda: queue.submit(lambda: lambda: print('late'), 'it'))",
        0,
        "late\n",
        "",
    ),
    "without a standard error": ("submit(0.5, OSError('disk')); sys.stderr = None", 0, "helped\n", ""),
    "in a fork": (
        "submit(0.5, OSError('disk'))\nif os.fork() == 0: sys.exit()\nos.wait(); queue.wait()",
        0,
        "helped\n",
        LOG + LOST,
    ),
}


def ended(code, python=sys.executable):
    done = subprocess.run(
        [python, "-W", "ignore::DeprecationWarning", "-c", EXIT + code, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_process_waits_for_the_save_and_says_what_is_lost(end):
    code, status, out, err = ENDS[end]
    found = ended(code)
    assert found[:2] == (status, out), found[2]
    if isinstance(err, tuple):  # a traceback before
        assert found[2].startswith("Traceback")
        assert found[2].endswith("".join(err))
    else:
        assert found[2] == err


def test_control_c_gives_up_the_wait_at_the_end():
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT + "submit(30)", str(ROOT)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == WAITING
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
