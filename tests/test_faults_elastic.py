"""Faults of samplers and of changing hardware, as people met them; the rows are those of docs/reference/faults.md.

A test runs uninterrupted here and is resumed in a fresh interpreter. Lists are compared as they came.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from support.datasets import Augmented, Indices, keep
from support.fresh import ROOT, TESTS
from support.runs import plainly
from support.samplers import ByLength, N
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumable_data import (
    CheckpointManager,
    ResumableLoader,
    RNGRestoreError,
    capture_rng_state,
    restore_rng_state,
)

pytest_plugins = ["support.plugin"]


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


# ── samplers of others ───────────────────────────────────────────────────────────────────────────────


class Windows(ByLength):
    """A user's batch sampler around a DistributedSampler, without a set_epoch of its own."""

    def __iter__(self):
        keys = list(self.sampler)
        for at in range(0, len(keys), self.batch_size):
            yield keys[at : at + self.batch_size]


def windows(rank, **crew):
    inner = DistributedSampler(range(N), 2, rank, seed=9)
    return ResumableLoader(
        Augmented(N),
        batch_sampler=Windows(inner, 4),
        seed=3,
        collate_fn=keep,
        num_replicas=2,
        rank=rank,
        **crew,
    )


def windows_resumed(rank, states, crew):
    results = []
    for state in states:
        loader = windows(rank, **crew)
        loader.load_state_dict(state)
        results.append([plainly(list(loader)) for _ in range(2)])
    return results


@pytest.mark.parametrize("rank", [0, 1])
def test_w14_the_epoch_reaches_a_sampler_inside_a_users_batch_sampler(fresh, crew, rank):
    loader = windows(rank)
    whole = [plainly(list(loader)) for _ in range(5)]
    for epoch, batches in enumerate(whole):
        inner = DistributedSampler(range(N), 2, rank, seed=9)
        inner.set_epoch(epoch)
        theirs = DataLoader(Indices(N), batch_sampler=Windows(inner, 4), collate_fn=keep)
        assert [[sample[0] for sample in batch] for batch in batches] == list(theirs)
    loader, states = windows(rank, **crew), []
    for _ in range(3):
        live = iter(loader)
        next(live)
        next(live)
        states.append(saved(loader))
        list(live)
    results = fresh(windows_resumed, rank=rank, states=states, crew=crew)
    assert results == [[whole[epoch][2:], whole[epoch + 1]] for epoch in range(3)]


DRAWN = {
    "replacement": lambda: RandomSampler(range(30), replacement=True, num_samples=45),
    "weighted": lambda: WeightedRandomSampler([1.0, 9.0, 0.1] * 10, 30),
    "subset": lambda: SubsetRandomSampler(range(4, 28)),
    "replacement_generator": lambda: RandomSampler(
        range(30), replacement=True, num_samples=45, generator=torch.Generator().manual_seed(2)
    ),
}


def drawn(kind, **crew):
    return ResumableLoader(Augmented(30), 4, sampler=DRAWN[kind](), seed=3, collate_fn=keep, **crew)


def drawn_resumed(kind, state, crew):
    loader = drawn(kind, **crew)
    loader.load_state_dict(state)
    return [plainly(list(loader)) for _ in range(2)]


@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_w17_resumed_in_epoch_2_at_batch_3(fresh, crew, kind):
    loader = drawn(kind)
    whole = [plainly(list(loader)) for _ in range(4)]
    assert sum(map(len, whole[2])) == {"weighted": 30, "subset": 24}.get(kind, 45)
    loader = drawn(kind, **crew)
    for _ in range(2):
        list(loader)
    live = iter(loader)
    for _ in range(3):
        next(live)
    state = saved(loader)
    assert (state["epoch"], state["batch_in_epoch"]) == (2, 3)
    assert fresh(drawn_resumed, kind=kind, state=state, crew=crew) == [whole[2][3:], whole[3]]


# ── other hardware ───────────────────────────────────────────────────────────────────────────────────


def ranks(n, width, batch_size, epoch=None, states=None, **more):
    loaders = [
        ResumableLoader(
            Augmented(n),
            batch_size,
            shuffle=True,
            seed=7,
            seeding="sample",
            collate_fn=keep,
            num_replicas=width,
            rank=rank,
            **more,
        )
        for rank in range(width)
    ]
    for at, loader in enumerate(loaders):
        if epoch is not None:
            loader.set_epoch(epoch)
        if states is not None:
            loader.load_state_dict(states[at % len(states)])
    return loaders


def together(loaders, steps=None):
    """The next batches of all ranks, as one stretch of the global order, as plain values."""
    running = [iter(loader) for loader in loaders]
    left = max(loader.batches_remaining for loader in loaders)
    out = []
    for _ in range(left if steps is None else steps):
        batches = [plainly(next(live, [])) for live in running]
        out += [b[at] for at in range(max(map(len, batches))) for b in batches if at < len(b)]
    return out


def elastic_leg(n, width, batch_size, states, steps, more):
    loaders = ranks(n, width, batch_size, states=states, **more)
    out = together(loaders, steps)
    return [
        out,
        [loader.state_dict() for loader in loaders],
        [loader.batches_remaining for loader in loaders],
    ]


def order(n, epoch):
    return together(ranks(n, 1, n, epoch))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("width", [1, 4, 5])
def test_w19_the_unseen_samples_once_each_under_another_number_of_ranks(fresh, crew, width, epoch):
    whole = order(20, epoch)
    loaders = ranks(20, 2, 3, epoch, **crew)
    got = together(loaders, 1)
    states = [saved(loader) for loader in loaders]
    assert states[0] == states[1]
    assert (states[0]["samples_in_epoch"], states[0]["num_replicas"]) == (6, 2)
    assert got == whole[:6]
    # a second save in the same epoch, on yet another number of ranks, and a third interpreter for the rest
    more, states, _ = fresh(elastic_leg, n=20, width=width, batch_size=1, states=states, steps=1, more=crew)
    assert all(state == states[0] for state in states)
    assert states[0]["segment"] == [6, 1]
    rest, states, _ = fresh(elastic_leg, n=20, width=3, batch_size=2, states=states, steps=None, more={})
    assert (got + more + rest)[:20] == whole
    assert len(got + more + rest) - 20 < 3
    assert states[0]["segment"] == [6 + width, 2]


def test_w19_control_dividing_batches_by_ranks_loses_samples():
    whole = order(20, 1)
    got = together(ranks(20, 2, 3, 1), 1)
    # what a loader does that multiplies its batch number by the new width
    (wrong,) = ranks(20, 1, 3, 1)
    wrong.seek(1, 1)
    assert got + together([wrong]) != whole


@pytest.mark.parametrize("other", [5, 16])
def test_w20_another_batch_size_continues_at_the_sample(fresh, crew, other):
    whole = order(100, 1)
    loaders = ranks(100, 1, 8, 1, **crew)
    assert together(loaders, 5) == whole[:40]
    rest, states, _ = fresh(
        elastic_leg, n=100, width=1, batch_size=other, states=[saved(loaders[0])], steps=None, more=crew
    )
    assert rest == whole[40:]
    assert states[0]["batch_in_epoch"] == 5 + -(-60 // other)
    assert states[0]["segment"] == [40, 5]


def test_w21_the_epoch_is_the_saved_one_never_worked_out_from_steps(fresh, crew):
    loaders = ranks(80, 8, 2, 2, **crew)
    got = together(loaders, 3)
    states = [saved(loader) for loader in loaders]
    rest, after, left = fresh(elastic_leg, n=80, width=1, batch_size=2, states=states, steps=None, more=crew)
    assert got + rest == order(80, 2)
    assert after[0]["epoch"] == 2
    assert left == [0]
    (one,) = ranks(80, 1, 2, states=states[:1])
    assert (one.epoch, one.batch_in_epoch, one.samples_in_epoch, one.batches_remaining) == (2, 3, 48, 16)


def test_w22_exact_lists_of_every_rank_for_every_tail():
    def lists(**more):
        return [
            [
                index
                for batch in ResumableLoader(
                    Indices(10), 2, seed=1, num_replicas=4, rank=rank, collate_fn=keep, **more
                )
                for index in batch
            ]
            for rank in range(4)
        ]

    assert lists(tail="pad") == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert lists(tail="drop") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lists(tail="uneven") == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    for tail in ("pad", "drop", "uneven"):
        assert lists(tail=tail, drop_last=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("more", [{"drop_last": True}, {"tail": "drop"}])
def test_w22_what_one_epoch_drops_another_delivers(more):
    loaders = [
        ResumableLoader(
            Indices(10), 2, shuffle=True, seed=1, num_replicas=4, rank=rank, collate_fn=keep, **more
        )
        for rank in range(4)
    ]
    seen = [set() for _ in range(20)]
    for loader in loaders:
        for epoch in loader.epochs(20):
            seen[epoch] |= {index for batch in loader for index in batch}
    assert all(len(epoch) == 8 for epoch in seen)
    assert set.union(*seen) == set(range(10))
    assert len({frozenset(epoch) for epoch in seen}) > 5


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────


class SlowFirst(Indices):
    """Sample 0 takes a second."""

    def __getitem__(self, index):
        if index == 0:
            time.sleep(1)
        return index


def overtaking(workers, state=None):
    loader = ResumableLoader(SlowFirst(24), 2, seed=1, collate_fn=keep, num_workers=workers, in_order=False)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def overtaking_rest(workers, state):
    return list(overtaking(workers, state))


@pytest.mark.parametrize("workers", [0, 2])
def test_w32_batches_that_overtake_a_slow_one_are_not_given_twice(fresh, workers):
    loader = overtaking(2)
    live = iter(loader)
    came = [next(live) for _ in range(4)]
    assert [0, 1] not in came
    rest = fresh(overtaking_rest, workers=workers, state=saved(loader))
    assert [0, 1] in rest
    assert sorted(came + rest) == [[at, at + 1] for at in range(0, 24, 2)]


class Reordering(Indices):
    """A dataset with an order of its own, drawn anew for each epoch."""

    def __init__(self, n):
        super().__init__(n)
        self.own, self.number = None, None

    def set_epoch(self, epoch):
        self.number = epoch
        self.own = np.random.permutation(self.n).tolist()

    def __getitem__(self, index):
        return self.number, index, self.own[index]


def reordering(crew):
    return ResumableLoader(Reordering(12), 3, shuffle=True, seed=4, collate_fn=keep, **crew)


def reordering_resumed(state, crew):
    loader = reordering(crew)
    loader.load_state_dict(state)
    return [plainly(list(loader)) for _ in range(2)]


@pytest.mark.parametrize("persistent", [False, True])
def test_w37_the_epoch_reaches_the_copies_in_live_workers(fresh, persistent):
    crew = {"num_workers": 2, "persistent_workers": persistent}
    loader = reordering({})
    whole = [plainly(list(loader)) for _ in range(3)]
    for epoch, batches in enumerate(whole):
        samples = [sample for batch in batches for sample in batch]
        assert {sample[0] for sample in samples} == {epoch}
        # one order an epoch, in whatever copy: it is a permutation
        assert sorted(sample[2] for sample in samples) == list(range(12))
        assert sorted(sample[1] for sample in samples) == list(range(12))
    assert [s[2] for b in whole[0] for s in sorted(b)] != [s[2] for b in whole[1] for s in sorted(b)]
    loader = reordering(crew)
    assert [plainly(list(loader)) for _ in range(3)] == whole
    loader = reordering(crew)
    list(loader)
    live = iter(loader)
    next(live)
    assert fresh(reordering_resumed, state=saved(loader), crew=crew) == [whole[1][1:], whole[2]]


# ── checkpoints of several processes ─────────────────────────────────────────────────────────────────

WRITER = """
import sys
import torch
from resumable_data import CheckpointManager
from test_faults_elastic import two_ranks
manager = CheckpointManager(sys.argv[1], every_steps=1)
loader = two_ranks(int(sys.argv[2]))
live = iter(loader)
next(live), next(live)
try:
    manager.save(2, {"data": loader})
    print("saved", flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
print(repr(loader.state_dict()), flush=True)
sys.stdin.readline()
"""


def two_ranks(rank):
    return ResumableLoader(Augmented(20), 3, shuffle=True, seed=7, num_replicas=2, rank=rank)


def test_w39_the_second_writer_is_refused_by_name_and_both_states_are_equal(tmp_path):
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    writers = []
    lines = []
    try:
        for rank in range(2):
            writers.append(
                subprocess.Popen(
                    [sys.executable, "-c", WRITER, str(tmp_path), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                )
            )
            lines.append([writers[-1].stdout.readline(), writers[-1].stdout.readline()])
    finally:
        for writer in writers:
            writer.communicate("\n", timeout=60)
    (first, state), (second, other) = lines
    assert first == "saved\n"
    assert second.startswith("CheckpointWriteError")
    assert str(writers[0].pid) in second
    assert state == other
    loader = two_ranks(0)
    found = CheckpointManager(tmp_path, every_steps=1).restore({"data": loader})
    assert found.step == 2
    assert repr(loader.state_dict()) == state.strip()


def ranked_rng(path, step):
    """Another interpreter: each rank's streams, restored from the one checkpoint, and the draws that follow."""
    found = CheckpointManager(path, every_steps=1).restore({})
    drawn = []
    for rank in range(2):
        restore_rng_state(found.extra["streams"][rank], rank=rank, world_size=2)
        drawn.append([torch.rand(3).tolist(), np.random.rand(3).tolist()])
    assert found.step == step
    return drawn


def captured(rank):
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    state = capture_rng_state(rank=rank, world_size=2)
    return state, [torch.rand(3).tolist(), np.random.rand(3).tolist()]


def test_r13_each_rank_gets_its_own_streams_back(fresh, tmp_path):
    (zero, first), (one, second) = captured(0), captured(1)
    assert first != second
    with CheckpointManager(tmp_path, every_steps=1) as manager:
        manager.save(1, {"streams": [zero, one]})
    assert fresh(ranked_rng, path=str(tmp_path), step=1) == [first, second]
    with pytest.raises(RNGRestoreError, match="rank"):
        restore_rng_state(zero, rank=1, world_size=2)
