from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import pickle
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resumable_data.permutation import Permutation, _sides
from resumable_data.splitmix import derive

VECTORS = json.loads((Path(__file__).parent / "golden" / "order.json").read_text())
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "permutation_statistics.py"
TOP = 2**64 - 1
KEYS = [(0, 0), (0, 1), (TOP, 3)]
HUGE = [10**9, 2**32 + 1, 10**12, 2**53 + 1, 2**62 - 2, 2**62 - 1]

# Small, any, and the edges where float square roots and 32-bit halves go wrong.
SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 2**62 - 1),
    st.builds(lambda e, d: min(max(1, 2**e + d), 2**62 - 1), st.integers(0, 62), st.integers(-2, 2)),
    st.builds(lambda s, d: min(max(1, s * s + d), 2**62 - 1), st.integers(1, 2**31 - 1), st.integers(-1, 1)),
)
WORDS = st.integers(0, TOP)


def name_of(vector):
    return f"{vector['n']}-{vector['seed']}-{vector['epoch']}"


def key_of(vector):
    return vector["n"], vector["seed"], vector["epoch"]


def whole(n, seed, epoch):
    return Permutation(n, seed, epoch).take(np.arange(n, dtype=np.int64))


def by_the_definition(n, seed, epoch, x):
    # The definition transcribed line by line, with nothing shared but the derivation of the keys.
    r = next(r for r in range(math.isqrt(n), n + 1) if r * r >= n)
    r += r % 2
    candidates = [r + 2 * i for i in range(max(1, min(64, r // 8)))]
    excess = {a: a * ((n + a - 1) // a) - n for a in candidates}
    a = min(a for a in candidates if excess[a] == min(excess.values()))
    b = (n + a - 1) // a
    rounds = 24 if n < 4096 else 8
    k = derive(0x52445031, n, seed, epoch, count=rounds)

    def f(v, key, m):
        h = (v * 0x9E3779B97F4A7C15 + key) % 2**64
        h ^= h // 2**32
        h = h * 0xD6E8FEB86659FD93 % 2**64
        return (h // 2**32) * m // 2**32

    while True:
        left, right = divmod(x, b)
        for i in range(0, rounds, 2):
            left = (left + f(right, k[i], a)) % a
            right = (right + f(left, k[i + 1], b)) % b
        x = left * b + right
        if x < n:
            return x


# ── the frozen vectors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vector", VECTORS["permutation"], ids=name_of)
def test_golden_first_and_last(vector):
    order = Permutation(*key_of(vector))
    first, last = vector["first"], vector["n"] - 1
    assert [order.index(p) for p in range(len(first))] == first
    assert order.take(np.arange(len(first), dtype=np.int64)).tolist() == first
    # Beside 20 others, so that the vectorised path is the one that answers.
    positions = np.array([*range(len(first)), *[last] * 20], dtype=np.int64)
    assert order.take(positions).tolist() == first + [vector["last"]] * 20
    assert order.index(last) == vector["last"]


@pytest.mark.parametrize("vector", VECTORS["permutation_sha256"], ids=name_of)
def test_golden_digest(vector):
    indices = Permutation(*key_of(vector)).take(np.arange(vector["count"], dtype=np.int64))
    digest = hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()
    assert digest[:32] == vector["sha256_prefix"]


# ── a permutation, at every size ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("seed", "epoch"), KEYS)
def test_bijection_for_every_n_to_2000(seed, epoch):
    for n in range(2001):
        seen = np.zeros(n, dtype=bool)
        seen[whole(n, seed, epoch)] = True
        assert seen.all(), n


@pytest.mark.parametrize("n", [4095, 4096, 4097, 9973, 65536, 65537, 100_003, 2**18 - 1, 500_000, 10**6])
def test_bijection_of_larger_n(n):
    assert np.array_equal(np.sort(whole(n, 42, n)), np.arange(n))


@pytest.mark.parametrize("n", HUGE)
def test_windows_of_huge_n_are_injective_in_range_and_equal_to_the_scalar(n):
    order = Permutation(n, 5, 1)
    for begin in (0, n // 2 - 10_000, n - 20_000):
        positions = np.arange(begin, begin + 20_000, dtype=np.int64)
        indices = order.take(positions)
        assert indices.dtype == np.int64
        assert indices.min() >= 0
        assert indices.max() < n
        assert np.unique(indices).size == indices.size
        # Spread over the whole range: all 16 sixteenths hold about a sixteenth.
        share = np.bincount((indices // (n // 16 + 1)).astype(np.int64), minlength=16) / indices.size
        assert abs(share - 1 / 16).max() < 0.01
        for p in (0, 1, 8191, 8192, 19_999):
            assert order.index(begin + p) == indices[p]


@settings(deadline=None)
@given(SIZES, WORDS, WORDS, st.data())
def test_scalar_vector_and_definition_agree(n, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=30))
    order = Permutation(n, seed, epoch)
    expected = [by_the_definition(n, seed, epoch, p) for p in positions]
    assert [order.index(p) for p in positions] == expected
    assert order.take(np.array(positions, dtype=np.int64)).tolist() == expected
    # Tiled beyond the few that are done one by one, and at other places of the block.
    assert order.take(np.array(positions * 20, dtype=np.int64)).tolist() == expected * 20


@settings(deadline=None)
@given(SIZES)
def test_sides_cover_n_tightly_and_fit_32_bits(n):
    a, b = _sides(n)
    assert a * b >= n > a * (b - 1)
    assert a < 2**32
    assert b < 2**32
    assert n == 1 or (a % 2 == 0 and a * a >= n)


@pytest.mark.parametrize("n", [3, 5, 7, 11, 13])
def test_many_lanes_walking_at_once(n):
    # Up to 3 of 8 lanes fall outside these domains, in every block, and go through again together.
    order = Permutation(n, 1, 0)
    assert order.take(np.tile(np.arange(n), 5000)).tolist() == [order.index(p) for p in range(n)] * 5000


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_seed_epoch_and_n_all_matter_and_do_not_mix():
    keys = [(seed, epoch) for seed in range(12) for epoch in range(12)]
    orders = {whole(1000, *key).tobytes() for key in keys}
    assert len(orders) == len(keys)  # (0, 1) and (1, 0) among them
    assert whole(1000, 5, 6).tolist() == whole(1000, 5, 6).tolist()
    longer = whole(1001, 5, 6)
    assert longer[longer < 1000].tolist() != whole(1000, 5, 6).tolist()


def test_negative_control_adding_the_epoch_to_the_seed_makes_runs_coincide():
    orders = {whole(1000, seed + epoch, 0).tobytes() for seed in range(12) for epoch in range(12)}
    assert len(orders) == 23


def test_orders_of_neighbouring_keys_agree_at_about_one_position():
    base = whole(4096, 7, 7)
    same = [(whole(4096, 7 + s, 7 + e) == base).sum() for s, e in ((0, 1), (1, 0), (1, -1), (-1, 1), (0, -1))]
    assert max(same) <= 8  # Poisson with mean 1: above 8 once in a million


def test_negative_control_a_network_without_rounds_is_no_shuffle():
    class NoRounds(Permutation):
        __slots__ = ()

        def _rounds(self):
            return 0

    positions = np.arange(4096, dtype=np.int64)
    assert NoRounds(4096, 0, 0).take(positions).tolist() == positions.tolist()


def test_the_statistics_pass_and_notice_four_rounds(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("permutation_statistics", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "permutation_statistics", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert module.main(["--quick", "--check"]) == 0
    assert "4 rounds: FAILS" in capsys.readouterr().out
    # And the check itself can fail: the control in place of the order.
    monkeypatch.setitem(module.SOURCES, "shuffled.v1", module.SOURCES["4 rounds"])
    monkeypatch.setattr(module, "QUICK_SIZES", {16: 240})
    assert module.main(["--quick", "--check"]) == 1


# ── the object ───────────────────────────────────────────────────────────────────────────────────────────


def test_take_leaves_its_input_alone_and_takes_any_length_and_stride():
    order = Permutation(50_000, 3, 4)
    for size in (0, 1, 2, 10, 11, 64, 8191, 8192, 8193, 20_000):
        positions = np.arange(size, dtype=np.int64)[::-1]
        positions.flags.writeable = False
        taken = order.take(positions)
        assert taken.shape == (size,)
        assert taken.flags.writeable
        assert not np.shares_memory(taken, positions)
        assert np.array_equal(positions, np.arange(size)[::-1])
        assert np.array_equal(taken[::-1], order.take(np.arange(size, dtype=np.int64)))
    everything = order.take(np.arange(50_000, dtype=np.int64))
    assert np.array_equal(order.take(np.arange(50_000, dtype=np.int64)[::7]), everything[::7])


def test_length_names_and_pickle():
    order = Permutation(np.int64(10**12), 42, TOP)
    assert len(order) == 10**12
    assert type(order.n) is int
    assert repr(order) == f"Permutation(n={10**12}, seed=42, epoch={TOP})"
    data = pickle.dumps(order)
    assert len(data) < 200
    copy = pickle.loads(data)
    assert (copy.n, copy.seed, copy.epoch) == (10**12, 42, TOP)
    positions = np.arange(100, dtype=np.int64)
    assert np.array_equal(copy.take(positions), order.take(positions))


def test_threads_may_share_one_object():
    order = Permutation(10**9, 1, 1)
    starts = [i * 30_000 for i in range(16)]

    def window(begin):
        return order.take(np.arange(begin, begin + 30_000, dtype=np.int64))

    expected = [window(s) for s in starts]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, pool.map(window, starts), expected))


def test_memory_does_not_grow_with_n():
    def peak(n):
        positions = np.arange(1000, dtype=np.int64)
        tracemalloc.start()
        try:
            Permutation(n, 0, 0).take(positions)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(5000)  # what numpy allocates once
    assert peak(2**62 - 1) < 100_000
    assert peak(2**62 - 1) < peak(5000) + 10_000


def test_degenerate_domains():
    assert len(Permutation(0, 1, 2)) == 0
    assert Permutation(0, 1, 2).take(np.array([], dtype=np.int64)).tolist() == []
    assert Permutation(1, 1, 2).index(0) == 0
    assert Permutation(1, 1, 2).take(np.zeros(20, dtype=np.int64)).tolist() == [0] * 20


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "name", "value", "end"),
    [
        ((-1, 0, 0), "n", -1, "2**62"),
        ((2**62, 0, 0), "n", 2**62, "2**62"),
        ((10, -1, 0), "seed", -1, "2**64"),
        ((10, 2**64, 0), "seed", 2**64, "2**64"),
        ((10, 0, -5), "epoch", -5, "2**64"),
        ((10, 0, 2**64), "epoch", 2**64, "2**64"),
    ],
)
def test_values_outside_their_range(args, name, value, end):
    with pytest.raises(ValueError) as error:
        Permutation(*args)
    assert str(error.value).startswith(f"{name} must be in [0, {end}), found {value};")


@pytest.mark.parametrize("wrong", [True, False, np.True_, 1.0, "1", None, np.float64(1), [1]])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_arguments_that_are_no_integers(wrong, place):
    args = [10, 0, 0]
    args[place] = wrong
    with pytest.raises(TypeError) as error:
        Permutation(*args)
    name = ("n", "seed", "epoch")[place]
    assert str(error.value).startswith(f"{name} must be an integer, found {wrong!r} of type")


@pytest.mark.parametrize("n", [0, 1, 10, 10**12, 2**62 - 1])
def test_positions_outside(n):
    order = Permutation(n, 0, 0)
    for bad in (-1, n, n + 1, -(2**63), 2**63 - 1):
        message = rf"position must be in \[0, {n}\), found {bad};"
        with pytest.raises(IndexError, match=message):
            order.index(bad)
        for size in (1, 5, 100):  # in every path, at the last place, behind good ones where there are any
            positions = np.zeros(size if n else 1, dtype=np.int64)
            positions[-1] = bad
            with pytest.raises(IndexError, match=message):
                order.take(positions)


def test_positions_of_the_wrong_kind():
    order = Permutation(10, 0, 0)
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="position must be an integer"):
            order.index(wrong)
    for wrong in ([1, 2], range(3), 5, np.int64(5)):
        with pytest.raises(TypeError, match=f"array of int64, found {type(wrong).__name__}"):
            order.take(wrong)
    for dtype in ("int32", "uint64", "float64", "bool"):
        with pytest.raises(TypeError, match=f"array of int64, found {dtype}"):
            order.take(np.ones(3, dtype=dtype))
    for shape in ((), (2, 3), (1, 1)):
        with pytest.raises(ValueError, match="must have one dimension"):
            order.take(np.zeros(shape, dtype=np.int64))
