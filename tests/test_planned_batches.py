"""``BucketBatchSampler`` through the loader: any batch by its number, dealt out and elastic by whole batches."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.strategies import examples, tried
from support.datasets import Augmented, keep
from support.runs import plainly
from torch.utils.data import DataLoader

from resumable_data import ResumableLoader, StateMismatchError
from resumable_data.bucketing import BucketBatchSampler

pytest_plugins = ["support.plugin"]

N = 60
LENGTHS = np.random.default_rng(0).integers(1, 50, N)


def planner(**more):
    return BucketBatchSampler(LENGTHS, **{"max_tokens": 100, **more})


def make(width=1, rank=0, seeding="batch", sampler=None, seed=5, **more):
    return ResumableLoader(
        Augmented(N),
        batch_sampler=planner() if sampler is None else sampler,
        seed=seed,
        num_replicas=width,
        rank=rank,
        seeding=seeding,
        collate_fn=keep,
        **more,
    )


def course(loader, epochs):
    for epoch in loader.epochs(epochs):
        for number, batch in loader.enumerate():
            yield [epoch, number, plainly(batch)]


def resumed_all(states, crew, width=1, rank=0):
    results = []
    for state in states:
        loader = make(width, rank, **crew)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        head = list(islice(course(loader, 3), 2))
        again = make(width, rank)
        again.load_state_dict(loader.state_dict())
        results.append(head + list(course(again, 3)))
    return results


@pytest.mark.parametrize(("workers", "width", "rank"), [(0, 1, 0), (0, 3, 1), (2, 2, 0)])
def test_stopped_anywhere_it_goes_on_by_number(fresh, workers, width, rank):
    loader = make(width, rank)
    whole, states = [], []
    for event in course(loader, 3):
        whole.append(event)
        states.append(json.loads(json.dumps(loader.state_dict())))
    stops = [0, 7, len(whole) // 2, len(whole) - 4] if workers else range(0, len(whole) - 3, 3)
    picked = [states[stop] for stop in stops]
    crew = {"num_workers": workers}
    results = fresh(resumed_all, states=picked, crew=crew, width=width, rank=rank)
    for stop, rest in zip(stops, results, strict=True):
        assert whole[: stop + 1] + rest == whole, stop
    assert make(width, rank).batch_at(1, 2)[0][0] == next(e for e in whole if e[:2] == [1, 2])[2][0][0]


def test_torchs_loader_gives_the_same_batches():
    sampler = planner(seed=5)
    theirs = DataLoader(Augmented(N), batch_sampler=sampler, collate_fn=keep)
    loader = make()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [[s[0] for s in batch] for batch in loader] == [[s[0] for s in batch] for batch in theirs]


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_whole_batches_are_dealt_round(width, tail):
    alone = [[s[0] for s in batch] for batch in make()]
    loaders = [make(width, rank, tail=tail) for rank in range(width)]
    ranks = [[[s[0] for s in batch] for batch in loader] for loader in loaders]
    count = len(alone)
    assert count % 3
    for rank, batches in enumerate(ranks):
        mine = range(rank, count, width)
        expected = [alone[at] for at in mine]
        if tail == "drop":
            expected = expected[: count // width]
        elif tail == "pad" and len(expected) < -(-count // width):
            expected.append(alone[(rank + len(expected) * width) % count])
        assert batches == expected
        assert len(loaders[rank]) == len(expected)


widths = st.integers(1, 5)


@settings(max_examples=examples(40))
@given(
    n=st.integers(1, 80),
    plan=st.lists(st.tuples(widths, st.integers(0, 5)), min_size=1, max_size=4),
    last=widths,
    tail=st.sampled_from(["pad", "drop", "uneven"]),
    epoch=st.integers(0, 2),
    drop=st.booleans(),
)
def test_any_plan_of_widths_is_one_uninterrupted_pass(n, plan, last, tail, epoch, drop):
    lengths = np.random.default_rng(n).integers(1, 40, n)

    def loaders(width, state):
        made = []
        for rank in range(width):
            sampler = BucketBatchSampler(lengths, max_tokens=80, drop_last=drop)
            loader = ResumableLoader(
                Augmented(n),
                batch_sampler=sampler,
                seed=5,
                num_replicas=width,
                rank=rank,
                tail=tail,
                seeding="sample",
                collate_fn=keep,
            )
            if state is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(state)
            made.append(loader)
        return made

    (alone,) = loaders(1, None)
    whole = list(alone)
    got, state = [], None
    for width, steps in [*plan, (last, None)]:
        made = loaders(width, state)
        running = [iter(loader) for loader in made]
        left = [loader.batches_remaining for loader in made]
        for _ in range(max(left) if steps is None else min(steps, *left)):
            got += [batch for live in running for batch in [next(live, None)] if batch is not None]
        states = [loader.state_dict() for loader in made]
        if steps is not None:
            assert all(other == states[0] for other in states)
            delivered = min(len(got), len(whole))
            assert states[0]["samples_in_epoch"] == sum(map(len, whole[:delivered]))
        state = json.loads(json.dumps(states[0]))
    kept = min(len(got), len(whole))
    assert got[:kept] == whole[:kept]
    lost, widest = len(whole) - len(got), max(width for width, _ in [*plan, (last, None)])
    if tail == "uneven":
        assert lost == 0
    elif tail == "pad":
        assert -widest < lost <= 0
        repeats = [[s[0] for s in batch] for batch in got[len(whole) :]]
        assert repeats == [[s[0] for s in whole[at % len(whole)]] for at in range(len(repeats))]
    else:
        assert 0 <= lost < widest
    tried("elastic plans, whole batches", n, *plan, last, tail, epoch, drop)


def test_consecutive_plans_of_one_rank_are_the_epochs_of_the_seed():
    plan = planner().plan(5, 1)
    loader = make()
    list(loader)
    assert [[s[0] for s in batch] for batch in loader] == [plan.batch(at).tolist() for at in range(len(plan))]


def test_other_lengths_or_rules_are_refused():
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    longer = LENGTHS.copy()
    longer[0] = 49 if longer[0] < 25 else 1
    for sampler in (
        planner(max_tokens=120),
        planner(shuffle=False),
        BucketBatchSampler(longer, max_tokens=100),
    ):
        with pytest.raises(StateMismatchError, match="order_digest"):
            make(sampler=sampler).load_state_dict(state)
    make(sampler=planner()).load_state_dict(state)


def test_a_seed_of_the_planners_own_decides_the_order():
    one, other = make(sampler=planner(seed=9), seed=1), make(sampler=planner(seed=9), seed=2)
    indices = [[[s[0] for s in batch] for batch in loader] for loader in (one, other)]
    assert indices[0] == indices[1]
    assert indices[0] != [[s[0] for s in batch] for batch in make(seed=1)]


def test_set_epoch_told_to_the_planner_is_the_loaders():
    whole = make()
    epochs = [list(whole) for _ in range(3)]
    sampler = planner()
    loader = make(sampler=sampler)
    sampler.set_epoch(2)
    assert list(loader) == epochs[2]
    loader.seek(1, 3)
    assert list(loader) == epochs[1][3:]
    assert sampler.epoch == 1


def test_control_another_epoch_has_other_batches():
    loader = make()
    assert [[s[0] for s in b] for b in loader] != [[s[0] for s in b] for b in loader]
