from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections import Counter
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from resumable_data.mixture import Mixture, OrderedDataset
from resumable_data.permutation import Permutation
from resumable_data.splitmix import derive

VECTORS = json.loads((Path(__file__).parent / "golden" / "mixture.json").read_text())["mixtures"]
TOP = 2**64 - 1
WORDS = st.one_of(st.integers(0, 3), st.integers(0, TOP))


class Rows(Dataset):
    """n samples that say whose they are."""

    def __init__(self, name, n):
        self.name, self.n = name, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        return f"{self.name}{index}"


def mixture(sizes=(50, 30, 20), weights=(0.5, 0.3, 0.2), **arguments):
    return Mixture([Rows("abcdefghij"[at % 10], size) for at, size in enumerate(sizes)], weights, **arguments)


def keys(ours, seed=0, epoch=0, begin=0, end=None):
    positions = np.arange(begin, len(ours) if end is None else end, dtype=np.int64)
    return ours.indices_at(seed, epoch, positions).tolist()


def sources(ours, *key, **window):
    return [ours.locate(key)[0] for key in keys(ours, *key, **window)]


@st.composite
def geometries(draw):
    """Arguments of a mixture."""
    count = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    weights = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count).filter(any))
    unit = Fraction(draw(st.sampled_from(["1", "0.1", "0.37"])))
    needed = math.ceil(sum(weights) / min(weight for weight in weights if weight))
    block = draw(st.one_of(st.none(), st.integers(needed, needed + 30)))
    length = draw(st.one_of(st.none(), st.integers(0, 300)))
    return {
        "sizes": sizes,
        "weights": [float(weight * unit) for weight in weights],
        "length": length,
        "block": block,
    }


def by_the_definition(sizes, weights, length, block, seed, epoch, begin=0, end=None):
    """The keys from the block that ``begin`` is in up to ``end``, transcribed with plain numbers."""
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    upto = [sum(shares[: at + 1]) for at in range(len(shares))]

    def visited_before(position):
        floors = [0, *(math.floor(share * position) for share in upto)]
        return [floors[at + 1] - floors[at] for at in range(len(shares))]

    key = [derive(0x4D495850, seed, epoch, source, count=1)[0] for source in range(len(sizes))]
    last = max(0, length // block - 1)
    found = []
    for number in range(min(begin // block, last), last + 1):
        start = number * block
        stop = length if number == last else start + block
        if end is not None and start >= end:
            break
        bits = (stop - start - 1).bit_length() if stop > start else 0
        (state,) = derive(0x4D495842, seed, epoch, number, count=1)
        # derive's own emission, continued from the state
        words = [emitted(state, slot) >> bits for slot in range(stop - start)]
        order = sorted(range(stop - start), key=lambda slot: (words[slot], slot))
        visits = visited_before(start)
        labels = [
            at
            for at, (a, b) in enumerate(zip(visits, visited_before(stop), strict=True))
            for _ in range(b - a)
        ]
        of_slot = dict(zip(order, labels, strict=True))
        for slot in range(stop - start):
            source = of_slot[slot]
            turn, place = divmod(visits[source], sizes[source])
            index = Permutation(sizes[source], key[source], turn).index(place)
            found.append(sum(sizes[:source]) + index)
            visits[source] += 1
    return found


def emitted(state, slot):
    z = (state + (slot + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


# ── the frozen vectors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden(vector):
    ours = Mixture([range(size) for size in vector["sizes"]], vector["weights"], length=vector["length"])
    assert ours.block == vector["block"]
    begin = vector["begin"]
    found = np.array(keys(ours, vector["seed"], vector["epoch"], begin, begin + vector["count"]), "<i8")
    assert found[:12].tolist() == vector["first"]
    assert hashlib.sha256(found.tobytes()).hexdigest()[:32] == vector["sha256_prefix"]


# ── the law: a function of seed, epoch and position ──────────────────────────────────────────────────────


@given(geometries(), WORDS, WORDS)
def test_the_order_is_the_definition(geometry, seed, epoch):
    ours = mixture(**geometry)
    geometry = {**geometry, "length": len(ours), "block": ours.block}
    assert keys(ours, seed, epoch) == by_the_definition(**geometry, seed=seed, epoch=epoch)


@given(geometries(), WORDS, WORDS, st.data())
def test_any_position_in_any_order_is_what_the_whole_epoch_holds(geometry, seed, epoch, data):
    ours = mixture(**geometry)
    whole = keys(ours, seed, epoch)
    positions = data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=20) if len(ours) else st.just([]))
    fresh = mixture(**geometry)
    assert fresh.indices_at(seed, epoch, np.array(positions, np.int64)).tolist() == [
        whole[p] for p in positions
    ]


@given(geometries(), WORDS, st.lists(st.integers(0, 300), max_size=5))
def test_chained_resumes_equal_the_uninterrupted_run(geometry, seed, stops):
    whole = keys(mixture(**geometry), seed)
    edges = [0, *sorted(min(stop, len(whole)) for stop in stops), len(whole)]
    parts = [keys(mixture(**geometry), seed, 0, a, b) for a, b in pairwise(edges)]
    assert list(chain.from_iterable(parts)) == whole


@given(geometries(), WORDS, WORDS)
def test_proportions_are_exact_to_within_one_sample(geometry, seed, epoch):
    ours = mixture(**geometry)
    shares = [Fraction(str(weight)) for weight in geometry["weights"]]
    shares = [share / sum(shares) for share in shares]
    found = sources(ours, seed, epoch)
    blocks = max(0, len(ours) // ours.block - 1)
    for end in [*range(0, blocks * ours.block + 1, ours.block), len(ours)]:
        count = Counter(found[:end])
        for source, share in enumerate(shares):
            assert abs(count[source] - share * end) < 1
            assert share or not count[source]


@given(geometries(), WORDS, WORDS)
def test_nothing_of_a_source_repeats_before_all_of_it_was_seen(geometry, seed, epoch):
    ours = mixture(**geometry)
    found = [ours.locate(key) for key in keys(ours, seed, epoch)]
    for source, size in enumerate(geometry["sizes"]):
        indices = [index for at, index in found if at == source]
        for begin in range(0, len(indices), size):
            turn = indices[begin : begin + size]
            assert len(set(turn)) == len(turn)


def test_seed_and_epoch_are_not_added():
    orders = [keys(mixture(), *key) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (TOP, 0)]]
    assert all(a != b for at, a in enumerate(orders) for b in orders[:at])
    arrangements = [sources(mixture(), *key) for key in [(0, 0), (0, 1), (1, 0)]]
    assert all(a != b for at, a in enumerate(arrangements) for b in arrangements[:at])
    assert keys(mixture(), 0, 1) == orders[1]


def test_drawing_sources_by_chance_would_fail_the_law():
    # The usual mixture: a generator that moves with every sample. What it gives depends on where it began.
    def drawn(generator, count):
        return generator.choice(3, size=count, p=[0.5, 0.3, 0.2]).tolist()

    whole = drawn(np.random.default_rng(0), 600)
    resumed = whole[:100] + drawn(np.random.default_rng(0), 500)
    assert resumed != whole
    # And its proportions are not exact.
    assert any(abs(whole.count(at) - share * 600) >= 1 for at, share in enumerate([0.5, 0.3, 0.2]))


# ── proportions ──────────────────────────────────────────────────────────────────────────────────────────


def test_shares_of_small_whole_numbers_are_exact_in_every_block():
    ours = mixture([900, 900, 900], [0.7, 0.2, 0.1], length=51_000)
    assert ours.block == 1020
    found = np.array(sources(ours)).reshape(-1, ours.block)
    for block in found:
        assert np.bincount(block).tolist() == [714, 204, 102]


def test_sources_are_scattered_over_a_block():
    # A third of the slots each: the longest run of one source is short, and the halves hold about half.
    found = sources(mixture([9, 9, 9], [1, 1, 1], length=1023))
    runs = "".join("abc"[source] for source in found)
    assert all(run * 15 not in runs for run in "abc")
    for source in range(3):
        assert 120 < found[:512].count(source) < 222


def test_a_rare_source_gets_a_larger_block_and_its_share():
    ours = mixture([50, 50], [3, 9997], length=100_000)
    assert ours.block == math.ceil(10_000 / 3)
    assert sources(ours).count(0) == 30


def test_weights_in_any_unit():
    expected = keys(mixture(weights=[5, 3, 2]))
    for weights in (
        [0.5, 0.3, 0.2],
        (50, 30, 20),
        np.array([0.5, 0.3, 0.2]),
        np.array([5, 3, 2], np.uint8),
        [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)],
        [5e-9, 3e-9, 2e-9],
    ):
        ours = mixture(weights=weights)
        assert keys(ours) == expected
        assert ours.fingerprint == mixture().fingerprint


def test_an_epoch_of_proportional_weights_is_a_permutation():
    ours = mixture()
    assert len(ours) == 100
    assert sorted(keys(ours)) == list(range(100))


def test_small_sources_begin_again_and_large_ones_are_read_in_part():
    ours = mixture([5, 1000], [1, 1], length=200)
    assert sorted(Counter(key for key in keys(ours) if key < 5).values()) == [20] * 5
    parts = [{key for key in keys(ours, 0, epoch) if key >= 5} for epoch in (0, 1)]
    assert [len(part) for part in parts] == [100, 100]
    assert len(parts[0] & parts[1]) < 50


def test_a_source_of_weight_0_is_never_visited_and_may_be_empty():
    ours = mixture([10, 0, 10], [1, 0, 3])
    assert len(ours) == 20
    assert set(sources(ours)) == {0, 2}
    assert len(mixture([10, 7], [1, 0])) == 10


def test_positions_far_out_cost_what_the_first_ones_do():
    ours = Mixture([range(10**15), range(3)], [0.999, 0.001], length=2**61)
    far = 2**61 - 5000
    found = keys(ours, 1, 2, far, far + 200)
    assert len(set(found) & {10**15, 10**15 + 1, 10**15 + 2}) <= 3
    assert found[100:] == keys(ours, 1, 2, far + 100, far + 200)
    assert keys(ours, 1, 2, len(ours) - 1) == keys(ours, 1, 2, len(ours) - 3)[-1:]


def test_passes_longer_than_a_window():
    ours = mixture([2500, 1300], [1, 1], length=9000)
    expected = by_the_definition([2500, 1300], [1, 1], 9000, ours.block, 4, 5)
    assert keys(ours, 4, 5) == expected


# ── a dataset ────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_are_those_of_a_concat_dataset():
    ours = mixture()
    theirs = ConcatDataset(ours.datasets)
    assert [ours[key] for key in range(100)] == [theirs[key] for key in range(100)]
    assert ours.locate(0) == (0, 0)
    assert ours.locate(np.int64(50)) == (1, 0)
    assert ours.locate(99) == (2, 19)
    assert mixture([10, 0, 10], [1, 0, 3]).locate(10) == (2, 0)


def test_keys_outside():
    for key in (-1, 100):
        with pytest.raises(IndexError, match=rf"key must be in \[0, 100\), found {key}; keys come from"):
            mixture()[key]
    with pytest.raises(TypeError, match="key must be an integer, found True"):
        mixture()[True]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_reads_the_order(num_workers):
    ours = mixture(length=70)
    sampler = ours.sampler(seed=3)
    loader = DataLoader(ours, batch_size=8, sampler=sampler, num_workers=num_workers)
    assert len(loader) == 9
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert [row for batch in loader for row in batch] == [ours[key] for key in keys(ours, 3, epoch)]


def test_the_sampler():
    ours = mixture([5000, 3000, 2000])
    sampler = ours.sampler(seed=3)
    assert isinstance(sampler, Sampler)
    assert len(sampler) == 10_000
    assert list(sampler) == list(sampler) == keys(ours, 3, 0)
    passing = iter(sampler)
    sampler.set_epoch(1)
    assert list(passing) == keys(ours, 3, 0)
    assert list(sampler) == keys(ours, 3, 1)
    assert all(type(key) is int for key in sampler)


def test_a_sampler_without_a_seed_adopts_torchs_and_draws_nothing():
    before = torch.get_rng_state()
    try:
        torch.manual_seed(11)
        state = torch.get_rng_state()
        sampler = mixture().sampler()
        first = list(sampler)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(12)
        assert list(sampler) == first == keys(mixture(), 11)
    finally:
        torch.set_rng_state(before)


def test_pickles():
    ours = pickle.loads(pickle.dumps(mixture()))
    assert keys(ours, 5, 6) == keys(mixture(), 5, 6)
    assert ours.fingerprint == mixture().fingerprint
    assert ours[99] == "c19"


def test_it_is_what_the_protocol_says():
    assert isinstance(mixture(), OrderedDataset)
    assert mixture().order_name == "mixture.v1"
    assert not isinstance(ConcatDataset([TensorDataset(torch.arange(3))]), OrderedDataset)


def test_fingerprints_tell_mixtures_apart():
    different = [
        mixture(),
        mixture([50, 30, 21]),
        mixture([30, 50, 20]),
        mixture(weights=[0.5, 0.25, 0.25]),
        mixture(length=99),
        mixture(block=50),
    ]
    assert len({one.fingerprint for one in different}) == len(different)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "found 2 weights for 3 datasets", {"weights": [1, 2]}),
        (ValueError, "found 0 weights for 0 datasets", {"sizes": [], "weights": []}),
        (ValueError, r"weights\[1\] must be in \[0, inf\), found -1", {"weights": [1, -1, 1]}),
        (ValueError, r"weights\[0\] must be in \[0, inf\), found nan", {"weights": [float("nan"), 1, 1]}),
        (ValueError, r"weights\[2\] must be in \[0, inf\), found inf", {"weights": [1, 1, float("inf")]}),
        (TypeError, r"weights\[1\] must be a number, found '1'", {"weights": [1, "1", 1]}),
        (TypeError, r"weights\[1\] must be a number, found True", {"weights": [1, True, 1]}),
        (ValueError, r"weights must not all be 0, found \[0, 0.0, 0\]", {"weights": [0, 0.0, 0]}),
        (ValueError, r"datasets\[1\] is empty and has weight 3", {"sizes": [1, 0, 1], "weights": [1, 3, 1]}),
        (ValueError, r"length must be in \[0, 2\*\*62\), found -1", {"length": -1}),
        (TypeError, "length must be an integer, found 1.0", {"length": 1.0}),
        (ValueError, r"block must be in \[1, 65536\], found 0", {"block": 0}),
        (TypeError, "block must be an integer, found 'x'", {"block": "x"}),
        (ValueError, r"weights\[2\] is 1/5 of all and needs a block of 5 positions, found 4", {"block": 4}),
        (ValueError, r"weights\[1\] is 1/100001 of all .*, found 65536", {"weights": [10**5, 1, 0]}),
    ],
)
def test_bad_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        mixture(**arguments)


class Stream(IterableDataset):
    """Has a length, and inherits a __getitem__ that only raises."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("source", [iter([1]), {1, 2}, Stream(), 3], ids=lambda source: type(source).__name__)
def test_sources_are_map_style(source):
    with pytest.raises(TypeError, match=r"datasets\[1\] must be a map-style dataset"):
        Mixture([Rows("a", 3), source], [1, 1])


@pytest.mark.parametrize(
    ("error", "message", "seed", "epoch", "positions"),
    [
        (IndexError, r"positions must be in \[0, 100\), found 100", 0, 0, np.array([3, 100, -1])),
        (IndexError, r"positions must be in \[0, 100\), found -1", 0, 0, np.array([3, -1])),
        (TypeError, "positions must be a numpy array of int64, found list", 0, 0, [1]),
        (TypeError, "positions must be a numpy array of int64, found float64", 0, 0, np.array([1.0])),
        (ValueError, "positions must have one dimension", 0, 0, np.array([[1]])),
        (ValueError, "seed must be in", -1, 0, np.array([1])),
        (TypeError, "epoch must be an integer", 0, 1.0, np.array([1])),
    ],
)
def test_bad_questions(error, message, seed, epoch, positions):
    with pytest.raises(error, match=message):
        mixture().indices_at(seed, epoch, positions)
