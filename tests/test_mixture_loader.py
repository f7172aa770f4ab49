"""A ``Mixture`` through the loader: an order by position, so resumed, dealt out and elastic like any other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property.strategies import examples, tried
from support.datasets import Augmented, keep
from support.runs import passes, plainly

from resumable_data import ResumableLoader, StateMismatchError
from resumable_data.mixture import Mixture

pytest_plugins = ["support.plugin"]


class Source(Augmented):
    """Item i is the source's name, i and draws from all three libraries."""

    def __init__(self, name, n):
        super().__init__(n)
        self.name = name

    def __getitem__(self, index):
        return (self.name, *super().__getitem__(index))


def mixture(weights=(1, 2, 0.5), length=None):
    return Mixture([Source("a", 10), Source("b", 20), Source("c", 7)], list(weights), length=length)


def make(batch_size=4, data=None, **more):
    return ResumableLoader(mixture() if data is None else data, batch_size, seed=4, collate_fn=keep, **more)


def resumed(states, crew, batch_size=4):
    results = []
    for state in states:
        loader = make(batch_size, **crew)
        loader.load_state_dict(state)
        results.append(passes(loader, 2))
    return results


def test_stopped_anywhere_it_goes_on(fresh, crew):
    whole = passes(make(), 4)
    loader, states = make(), []
    places = [(epoch, batch) for epoch in range(2) for batch in range(0, len(loader), 2)]
    for epoch in loader.epochs(2):
        for number, _ in loader.enumerate():
            if (epoch, number + 1) in places:
                states.append(json.loads(json.dumps(loader.state_dict())))
    places = [place for place in places if place[1]]
    if crew["num_workers"]:
        places, states = places[-2:], states[-2:]
    for (epoch, batch), rest in zip(places, fresh(resumed, states=states, crew=crew), strict=True):
        assert rest == [whole[epoch][batch:], whole[epoch + 1]]


def test_the_keys_are_those_of_the_order():
    data = mixture()
    loader = make(data=data)
    for epoch in range(2):
        keys = data.indices_at(4, epoch, np.arange(len(data)))
        names = [("a", "b", "c")[data.locate(key)[0]] for key in keys.tolist()]
        indices = [data.locate(key)[1] for key in keys.tolist()]
        samples = [sample for batch in loader for sample in batch]
        assert [(s[0], s[1]) for s in samples] == list(zip(names, indices, strict=True))


@settings(max_examples=examples(50))
@given(
    length=st.integers(1, 200),
    plan=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=4),
    epoch=st.integers(0, 2),
)
def test_any_plan_of_ranks_and_batch_sizes_is_one_uninterrupted_pass(length, plan, epoch):
    def loaders(width, batch_size, state):
        made = [
            make(
                batch_size,
                mixture(length=length),
                num_replicas=width,
                rank=rank,
                tail="uneven",
                seeding="sample",
            )
            for rank in range(width)
        ]
        for loader in made:
            loader.set_epoch(epoch) if state is None else loader.load_state_dict(state)
        return made

    (alone,) = loaders(1, length, None)
    (whole,) = alone
    got, state = [], None
    for width, batch_size, steps in [*plan, (2, 3, None)]:
        made = loaders(width, batch_size, state)
        running = [iter(loader) for loader in made]
        left = [loader.batches_remaining for loader in made]
        for _ in range(max(left) if steps is None else min(steps, *left)):
            batches = [next(live, []) for live in running]
            got += [b[at] for at in range(max(map(len, batches))) for b in batches if at < len(b)]
        state = json.loads(json.dumps(made[0].state_dict()))
        if steps is not None:
            assert all(loader.state_dict() == state for loader in made)
            assert state["samples_in_epoch"] == len(got)
    assert got == whole
    tried("elastic plans, mixtures", length, *plan, epoch)


def test_another_mixture_is_refused():
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    assert state["order"] == "sampler"
    same_size = Mixture([Source("a", 9), Source("b", 21), Source("c", 7)], [1, 2, 0.5])
    for data in (mixture((1, 1, 0.5)), same_size):
        with pytest.raises(StateMismatchError, match="order_digest"):
            make(data=data).load_state_dict(state)
    make().load_state_dict(state)


def test_any_batch_can_be_looked_up():
    loader = make()
    whole = [list(loader) for _ in range(2)]
    assert [plainly(loader.batch_at(1, at)) for at in range(len(loader))] == plainly(whole[1])
    loader.seek(0, 3)
    assert list(loader) == whole[0][3:]


def test_control_epochs_differ():
    loader = make()
    assert [s[:2] for b in loader for s in b] != [s[:2] for b in loader for s in b]
