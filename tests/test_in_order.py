"""``in_order=False``: batches come as they are ready, and which of them came is part of the position."""

from __future__ import annotations

import json
import time

import pytest
from support.datasets import Indices, keep
from support.runs import streams
from support.samplers import Python, Stateful

from resumable_data import ResumableLoader, StateError, StateMismatchError

pytest_plugins = ["support.plugin"]

N = 24


class Uneven(Indices):
    """Item i is i; some take a while, so that batches overtake each other."""

    def __getitem__(self, index):
        if index % 5 == 0:
            time.sleep(0.03)
        return super().__getitem__(index)


class First(Indices):
    """Item 0 takes so long that everything else is ready before it."""

    def __getitem__(self, index):
        if index == 0:
            time.sleep(0.5)
        return super().__getitem__(index)


ORDERS = {
    "shuffled": lambda: {"shuffle": True},
    "sequential": lambda: {},
    "sampler": lambda: {"sampler": Python(N)},
    "stateful": lambda: {"sampler": Stateful(N)},
    "limited": lambda: {"shuffle": True, "batches_per_epoch": 9},
}


def make(order="shuffled", data=Uneven, **arguments):
    chosen = {"num_workers": 2, "in_order": False, "prefetch_factor": 3, **ORDERS[order](), **arguments}
    if not chosen["num_workers"]:
        del chosen["prefetch_factor"]
    return ResumableLoader(data(N), 2, seed=5, collate_fn=keep, **chosen)


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def expected(order, epochs):
    loader = make(order, data=Indices, num_workers=0)
    return [list(loader) for _ in range(epochs)]


def chain(order, stops, state, crews):
    """In a fresh interpreter: a chain of kills over two epochs; what came, as [epoch, batch], and the states."""
    seen, states = [], []
    for at, stop in enumerate([*stops, None]):
        workers = crews[at % len(crews)]
        loader = make(order, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        count = 0
        running = pairs(loader)
        while stop is None or count < stop:
            event = next(running, None)
            if event is None:
                break
            seen.append(event)
            count += 1
        state = saved(loader)
        states.append(state)
        running.close()
    return seen, states


def pairs(loader):
    for epoch in loader.epochs(2):
        for batch in loader:
            yield [epoch, batch]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_chained_kills_lose_nothing_and_repeat_nothing(fresh, order):
    whole = expected(order, 2)
    seen, states = fresh(chain, order=order, stops=[4, 3, 1, 6], state=None, crews=[2, 0])
    for epoch in range(2):
        came = [batch for at, batch in seen if at == epoch]
        assert sorted(came) == sorted(whole[epoch]), "the union is exact, and nothing came twice"
    for state in states[:-1]:
        assert state["batch_in_epoch"] >= len(state["delivered_ahead"])


def test_batches_do_overtake_each_other_and_the_position_says_which():
    loader = make("sequential", data=First)
    live = iter(loader)
    came = [next(live) for _ in range(4)]
    state = saved(loader)
    assert [0, 1] not in came
    numbers = sorted(batch[0] // 2 for batch in came)
    assert state["delivered_ahead"] == numbers
    assert (state["batch_in_epoch"], state["samples_in_epoch"], state["consumed_samples"]) == (4, 0, 8)
    assert loader.batches_remaining == N // 2 - 4
    for workers in (0, 2):
        resumed = make("sequential", data=First, num_workers=workers)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert sorted(came + rest) == [[at, at + 1] for at in range(0, N, 2)]
        assert resumed.consumed_samples == N
        if not workers:
            assert rest == sorted(rest), "without workers they come in order"


def test_a_resumed_run_may_be_in_order_again():
    loader = make("sequential", data=First)
    live = iter(loader)
    came = [next(live) for _ in range(3)]
    ordered = make("sequential", data=First, in_order=True)
    ordered.load_state_dict(saved(loader))
    rest = list(ordered)
    assert rest == sorted(rest)
    assert sorted(came + rest) == [[at, at + 1] for at in range(0, N, 2)]
    assert list(ordered) == [[at, at + 1] for at in range(0, N, 2)]


def test_another_topology_is_refused_while_there_are_gaps():
    loader = make("sequential", data=First)
    live = iter(loader)
    next(live)
    state = saved(loader)
    assert state["delivered_ahead"]
    other = ResumableLoader(First(N), 3, seed=5)
    with pytest.raises(StateMismatchError) as caught:
        other.load_state_dict(state)
    assert list(caught.value.fields) == ["batch_size"]
    list(live)
    other.load_state_dict(saved(loader))
    assert len(list(other)) == N // 3


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("dataset_size", lambda: ResumableLoader(First(N - 2), 2, seed=5)),
        ("seed", lambda: ResumableLoader(First(N), 2, seed=6)),
        ("order", lambda: ResumableLoader(First(N), 2, seed=5, shuffle=True)),
    ],
)
def test_another_order_is_refused_while_there_are_gaps_also_by_name(name, other):
    # the numbers of the batches beyond the gap would stand for other samples
    live = iter(loader := make("sequential", data=First))
    next(live)
    state = saved(loader)
    assert state["delivered_ahead"]
    with pytest.raises(StateMismatchError) as caught:
        other().load_state_dict(state, override={name})
    assert list(caught.value.fields) == [name]
    list(live)
    other().load_state_dict(saved(loader), override={name})


def test_peek_cannot_know_what_comes_next():
    with pytest.raises(ValueError, match="in_order=False"):
        make().peek()
    assert make(num_workers=0).peek() == next(iter(make(num_workers=0)))


@pytest.mark.parametrize("ahead", [[0], [1, 1], [2, 1], [99], [-1], ["1"], [1, 2, 3, 4, 5], None])
def test_impossible_gaps_are_refused(ahead):
    loader = make("sequential", data=First)
    live = iter(loader)
    [next(live) for _ in range(3)]
    state = saved(loader)
    assert len(state["delivered_ahead"]) == 3
    other = make("sequential", num_workers=0)
    before = other.state_dict()
    with pytest.raises(StateError):
        other.load_state_dict({**state, "delivered_ahead": ahead})
    assert other.state_dict() == before


class Breaking(First):
    """Item 9 raises, once in a process."""

    broken = False

    def __getitem__(self, index):
        if index == 9 and not Breaking.broken:
            Breaking.broken = True
            raise KeyError("item 9")
        return super().__getitem__(index)


def test_after_a_failure_what_came_is_not_given_again():
    loader = make("sequential", data=Breaking)
    came = []
    with pytest.raises(KeyError, match="item 9"):
        came.extend(iter_into(loader, came))
    state = saved(loader)
    assert state["batch_in_epoch"] == len(came) > 0
    Breaking.broken = True
    try:
        came += list(loader)
    finally:
        Breaking.broken = False
    assert sorted(came) == [[at, at + 1] for at in range(0, N, 2)]
    assert loader.epoch == 1


def iter_into(loader, seen):
    for batch in loader:
        seen.append(batch)
    return []


def test_seeking_past_a_gap_records_what_is_passed_over():
    loader = make("sequential", data=First)
    live = iter(loader)
    came = [next(live) for _ in range(2)]
    numbers = sorted(batch[0] // 2 for batch in came)
    assert 0 not in numbers
    loader.seek(0, max(numbers) + 1)
    skipped = loader.state_dict()["skipped"]
    passed = {b for at in range(0, len(skipped), 3) for b in range(skipped[at + 1], skipped[at + 2])}
    assert passed == set(range(max(numbers) + 1)) - set(numbers)


def test_the_process_keeps_its_streams():
    before = streams()
    loader = make()
    live = iter(loader)
    next(live)
    loader.state_dict()
    assert streams() == before
