"""The law for planned batches: any batch of any epoch is a function of (lengths, seed, epoch, number)."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resumable_data.bucketing import BucketBatchSampler
from resumable_data.permutation import Permutation
from resumable_data.sampling import ArrayPlan
from resumable_data.splitmix import derive

WORDS = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
PADDINGS = ["0", "0.1", "0.3", "0.5", "1"]


@st.composite
def geometries(draw):
    """(lengths, arguments of the sampler)."""
    top = draw(st.sampled_from([1, 3, 20, 1000, 2**48]))
    lengths = draw(st.lists(st.integers(0, top), max_size=60))
    tokens = draw(st.one_of(st.none(), st.integers(1, 4 * top), st.just(10**30)))
    size = draw(st.one_of(st.integers(1, 12), st.just(10**30)))
    if tokens is not None and draw(st.booleans()):
        size = None
    return lengths, {
        "max_tokens": tokens,
        "batch_size": size,
        "max_padding": float(draw(st.sampled_from(PADDINGS))),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "too_long": "alone",
    }


def buckets_of(lengths, max_tokens, max_padding):
    """The buckets' lengths, each from the longest down, the longest bucket first."""
    keep = 1 - Fraction(str(max_padding))
    rest = sorted({max(1, length) for length in lengths}, reverse=True)
    found = []
    while rest:
        fits = max_tokens is None or rest[0] <= max_tokens
        inside = [x for x in rest if x >= rest[0] * keep and (fits or x > max_tokens)]
        found.append(inside)
        rest = rest[len(inside) :]
    return found


def limit_of(longest, max_tokens, batch_size):
    limits = [] if batch_size is None else [batch_size]
    if max_tokens is not None:
        limits.append(max(1, max_tokens // longest))
    return min(limits)


def by_the_definition(lengths, seed, epoch, *, max_padding, shuffle, drop_last, too_long, **limits):
    """The batches of an epoch, transcribed from the definition in plain lists."""
    n = len(lengths)
    buckets = buckets_of(lengths, limits["max_tokens"], max_padding)
    bucket = {length: number for number, inside in enumerate(buckets) for length in inside}
    key, turn_key = derive(0x4255434B, seed, count=2)
    order = [Permutation(n, key, epoch).index(p) for p in range(n)] if shuffle else list(range(n))
    order.sort(key=lambda sample: bucket[max(1, lengths[sample])])
    batches, full = [], True
    while order:
        longest = buckets[bucket[max(1, lengths[order[0]])]][0]
        size = limit_of(longest, **limits)
        full = len(order) >= size
        batches.append(order[:size])
        order = order[size:]
    if drop_last and not full:
        batches.pop()
    if shuffle:
        turn = Permutation(len(batches), turn_key, epoch)
        batches = [batches[turn.index(p)] for p in range(len(batches))]
    return batches


def read(plan):
    return [plan.batch(number).tolist() for number in range(len(plan))]


@given(geometries(), WORDS, WORDS)
def test_the_plan_is_the_definition(geometry, seed, epoch):
    lengths, arguments = geometry
    sampler = BucketBatchSampler(lengths, **arguments)
    plan = sampler.plan(seed, epoch)
    expected = by_the_definition(lengths, seed, epoch, **arguments)
    assert read(plan) == expected
    assert plan.sizes.tolist() == [len(batch) for batch in expected]
    assert len(sampler) == len(plan) == len(expected)


@given(geometries(), WORDS, WORDS)
def test_every_sample_once_and_under_the_budget(geometry, seed, epoch):
    lengths, arguments = geometry
    tokens, most = arguments["max_tokens"], arguments["batch_size"]
    batches = read(BucketBatchSampler(lengths, **arguments).plan(seed, epoch))
    delivered = [sample for batch in batches for sample in batch]
    assert len(delivered) == len(set(delivered))
    missing = set(range(len(lengths))) - set(delivered)
    if not arguments["drop_last"]:
        assert not missing
    elif missing:
        # What is dropped is one incomplete batch: it obeys the budget, with room for at least one more.
        longest = max(max(1, lengths[sample]) for sample in missing)
        assert len(missing) < limit_of(longest, tokens, most)
    for batch in batches:
        longest = max(lengths[sample] for sample in batch)
        assert most is None or len(batch) <= most
        assert tokens is None or longest * len(batch) <= tokens or len(batch) == 1


@given(geometries(), WORDS)
def test_padding_is_bounded_but_where_a_bucket_ends(geometry, seed):
    lengths, arguments = geometry
    keep = 1 - Fraction(str(arguments["max_padding"]))
    wider = 0
    for batch in read(BucketBatchSampler(lengths, **arguments).plan(seed, 0)):
        inside = [max(1, lengths[sample]) for sample in batch]
        wider += min(inside) < max(inside) * keep
    buckets = buckets_of(lengths, arguments["max_tokens"], arguments["max_padding"])
    assert wider <= max(0, len(buckets) - 1)


@given(geometries(), WORDS, WORDS, WORDS)
def test_every_epoch_has_the_same_sizes(geometry, seed, epoch, other):
    lengths, arguments = geometry
    sampler = BucketBatchSampler(lengths, **arguments)
    sizes = [sorted(sampler.plan(seed, at).sizes.tolist()) for at in (epoch, other)]
    assert sizes[0] == sizes[1]


# ── resuming by number, and what would break it ──────────────────────────────────────────────────────────


def interrupted(make, seed, epochs, stops):
    """(epoch, number, batch) of a run that is stopped after so many batches and goes on in a new sampler."""
    delivered, epoch, number = [], 0, 0
    for stop in [*stops, None]:
        sampler, left = make(), stop
        while epoch < epochs and left != 0:
            plan = sampler.plan(seed, epoch)
            if number == len(plan):
                epoch, number = epoch + 1, 0
                continue
            delivered.append((epoch, number, plan.batch(number).tolist()))
            number += 1
            left = None if left is None else left - 1
    return delivered


@given(geometries(), WORDS, st.lists(st.integers(0, 9), max_size=6))
def test_chained_resumes_equal_the_uninterrupted_run(geometry, seed, stops):
    lengths, arguments = geometry

    def make():
        return BucketBatchSampler(lengths, **arguments)

    assert interrupted(make, seed, 2, stops) == interrupted(make, seed, 2, [])


class DrawsAsItGoes:
    """The usual sampler: its order comes from a generator that moves with every plan."""

    def __init__(self):
        self.random = random.Random(0)

    def plan(self, seed, epoch):
        return ArrayPlan(self.random.sample(range(40), 40), [4] * 10)


def test_a_sampler_with_a_history_is_told_apart():
    assert interrupted(DrawsAsItGoes, 0, 2, [3, 5]) != interrupted(DrawsAsItGoes, 0, 2, [])


@given(st.integers(20, 60), WORDS, WORDS)
def test_ranks_together_hold_each_batch_once(n, seed, epoch):
    plan = BucketBatchSampler(np.arange(n), max_tokens=4 * n).plan(seed, epoch)
    for replicas in (1, 2, 3):
        numbers = [number for rank in range(replicas) for number in range(rank, len(plan), replicas)]
        together = np.concatenate([plan.batch(number) for number in numbers])
        assert sorted(together.tolist()) == list(range(n))
