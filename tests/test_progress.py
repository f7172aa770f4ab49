"""A bar for what takes over a second, nothing for what does not."""

from __future__ import annotations

import logging
import sys
from typing import ClassVar

import pytest

from resumable_data import progress
from resumable_data.progress import slow_progress


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Bar:
    """Stands where tqdm's bar would."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **arguments):
        self.arguments, self.updates, self.closed = arguments, [], False
        Bar.made.append(self)

    def update(self, count):
        self.updates.append(count)

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    module = type(sys)("tqdm.auto")
    module.tqdm = Bar
    package = type(sys)("tqdm")
    package.auto = module
    monkeypatch.setitem(sys.modules, "tqdm", package)
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    Bar.made = []
    return Bar.made


def test_what_is_quick_shows_nothing(clock, bars, caplog):
    with caplog.at_level(logging.INFO), slow_progress("reading", 10) as advance:
        for _ in range(10):
            clock.now += 0.09
            advance(1)
    assert bars == []
    assert caplog.messages == []


def test_after_a_second_a_bar_appears_with_what_was_done(clock, bars):
    with slow_progress("reading", 10) as advance:
        for _ in range(5):
            clock.now += 0.4
            advance(2)
    (bar,) = bars
    assert (bar.arguments["total"], bar.arguments["desc"]) == (10, "reading")
    assert bar.updates == [6, 2, 2]
    assert bar.closed


def test_the_bar_is_closed_when_the_work_fails(clock, bars):
    def work():
        with slow_progress("reading", 10) as advance:
            clock.now += 2
            advance(3)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        work()
    assert bars[0].closed


def test_without_tqdm_there_are_log_lines_now_and_then(clock, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with caplog.at_level(logging.INFO, "resumable_data"), slow_progress("reading", 100) as advance:
        for _ in range(20):
            clock.now += 1.5
            advance(5)
    assert caplog.messages[0] == "reading: 5 of 100 batches"
    assert caplog.messages[-1] == "reading: done, 100 batches"
    assert 4 <= len(caplog.messages) <= 8
