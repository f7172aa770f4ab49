"""Samplers with a state of their own: it is carried as of the first undelivered batch, whoever reads ahead."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.datasets import Indices, keep
from support.samplers import N, Python, Stateful, course, make
from torch.utils.data import Sampler

from resumable_data import ResumableLoader, StateError, StateMismatchError

KINDS = ["stateful", "stateful_drawing", "stateful_batches", "torchs_stateful"]


def saved(loader, **asked):
    return json.loads(json.dumps(loader.state_dict(**asked)))


def rest(case, state, epochs=3):
    loader = make(case)
    loader.load_state_dict(state)
    return list(course(loader, epochs))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", KINDS)
def test_nothing_is_lost_by_looking_or_reading_ahead_at_the_start_of_an_epoch(case, workers):
    whole = list(course(make(case), 3))
    second = next(at for at, event in enumerate(whole) if event[0] == 1)
    loader = make(case, num_workers=workers)
    loader.peek()
    live = iter(loader)
    assert rest(case, saved(loader)) == whole
    list(live)
    fresh_epoch = saved(loader)
    live = iter(loader)  # with workers: several batches are drawn by now
    loader.peek()
    assert rest(case, saved(loader)) == rest(case, fresh_epoch) == whole[second:]
    del live


@pytest.mark.parametrize("case", KINDS)
def test_the_state_of_some_batches_ago_is_the_samplers_of_that_moment(case):
    whole = list(course(make(case), 2))
    batches = [event for event in whole if event[1] != "end"]
    loader = make(case)
    assert list(course(loader, 2)) == whole
    for ago in range(len(batches) + 1):
        seen = [event for event in rest(case, saved(loader, in_flight=ago), 2) if event[1] != "end"]
        assert seen == batches[len(batches) - ago :], ago


@pytest.mark.parametrize("case", ["stateful", "torchs_stateful", "stateful_drawing"])
def test_leaving_an_epoch_early_does_not_depend_on_who_read_ahead(case):
    def left(workers, ends):
        loader = make(case, num_workers=workers)
        seen = []
        for _ in loader.epochs(3):
            for number, batch in loader.enumerate():
                seen.append([t.tolist() for t in batch])
                if number == 1:
                    break
            if ends:
                loader.end_epoch()
        return seen

    for ends in (False, True):
        assert left(2, ends) == left(0, ends)


def test_an_epoch_limited_by_number_leaves_the_sampler_where_it_stands():
    whole = list(course(make("stateful_limited"), 3))
    loader = make("stateful_limited")
    live = iter(loader)
    for _ in range(3):
        next(live)
    state = saved(loader)
    assert (state["epoch"], state["batch_in_epoch"]) == (0, 3)
    assert rest("stateful_limited", state) == whole[3:]


def test_the_state_is_text_and_small():
    state = saved(make("stateful"))
    assert isinstance(state["sampler"], str)
    assert len(json.dumps(state)) < 1500


def test_a_state_is_refused_where_the_sampler_has_none_and_the_reverse():
    with_state, without = saved(make("stateful")), saved(make("python"))
    for case, state in (("python", with_state), ("stateful", without)):
        loader = make(case)
        before = loader.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert list(caught.value.fields) == ["sampler"]
        assert loader.state_dict() == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": 1}', '{"state":{"~":["tensor"]},"streams":null,"ended":false}']
)
def test_an_unreadable_state_is_refused_before_anything_changes(text):
    loader = make("stateful")
    state = saved(loader)
    with pytest.raises(StateError, match="sampler"):
        loader.load_state_dict({**state, "sampler": text})
    assert saved(loader) == state


class Odd(Sampler):
    """A sampler whose state holds what it is given."""

    def __init__(self, value):
        self.value = value

    def __iter__(self):
        yield from range(N)

    def __len__(self):
        return N

    def state_dict(self):
        return {"deep": [{"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["deep"][0]["value"]


@pytest.mark.parametrize("value", [object(), {1, 2}, len, np.array([None]), 1j])
def test_what_cannot_be_carried_is_named_by_its_key(value):
    loader = ResumableLoader(Indices(N), 4, sampler=Odd(value), seed=3)
    with pytest.raises(TypeError, match=r"\['deep'\]\[0\]\['value'\]"):
        loader.state_dict()


def test_a_state_is_copied_when_it_is_taken():
    class Sharing(Stateful):
        """Hands out its own tensor, and moves it in place."""

        def __init__(self, n):
            super().__init__(n)
            self.place = torch.zeros(1, dtype=torch.int64)

        def __iter__(self):
            while self.place < self.n:
                self.place += 1
                yield int(self.place) - 1
            self.place.zero_()

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    def loader(workers=0):
        return ResumableLoader(
            Indices(N), 4, sampler=Sharing(N), seed=3, collate_fn=keep, num_workers=workers
        )

    running = loader(2)
    live = iter(running)
    head = [next(live), next(live)]
    state = saved(running)
    resumed = loader()
    resumed.load_state_dict(state)
    assert head + list(resumed) == [list(range(at, min(N, at + 4))) for at in range(0, N, 4)]
    again = loader()
    again.load_state_dict(state)
    list(again)
    assert saved(again)["batch_in_epoch"] == 0
    # loading the same dict twice: it was not handed to the sampler to be moved in place
    again.load_state_dict(state)
    assert head + list(again) == [list(range(at, min(N, at + 4))) for at in range(0, N, 4)]


def test_seeking_is_the_samplers_to_answer():
    with pytest.raises(ValueError, match="state of its own"):
        make("stateful").seek(0, 2)
    assert not hasattr(Python, "state_dict")
    make("python").seek(0, 2)
