"""States of some batches ago, for whoever reads ahead and has not handed on what it read."""

from __future__ import annotations

import json

import pytest
import torch
from support.datasets import Augmented, Indices, keep
from support.runs import plainly
from support.samplers import N, Python
from torch.utils.data import DistributedSampler

from resumable_data import ResumableLoader

pytest_plugins = ["support.plugin"]

KINDS = {
    "shuffled": lambda: {"shuffle": True, "seed": 7},
    "ranked": lambda: {"shuffle": True, "seed": 7, "num_replicas": 2, "rank": 1},
    "distributed": lambda: {"sampler": DistributedSampler(range(N), 2, 1)},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4), "seed": 7},
    "sampler": lambda: {"sampler": Python(N), "seed": 7},
}


def make(kind, **crew):
    return ResumableLoader(Augmented(N), 3, collate_fn=keep, **KINDS[kind](), **crew)


def saved(loader, in_flight=0):
    return json.loads(json.dumps(loader.state_dict(in_flight=in_flight)))


class Ahead:
    """A wrapper that reads one batch ahead to know which is the last: batches with a flag."""

    def __init__(self, loader):
        self.loader, self.held = loader, 0

    def __iter__(self):
        running = iter(self.loader)
        coming = next(running, None)
        self.held = coming is not None
        while coming is not None:
            batch, coming = coming, next(running, None)
            self.held = int(coming is not None)
            yield batch, coming is None
        self.held = 0

    def state_dict(self):
        return self.loader.state_dict(in_flight=self.held)


def wrapped_run(kind, epochs, state=None, stop=None, **crew):
    loader = make(kind, **crew)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(epochs):
        wrapper = Ahead(loader)
        for batch, last in wrapper:
            seen.append([epoch, plainly(batch), last])
            if len(seen) == stop:
                return seen, json.loads(json.dumps(wrapper.state_dict()))
    return seen, None


def wrapped_resumed(kind, states, crew):
    return [wrapped_run(kind, 3, state, **crew)[0] for state in states]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_w9_a_wrapper_that_reads_one_ahead_resumes_with_the_batch_it_held(fresh, kind):
    whole, _ = wrapped_run(kind, 3)
    per_epoch = sum(epoch == 0 for epoch, _, _ in whole)
    assert [last for _, _, last in whole] == ([False] * (per_epoch - 1) + [True]) * 3
    # a generator's last batch closes its epoch, draws included, before the wrapper hands it on
    stops = [stop for stop in range(1, len(whole)) if stop % per_epoch]
    states = []
    for stop in stops:
        seen, state = wrapped_run(kind, 3, stop=stop)
        assert seen == whole[:stop]
        assert state["batch_in_epoch"] == stop % per_epoch
        states.append(state)
    for stop, seen in zip(stops, fresh(wrapped_resumed, kind=kind, states=states, crew={}), strict=True):
        assert whole[:stop] + seen == whole, stop


def test_w9_with_workers(fresh):
    whole, _ = wrapped_run("shuffled", 3)
    _, state = wrapped_run("shuffled", 3, stop=13, num_workers=2)
    (seen,) = fresh(wrapped_resumed, kind="shuffled", states=[state], crew={"num_workers": 2})
    assert whole[:13] + seen == whole


def test_w9_control_the_position_is_what_the_wrapper_was_handed(fresh):
    whole, _ = wrapped_run("shuffled", 3)
    loader = make("shuffled")
    wrapper = iter(Ahead(loader))
    head = [[0, plainly(batch), last] for batch, last in (next(wrapper), next(wrapper))]
    # without in_flight the batch it holds is lost
    (seen,) = fresh(wrapped_resumed, kind="shuffled", states=[saved(loader)], crew={})
    assert head + seen == whole[:2] + whole[3:]


def test_w9_nobody_needs_to_read_ahead():
    loader = make("shuffled")
    assert [loader.batches_remaining == 0 for _ in loader] == [*[False] * (len(loader) - 1), True]


def remembered(kind, loader):
    """A generator's draws of one epoch back can be had, those of earlier ones are gone."""
    return len(loader) if kind == "generator" else 3 * len(loader)


def test_draws_that_are_gone_are_refused():
    loader = make("generator")
    assert sum(1 for _ in loader.epochs(3) for _ in loader) == 3 * len(loader)
    loader.state_dict(in_flight=len(loader))
    with pytest.raises(ValueError, match="in_flight"):
        loader.state_dict(in_flight=len(loader) + 1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_number_of_batches_back_is_the_state_of_that_moment(kind):
    loader = make(kind)
    moments = [saved(loader)]
    for _ in loader.epochs(3):
        for _ in loader:
            moments.append(saved(loader))
    here = saved(loader)
    per_epoch = len(loader)
    for ago in range(1, remembered(kind, loader) + 1):
        then = saved(loader, ago)
        # the moment before a batch: where it is an epoch's first, that epoch had been begun
        place = divmod(3 * per_epoch - ago, per_epoch)
        assert (then["epoch"], then["batch_in_epoch"]) == place
        if place[1]:
            assert then == moments[-1 - ago]
        again = make(kind)
        again.load_state_dict(then)
        assert sum(1 for _ in again.epochs(3) for _ in again) == ago
    assert saved(loader) == here


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_follows_a_state_of_some_batches_ago(kind):
    loader = make(kind)
    whole = [plainly(batch) for _ in loader.epochs(3) for batch in loader]
    for ago in range(remembered(kind, loader) + 1):
        again = make(kind)
        again.load_state_dict(saved(loader, ago))
        assert [plainly(batch) for _ in again.epochs(3) for batch in again] == whole[len(whole) - ago :], ago


def test_under_another_topology_the_segment_goes_back_too():
    first = ResumableLoader(Indices(20), 2, shuffle=True, seed=3)
    live = iter(first)
    for _ in range(3):
        next(live)
    loader = ResumableLoader(Indices(20), 3, shuffle=True, seed=3, collate_fn=keep)
    loader.load_state_dict(saved(first))
    rest = list(loader)
    assert len(rest) == 5
    live = iter(loader)
    rest.append(next(live))
    for ago in range(1, 7):
        state = saved(loader, ago)
        if ago > 1:
            assert state["segment"] == [6, 3]
        again = ResumableLoader(Indices(20), 3, shuffle=True, seed=3, collate_fn=keep)
        again.load_state_dict(state)
        seen = [batch for _ in again.epochs(1) for batch in again]
        assert seen == rest[6 - ago : 5]


def test_batches_that_were_not_delivered_since_are_refused():
    loader = make("shuffled")
    with pytest.raises(ValueError, match=r"in_flight must be in \[0, 0\]"):
        loader.state_dict(in_flight=1)
    live = iter(loader)
    next(live)
    state = saved(loader)
    assert loader.state_dict(in_flight=1)["batch_in_epoch"] == 0
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        loader.state_dict(in_flight=2)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="in_flight"):
        loader.state_dict(in_flight=1)
    next(iter(loader))
    assert loader.state_dict(in_flight=1) == state
    loader.seek(0, 1)
    with pytest.raises(ValueError, match="in_flight"):
        loader.state_dict(in_flight=1)
    for wrong in (-1, 1.0, True):
        with pytest.raises((ValueError, TypeError), match="in_flight"):
            loader.state_dict(in_flight=wrong)


def test_as_many_as_are_remembered():
    loader = ResumableLoader(Indices(300), 1, shuffle=True, seed=1)
    live = iter(loader)
    for _ in range(280):
        next(live)
    assert loader.state_dict(in_flight=256)["batch_in_epoch"] == 24
    with pytest.raises(ValueError, match="256"):
        loader.state_dict(in_flight=257)


def test_a_failed_batch_counts_once():
    class Failing(Indices):
        failed = False

        def __getitem__(self, index):
            if index == 4 and not self.failed:
                self.failed = True
                raise KeyError(index)
            return index

    loader = ResumableLoader(Failing(10), 2, seed=1, collate_fn=keep)
    seen = []
    with pytest.raises(KeyError):
        seen.extend(into(loader, seen))
    seen += list(loader)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [loader.state_dict(in_flight=ago)["batch_in_epoch"] for ago in range(1, 6)] == [4, 3, 2, 1, 0]


def into(loader, seen):
    for batch in loader:
        seen.append(batch)
    return []
