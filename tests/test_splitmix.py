from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumable_data.splitmix import GOLDEN, MASK64, absorb, derive, emit, mix, start, words_after

VECTORS = json.loads((Path(__file__).parent / "golden" / "order.json").read_text())["derive"]
WORDS = st.integers(0, MASK64)


def unmix(z: int) -> int:
    z = unshift(z, 31) * pow(0x94D0_49BB_1331_11EB, -1, 2**64) & MASK64
    z = unshift(z, 27) * pow(0xBF58_476D_1CE4_E5B9, -1, 2**64) & MASK64
    return unshift(z, 30)


def unshift(z: int, by: int) -> int:
    return z ^ (z >> by) ^ (z >> 2 * by)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['tag']}-{v['words']}")
def test_derive_gives_the_golden_words(vector):
    assert derive(vector["tag"], *vector["words"], count=vector["count"]) == vector["out"]


def test_emit_from_zero_is_the_published_splitmix64_stream():
    # The first outputs of SplitMix64 seeded with 0, as its reference implementations print them.
    assert emit(0, 3) == [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]


@given(WORDS)
def test_mix_is_a_bijection_of_64_bit_words(z):
    assert 0 <= mix(z) <= MASK64
    assert unmix(mix(z)) == z
    assert mix(unmix(z)) == z


@given(WORDS, st.lists(WORDS, max_size=4), st.integers(0, 5), st.integers(0, 5))
def test_more_words_extend_fewer(tag, words, count, more):
    assert derive(tag, *words, count=count + more)[:count] == derive(tag, *words, count=count)


@given(WORDS, WORDS, st.lists(WORDS, max_size=3), st.integers(0, 5))
def test_a_family_continued_by_hand_is_derive(tag, word, rest, count):
    state = absorb(start(tag), word)
    for w in rest:
        state = absorb(state, w)
    assert emit(state, count) == derive(tag, word, *rest, count=count)


@given(WORDS, WORDS, WORDS)
def test_coordinates_are_not_interchangeable(tag, u, v):
    assert (derive(tag, u, v, count=2) == derive(tag, v, u, count=2)) is (u == v)
    assert derive(tag, u, count=2) != derive(tag, u, v, count=2)
    assert derive(tag, u, count=2) != derive((tag + 1) & MASK64, u, count=2)


def test_words_of_neighbouring_coordinates_are_all_different():
    words = [w for seed in range(40) for epoch in range(40) for w in derive(7, seed, epoch, count=8)]
    assert len(set(words)) == len(words) == 40 * 40 * 8


def test_negative_control_addition_makes_neighbouring_coordinates_collide():
    words = [w for seed in range(40) for epoch in range(40) for w in derive(7, seed + epoch, count=8)]
    assert len(set(words)) == 79 * 8 < len(words)


def test_one_flipped_bit_of_a_coordinate_flips_half_of_the_word():
    (base,) = derive(1, 12345, count=1)
    flipped = [(derive(1, 12345 ^ (1 << bit), count=1)[0] ^ base).bit_count() for bit in range(64)]
    assert 28 < sum(flipped) / 64 < 36  # 64 words of 64 fair bits: mean 32, standard deviation 0.5
    assert min(flipped) > 8


def test_constants_are_those_of_the_definition():
    assert GOLDEN == 0x9E37_79B9_7F4A_7C15
    assert MASK64 == 2**64 - 1


@given(st.integers(0, MASK64), st.lists(st.integers(0, MASK64), max_size=4), st.integers(0, 6))
def test_the_one_frame_form_gives_the_same_words(state, words, count):
    expected = state
    for word in words:
        expected = absorb(expected, word)
    assert words_after(state, *words, count=count) == emit(expected, count)
