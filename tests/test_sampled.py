"""A sampler being read: how far ahead, on which streams, and what is compared."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from support.datasets import Indices, keep
from support.runs import streams
from support.samplers import N, Python, Stateful

from resumable_data import ResumableLoader, StateMismatchError, progress
from resumable_data.sampled import CHUNK, START, Mark, Reading, chain_of, decode_mark, encode_mark


class Counting(Python):
    """Counts what was asked of it."""

    def __init__(self, n):
        super().__init__(n)
        self.given = self.begun = 0

    def __iter__(self):
        self.begun += 1
        for key in super().__iter__():
            self.given += 1
            yield key


def reading(sampler, number=0, mark=START, samples=None, **arguments):
    known = (number, mark.digest) if number else None
    chosen = {"batch_size": 4, "drop_last": False, "coordinates": (3, 1), "known": known, **arguments}
    return Reading(sampler, number=number, samples=samples, mark=mark, **chosen)


def everything(read, number=0):
    batches = []
    while (drawn := read.batch(number)) is not None:
        batches.append(drawn.keys)
        number += 1
    return batches


def test_a_reading_is_a_function_of_seed_and_epoch():
    one, same = everything(reading(Python(N))), everything(reading(Python(N)))
    assert one == same
    assert sorted(key for keys in one for key in keys) == list(range(N))
    assert everything(reading(Python(N), coordinates=(3, 2))) != one
    assert everything(reading(Python(N), coordinates=(4, 1))) != one


def test_the_own_streams_go_on_between_reads_and_the_process_keeps_its_own():
    before = streams()
    read = reading(Python(N))
    whole = everything(reading(Python(N)))
    for number, keys in enumerate(whole):
        random.random(), np.random.rand(), torch.rand(1)
        here = streams()
        assert read.batch(number).keys == keys
        read.deliver_before(number + 1)
        assert streams() == here
    assert streams() != before


def test_reading_starts_with_one_batch_and_stays_bounded():
    sampler = Counting(1000)
    read = reading(sampler)
    assert sampler.given == 0
    read.batch(0)
    assert sampler.given == 4
    for number in range(100):
        read.batch(number)
        read.deliver_before(number + 1)
        assert sampler.given <= (number + 1 + CHUNK) * 4
    assert sampler.begun == 1


def test_places_of_batches_in_flight():
    read = reading(Python(N))
    for number in range(3):
        read.batch(number)
    places = [read.place_at(number) for number in range(4)]
    assert [samples for samples, _ in places] == [None, None, None, None]
    read = reading(Python(N), samples=0)
    for number in range(6):
        read.batch(number)
    assert [read.place_at(number)[0] for number in range(7)] == [0, 4, 8, 12, 16, 20, 23]
    digests = [read.place_at(number)[1].digest for number in range(7)]
    assert len(set(digests)) == 7
    read.deliver_before(4)
    assert read.place_at(4) == (16, Mark(digests[4]))


def test_skipping_compares_and_continues_the_chain():
    read = reading(Python(N), samples=0)
    whole = everything(read)
    samples, mark = read.place_at(4)
    resumed = reading(Python(N), 4, mark, samples)
    assert everything(resumed, 4) == whole[4:]
    assert resumed.place_at(6) == read.place_at(6)
    with pytest.raises(StateMismatchError, match="order_digest"):
        reading(Python(N), 4, Mark(b"x" * 16), samples).batch(4)
    wrong_number = reading(Python(N), 3, mark, samples)
    with pytest.raises(StateMismatchError, match="order_digest"):
        wrong_number.position()
    assert wrong_number.broken


def test_drop_last_and_whole_batches():
    assert [len(keys) for keys in everything(reading(Python(10)))] == [4, 4, 2]
    assert [len(keys) for keys in everything(reading(Python(10), drop_last=True))] == [4, 4]
    assert [len(keys) for keys in everything(reading(Python(8), drop_last=True))] == [4, 4]
    given = [[1, 2], (3,), []]
    assert everything(reading(given, batch_size=None)) == given
    assert everything(reading([])) == []


def test_the_end_is_not_asked_for_twice():
    class Once:
        def __iter__(self):
            return self

        asked = 0

        def __next__(self):
            self.asked += 1
            if self.asked > 2:
                assert self.asked == 3, "asked again after its end"
                raise StopIteration
            return self.asked

    read = reading(Once(), batch_size=1)
    assert everything(read) == [[1], [2]]
    assert read.batch(2) is None
    assert read.batch(2) is None


def test_a_stateful_sampler_is_marked_batch_by_batch():
    read = reading(Stateful(N))
    for number in range(6):
        read.batch(number)
    places = [read.place_at(number)[1].state["at"] for number in range(1, 6)]
    assert places == [4, 8, 12, 16, 20]


def test_marks_go_through_text():
    mark = Mark(b"\x01" * 16, {"at": 4, "t": torch.tensor([1.5])}, None, True)
    text = encode_mark(mark)
    back = decode_mark(mark.digest.hex(), text)
    assert back.digest == mark.digest
    assert back.ended
    assert back.state["at"] == 4
    assert torch.equal(back.state["t"], mark.state["t"])
    assert encode_mark(START) is None
    assert decode_mark("", None) == START


def test_chains_of_samplers_are_followed_and_end():
    class Link:
        pass

    outer, middle, inner = Link(), Link(), Link()
    outer.batch_sampler, middle.sampler = middle, inner
    assert chain_of(outer) == [outer, middle, inner]
    inner.sampler = outer
    assert chain_of(outer) == [outer, middle, inner], "a circle is walked once"
    assert chain_of(None) == []


def test_a_long_skip_shows_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress, "_make_bar", progress._LoggedProgress)

    def loader():
        return ResumableLoader(Indices(4100), 2, sampler=Python(4100), seed=3, collate_fn=keep)

    one = loader()
    live = iter(one)
    head = [next(live) for _ in range(1500)]
    two = loader()
    two.load_state_dict(one.state_dict())
    with caplog.at_level(logging.INFO, "resumable_data"):
        assert list(two) == list(live)
    assert len(head) == 1500
    assert any("skipping forward in the sampler: 1024 of 1500 batches" in line for line in caplog.messages)
    assert any("done, 1500 batches" in line for line in caplog.messages)
