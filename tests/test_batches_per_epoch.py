"""An epoch that is its first k batches, said to the loader or done by a loop that breaks."""

from __future__ import annotations

import json

import pytest
import torch
from support.datasets import Augmented, Indices, keep
from support.runs import plainly
from support.samplers import Lengthless, Python
from torch.utils.data import DataLoader, RandomSampler

from resumable_data import ResumableLoader, StateMismatchError

pytest_plugins = ["support.plugin"]

N, LIMIT, EPOCHS = 160, 50, 3


def make(**arguments):
    return ResumableLoader(Augmented(N), 2, shuffle=True, seed=7, collate_fn=keep, **arguments)


def breaking_loop(state=None, stop=None, **crew):
    """Trains on 50 of the 80 batches: the number of a batch is asked before it is trained on."""
    loader = make(**crew)
    assert len(loader) == 80
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for number, batch in loader.enumerate():
            if number >= LIMIT:
                break
            seen.append([epoch, number, plainly(batch)])
            if len(seen) == stop:
                return seen, json.loads(json.dumps(loader.state_dict()))
    return seen, None


def limited_loop(state=None, stop=None, **crew):
    loader = make(batches_per_epoch=LIMIT, **crew)
    assert len(loader) == LIMIT
    if state is not None:
        loader.load_state_dict(state)
        assert loader.batches_remaining == LIMIT - loader.batch_in_epoch
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for number, batch in loader.enumerate():
            seen.append([epoch, number, plainly(batch)])
            if len(seen) == stop:
                return seen, json.loads(json.dumps(loader.state_dict()))
    return seen, None


LOOPS = {"breaking": breaking_loop, "limited": limited_loop}


def resumed_all(loop, states, crew):
    return [LOOPS[loop](state, **crew)[0] for state in states]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_loop_over_50_of_80_batches_killed_at_every_save_point(fresh, loop):
    whole, _ = LOOPS[loop]()
    assert [(epoch, number) for epoch, number, _ in whole] == [(e, b) for e in range(3) for b in range(LIMIT)]
    # saves every 10 steps, and around the epoch's end
    stops = [*range(10, 150, 10), 1, 49, 51, 99, 101, 149]
    states = []
    for stop in stops:
        head, state = LOOPS[loop](stop=stop)
        assert head == whole[:stop]
        states.append(state)
    for stop, seen in zip(stops, fresh(resumed_all, loop=loop, states=states, crew={}), strict=True):
        assert whole[:stop] + seen == whole, stop
    some = [4, 5, 14]  # with workers: at the epoch's end, after it, at its first save
    for at, seen in zip(
        some,
        fresh(resumed_all, loop=loop, states=[states[at] for at in some], crew={"num_workers": 2}),
        strict=True,
    ):
        assert whole[: stops[at]] + seen == whole, stops[at]


def test_both_loops_see_the_same_batches():
    assert breaking_loop() == limited_loop()


def test_control_a_loop_that_counts_its_own_batches_after_a_resume_trains_too_many():
    whole, _ = breaking_loop()
    _, state = breaking_loop(stop=60)
    loader = make()
    loader.load_state_dict(state)
    seen = []
    for number, batch in enumerate(loader):  # numbers from 0 although the pass does not begin there
        if number >= LIMIT:
            break
        seen.append(plainly(batch))
    assert seen != [batch for epoch, number, batch in whole if epoch == 1][10:]
    assert len(seen) == 50


def test_the_limit_is_part_of_the_state():
    _, state = limited_loop(stop=10)
    assert state["batches_per_epoch"] == LIMIT
    for other in (None, 49, 51):
        loader = make(batches_per_epoch=other)
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert caught.value.fields == {"batches_per_epoch": (LIMIT, other)}
        loader.load_state_dict(state, override={"batches_per_epoch"})
        assert loader.batch_in_epoch == 10
        assert loader.batches_remaining == (other or 80) - 10


def test_a_limit_beyond_the_epoch_changes_nothing():
    loader = make(batches_per_epoch=1000)
    assert len(loader) == 80
    assert list(loader) == list(make())


@pytest.mark.parametrize("value", [0, -1, 2**64])
def test_impossible_limits_are_refused(value):
    with pytest.raises(ValueError, match="batches_per_epoch"):
        make(batches_per_epoch=value)


@pytest.mark.parametrize("value", [1.5, "3", True])
def test_limits_of_another_type_are_refused(value):
    with pytest.raises(TypeError, match="batches_per_epoch"):
        make(batches_per_epoch=value)


def test_a_limit_counts_batches_whatever_the_ranks():
    loaders = [make(batches_per_epoch=7, num_replicas=3, rank=rank) for rank in range(3)]
    epochs = [list(loader) for loader in loaders]
    assert [len(epoch) for epoch in epochs] == [7, 7, 7]
    assert loaders[0].consumed_samples == 42
    state = loaders[0].state_dict()
    one = make(batches_per_epoch=7)
    one.load_state_dict(state)
    assert len(list(one)) == 7
    # in the middle of an epoch the limit still counts all of its batches
    live = iter(loaders[0])
    for _ in range(3):
        next(live)
    one.load_state_dict(loaders[0].state_dict())
    assert one.batches_remaining == len(list(one)) == 4
    assert one.consumed_samples == 42 + 3 * 6 + 4 * 2


def test_a_generators_draws_are_those_of_whole_passes():
    def theirs(epochs):
        generator = torch.Generator().manual_seed(4)
        loader = DataLoader(Indices(20), 2, shuffle=True, generator=generator, collate_fn=keep)
        return [list(loader) for _ in range(epochs)], generator.get_state()

    whole, state = theirs(3)
    generator = torch.Generator().manual_seed(4)
    loader = ResumableLoader(
        Indices(20), 2, shuffle=True, generator=generator, collate_fn=keep, seed=1, batches_per_epoch=4
    )
    assert [list(loader) for _ in range(3)] == [epoch[:4] for epoch in whole]
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("sampler", [Python, Lengthless])
def test_a_custom_sampler_is_read_no_further(sampler):
    loader = ResumableLoader(
        Indices(N), 2, sampler=sampler(N), seed=1, collate_fn=keep, batches_per_epoch=5, num_workers=2
    )
    longer = ResumableLoader(Indices(N), 2, sampler=sampler(N), seed=1, collate_fn=keep)
    assert list(loader) == list(longer)[:5]
    assert len(loader) == 5
    assert loader.epoch == 1


def test_an_infinite_sampler_has_epochs_by_its_limit():
    class Endless:
        def __iter__(self):
            at = 0
            while True:
                yield at % N
                at += 1

    loader = ResumableLoader(Indices(N), 2, sampler=Endless(), seed=1, batches_per_epoch=3, collate_fn=keep)
    assert [list(loader) for _ in range(2)] == [[[0, 1], [2, 3], [4, 5]]] * 2


def test_more_samples_than_the_dataset_has():
    sampler = RandomSampler(
        range(10), replacement=True, num_samples=45, generator=torch.Generator().manual_seed(1)
    )
    loader = ResumableLoader(Indices(10), 4, sampler=sampler, seed=1, batches_per_epoch=11, collate_fn=keep)
    assert sum(map(len, loader)) == 44
