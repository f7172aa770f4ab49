from __future__ import annotations

import hashlib
import json
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from resumable_data.bucketing import BatchPlanner, BucketBatchSampler
from resumable_data.sampling import ArrayPlan
from resumable_data.splitmix import derive

VECTORS = json.loads((Path(__file__).parent / "golden" / "bucketing.json").read_text())["plans"]
TOP = 2**64 - 1
LENGTHS = [1 + word % 90 for word in derive(1, count=500)]


def read(plan):
    return [plan.batch(number).tolist() for number in range(len(plan))]


def sampler(lengths=LENGTHS, **arguments):
    return BucketBatchSampler(lengths, **{"max_tokens": 512, "seed": 7, **arguments})


# ── the frozen vectors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden(vector):
    lengths = [1 + word % vector["longest"] for word in derive(1, count=vector["samples"])]
    plan = BucketBatchSampler(lengths, **vector["arguments"]).plan(vector["seed"], vector["epoch"])
    assert len(plan) == vector["batches"]
    assert [plan.batch(number).tolist() for number in range(2)] == vector["first"]
    digest = hashlib.sha256(plan.indices.astype("<i8").tobytes() + plan.sizes.astype("<i8").tobytes())
    assert digest.hexdigest()[:32] == vector["sha256_prefix"]


# ── a function of seed and epoch ─────────────────────────────────────────────────────────────────────────


def test_seed_and_epoch_are_not_added():
    plans = [read(sampler().plan(*key)) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (TOP, 0)]]
    assert all(a != b for at, a in enumerate(plans) for b in plans[:at])
    assert read(sampler().plan(0, 1)) == plans[1]


def test_who_meets_whom_changes_with_the_epoch():
    first, second = ({tuple(sorted(batch)) for batch in read(sampler().plan(7, epoch))} for epoch in (0, 1))
    assert len(first & second) < len(first) / 4
    # Control: with equal lengths only, and no two equal, the members cannot change, only their turn.
    alone = sampler(range(1, 200), max_padding=0)
    first, second = ({tuple(sorted(batch)) for batch in read(alone.plan(7, epoch))} for epoch in (0, 1))
    assert first == second
    assert read(alone.plan(7, 0)) != read(alone.plan(7, 1))


def test_without_shuffle_the_longest_come_first_and_epochs_are_equal():
    fixed = sampler(shuffle=False)
    batches = read(fixed.plan(0, 0))
    assert batches == read(fixed.plan(1, 5))
    longest = [max(LENGTHS[sample] for sample in batch) for batch in batches]
    assert longest[0] >= 0.9 * max(LENGTHS)
    assert longest[-1] < longest[0] / 4
    assert all(later <= earlier / 0.9 for earlier, later in pairwise(longest))


def test_batches_of_one_are_not_in_the_order_of_the_samples_twice():
    # One sample a batch: both permutations are over range(n), and a shared key would square the order.
    plan = BucketBatchSampler([5] * 200, batch_size=1).plan(3, 0)
    samples_key, batches_key = derive(0x4255434B, 3, count=2)
    assert samples_key != batches_key
    assert sorted(plan.indices.tolist()) == list(range(200))


def test_the_latest_plan_is_kept():
    ours = sampler()
    plan = ours.plan(1, 0)
    assert ours.plan(1, 0) is plan
    assert ours.plan(1, 1) is not plan
    assert read(ours.plan(1, 0)) == read(plan)


def test_padding_is_much_less_than_in_random_batches():
    def share_of_padding(**arguments):
        lengths = np.array(LENGTHS)
        batches = read(sampler(batch_size=16, max_tokens=None, **arguments).plan(0, 0))
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        return 1 - lengths.sum() / padded

    assert share_of_padding(max_padding=0.1) < 0.15
    assert share_of_padding(max_padding=1) > 0.35


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sample_over_the_budget_is_refused_or_alone():
    lengths = [5, 30, 7, 40, 8]
    with pytest.raises(ValueError, match=r"max_tokens=29, found 2 .* index 1 with 30.*too_long='alone'"):
        BucketBatchSampler(lengths, max_tokens=29)
    assert len(BucketBatchSampler(lengths, max_tokens=40)) == 3
    batches = read(BucketBatchSampler(lengths, max_tokens=29, too_long="alone").plan(0, 0))
    assert [1] in batches
    assert [3] in batches
    assert sum(len(batch) for batch in batches) == 5


def test_what_fits_is_not_alone_because_a_longer_one_is_near():
    ours = BucketBatchSampler([21, 10, 10], max_tokens=20, too_long="alone", max_padding=1)
    batches = read(ours.plan(0, 0))
    assert sorted(map(sorted, batches)) == [[0], [1, 2]]


def test_the_padding_is_read_as_written():
    # 0.7 * 10 is 7; with the binary 0.3 it would be a little more, and 7 in a bucket of its own.
    batches = read(BucketBatchSampler([10, 7], batch_size=1, max_padding=0.3, shuffle=False).plan(0, 0))
    assert batches == [[0], [1]]
    assert BucketBatchSampler([10, 7], batch_size=2, max_padding=0.3)._buckets.tolist() == [0, 0]
    assert BucketBatchSampler([10, 7], batch_size=2, max_padding=0.2999)._buckets.tolist() == [0, 1]


def test_drop_last_drops_one_incomplete_batch():
    kept, dropped = (sampler([3] * 50, max_tokens=24, drop_last=drop) for drop in (False, True))
    assert (len(kept), len(dropped)) == (7, 6)
    assert sorted(kept.plan(0, 0).sizes.tolist()) == [2, 8, 8, 8, 8, 8, 8]
    missing = [set(range(50)) - set(dropped.plan(0, epoch).indices.tolist()) for epoch in range(4)]
    assert all(len(samples) == 2 for samples in missing)
    assert len(set(map(frozenset, missing))) > 1
    assert len(sampler([3] * 48, max_tokens=24, drop_last=True)) == 6


def test_no_samples_no_batches():
    for arguments in ({}, {"shuffle": False}, {"drop_last": True}):
        assert read(sampler([], **arguments).plan(0, 0)) == []
        assert list(sampler([], **arguments)) == []


def test_more_buckets_than_16_bits_count():
    lengths = np.arange(1, 70_001)
    plan = BucketBatchSampler(lengths, batch_size=7, max_padding=0, shuffle=False).plan(0, 0)
    assert np.array_equal(plan.indices, np.arange(70_000)[::-1])


# ── with torch's own loader ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_delivers_the_plan(num_workers):
    ours = sampler(LENGTHS[:60])
    loader = DataLoader(torch.arange(60), batch_sampler=ours, num_workers=num_workers)
    assert len(loader) == len(ours)
    for epoch in (0, 1):
        ours.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == read(ours.plan(7, epoch))


def test_without_set_epoch_every_pass_is_the_same():
    ours = sampler()
    assert list(ours) == list(ours)
    first = list(ours)
    ours.set_epoch(1)
    assert list(ours) != first


def test_a_pass_stays_in_the_epoch_in_which_it_began():
    ours = sampler()
    passing = iter(ours)
    ours.set_epoch(1)
    assert list(passing) == read(sampler().plan(7, 0))


def test_a_seed_is_adopted_once_and_nothing_is_drawn():
    before = torch.get_rng_state()
    try:
        torch.manual_seed(11)
        state = torch.get_rng_state()
        ours = sampler(seed=None)
        assert ours.seed is None
        first = list(ours)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(12)
        assert list(ours) == first == read(ours.plan(11, 0))
        assert list(sampler(seed=None)) != first
    finally:
        torch.set_rng_state(before)


def test_pickles_without_its_plan():
    ours = sampler(np.array(LENGTHS * 20))
    bare = len(pickle.dumps(ours))
    plan = ours.plan(7, 3)
    sent = pickle.dumps(ours)
    assert len(sent) == bare
    assert read(pickle.loads(sent).plan(7, 3)) == read(plan)


def test_it_is_what_the_protocol_says():
    ours = sampler()
    assert isinstance(ours, BatchPlanner)
    assert isinstance(ours, Sampler)
    assert ours.order_name == "buckets.v1"
    assert not isinstance(torch.utils.data.BatchSampler(range(3), 2, False), BatchPlanner)


def test_fingerprints_tell_samplers_apart():
    different = [
        sampler(),
        sampler(LENGTHS[::-1]),
        sampler(max_tokens=400),
        sampler(shuffle=False),
        sampler(drop_last=True),
        sampler(max_padding=0.2),
        sampler(batch_size=3),
    ]
    assert len({one.fingerprint for one in different}) == len(different)
    assert sampler(np.array(LENGTHS, np.int16)).fingerprint == sampler(seed=8).fingerprint
    assert len(sampler().fingerprint) == 32


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        tuple(LENGTHS),
        np.array(LENGTHS, np.uint8),
        torch.tensor(LENGTHS),
        np.array(LENGTHS, np.uint64),
    ],
    ids=lambda lengths: type(lengths).__name__,
)
def test_lengths_of_any_integer_kind(lengths):
    assert read(sampler(lengths).plan(7, 0)) == read(sampler().plan(7, 0))


def test_lengths_are_copied():
    lengths = np.array(LENGTHS)
    ours = sampler(lengths)
    expected = read(ours.plan(7, 0))
    lengths[:] = 1
    ours.plan(7, 1)
    assert read(ours.plan(7, 0)) == expected


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "max_tokens and batch_size are both None", {"max_tokens": None}),
        (ValueError, "max_tokens must be at least 1, found 0", {"max_tokens": 0}),
        (TypeError, "max_tokens must be an integer, found 1.5", {"max_tokens": 1.5}),
        (ValueError, "batch_size must be at least 1, found -1", {"batch_size": -1}),
        (TypeError, "batch_size must be an integer, found True", {"batch_size": True}),
        (ValueError, r"max_padding must be in \[0, 1\], found 1.1", {"max_padding": 1.1}),
        (ValueError, r"max_padding must be in \[0, 1\], found nan", {"max_padding": float("nan")}),
        (TypeError, "max_padding must be a number, found '1'", {"max_padding": "1"}),
        (TypeError, "shuffle must be True or False, found 1", {"shuffle": 1}),
        (TypeError, "drop_last must be True or False, found None", {"drop_last": None}),
        (ValueError, "too_long must be 'raise' or 'alone', found 'drop'", {"too_long": "drop"}),
        (ValueError, r"seed must be in \[0, 2\*\*64\), found -1", {"seed": -1}),
        (TypeError, "seed must be an integer", {"seed": 0.0}),
        (ValueError, r"lengths must be in \[0, 2\*\*48\], found -2 at index 1", {"lengths": [1, -2, -3]}),
        (ValueError, r"lengths must be in \[0, 2\*\*48\], found .* at index 0", {"lengths": [2**48 + 1]}),
        (ValueError, "lengths must be below", {"lengths": np.array([2**63], np.uint64)}),
        (TypeError, "lengths must be integers, found an array of float64", {"lengths": [1.0]}),
        (TypeError, "lengths must be integers, found an array of bool", {"lengths": [True]}),
        (TypeError, "lengths must be integers, found an array of object", {"lengths": [2**70]}),
        (ValueError, r"lengths must have one dimension, found shape \(1, 2\)", {"lengths": [[1, 2]]}),
        (ValueError, r"lengths must have one dimension, found shape \(\)", {"lengths": iter([1])}),
    ],
)
def test_bad_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        sampler(**{"lengths": LENGTHS, **arguments})


@pytest.mark.parametrize("call", [lambda s: s.plan(0, -1), lambda s: s.set_epoch(2**64)])
def test_bad_epochs(call):
    with pytest.raises(ValueError, match=r"epoch must be in \[0, 2\*\*64\)"):
        call(sampler())


def test_numbers_outside_the_plan():
    plan = sampler().plan(0, 0)
    for number in (-1, len(plan)):
        with pytest.raises(IndexError, match=rf"number must be in \[0, {len(plan)}\), found {number}"):
            plan.batch(number)
    with pytest.raises(TypeError, match="number must be an integer"):
        plan.batch(1.0)


# ── plans held in arrays ─────────────────────────────────────────────────────────────────────────────────


def test_an_array_plan_is_read_only_and_its_batches_are_not():
    given = np.array([4, 2, 0])
    plan = ArrayPlan(given, [1, 2])
    given[:] = 9
    assert read(plan) == [[4], [2, 0]]
    assert plan.offsets.tolist() == [0, 1, 3]
    for array in (plan.indices, plan.sizes, plan.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    plan.batch(1)[0] = 7
    assert read(plan) == [[4], [2, 0]]


@pytest.mark.parametrize(
    ("indices", "sizes", "message"),
    [
        ([1, 2], [1], "sizes must add up to the number of indices, 2, found 1"),
        ([1], [1, 0], "sizes must be at least 1, found 0 for batch 1"),
        ([[1]], [1], "indices must have one dimension"),
    ],
)
def test_array_plans_that_do_not_add_up(indices, sizes, message):
    with pytest.raises(ValueError, match=message):
        ArrayPlan(indices, sizes)
