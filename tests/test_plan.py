"""Which positions a rank's batches hold, in cases small enough to check by eye."""

from __future__ import annotations

import pytest

from resumable_data.plan import Plan


def dealt(length, batch_size, num_replicas, *, drop_last=False):
    """Positions of every rank's batches."""
    return [
        [[plan.first(t) + i * num_replicas for i in range(plan.count(t))] for t in range(plan.batches)]
        for plan in (
            Plan(length, length, batch_size, num_replicas, rank, drop_last) for rank in range(num_replicas)
        )
    ]


def test_one_replica():
    assert dealt(5, 2, 1) == [[[0, 1], [2, 3], [4]]]
    assert dealt(5, 2, 1, drop_last=True) == [[[0, 1], [2, 3]]]


def test_two_replicas_take_every_second_position():
    assert dealt(8, 2, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_without_drop_last_ranks_end_together_on_repeats():
    # positions 10 and 11 repeat the epoch's start
    assert dealt(10, 2, 4) == [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7], [11]]]


def test_drop_last_keeps_whole_global_batches_only():
    assert dealt(11, 2, 2, drop_last=True) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert dealt(7, 2, 4, drop_last=True) == [[], [], [], []]


@pytest.mark.parametrize("drop_last", [False, True])
def test_nothing_to_deal(drop_last):
    assert dealt(0, 3, 2, drop_last=drop_last) == [[], []]


def test_fewer_samples_than_ranks():
    assert dealt(1, 4, 3) == [[[0]], [[1]], [[2]]]


def test_samples_at_counts_no_padding():
    plan = Plan(length=10, real=10, batch_size=2, num_replicas=4, rank=3, drop_last=False)
    assert [plan.samples_at(t) for t in range(3)] == [0, 8, 10]
    padded = Plan(length=12, real=10, batch_size=2, num_replicas=4, rank=3, drop_last=False)
    assert [padded.samples_at(t) for t in range(3)] == [0, 8, 10]


def test_a_trillion_positions_are_as_cheap_as_ten():
    plan = Plan(10**12, 10**12, 64, 1000, 7, False)
    assert plan.batches == 10**12 // 64000
    assert plan.first(plan.batches - 1) == 10**12 - 64000 + 7
