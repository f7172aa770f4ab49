"""Python's stream saved as memory: the same as getstate and setstate, wherever it stands."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumable_data import mersenne
from resumable_data.mersenne import PythonStream, layout_known
from resumable_data.seeding import StreamsAside


@pytest.fixture(autouse=True)
def _kept():
    before = random.getstate()
    yield
    random.setstate(before)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the layout is CPython's")
def test_the_layout_is_the_one_expected():
    assert layout_known(), "CPython's random.Random has another layout: saving falls back to getstate"


@given(seed=st.integers(0, 2**70), draws=st.integers(0, 1300), gauss=st.booleans(), block=st.booleans())
def test_what_was_saved_comes_back(seed, draws, gauss, block):
    stream = PythonStream(block)
    random.seed(seed)
    for _ in range(draws):
        random.random()
    if gauss:
        random.gauss()
    before = random.getstate()
    saved = stream.save()
    random.seed(seed + 1)
    random.gauss()
    assert random.getstate() != before
    stream.restore(saved)
    assert random.getstate() == before
    assert [random.random() for _ in range(3)] == _draws_after(before)


def _draws_after(state):
    random.setstate(state)
    return [random.random() for _ in range(3)]


def test_a_saved_state_is_a_copy():
    stream = PythonStream()
    random.seed(5)
    saved, before = stream.save(), random.getstate()
    for _ in range(2000):
        random.random()
    stream.restore(saved)
    assert random.getstate() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(sys.implementation, "name", "another"),
        lambda patch: patch.setattr(mersenne, "_HEADER", mersenne._HEADER + 4),
        lambda patch: patch.setattr(mersenne, "GLOBAL", random.SystemRandom()),
    ],
)
def test_another_layout_falls_back_to_getstate(monkeypatch, change):
    layout_known.cache_clear()
    change(monkeypatch)
    try:
        assert not layout_known()
        random.seed(3)
        before = random.getstate()
        stream = PythonStream()
        saved = stream.save()
        assert saved.block is None
        random.random()
        stream.restore(saved)
        assert random.getstate() == before
    finally:
        layout_known.cache_clear()


@pytest.mark.parametrize("known", [True, False])
def test_streams_set_aside_are_back_either_way(monkeypatch, known):
    monkeypatch.setattr(mersenne, "layout_known", lambda: known)
    aside = StreamsAside()
    random.seed(11)
    random.gauss()
    before = random.getstate()
    drawn = aside.around(lambda _: (random.seed(1), random.random())[1], None)
    assert random.getstate() == before
    assert drawn == random.Random(1).random()
