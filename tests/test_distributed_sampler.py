"""``sampler=DistributedSampler(...)``: torch's own arithmetic and order, value by value, resumed and elastic."""

from __future__ import annotations

import json
from itertools import product

import pytest
from support.datasets import Augmented, Indices, keep
from support.runs import passes, plainly
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from resumable_data import ResumableLoader, StateMismatchError

pytest_plugins = ["support.plugin"]

SIZES = [1, 3, 8, 10, 11, 23]
WIDTHS = [1, 2, 3, 4, 7]
BATCHES = [1, 2, 3, 8]


def theirs(n, width, rank, batch_size, sampler_drops, loader_drops, shuffle, epoch, seed=5):
    data = Indices(n)
    sampler = DistributedSampler(data, width, rank, shuffle=shuffle, seed=seed, drop_last=sampler_drops)
    sampler.set_epoch(epoch)
    return sampler, DataLoader(data, batch_size, sampler=sampler, drop_last=loader_drops, collate_fn=keep)


def ours(n, width, rank, batch_size, sampler_drops, loader_drops, shuffle, epoch, seed=5, **more):
    data = Indices(n)
    sampler = DistributedSampler(data, width, rank, shuffle=shuffle, seed=seed, drop_last=sampler_drops)
    loader = ResumableLoader(
        data, batch_size, sampler=sampler, drop_last=loader_drops, collate_fn=keep, **more
    )
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize("sampler_drops", [False, True])
@pytest.mark.parametrize("loader_drops", [False, True])
def test_every_geometry_gives_torchs_batches(loader_drops, sampler_drops):
    for n, width, batch_size in product(SIZES, WIDTHS, BATCHES):
        for rank in range(width):
            for shuffle, epoch in ((True, 3), (False, 0)):
                case = (n, width, rank, batch_size, sampler_drops, loader_drops, shuffle, epoch)
                _, torchs = theirs(*case)
                loader = ours(*case)
                assert len(loader) == len(torchs), case
                assert list(loader) == list(torchs), case
                assert loader.epoch == epoch + 1


@pytest.mark.parametrize("sampler_drops", [False, True])
def test_positions_and_counts_follow(sampler_drops):
    for n, width, batch_size in product([5, 10, 23], [2, 3, 4], [2, 3]):
        loaders = [ours(n, width, rank, batch_size, sampler_drops, False, True, 1) for rank in range(width)]
        running = [iter(loader) for loader in loaders]
        dealt = n // width * width if sampler_drops else n
        for batch in range(1, len(loaders[0]) + 1):
            for live in running:
                next(live)
            states = [loader.state_dict() for loader in loaders]
            assert all(state == states[0] for state in states)
            assert states[0]["samples_in_epoch"] == min(dealt, batch * width * batch_size)
            assert states[0]["tail"] == ("drop" if sampler_drops else "pad")
            assert states[0]["order"] == "distributed"
            assert len(states[0]["order_digest"]) == 32
            # the other ranks' loaders take it, and so does this one
            for rank in range(width):
                ours(n, width, rank, batch_size, sampler_drops, False, True, 0).load_state_dict(states[0])


def augmented(width, rank, batch_size, **crew):
    data = Augmented(23)
    return ResumableLoader(
        data,
        batch_size,
        sampler=DistributedSampler(data, width, rank, seed=5),
        seeding="sample",
        collate_fn=keep,
        **crew,
    )


def resumed(width, rank, batch_size, state, crew):
    loader = augmented(width, rank, batch_size, **crew)
    loader.load_state_dict(state)
    return passes(loader, 2)


def test_resumed_in_epoch_1_on_both_ranks(fresh, crew):
    for rank in (0, 1):
        whole = passes(augmented(2, rank, 4), 3)
        loader = augmented(2, rank, 4, **crew)
        list(loader)
        live = iter(loader)
        next(live)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = fresh(resumed, width=2, rank=rank, batch_size=4, state=state, crew=crew)
        assert rest == [whole[1][1:], whole[2]]


def test_another_width_deals_the_rest_of_the_same_order(fresh):
    loaders = [augmented(2, rank, 3) for rank in (0, 1)]
    for loader in loaders:
        loader.set_epoch(1)
    running = [iter(loader) for loader in loaders]
    head = [plainly([next(live) for live in running]) for _ in range(2)]
    state = json.loads(json.dumps(loaders[0].state_dict()))
    assert state["samples_in_epoch"] == 12
    alone = augmented(1, 0, 23)
    alone.set_epoch(1)
    order = plainly(next(iter(alone)))
    got = [sample for batches in head for row in zip(*batches, strict=True) for sample in row]
    assert got == order[:12]
    parts = [fresh(resumed, width=3, rank=rank, batch_size=2, state=state, crew={})[0] for rank in range(3)]
    rest = []
    for batches in zip(*parts, strict=True):
        rest += [sample for row in zip(*batches, strict=True) for sample in row]
    assert rest[:11] == order[12:]
    # the epoch's start is repeated so that three ranks stay even
    assert [sample[0] for sample in rest[11:]] == [order[0][0]]


def test_its_seed_and_shuffle_are_the_orders(fresh):
    state = ours(23, 2, 0, 4, False, False, True, 1).state_dict()
    assert state["seed"] == 5
    with pytest.raises(StateMismatchError) as caught:
        ours(23, 2, 0, 4, False, False, True, 1, seed=6).load_state_dict(state)
    assert list(caught.value.fields) == ["seed"]
    loader = ours(23, 2, 0, 4, False, False, True, 1)
    next(iter(loader))
    with pytest.raises(StateMismatchError, match="order_digest"):
        ours(23, 2, 0, 4, False, False, False, 1).load_state_dict(loader.state_dict())


def test_numbers_beside_it_must_agree_and_so_must_the_tail():
    def build(**more):
        return ResumableLoader(Indices(10), 3, sampler=DistributedSampler(Indices(10), 2, 1), **more)

    assert len(list(build(num_replicas=2, rank=1))) == 2
    for more in ({"num_replicas": 2, "rank": 0}, {"num_replicas": 4, "rank": 1}, {"tail": "uneven"}):
        with pytest.raises(ValueError, match="DistributedSampler"):
            build(**more)


class Reversed(DistributedSampler):
    """A subclass may do anything."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def test_a_subclass_is_read_like_any_sampler():
    sampler = Reversed(Indices(23), 2, 1, seed=5)
    loader = ResumableLoader(Indices(23), 4, sampler=sampler, seed=1, collate_fn=keep)
    for epoch in range(3):
        other = Reversed(Indices(23), 2, 1, seed=5)
        other.set_epoch(epoch)
        assert list(loader) == list(DataLoader(Indices(23), 4, sampler=other, collate_fn=keep))
    assert loader.state_dict()["order"] == "sampler"


def test_a_batch_sampler_of_torchs_own_around_it_is_the_same_thing():
    inner = DistributedSampler(Indices(23), 2, 1, seed=5)
    loader = ResumableLoader(Indices(23), batch_sampler=BatchSampler(inner, 4, True), collate_fn=keep)
    straight = ours(23, 2, 1, 4, False, True, True, 0)
    assert list(loader) == list(straight)
    assert loader.state_dict() == straight.state_dict()
    assert inner.epoch == 0


def test_control_a_sampler_whose_epoch_is_forgotten_differs():
    first = theirs(23, 2, 0, 4, False, False, True, 0)[1]
    assert list(first) == list(first)
    assert list(first) != list(ours(23, 2, 0, 4, False, False, True, 1))
