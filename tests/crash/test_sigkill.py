"""Real SIGKILLs: at random, before every system call of a save, and of fresh interpreters."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from resumable_data.checkpoint import CheckpointManager

TRAINER = Path(__file__).with_name("trainer.py")
PATIENCE = 120.0  # seconds for any one report, many times what it takes


class Reports:
    """The JSON lines of a process, each waited for with a limit."""

    def __init__(self, *arguments):
        root = str(TRAINER.parents[2])
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"},  # torch's, of many workers
        )
        self._lines = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(json.loads(line))
        self._lines.put({"gone": self.process.wait()})

    def get(self):
        return self._lines.get(timeout=PATIENCE)

    def kill(self):
        """SIGKILL, also of the workers left behind: they hold the pipe whose end tells that all is over."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self):
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.wait()
        self._thread.join(PATIENCE)


class Zygote(Reports):
    """Trainers that cost a fork each."""

    def __init__(self):
        super().__init__("--zygote")
        assert self.get() == {"ready": True}

    def train(self, directory, *arguments, kill_after=None):
        order = {"arguments": [str(directory), *arguments], "kill_after": kill_after}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return list(follow(self))


def train_fresh(directory, *arguments, kill_after=None):
    reports = Reports(str(directory), *arguments)
    try:
        seen = []
        for event in follow(reports):
            seen.append(event)
            if "restored" in event and kill_after is not None:
                time.sleep(kill_after)  # from the restore: how long imports take nobody knows
                reports.kill()
        return seen
    finally:
        reports.close()


def follow(reports):
    """All reports of one trainer up to its end."""
    while "gone" not in (event := reports.get()):
        yield event
    yield event


def wrong(events, reference):
    """Steps whose reported loss is not the uninterrupted run's."""
    return [
        event["step"]
        for event in events
        if "loss" in event and event["loss"] != reference["losses"][event["step"] - 1]
    ]


def check(directory, events, reference):
    """What must hold after any process has ended, however it did; gives its exit status."""
    assert wrong(events, reference) == []
    for event in events:
        assert event.get("left", []) == []
        assert event.get("skipped", 0) == 0, "a kill has damaged a committed checkpoint"
    found = CheckpointManager(directory).load_latest()
    if found is not None:
        assert found.state["losses"] == reference["losses"][: found.step]
    restored = next((event["restored"] for event in events if "restored" in event), 0)
    saved = [event["saved"] for event in events if "saved" in event]
    # a save that has returned is never lost
    assert (found.step if found else 0) >= max([restored, *saved])
    return events[-1]["gone"]


def check_end(events, reference):
    """The run is the uninterrupted one."""
    done = next(event for event in events if "done" in event)
    assert done["losses"] == reference["losses"]
    assert done["weights"] == reference["weights"]
    assert done["left"] == []


@pytest.fixture(scope="module")
def zygote():
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="module")
def reference(zygote, tmp_path_factory):
    events = zygote.train(tmp_path_factory.mktemp("reference") / "run")
    assert events[-1]["gone"] == 0
    return next(event for event in events if "done" in event)


@pytest.fixture(scope="module")
def thirds(zygote, reference, tmp_path_factory):
    """Workers -> seconds in which this machine does a third of the shortest run: kills up to then do strike."""
    seconds = {}
    for workers in "02":
        begun = time.monotonic()
        directory = tmp_path_factory.mktemp("pace") / "run"
        check_end(zygote.train(directory, "--every", "3", "--workers", workers), reference)
        seconds[workers] = (time.monotonic() - begun) / 3
    return seconds


def kill_at_random(train, directory, reference, *, kills, seed, longest, arguments=()):
    """Kill so many processes of one run, then let it finish; the moments, up to `longest`, from a seed."""
    chance = random.Random(seed)
    done = struck = 0
    while struck < kills:
        workers = str(done % 2 * 2)
        events = train(
            directory, "--workers", workers, *arguments, kill_after=chance.uniform(0, longest[workers])
        )
        status = check(directory, events, reference)
        done += 1
        if status == 0:
            break  # the run was over first
        assert status == -signal.SIGKILL
        struck += 1
    events = train(directory, *arguments)
    assert check(directory, events, reference) == 0
    check_end(events, reference)
    return struck


# the moments come from the seed, what they hit from the machine: three runs of 11 kills are 33 moments
@pytest.mark.parametrize(("seed", "every"), [(0, 1), (1, 2), (2, 3)])
def test_killed_at_random_moments(zygote, reference, thirds, tmp_path, seed, every):
    struck = runs = 0
    while struck < 11:
        struck += kill_at_random(
            zygote.train,
            tmp_path / f"run-{runs}",
            reference,
            kills=11 - struck,
            seed=100 * seed + runs,
            arguments=("--every", str(every)),
            longest=thirds,
        )
        runs += 1
        assert runs < 8, "the trainer is too quick for its kills: nothing is being tested"


def test_killed_in_fresh_interpreters(reference, tmp_path):
    longest = {"0": 0.25, "2": 0.25}
    assert kill_at_random(train_fresh, tmp_path / "run", reference, kills=3, seed=7, longest=longest) == 3


def test_killed_before_every_system_call_of_a_save(zygote, tmp_path):
    # the first save begins a directory, the fourth prunes and moves latest.json
    whole = zygote.train(tmp_path / "whole", "--epochs", "1")
    reference = next(event for event in whole if "done" in event)
    calls = []
    for call in range(1, 100):
        directory = tmp_path / f"run-{call}"
        deaths = 0
        for save in ("1", "4"):
            events = zygote.train(directory, "--epochs", "1", "--die", save, str(call))
            status = check(directory, events, reference)
            assert status in (0, -signal.SIGKILL)
            deaths += status != 0
            calls += [event["dies"] for event in events if "dies" in event]
        check_end(zygote.train(directory, "--epochs", "1"), reference)
        if deaths == 0:
            break
    else:
        pytest.fail("a save made 99 system calls and there was no end to it")
    # the deaths were where they matter
    assert calls.count("rename") >= 6
    assert calls.count("fsync") >= 6
    assert {"open", "write", "dirsync", "unlink"} <= set(calls)


def test_the_comparison_catches_a_checkpoint_without_the_rng(zygote, reference, tmp_path):
    zygote.train(tmp_path / "run", "--die", "9", "1")
    resumed = zygote.train(tmp_path / "run", "--forget-rng")
    assert resumed[-1]["gone"] == 0
    assert resumed[0]["restored"] == 8
    assert wrong(resumed, reference) != []
    with pytest.raises(AssertionError):
        check_end(resumed, reference)
