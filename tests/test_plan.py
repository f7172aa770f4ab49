"""Which positions a rank's batches hold, in cases small enough to check by eye."""

from __future__ import annotations

import pytest

from resumable_data.plan import Plan


def dealt(length, batch_size, num_replicas, *, drop_last=False, begin=0, **options):
    """Positions of every rank's batches from batch ``begin`` on."""
    return [
        [[plan.first(t) + i * num_replicas for i in range(plan.count(t))] for t in range(begin, plan.batches)]
        for plan in (
            Plan(length, batch_size, num_replicas, rank, drop_last, **options) for rank in range(num_replicas)
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


def test_drop_leaves_out_what_does_not_go_round():
    assert dealt(10, 2, 4, tail="drop") == [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]
    assert dealt(7, 2, 2, tail="drop") == [[[0, 2], [4]], [[1, 3], [5]]]
    assert dealt(3, 2, 4, tail="drop") == [[], [], [], []]


def test_uneven_ranks_may_end_a_sample_or_a_batch_apart():
    assert dealt(7, 2, 2, tail="uneven") == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert dealt(10, 2, 4, tail="uneven") == [[[0, 4], [8]], [[1, 5], [9]], [[2, 6]], [[3, 7]]]
    assert dealt(2, 2, 4, tail="uneven") == [[[0]], [[1]], [], []]


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_drop_last_keeps_whole_global_batches_only(tail):
    assert dealt(11, 2, 2, drop_last=True, tail=tail) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert dealt(7, 2, 4, drop_last=True, tail=tail) == [[], [], [], []]


def test_padding_first_is_torchs_arithmetic():
    # 11 padded to 12 fill three batches of each rank's two: a repeat is kept although batches are dropped
    assert dealt(11, 2, 2, drop_last=True, pads_first=True) == [
        [[0, 2], [4, 6], [8, 10]],
        [[1, 3], [5, 7], [9, 11]],
    ]
    # its own drop_last leaves 10: five for each rank, of which the last has no batch to be in
    assert dealt(11, 2, 2, drop_last=True, pads_first=True, tail="drop") == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ]
    assert dealt(11, 2, 2, pads_first=True) == dealt(11, 2, 2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("length", [0, 6])
def test_nothing_to_deal(drop_last, tail, length):
    start = (length, length // 2)
    assert dealt(length, 3, 2, drop_last=drop_last, tail=tail, start=start, begin=start[1]) == [[], []]


def test_fewer_samples_than_ranks():
    assert dealt(1, 4, 3) == [[[0]], [[1]], [[2]]]


def test_the_rest_is_dealt_from_where_another_topology_stopped():
    # one rank delivered [0, 1, 2] and [3, 4, 5]; two ranks go on, and number their batches from 2
    rest = {"start": (6, 2), "begin": 2}
    assert dealt(11, 2, 2, **rest) == [[[6, 8], [10]], [[7, 9], [11]]]
    assert dealt(11, 2, 2, **rest, tail="drop") == [[[6, 8]], [[7, 9]]]
    assert dealt(11, 2, 2, **rest, tail="uneven") == [[[6, 8], [10]], [[7, 9]]]
    assert dealt(11, 2, 2, **rest, drop_last=True) == [[[6, 8]], [[7, 9]]]


def test_starting_changes_the_start_alone():
    plan = Plan(11, 2, 2, 1, False, tail="uneven", limit=4)
    assert plan.starting((0, 0)) is plan
    assert plan.starting((6, 2)) == Plan(11, 2, 2, 1, False, tail="uneven", limit=4, start=(6, 2))
    assert plan.starting((6, 2)).starting((0, 0)) == plan


def test_a_limit_counts_batches_of_the_epoch_those_of_another_topology_too():
    assert dealt(11, 2, 2, limit=2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert dealt(11, 2, 2, limit=9) == dealt(11, 2, 2)
    rest = {"start": (6, 2), "begin": 2}
    assert dealt(11, 2, 2, **rest, limit=3) == [[[6, 8]], [[7, 9]]]
    assert dealt(11, 2, 2, **rest, limit=2) == [[], []]


def test_a_limit_that_was_passed_leaves_nothing_and_takes_nothing_back():
    assert Plan(11, 2, 2, 0, False, start=(8, 4), limit=2).batches == 4


def test_samples_at_counts_no_padding():
    plan = Plan(10, 2, 4, 3, False)
    assert [plan.samples_at(t) for t in range(3)] == [0, 8, 10]


def test_samples_at_counts_nothing_that_is_dropped():
    assert [Plan(11, 2, 2, 0, True).samples_at(t) for t in range(3)] == [0, 4, 8]
    assert [Plan(7, 2, 2, 0, False, tail="drop").samples_at(t) for t in range(3)] == [0, 4, 6]
    # the repeat that torch keeps is no sample
    assert [Plan(11, 2, 2, 0, True, pads_first=True).samples_at(t) for t in range(4)] == [0, 4, 8, 11]


def test_samples_at_goes_on_from_the_start():
    plan = Plan(11, 2, 2, 0, False, start=(6, 2))
    assert [plan.samples_at(t) for t in (2, 3, 4)] == [6, 10, 11]


def test_a_trillion_positions_are_as_cheap_as_ten():
    plan = Plan(10**12, 64, 1000, 7, False)
    assert plan.batches == 10**12 // 64000
    assert plan.first(plan.batches - 1) == 10**12 - 64000 + 7
