"""The table of what is kept, first over plain records, then over directories."""

import errno
import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.helpers import FailingOps, debris, flip, names
from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.atomic import FsOps
from resumable_data.checkpoint.retention import Policy, Record
from resumable_data.errors import CheckpointWriteError

MIN, MAX = ("loss", "min"), ("loss", "max")


def record(step, metric=None, *, ordinal=1, generation=0, counted=True, **flags):
    name = f"{step}.g{generation}"
    return Record(name, ordinal, step, generation, metric=metric, counted=counted, **flags)


def kept(records, keep_last=None, keep_best=None):
    gone = Policy(keep_last, keep_best).doomed(records)
    return [r.name for r in records if r not in gone]


def rated(*metrics):
    """Steps 1, 2, ... with these metrics."""
    return [record(i + 1, metric) for i, metric in enumerate(metrics)]


TABLE = {
    "best first": (rated(0.1, 0.5, 0.4, 0.3), 1, MIN, [1, 4]),
    "best in the middle": (rated(0.5, 0.1, 0.4, 0.3), 1, MIN, [2, 4]),
    "best last": (rated(0.5, 0.4, 0.3, 0.1), 1, MIN, [4]),
    "best among the last": (rated(0.5, 0.4, 0.1, 0.3), 2, MIN, [3, 4]),
    "the greatest": (rated(0.5, 0.9, 0.4, 0.3), 1, MAX, [2, 4]),
    "a tie: the newest": (rated(0.1, 0.1, 0.5, 0.3), 1, MIN, [2, 4]),
    "a tie of the greatest": (rated(0.9, 0.9, 0.5, 0.3), 1, MAX, [2, 4]),
    "NaN is never best": (rated(math.nan, 0.5, math.nan, math.nan), 1, MIN, [2, 4]),
    "nor is NaN the greatest": (rated(math.nan, 0.5, math.nan, math.nan), 1, MAX, [2, 4]),
    "infinity is never best": (rated(-math.inf, 0.5, 0.6, 0.7), 1, MIN, [2, 4]),
    "nor the greatest": (rated(math.inf, 0.5, 0.4, 0.3), 1, MAX, [2, 4]),
    "negative and zero": (rated(0, -2, 3, 4), 1, MIN, [2, 4]),
    "a metric is missing": (rated(None, 0.5, None, None), 1, MIN, [2, 4]),
    "no metric anywhere": (rated(None, None, None), 1, MIN, [3]),
    "no best is asked for": (rated(0.1, 0.5, 0.4), 1, None, [3]),
    "keep_last 1": (rated(None, None, None), 1, None, [3]),
    "keep_last 2": (rated(None, None, None), 2, None, [2, 3]),
    "keep_last None": (rated(0.1, 0.2, 0.3), None, MIN, [1, 2, 3]),
    "9 to 10": ([record(9), record(10)], 1, None, [10]),
    "99999 to 100000": ([record(99_999), record(100_000)], 1, None, [100_000]),
    "a new run at lower steps": ([record(90), record(95), record(5, ordinal=2)], 1, None, [5]),
    "higher steps of an older run": (
        [record(90), record(95), record(5, ordinal=2), record(6, ordinal=2)],
        2,
        None,
        [5, 6],
    ),
    "the best of an older run": ([record(90, 0.1), record(5, 0.2, ordinal=2)], 1, MIN, [90, 5]),
    "a damaged newer one takes no place": ([record(1), record(2), record(3, counted=False)], 1, None, [2, 3]),
    "a damaged older one goes": ([record(1, counted=False), record(2)], 1, None, [2]),
    "none counts: all stay": ([record(i, counted=False) for i in (1, 2, 3)], 1, None, [1, 2, 3]),
    "unreadable ones stay": ([record(1, readable=False, counted=False), record(2)], 1, None, [1, 2]),
    "the held one": ([record(1, held=True), record(2), record(3)], 1, None, [1, 3]),
    "the held one counts": ([record(1), record(2, held=True)], 1, None, [2]),
    "the held one of an older run": (
        [record(1, held=True), record(2, ordinal=2), record(3, ordinal=2)],
        1,
        None,
        [1, 3],
    ),
    "the best is not verified": ([record(1, 0.1, counted=False), *rated(9, 0.2, 0.3)[1:]], 1, MIN, [1, 2, 3]),
    "marked is never best": ([record(1, 0.1, marked=True), *rated(9, 0.2, 0.3)[1:]], 1, MIN, [2, 3]),
    "marked takes no place": ([record(1), record(2), record(3, marked=True)], 1, None, [2, 3]),
    "marked goes with its age": ([record(1, marked=True), record(2)], 1, None, [2]),
    "marked is not held": ([record(1, marked=True, held=True), record(2)], 1, None, [2]),
}


@pytest.mark.parametrize(("records", "keep_last", "keep_best", "expected"), TABLE.values(), ids=TABLE.keys())
def test_table(records, keep_last, keep_best, expected):
    by_age = [f"{step}.g0" for step in expected]
    assert kept(records, keep_last, keep_best) == by_age
    assert sorted(kept(records[::-1], keep_last, keep_best)) == sorted(by_age)  # their order says nothing


@pytest.mark.parametrize("keep_last", [None, 1, 3])
def test_an_older_generation_goes_once_a_newer_one_is_whole(keep_last):
    old, new = record(5), record(5, generation=1)
    assert kept([old, new], keep_last) == ["5.g1"]
    assert kept([old, record(5, generation=1, counted=False)], keep_last) == ["5.g0", "5.g1"]
    assert kept([old, record(5, generation=1, marked=True)], keep_last) == ["5.g0", "5.g1"]
    assert kept([record(5, held=True), new], keep_last) == ["5.g0", "5.g1"]
    assert kept([old, record(5, generation=1, ordinal=2)], None) == ["5.g0", "5.g1"]  # of another run


def test_the_oldest_goes_first():
    records = [record(step, ordinal=ordinal) for ordinal, step in ((1, 50), (1, 60), (2, 3), (2, 20))]
    assert [gone.step for gone in Policy(1).doomed(records[::-1])] == [50, 60, 3]


METRICS = st.none() | st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf]) | st.floats(width=16)


@st.composite
def directories(draw):
    places = draw(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 2)), max_size=14, unique=True
        )
    )
    return [
        record(
            step,
            draw(METRICS),
            ordinal=ordinal,
            generation=generation,
            counted=draw(st.booleans()),
            readable=draw(st.integers(0, 4)) > 0,
            marked=draw(st.integers(0, 4)) == 0,
            held=draw(st.integers(0, 5)) == 0,
        )
        for ordinal, step, generation in places
    ]


@given(directories(), st.none() | st.integers(1, 5), st.sampled_from([None, MIN, MAX]))
def test_what_is_never_deleted(records, keep_last, keep_best):
    policy = Policy(keep_last, keep_best)
    gone = policy.doomed(records)
    left = [r for r in records if r not in gone]
    assert all(r.readable for r in gone)
    assert all(r in left for r in records if r.held and not r.marked)
    assert policy.doomed(left) == []  # once more changes nothing
    good = [r for r in records if r.readable and r.counted and not r.marked]
    distinct = {(r.ordinal, r.step) for r in good}
    wanted = len(distinct) if keep_last is None else min(keep_last, len(distinct))
    assert len({(r.ordinal, r.step) for r in good if r in left}) >= wanted
    if good:
        assert max(good, key=lambda r: r.order) in left
    best = policy.best(records)
    assert best is None or best in left
    assert policy.best(left) == best
    if keep_last is None:  # then only what a newer generation stands for goes
        assert all(any(o.order > r.order and o.step == r.step for o in good) for r in gone)


@given(directories(), st.integers(1, 5))
def test_nothing_old_stays_for_no_reason(records, keep_last):
    left = [r for r in records if r not in Policy(keep_last).doomed(records)]
    newest = sorted({(r.ordinal, r.step) for r in left if r.counted and r.readable and not r.marked})
    newest = newest[-keep_last:]
    for r in left:
        if len(newest) == keep_last and (r.ordinal, r.step) < newest[0]:
            assert not r.readable or (r.held and not r.marked)


# ── over directories ─────────────────────────────────────────────────────────────────────────────────


def save(manager, step, loss=None):
    metrics = {} if loss is None else {"loss": loss}
    return manager.save(step, {"value": torch.tensor(float(step))}, metrics=metrics)


def steps(directory):
    return [int(name[5:17]) for name in names(directory) if name.endswith(".pt")]


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize(
    ("losses", "expected"),
    [([0.1, 0.5, 0.4], [1, 3]), ([0.5, 0.1, 0.4], [2, 3]), ([0.5, 0.4, 0.1], [3]), ([0.1, 0.1, 0.1], [3])],
)
def test_saves_keep_the_best(tmp_path, shards, losses, expected):
    with CheckpointManager(tmp_path, keep_last=1, keep_best=MIN, shards=shards) as manager:
        for i, loss in enumerate(losses):
            save(manager, i + 1, loss)
        there = [name for name in names(tmp_path) if name.startswith("step_")]
        assert sorted({int(name[5:17]) for name in there}) == expected
        assert len(there) == len(expected) * (2 if shards is None else 1)


def test_a_moved_directory_counts_anew_and_knows_its_best(tmp_path):
    with CheckpointManager(tmp_path / "a", keep_last=2, keep_best=MIN) as manager:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
            save(manager, step, loss)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    with CheckpointManager(tmp_path / "b", keep_last=2, keep_best=MIN) as moved:
        assert moved.best_path() == tmp_path / "b" / "step_000000000001.pt"
        save(moved, 4, 0.6)
        assert steps(tmp_path / "b") == [1, 2, 3, 4]  # one of them is known to be whole
        save(moved, 5, 0.7)
        assert steps(tmp_path / "b") == [1, 4, 5]


def test_a_best_that_somebody_deleted_is_followed_by_the_next(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1, keep_best=MIN) as manager:
        best = save(manager, 1, 0.1)
        save(manager, 2, 0.3)
        best.unlink()
        save(manager, 3, 0.4)
        assert steps(tmp_path) == [2, 3]
        assert manager.best_path().name == "step_000000000002.pt"


def test_a_failed_save_deletes_nothing(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        save(manager, 1)
        manager._ops = FailingOps(at=0, code=errno.ENOSPC, only={"rename"})
        with pytest.raises(CheckpointWriteError):
            save(manager, 2)
        assert steps(tmp_path) == [1]
        assert debris(tmp_path) == []
        manager._ops = FsOps()
        save(manager, 3)
        assert steps(tmp_path) == [3]


def test_a_failed_deletion_is_a_warning_and_the_save_stands(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        save(manager, 1)
        manager._ops = FailingOps(at=0, code=errno.EACCES, only={"unlink"})
        with pytest.warns(UserWarning, match="step 2 is committed"):
            path = save(manager, 2)
        assert manager.latest_path() == path
        manager._ops = FsOps()
        save(manager, 3)
        assert steps(tmp_path) == [3]
        assert debris(tmp_path) == []


def test_another_run_that_is_newer_and_whole_does_not_have_ours_pruned_at_once(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as ours, CheckpointManager(tmp_path, keep_last=1) as other:
        save(ours, 1)
        save(other, 2)
        assert all(report.ok for report in ours.verify())
        path = save(ours, 3)
        assert path.exists()
        assert steps(tmp_path) == [2, 3]


def test_a_replaced_index_does_not_count_as_the_one_that_was_verified(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        save(manager, 1)
        second = save(manager, 2)
        flip(second.with_suffix(".json"), 20)
        save(manager, 3)
        assert steps(tmp_path) == [2, 3]  # of which run the second is nobody knows


def test_verifying_makes_checkpoints_count(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in range(1, 6):
            save(manager, step)
    with CheckpointManager(tmp_path, keep_last=2) as other:
        other.prune()
        assert steps(tmp_path) == [1, 2, 3, 4, 5]
        other.verify(5)
        other.prune()
        assert steps(tmp_path) == [1, 2, 3, 4, 5]
        other.verify()
        other.prune()
        assert steps(tmp_path) == [4, 5]


def test_foreign_files_stay_in_place(tmp_path):
    foreign = ["step_5.pt", "step_000000000001.pt.bak", "best.pt", "notes.txt", "step_000000000001.txt"]
    with CheckpointManager(tmp_path, keep_last=1, shards=2) as manager:
        for name in foreign:
            (tmp_path / name).write_text("x")
        first = save(manager, 1)
        (first / "notes.txt").write_text("mine")
        save(manager, 2)
        assert (first / "notes.txt").read_text() == "mine"
        assert set(foreign) <= set(names(tmp_path))
        assert manager.load_latest().step == 2
        assert [report.step for report in manager.verify()] == [2]
