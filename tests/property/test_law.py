"""The law, generated: however often a run is stopped, it delivers what it would have delivered."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from support_law import indices_of, position, through_json

from resumable_data.state import KEYS

from .strategies import Geometry, chains, examples, geometries, tried

EPOCHS = 3


def course(loader, epochs=EPOCHS):
    """What a training loop sees: every batch with its place, and the end of every epoch, once each."""
    for epoch in loader.epochs(epochs):
        for number, batch in loader.enumerate():
            yield epoch, number, batch
        yield epoch, "end"


def uninterrupted(geometry, rank, epochs=EPOCHS):
    return list(course(geometry.loader(rank), epochs))


def stops_of(chain, total):
    """Numbers of events after which the run stops, in order; fractions of what is then left."""
    stops, done = [], 0
    for fraction in chain:
        done += round(fraction * (total - done))
        stops.append(done)
    return stops


def interrupted(geometry, rank, stops, epochs=EPOCHS, workers=((0, False),)):
    """The same course, run by a chain of loaders that know each other's JSON states only."""
    seen, state = [], None
    for number, stop in enumerate([*stops, None]):
        count, persistent = workers[number % len(workers)]
        loader = geometry.loader(rank, num_workers=count, persistent_workers=persistent)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.resumed
            assert loader.state_dict() == state, "load then state_dict is the identity"
        run = course(loader, epochs)
        seen += run if stop is None else islice(run, stop - len(seen))
        state = through_json(loader.state_dict())
        assert state == loader.state_dict(), "JSON carries a state unchanged"
        assert tuple(state) == KEYS
        run.close()
    assert position(loader) == (epochs, 0)
    return seen


@settings(max_examples=examples(700))
@given(geometry=geometries(), chain=chains, data=st.data())
def test_any_chain_of_stops_delivers_the_uninterrupted_run(geometry, chain, data):
    rank = data.draw(st.sampled_from(geometry.ranks), label="rank")
    whole = uninterrupted(geometry, rank)
    stops = stops_of(chain, len(whole))
    assert interrupted(geometry, rank, stops) == whole
    tried("law, a chain of stops, workers 0", geometry, rank, *stops)


@settings(max_examples=examples(20))
@given(geometry=geometries(max_n=25))
def test_every_single_stop_delivers_the_uninterrupted_run(geometry):
    for rank in geometry.ranks:
        whole = uninterrupted(geometry, rank)
        for stop in range(len(whole) + 1):
            assert interrupted(geometry, rank, [stop]) == whole
    tried("law, a stop at every moment, workers 0", geometry)


WORKERS = st.lists(
    st.sampled_from([(0, False), (2, False), (2, True)]), min_size=1, max_size=3, unique=True
).filter(lambda chosen: chosen != [(0, False)])


@settings(max_examples=examples(40))
@given(
    geometry=geometries(max_replicas=3),
    chain=st.lists(st.floats(0, 1), min_size=1, max_size=2),
    workers=WORKERS,
    data=st.data(),
)
def test_workers_change_nothing_whether_stopped_or_not(geometry, chain, workers, data):
    rank = data.draw(st.sampled_from(geometry.ranks), label="rank")
    whole = uninterrupted(geometry, rank, 2)
    stops = stops_of(chain, len(whole))
    assert interrupted(geometry, rank, stops, 2, workers) == whole
    tried("law, workers 2, persistent or not", geometry, rank, *stops, *workers)


@settings(max_examples=examples(200))
@given(geometry=geometries(), epoch=st.integers(0, 2**64 - 2), steps=st.integers(0, 70))
def test_states_are_equal_on_all_ranks_and_keep_their_keys(geometry, epoch, steps):
    loaders = [geometry.loader(rank) for rank in geometry.ranks]
    for loader in loaders:
        loader.seek(epoch, 0)
    passes = [iter(loader) for loader in loaders]
    for _ in range(min(steps, geometry.batches)):
        for this in passes:
            next(this)
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        assert tuple(states[0]) == KEYS
        assert through_json(states[0]) == states[0]
    for loader in loaders:
        assert loader.samples_in_epoch == loader.consumed_samples
        assert loader.batches_remaining == geometry.batches - loader.batch_in_epoch
    tried("states of all ranks", geometry, epoch, steps)


def expected_order(geometry, per_rank):
    """The global order that the ranks' batches were dealt from, put together again."""
    order = []
    for together in zip(*per_rank, strict=True):
        rows = [indices_of(batch) for batch in together]
        assert len({len(row) for row in rows}) == 1, "all ranks' batches have one size"
        for across in zip(*rows, strict=True):
            order += across
    return order


@settings(max_examples=examples(250))
@given(geometry=geometries(), epoch=st.integers(0, 5))
def test_an_epoch_covers_the_dataset_exactly_once_up_to_the_tail(geometry, epoch):
    per_rank = []
    for rank in geometry.ranks:
        loader = geometry.loader(rank)
        assert len(loader) == geometry.batches
        loader.seek(epoch, 0)
        per_rank.append(list(loader))
        assert len(per_rank[-1]) == geometry.batches
        assert loader.consumed_samples == min(
            geometry.n, geometry.batches * geometry.num_replicas * geometry.batch_size
        )
    order = expected_order(geometry, per_rank)
    n, ranks = geometry.n, geometry.num_replicas
    if geometry.drop_last:
        assert len(order) == n // (ranks * geometry.batch_size) * ranks * geometry.batch_size
        assert len(set(order)) == len(order)
        assert set(order) <= set(range(n))
    else:
        assert sorted(order[:n]) == list(range(n))
        # fewer than one sample a rank is repeated, from the epoch's start
        assert len(order) - n == -n % ranks
        assert order[n:] == [order[p % n] for p in range(n, len(order))]
    if not geometry.shuffle:
        assert order == [p % n for p in range(len(order))]
    tried("coverage of an epoch", geometry, epoch)


@settings(max_examples=examples(100))
@given(geometry=geometries(), data=st.data())
def test_any_batch_can_be_seen_again_and_looked_ahead_to(geometry, data):
    rank = data.draw(st.sampled_from(geometry.ranks), label="rank")
    loader = geometry.loader(rank)
    delivered = {}
    for epoch in loader.epochs(2):
        for number, batch in loader.enumerate():
            delivered[epoch, number] = batch
            if loader.batches_remaining:
                ahead = epoch, loader.batch_in_epoch
                assert loader.peek() == loader.batch_at(*ahead)
    before = loader.state_dict()
    assert {place: loader.batch_at(*place) for place in delivered} == delivered
    assert loader.state_dict() == before
    tried("batch_at and peek", geometry, rank)


@settings(max_examples=examples(100))
@given(geometry=geometries(max_n=30, seedings=("sample",)), other=st.integers(1, 9))
def test_under_sample_seeding_augmentations_do_not_depend_on_batches_and_ranks(geometry, other):
    geometry = replace(geometry, drop_last=False)
    alone = replace(geometry, batch_size=other, num_replicas=1)

    def samples(geometry, rank):
        return [sample for batch in geometry.loader(rank) for sample in batch[0]]

    once = {sample[0]: sample for sample in samples(alone, 0)}
    for rank in geometry.ranks:
        real = (geometry.n - rank + geometry.num_replicas - 1) // geometry.num_replicas
        assert all(sample == once[sample[0]] for sample in samples(geometry, rank)[: max(0, real)])
    tried("sample seeding over batch sizes and ranks", geometry, other)


def test_control_equal_courses_are_not_equal_by_themselves():
    # what the comparisons above rest on: epochs, seeds, ranks and places all show in the batches
    geometry = Geometry(12, 3, 2, False, True, "batch", 5, False)
    first, second, third = ([e for e in uninterrupted(geometry, 0) if e[0] == epoch] for epoch in range(3))
    bodies = [[batch for _, _, batch in events[:-1]] for events in (first, second, third)]
    elsewhere = [
        [batch for _, _, batch in islice(course(changed.loader(rank)), 2)]
        for changed, rank in [(geometry, 1), (replace(geometry, seed=6), 0), (replace(geometry, n=13), 0)]
    ]
    bodies += elsewhere
    for at, one in enumerate(bodies):
        assert all(one[0] != other[0] for other in bodies[:at])


def test_control_a_stopped_run_that_is_not_resumed_differs():
    geometry = Geometry(12, 3, 1, False, True, "batch", 5, False)
    whole = uninterrupted(geometry, 0)
    afresh = [*islice(course(geometry.loader(0)), 2), *course(geometry.loader(0))]
    one_off = geometry.loader(0)
    one_off.seek(0, 3)  # as if the prefetched batch had been counted
    assert afresh != whole
    assert [*islice(course(geometry.loader(0)), 2), *course(one_off)] != whole
    assert interrupted(geometry, 0, [2]) == whole
