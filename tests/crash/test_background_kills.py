"""SIGKILL of processes that save in the background while they go on changing what they save."""

import random
import signal
from collections import Counter

import pytest
from support.checkpoints import LAYOUTS
from support.forked import Parent

ROUNDS = 12  # by layout and durability: 48 in all
NIGHTLY = 150


@pytest.fixture(scope="module")
def parent():
    with Parent() as started:
        yield started


def killed_in_the_background(parent, tmp_path, layout, durability, rounds):
    draw = random.Random(f"{layout} {durability}")
    outcomes, newest = Counter(), 0
    for number in range(rounds):
        first = number % 4 == 0  # in its very first save
        directory = tmp_path / (f"first-{number}" if first else "run")
        delay = draw.uniform(0, 0.01 if first else 0.03)  # from when a save has begun
        answer = parent.ask(
            do="kill",
            directory=str(directory),
            layout=layout,
            durability=durability,
            delay=delay,
            background=True,
        )
        assert answer["status"] == -signal.SIGKILL
        assert answer["error"] is None, answer["error"]
        assert answer["skipped"] == answer["damaged"] == []
        # "n" is said when save n has begun, so that the one before it is committed
        begun = int(answer["reported"][-1]) if answer["reported"] else 0
        found = answer["found"] or [0, 0]
        assert found[0] == found[1]
        assert found[0] >= begun - 1
        assert answer["after"] == answer["wanted"]
        assert answer["debris"] == []
        outcomes["with the save whole" if found[0] >= begun else "with the one before"] += 1
        outcomes["files half written"] += any(".tmp" in name for name in answer["left"])
        if not first:
            assert found[0] >= newest
            newest = answer["after"][0]
    print(f"{rounds} kills, 0 unreadable: in the background, {layout}, {durability}:", dict(outcomes))
    return outcomes


def test_killed_while_a_save_runs_in_the_background(parent, tmp_path):
    outcomes = Counter()
    for layout in LAYOUTS:
        for durability in ("full", "process"):
            place = tmp_path / layout / durability
            outcomes += killed_in_the_background(parent, place, layout, durability, ROUNDS)
    assert outcomes["with the save whole"] + outcomes["with the one before"] == 48
    assert outcomes["with the one before"] > 0  # else no kill met a save under way
    assert outcomes["files half written"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["full", "process"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_in_the_background_all_night(parent, tmp_path, layout, durability):
    killed_in_the_background(parent, tmp_path, layout, durability, NIGHTLY)
