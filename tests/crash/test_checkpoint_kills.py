"""SIGKILL of processes that save without pause: at random moments, and before every single call of a save."""

import logging
import os
import random
import re
import signal
from collections import Counter

import pytest
from support.checkpoints import LAYOUTS, seen
from support.forked import KEEP, Parent

#: What the savers do, and how long they live at most, in seconds.
STYLES = {
    "single": ({"layout": "single"}, 0.06),
    "sharded": ({"layout": "sharded"}, 0.08),
    "single, slow prune": ({"layout": "single", "slow": True}, 0.1),
    "sharded, slow prune": ({"layout": "sharded", "slow": True}, 0.15),
    "single, without fsync": ({"layout": "single", "durability": "process"}, 0.04),
    "sharded, without fsync": ({"layout": "sharded", "durability": "process"}, 0.05),
}


@pytest.fixture(scope="module")
def parent():
    with Parent() as started:
        yield started


def check(answer):
    """What loads is whole and no older than the last save that returned; the next save tidies up."""
    assert answer["error"] is None, answer["error"]
    reported = int(answer["reported"][-1]) if answer["reported"] else 0
    found = answer["found"]
    assert (found[0] if found else 0) >= reported
    assert found is None or found[0] == found[1]
    assert answer["skipped"] == answer["damaged"] == []
    assert answer["whole"] >= min(KEEP, reported)
    assert answer["after"] == answer["wanted"]
    assert answer["debris"] == []
    return answer


def moment(answer):
    """Where the kill fell, by what it has left."""
    left = answer["left"]
    stems = {
        re.sub(r"\.(pt|json)$", "", name) for name in left if re.fullmatch(r"step_\d+(\.pt|\.json)?", name)
    }
    lone = [stem for stem in stems if f"{stem}.json" in left and f"{stem}.pt" not in left]
    if any(name.endswith(".dead") for name in left):
        return "in a prune"
    if any(".tmp/" in name or (name.endswith(".tmp") and not name.startswith(".latest")) for name in left):
        return "with the index in place and not the data" if lone else "while writing"
    if any(name.startswith(".latest") for name in left):
        return "between commit and pointer"
    if not stems:
        return "before anything was written"
    return "in a prune" if lone else "between two saves"


def killed_at_random(parent, tmp_path, style, rounds, seed):
    request, longest = STYLES[style]
    draw = random.Random(f"{seed} {style}")
    moments, newest = Counter(), 0
    for number in range(rounds):
        # every fourth one begins in an empty directory and dies young: in its very first save
        first = number % 4 == 0
        directory = tmp_path / (f"first-{number}" if first else "run")
        delay = draw.uniform(0, longest / 3 if first else longest)
        answer = check(parent.ask(do="kill", directory=str(directory), delay=delay, **request))
        assert answer["status"] == -signal.SIGKILL
        moments[moment(answer)] += 1
        if not first:
            assert answer["after"][0] > newest
            newest = answer["after"][0]
    print(f"{rounds} kills, 0 unreadable: {style}:", dict(moments.most_common()))


@pytest.mark.parametrize("style", STYLES)
def test_killed_at_random_moments_of_a_save_loop(parent, tmp_path, style):
    killed_at_random(parent, tmp_path, style, 30, seed=5)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("style", STYLES)
def test_killed_at_random_moments_all_night(parent, tmp_path, style, seed):
    killed_at_random(parent, tmp_path, style, 84, seed=seed)


@pytest.mark.parametrize("saves", [0, 3], ids=["the very first save", "a save that prunes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_before_each_call_of_a_save(parent, tmp_path, layout, saves):
    moments, newer = Counter(), []
    for call in range(100):
        directory = tmp_path / str(call)
        answer = check(parent.ask(do="kill", directory=str(directory), layout=layout, at=[saves, call]))
        if answer["status"] == 0:  # the save has fewer calls
            break
        assert answer["status"] == -signal.SIGKILL
        assert answer["reported"] == [str(step + 1) for step in range(saves)]
        moments[moment(answer)] += 1
        newer.append((answer["found"] or [0])[0])
    print(f"{call} kills, 0 unreadable: before each call of save {saves + 1}, {layout}:", dict(moments))
    # the old one up to the commit, from then on the new one
    assert newer == sorted(newer)
    assert set(newer) == {saves, saves + 1}
    assert {"while writing", "between commit and pointer"} <= moments.keys()
    assert ("in a prune" in moments) == (saves == 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_beside_a_writer_never_fails(parent, tmp_path, caplog, layout):
    caplog.set_level(logging.ERROR, logger="resumable_data")
    writer = parent.ask(do="start", directory=str(tmp_path), layout=layout)
    try:
        steps = []
        while len(steps) < 500:
            found, skipped = seen(tmp_path)
            assert skipped == ()
            if found is not None:
                assert found[0] == found[1]
                steps.append(found[0])
        os.kill(writer, 0)  # it is alive
    finally:
        answer = parent.ask(do="stop")
    assert answer["status"] == -signal.SIGKILL
    assert steps == sorted(steps)
    assert len(set(steps)) > 10
