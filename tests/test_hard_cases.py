"""Uses of the loader that looked lawful and were not: each was a silent difference once."""

from __future__ import annotations

import copy
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from resumable_data import ResumableLoader, StateError, StateMismatchError

DATA = list(range(20))


def listed(batches):
    return [batch.tolist() for batch in batches]


def resumed(make, state, **options):
    loader = make()
    loader.load_state_dict(state, **options)
    return loader


class Reused:
    """A batch sampler that hands out one buffer again and again."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        buffer = np.empty(4, dtype=np.int64) if self.kind == "array" else [0] * 4
        for begin in range(0, 20, 4):
            buffer[:] = range(begin, begin + 4)
            yield iter(list(buffer)) if self.kind == "iterator" else buffer


@pytest.mark.parametrize("kind", ["list", "array", "iterator"])
def test_a_batch_sampler_may_use_its_buffer_again(kind):
    def make():
        return ResumableLoader(DATA, batch_sampler=Reused(kind), seed=1)

    loader = make()
    loader.peek()
    whole = listed(loader)
    assert whole == [DATA[begin : begin + 4] for begin in range(0, 20, 4)]
    loader = make()
    next(live := iter(loader))
    del live
    assert listed(resumed(make, loader.state_dict())) == whole[1:]


class Counting:
    """A sampler with a state, which makes itself ready for the next epoch as it ends."""

    def __init__(self, n=22):
        self.n, self.i = n, 0

    def __iter__(self):
        while self.i < self.n:
            self.i += 1
            yield (self.i - 1) % 20
        self.i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


@pytest.mark.parametrize("drop_last", [True, False])
def test_what_an_incomplete_last_batch_left_behind_is_no_epoch(drop_last):
    def make():
        return ResumableLoader(DATA, 4, sampler=Counting(), drop_last=drop_last, seed=1)

    whole = listed(make())
    assert len(whole) == (5 if drop_last else 6)
    loader = make()
    live = iter(loader)
    for _ in whole:
        next(live)
    again = resumed(make, loader.state_dict())
    assert listed(again) == []
    assert [listed(again), listed(again)] == [whole] * 2


@pytest.mark.parametrize("override", [{"order_digest"}, {"dataset_size"}])
def test_an_override_leaves_a_samplers_own_state_alone(override):
    loader = ResumableLoader(DATA, 4, sampler=Counting(), seed=1)
    live = iter(loader)
    next(live), next(live)
    state = loader.state_dict()
    data = list(range(21)) if "dataset_size" in override else DATA
    again = resumed(lambda: ResumableLoader(data, 4, sampler=Counting(), seed=1), state, override=override)
    assert again.state_dict()["sampler"] == state["sampler"]
    assert listed(again)[0] == [8, 9, 10, 11]


class Remembering:
    """A sampler with a history that nothing captures, and which fails once."""

    def __init__(self):
        self.draws, self.failed = random.Random(0), False

    def __iter__(self):
        for at in range(20):
            if at == 10 and not self.failed:
                self.failed = True
                raise OSError("the index is away for a moment")
            yield self.draws.randrange(20)


def test_a_sampler_that_raised_is_read_again_under_the_eye_of_what_it_gave():
    loader = ResumableLoader(DATA, 2, sampler=Remembering(), seed=1)
    with pytest.raises(OSError, match="away"):
        listed(loader)
    assert loader.batch_in_epoch > 0
    with pytest.raises(StateMismatchError, match="order_digest"):
        iter(loader)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ({"shuffle": True}, {"shuffle": False}),
        ({"seed": 1}, {"seed": 2}),
    ],
)
def test_between_epochs_another_distributed_order_is_refused(saved, other):
    def make(options):
        return ResumableLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0, **options), seed=3)

    loader = make(saved)
    listed(loader)
    state = loader.state_dict()
    assert listed(resumed(lambda: make(saved), state)) == listed(loader)
    with pytest.raises(StateMismatchError, match="order_digest"):
        make(other).load_state_dict(state)


def test_between_epochs_other_weights_are_refused():
    def make(first):
        drawn = torch.Generator().manual_seed(3)
        return ResumableLoader(DATA, 4, sampler=WeightedRandomSampler([first] * 20, 20, generator=drawn))

    loader = make(0.5)
    listed(loader)
    with pytest.raises(StateMismatchError, match="order_digest"):
        make(0.25).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("delivered", [0, 1])
def test_a_seek_past_the_end_of_a_sampler_is_refused(delivered):
    loader = ResumableLoader(DATA, 4, sampler=list(range(20)), seed=1)
    live = iter(loader)
    for _ in range(delivered):
        next(live)
    with pytest.raises(IndexError, match="past the epoch's end"):
        loader.seek(0, 9)


def test_a_grown_dataset_is_gone_on_with_from_the_sample_where_it_stood():
    loader = ResumableLoader(DATA[:10], 4)
    live = iter(loader)
    next(live), next(live), next(live)
    grown = resumed(lambda: ResumableLoader(DATA[:14], 4), loader.state_dict(), override={"dataset_size"})
    assert listed(grown) == [[10, 11, 12, 13]]


def test_a_dataset_smaller_than_the_position_is_refused():
    loader = ResumableLoader(DATA, 8)
    live = iter(loader)
    next(live), next(live)
    smaller = ResumableLoader(DATA[:10], 4, tail="uneven")
    with pytest.raises(StateError):
        smaller.load_state_dict(loader.state_dict(), override={"dataset_size", "tail"})


def test_a_distributed_sampler_may_be_longer_than_the_dataset_says():
    def make():
        return ResumableLoader(DATA, 4, sampler=DistributedSampler(list(range(40)), 1, 0), collate_fn=len)

    class Endless:
        def __getitem__(self, index):
            return index

    def endless():
        return ResumableLoader(Endless(), 4, sampler=DistributedSampler(list(range(40)), 1, 0))

    loader = endless()
    live = iter(loader)
    for _ in range(7):
        next(live)
    assert listed(resumed(endless, loader.state_dict())) == listed(live)
    assert len(make()) == 10


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_not_copied(how):
    with pytest.raises(TypeError, match="can neither be copied nor pickled"):
        how(ResumableLoader(DATA, 4))


def test_a_warning_made_an_error_finds_nothing_changed():
    loader = ResumableLoader(DATA, 4, seeding=None, seed=1)
    live = iter(loader)
    next(live)
    fresh = ResumableLoader(DATA, 4, seeding=None, seed=1)
    before = fresh.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="seeding=None"):
            fresh.load_state_dict(loader.state_dict())
    assert fresh.state_dict() == before
