"""Faults of position, as people met them; the rows are those of docs/reference/faults.md.

A test runs uninterrupted here and is resumed in a fresh interpreter. Lists are compared as they came, in
order and with ``==``.
"""

from __future__ import annotations

import io
import logging
import os
from itertools import chain

import pytest
import torch
from support.fresh import CallFailedError, no_hang
from support.runs import (
    build,
    passes,
    plainly,
    recipe,
    rest,
    resumed,
    resumed_each,
    run_to,
    sampler,
    saves,
    take,
    uninterrupted,
    without_crew,
)
from torch.utils.data import DataLoader, DistributedSampler

from resumable_data import ResumableLoader, StaleIteratorError, StateMismatchError
from resumable_data.deals import PositionDeal

pytest_plugins = ["support.plugin"]

EPOCHS = [0, 1, 2]


# ── the end of an epoch ──────────────────────────────────────────────────────────────────────────────


def test_w1_a_state_taken_after_the_last_stop_iteration_goes_on_with_the_next_epoch(fresh, crew):
    plain = recipe(10, 3, **crew)
    whole = uninterrupted(plain, 5)
    loader, states = build(plain), []
    for epoch in EPOCHS:
        assert rest(iter(loader)) == whole[epoch]
        states.append(loader.state_dict())
    assert fresh(resumed_each, plain=plain, states=states, count=2) == [
        [whole[epoch + 1], whole[epoch + 2]] for epoch in EPOCHS
    ]


def loop_to(plain, state, stop):
    loader = build(plain)
    loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(stop):
        seen.append(["begin", epoch])
        seen.extend(rest(iter(loader)))
        seen.append(["end", epoch])
    return seen


def test_w2_a_state_taken_before_the_last_stop_iteration_ends_the_epoch_once(fresh, crew):
    plain = recipe(10, 3, **crew)
    whole = uninterrupted(plain, 4)
    states = saves(plain, 4)
    assert [(state["epoch"], state["batch_in_epoch"]) for state in states] == [(0, 4), (1, 4), (2, 4)]
    assert fresh(resumed_each, plain=plain, states=states, count=2) == [[[], one] for one in whole[1:]]
    following = [["begin", 3], *whole[3], ["end", 3]]
    assert fresh(loop_to, plain=plain, state=states[2], stop=4) == [["begin", 2], ["end", 2], *following]


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def usual_loop(plain, state, step, stop, style):
    """A loop that works its epoch out from the step, with and without telling the loader."""
    loader = build(plain)
    loader.load_state_dict(state)
    records = Records()
    logging.getLogger("resumable_data").addHandler(records)
    seen = []
    counted = range(step // len(loader), stop)
    for epoch in loader.epochs(stop) if style == "epochs" else counted:
        if style == "set_epoch":
            loader.set_epoch(epoch)
        seen += rest(iter(loader))
    logging.getLogger("resumable_data").removeHandler(records)
    return [seen, records.lines]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("style", ["epochs", "set_epoch", "bare"])
def test_w3_no_epoch_is_lost_to_two_corrections_that_add_up(fresh, crew, style, closed):
    plain = recipe(10, 3, **crew)
    whole = uninterrupted(plain, 3)
    loader = build(plain)
    live = run_to(loader, 0, 4)
    if closed:
        assert rest(live) == []
    seen, said = fresh(
        usual_loop, plain=plain, state=loader.state_dict(), step=len(loader), stop=3, style=style
    )
    if style == "bare" and not closed:
        # the range leaves epoch 0 out, and the loader still has its end to give: two passes make one epoch
        assert seen == whole[1]
        assert len(said) == 1
        assert "epochs(stop) or set_epoch()" in said[0]
    else:
        assert seen == whole[1] + whole[2]
        assert said == []


# ── many resumes ─────────────────────────────────────────────────────────────────────────────────────


def stretch(plain, state, count):
    """The next ``count`` batches after a load, whatever epochs they are in, and the state then."""
    loader = build(plain)
    loader.load_state_dict(state)
    return [take(loader.cycle(), count), loader.state_dict()]


def hops(plain, state, counts):
    """``stretch`` again and again, each in a loader of its own."""
    seen = []
    for count in counts:
        batches, state = stretch(plain, state, count)
        seen += batches
    return [seen, state]


def test_w4_a_chain_of_resumes_equals_one_run(fresh, crew):
    plain = recipe(100, 2, **crew)
    whole = take(build(plain).cycle(), 45)
    first = build(plain)
    seen = take(first.cycle(), 15)
    state = first.state_dict()
    for count in (5, 5, 20):
        batches, state = fresh(stretch, plain=plain, state=state, count=count)
        seen += batches
    assert seen == whole


def test_w4_resumes_after_every_batch_of_three_epochs(fresh, crew):
    n = 100 if crew["num_workers"] == 0 else 10  # starting workers takes its time
    plain = recipe(n, 2, **crew)
    one = build(plain)
    whole = take(one.cycle(), 3 * n // 2)
    state = build(plain).state_dict()
    assert fresh(hops, plain=plain, state=state, counts=[1] * len(whole)) == [whole, one.state_dict()]


def test_w5_epochs_after_a_resume_are_full_in_every_worker(fresh):
    plain = recipe(20, 2, data="located", num_workers=2, persistent_workers=True)
    whole = uninterrupted(plain, 6)
    for epoch, state in enumerate(saves(plain, 7)):
        rests = fresh(resumed, plain=plain, state=state, count=4)
        # a batch is [indices, worker ids, worker seeds]
        assert [[b[0] for b in one] for one in rests] == [
            [b[0] for b in one] for one in [whole[epoch][7:], *whole[epoch + 1 : epoch + 4]]
        ]
        for one in rests[1:]:
            assert {worker for batch in one for worker in batch[1]} == {0, 1}


def test_w6_two_passes_without_a_load_are_both_full(crew):
    loader = build(recipe(10, 3, **crew))
    first, second = rest(loader), rest(loader)
    for one in (first, second):
        assert len(one) == len(loader) == 4
        assert sorted(chain.from_iterable(one)) == list(range(10))
    assert first != second


# ── what has been delivered ──────────────────────────────────────────────────────────────────────────

PREFETCHING = recipe(12, 1, num_workers=4, prefetch_factor=8)


def two_of_twelve(fresh, kind=ResumableLoader):
    whole = uninterrupted(PREFETCHING, 2)
    loader = build(PREFETCHING, kind)
    live = iter(loader)
    assert take(live, 2) == whole[0][:2]
    state = loader.state_dict()
    assert (state["batch_in_epoch"], state["samples_in_epoch"]) == (2, 2)
    assert fresh(resumed, plain=PREFETCHING, state=state, count=2) == [whole[0][2:], whole[1]]


def test_w7_prefetched_batches_are_not_delivered_ones(fresh):
    two_of_twelve(fresh)


class CountingFetched(ResumableLoader):
    """The fault of W7: it counts a batch where a worker is asked for it."""

    fetched = 0

    def state_dict(self, *, in_flight=0):
        counts = ("batch_in_epoch", "samples_in_epoch", "consumed_samples")
        return super().state_dict(in_flight=in_flight) | dict.fromkeys(counts, self.fetched)


def test_w7_control_counting_prefetched_batches_fails(fresh, monkeypatch):
    tickets = PositionDeal.tickets

    def counted(*args, **kwargs):
        for ticket in tickets(*args, **kwargs):
            CountingFetched.fetched += 1
            yield ticket

    monkeypatch.setattr(CountingFetched, "fetched", -24)  # two passes without workers come first
    monkeypatch.setattr(PositionDeal, "tickets", counted)
    with pytest.raises(AssertionError, match=r"12, 12\) == \(2, 2"):
        two_of_twelve(fresh, CountingFetched)


def looked_only(plain, state):
    loader = build(plain)
    loader.load_state_dict(state)
    live = iter(loader)
    again = loader.state_dict()
    return [again, rest(live)]


def test_w8_an_iterator_that_delivered_nothing_moves_nothing(fresh, crew):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 3)
    for epoch, state in enumerate(saves(plain, 5)):
        assert state["batch_in_epoch"] == 5
        assert fresh(looked_only, plain=plain, state=state) == [state, whole[epoch][5:]]


# ── which order ──────────────────────────────────────────────────────────────────────────────────────


def test_w10_later_epochs_resume_in_their_own_order_on_every_rank(fresh, crew):
    states = []
    for rank in (0, 1):
        plain = recipe(21, 2, num_replicas=2, rank=rank, **crew)
        whole = uninterrupted(plain, 4)
        states.append(saves(plain, 3))
        assert fresh(resumed_each, plain=plain, states=states[-1], count=2) == [
            [whole[epoch][3:], whole[epoch + 1]] for epoch in EPOCHS
        ]
    assert states[0] == states[1]


def test_w11_plain_passes_over_a_distributed_sampler_differ_and_come_back(fresh, crew):
    plain = recipe(21, 2, sampler={"distributed": {"num_replicas": 2, "rank": 1, "seed": 3}}, **crew)
    del plain["seed"]
    whole = uninterrupted(plain, 4)
    theirs = DistributedSampler(range(21), num_replicas=2, rank=1, seed=3)
    for epoch, one in enumerate(whole):
        theirs.set_epoch(epoch)
        assert list(chain.from_iterable(one)) == list(theirs)
    assert passes(build(plain), 3) == whole[:3]
    assert fresh(resumed_each, plain=plain, states=saves(plain, 4), count=2) == [
        [whole[epoch][4:], whole[epoch + 1]] for epoch in EPOCHS
    ]


def test_w12_set_epoch_after_iter_means_the_same_with_and_without_workers(crew):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 4)
    loader = build(plain)
    live = iter(loader)
    loader.set_epoch(3)
    with pytest.raises(StaleIteratorError, match="newest iterator"):
        next(live)
    assert rest(loader) == whole[3]
    live = iter(loader)
    take(live, 1)
    loader.set_epoch(4)  # the epoch that pass is in: it is left alone
    assert len(rest(live)) == 9
    assert loader.epoch == 4


def told_after_iter(plain, state):
    loader = build(plain)
    loader.load_state_dict(state)
    live = iter(loader)
    loader.set_epoch(1)
    del live
    return [rest(iter(loader)), loader.epoch]


@pytest.mark.parametrize("closed", [False, True])
def test_w13_set_epoch_after_a_look_at_a_finished_epoch_gives_the_next_in_full(fresh, crew, closed):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 2)
    loader = build(plain)
    live = run_to(loader, 0, 10)
    if closed:
        assert rest(live) == []
    assert fresh(told_after_iter, plain=plain, state=loader.state_dict()) == [whole[1], 2]


def loaded_late(plain, states, before):
    loader, seen = build(plain), []
    for state in states:
        used = iter(loader)  # kept, as a trainer that has begun would keep it
        take(used, before)
        loader.load_state_dict(state)
        seen.append(passes(loader, 2))
    return seen


@pytest.mark.parametrize("before", [0, 3])
def test_w15_a_state_loaded_into_a_loader_in_use_brings_its_epochs_order(fresh, crew, before):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 4)
    states = saves(plain, 4)
    assert fresh(loaded_late, plain=plain, states=states[::-1], before=before) == [
        [whole[epoch][4:], whole[epoch + 1]] for epoch in EPOCHS[::-1]
    ]


def drawn_between(plain, state, counts):
    """Passes with other draws of the user's in between; a seed that was adopted is drawn from as well."""
    loader = build(plain)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for count in counts:
        torch.rand(count)
        seen.append(rest(iter(loader)))
    return seen


@pytest.mark.parametrize("seed", [7, None])
def test_w16_draws_of_the_users_between_epochs_do_not_move_the_order(fresh, crew, seed):
    plain = recipe(20, 2, **crew, seed=seed) if seed is None else recipe(20, 2, **crew)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        loader = build(plain)
        states = [loader.state_dict()]
        whole = []
        for count in (1, 2, 3):
            whole.append(rest(iter(loader)))
            torch.rand(count)
            states.append(loader.state_dict())
    assert whole[0] != whole[1] != whole[2]
    for epoch in EPOCHS:
        counts = [9, 4, 17][epoch:]
        assert fresh(drawn_between, plain=plain, state=states[epoch], counts=counts) == whole[epoch:]


def test_w16_control_an_adopted_seed_that_is_not_carried_gives_another_order(fresh):
    plain = recipe(20, 2, seed=None)
    whole = passes(build(plain), 3)
    assert fresh(drawn_between, plain=plain, state=None, counts=[0, 0, 0]) != whole


def test_w18_a_random_sampler_with_a_generator_resumes_in_its_stream(fresh, crew):
    plain = recipe(20, 2, sampler={"random": 11}, **crew)
    whole = uninterrupted(plain, 4)
    assert whole == passes(build(without_crew(plain), DataLoader), 4)
    assert fresh(resumed_each, plain=plain, states=saves(plain, 2), count=2) == [
        [whole[epoch][2:], whole[epoch + 1]] for epoch in EPOCHS
    ]


# ── short and empty epochs ───────────────────────────────────────────────────────────────────────────


def test_w23_with_drop_last_what_is_left_is_what_was_not_delivered(fresh, crew):
    plain = recipe(11, 2, drop_last=True, **crew)
    whole = uninterrupted(plain, 4)
    assert len(whole[0]) == 5
    for epoch in EPOCHS if crew["num_workers"] == 0 else [1]:
        states, loader = [], build(plain)
        live = run_to(loader, epoch, 0)
        for _ in range(6):
            states.append(loader.state_dict())
            next(live, None)
        assert [state["epoch"] for state in states] == [epoch] * 6
        assert fresh(resumed_each, plain=plain, states=states, count=2) == [
            [whole[epoch][k:], whole[epoch + 1]] for k in range(6)
        ]


def small_loader(plain):
    """What a loader over little or no data gives in two passes, and after a load in between."""
    loader = build(plain)
    first = rest(iter(loader))
    state = loader.state_dict()
    second = rest(iter(loader))
    other = build(plain)
    other.load_state_dict(state)
    return [len(loader), first, second, rest(iter(other))]


SMALL = {
    # n, batch size, arguments, the indices of one pass batch by batch (sequential: the order says nothing)
    "no data": (0, 2, {}, []),
    "no data, ranks": (0, 2, {"num_replicas": 2, "rank": 1}, []),
    "less than a batch": (3, 8, {}, [[0, 1, 2]]),
    "less than a batch, drop_last": (3, 8, {"drop_last": True}, []),
    "less than the workers": (1, 1, {}, [[0]]),
    "less than the ranks": (2, 2, {"num_replicas": 4, "rank": 3}, [[1]]),
    "less than the ranks, drop_last": (2, 2, {"num_replicas": 4, "rank": 3, "drop_last": True}, []),
}


@pytest.mark.parametrize("case", SMALL)
def test_w24_little_or_no_data_ends_and_does_not_hang(fresh, crew, case):
    n, batch_size, arguments, expected = SMALL[case]
    plain = recipe(n, batch_size, **crew, **arguments) | {"shuffle": False}
    assert fresh(small_loader, plain=plain) == [len(expected), expected, expected, expected]


def test_w24_shuffling_no_data_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="num_samples") as theirs:
        build(recipe(0, 2), DataLoader)
    with pytest.raises(ValueError, match="num_samples") as ours:
        build(recipe(0, 2))
    assert str(ours.value) == str(theirs.value)


# ── looking at the position ──────────────────────────────────────────────────────────────────────────


def numbered(plain, state):
    def loaded():
        loader = build(plain)
        loader.load_state_dict(state)
        return loader

    ours = loaded()
    counts = [len(ours), ours.batches_remaining, ours.resumed]
    numbers = [[number, plainly(batch)] for number, batch in ours.enumerate()]
    return [counts, numbers, [number for number, _ in enumerate(loaded())], rest(ours)]


def test_w25_numbers_and_lengths_after_a_resume(fresh, crew):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 4)
    for epoch, state in enumerate(saves(plain, 5)):
        counts, numbers, plain_numbers, following = fresh(numbered, plain=plain, state=state)
        assert counts == [10, 5, True]
        assert numbers == [[number, whole[epoch][number]] for number in range(5, 10)]
        assert plain_numbers == [0, 1, 2, 3, 4]  # python's own enumerate counts what it is handed
        assert following == whole[epoch + 1]


def asked_often(plain, state):
    loader = build(plain)
    loader.load_state_dict(state)
    seen, asked = [], []
    live = iter(loader)
    for _ in range(3):
        states = [loader.state_dict() for _ in range(10)]
        length, peeked, past = len(loader), plainly(loader.peek()), plainly(loader.batch_at(0, 0))
        seen += take(live, 1)
        asked.append([states, length, peeked == seen[-1], past])
    return [seen, asked, rest(live)]


def test_w26_asking_moves_nothing(fresh, crew):
    plain = recipe(20, 2, data="augmented", **crew)
    whole = uninterrupted(plain, 3)
    loader = build(plain)
    for epoch in EPOCHS:
        states, live = [], run_to(loader, 0, 4)
        for _ in range(3):
            states.append(loader.state_dict())
            next(live)
        rest(live)
        seen, asked, following = fresh(asked_often, plain=plain, state=states[0])
        assert asked == [[[state] * 10, 10, True, whole[0][0]] for state in states]
        assert seen + following == whole[epoch][4:]


def asked_first(plain, state):
    loader = build(plain)
    before = loader.state_dict()
    assert before["batch_in_epoch"] == 0
    loader.load_state_dict(state)
    return [loader.state_dict(), *passes(loader, 2)]


def test_w27_a_state_asked_for_before_a_load_does_not_outlive_it(fresh, crew):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 4)
    for epoch, state in enumerate(saves(plain, 6)):
        assert fresh(asked_first, plain=plain, state=state) == [state, whole[epoch][6:], whole[epoch + 1]]


def load_and_ask(plain, states):
    answers = []
    for state in states:
        loader = build(plain)
        loader.load_state_dict(state)
        answers.append(loader.state_dict())
    return answers


@pytest.mark.parametrize(
    "order", [{}, {"generator": 5}, {"sampler": {"distributed": {"num_replicas": 2, "rank": 0}}}], ids=str
)
def test_w28_load_then_state_is_the_identity(fresh, crew, order):
    plain = recipe(20, 2, **crew, **order)
    loader = build(plain)
    states = [loader.state_dict()]
    for _ in EPOCHS:
        for batches, _ in enumerate(loader, 1):
            if batches in (1, 3, len(loader)):
                states.append(loader.state_dict())
        states.append(loader.state_dict())
    assert len({str(state) for state in states}) == len(states) == 1 + 4 * len(EPOCHS)
    assert fresh(load_and_ask, plain=plain, states=states) == states


# ── more than one iterator ───────────────────────────────────────────────────────────────────────────


def loaded_while_live(plain, state):
    loader = build(plain)
    old = iter(loader)
    take(old, 1)
    loader.load_state_dict(state)
    stale = []
    for _ in range(2):
        try:
            stale.append(plainly(next(old)))
        except StaleIteratorError as error:
            stale.append(type(error).__name__)
    new = iter(loader)
    seen = take(new, 2)
    advanced = loader.state_dict()["batch_in_epoch"]
    try:
        next(old)
    except StaleIteratorError as error:
        stale.append(type(error).__name__)
    return [stale, advanced, seen + rest(new)]


@pytest.mark.parametrize("workers", [0, 2])
def test_w29_a_load_makes_the_live_iterator_stale(fresh, workers):
    plain = recipe(20, 2, num_workers=workers, persistent_workers=workers > 0)
    whole = uninterrupted(plain, 3)
    for epoch, state in enumerate(saves(plain, 5)):
        assert fresh(loaded_while_live, plain=plain, state=state) == [
            ["StaleIteratorError"] * 3,
            7,
            whole[epoch][5:],
        ]


def test_w30_after_a_break_a_copy_goes_on_and_the_same_object_begins_anew(fresh, crew):
    plain = recipe(20, 2, **crew)
    whole = uninterrupted(plain, 4)
    loader, states = build(plain), []
    for epoch in EPOCHS:
        for number, _ in enumerate(loader, 1):
            if number == 3:
                break
        assert (loader.epoch, loader.batch_in_epoch) == (epoch, 3)
        states.append(loader.state_dict())
        if epoch == 0:
            with pytest.warns(UserWarning, match=r"epoch 0 stood at batch 3 of 10.*left out"):
                iter(loader)
    assert rest(loader) == whole[3]
    assert fresh(resumed_each, plain=plain, states=states, count=2) == [
        [whole[epoch][3:], whole[epoch + 1]] for epoch in EPOCHS
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_w31_first_batches_again_and_again_leave_nothing_over(fresh, workers):
    plain = recipe(20, 2, num_workers=workers, persistent_workers=workers > 0)
    whole = uninterrupted(plain, 7)
    loader = build(plain)
    with no_hang():
        seen = [plainly(next(iter(loader)))]
        with pytest.warns(UserWarning, match="left out"):
            seen.append(plainly(next(iter(loader))))
        seen += [plainly(next(iter(loader))) for _ in range(3)]
        state = loader.state_dict()
        assert seen == [one[0] for one in whole[:5]]
        assert rest(loader) == whole[5]
        assert rest(loader) == whole[6]
    assert fresh(resumed, plain=plain, state=state, count=3) == [whole[4][1:], whole[5], whole[6]]


@pytest.mark.parametrize("collate", ["keep", "nothing"])
def test_w33_none_is_data(fresh, crew, collate):
    plain = recipe(9, 2, data="holed", collate_fn=collate, **crew)
    whole = passes(build(plain), 3)
    assert [len(one) for one in whole] == [5, 5, 5]
    flat = list(chain.from_iterable(whole[0])) if collate == "keep" else []
    assert [flat.count(None), len(flat)] == ([3, 9] if collate == "keep" else [0, 0])
    loader = build(plain)
    run_to(loader, 1, 2)
    assert fresh(resumed, plain=plain, state=loader.state_dict(), count=2) == [whole[1][2:], whole[2]]


# ── another run's state ──────────────────────────────────────────────────────────────────────────────


def refused(plain, state, override):
    loader = build(plain)
    before = loader.state_dict()
    try:
        loader.load_state_dict(state, override=override)
    except StateMismatchError as error:
        sound = loader.state_dict() == before and all(name in str(error) for name in error.fields)
        return [plainly(error.fields), sound, []]
    return [{}, True, rest(iter(loader))]


OTHERS = {
    "dataset_id": ({"dataset_id": "b"}, {"dataset_id": ["a", "b"]}),
    "dataset_size": ({"data": ["indices", 21]}, {"dataset_size": [20, 21]}),
    "seed": ({"seed": 8}, {"seed": [7, 8]}),
    "drop_last": ({"drop_last": True}, {"drop_last": [False, True]}),
    "order": ({"shuffle": False}, {"order": ["shuffled.v1", "sequential"]}),
    "seeding": ({"seeding": "sample"}, {"seeding": ["batch.v1", "sample.v1"]}),
}
OTHERS["all"] = (
    {name: value for changed, _ in OTHERS.values() for name, value in changed.items()},
    {name: values for _, fields in OTHERS.values() for name, values in fields.items()},
)


@pytest.mark.parametrize("case", OTHERS)
def test_w34_another_runs_state_is_refused_field_by_field(fresh, case):
    plain = recipe(20, 2, dataset_id="a")
    changed, fields = OTHERS[case]
    loader = build(plain)
    run_to(loader, 1, 3)
    state = loader.state_dict()
    other = plain | changed
    assert fresh(refused, plain=other, state=state, override=[]) == [fields, True, []]
    # by name: the present value holds, the position stays
    present = passes(build(other), 2)[1][3:]
    assert fresh(refused, plain=other, state=state, override=sorted(fields)) == [{}, True, present]
    if len(fields) > 1:
        left = dict(sorted(fields.items())[1:])
        assert fresh(refused, plain=other, state=state, override=sorted(fields)[:1]) == [left, True, []]


def train_and_validate(plain, other, states, steps, every):
    """A training loader and a validation loader side by side: what came, and where both stand."""
    train, validation = build(plain), build(other)
    if states is not None:
        train.load_state_dict(states["train"])
        validation.load_state_dict(states["validation"])
    seen = []
    for step, batch in zip(range(steps), train.cycle(), strict=False):
        seen.append(["train", plainly(batch)])
        if step % every == every - 1:
            seen.append(["validation", *rest(validation)])
    return [seen, {"train": train.state_dict(), "validation": validation.state_dict()}]


def test_w35_a_validation_loader_has_a_position_of_its_own(fresh, crew):
    plain, other = recipe(20, 2, **crew), recipe(9, 4, seed=1, **crew)
    whole, _ = train_and_validate(plain, other, None, 24, 4)
    first, states = train_and_validate(plain, other, None, 12, 4)
    assert (states["train"]["epoch"], states["train"]["batch_in_epoch"]) == (1, 2)
    assert (states["validation"]["epoch"], states["validation"]["batch_in_epoch"]) == (3, 0)
    second, _ = fresh(train_and_validate, plain=plain, other=other, states=states, steps=12, every=4)
    assert first + second == whole


# ── the cost of a resume ─────────────────────────────────────────────────────────────────────────────

MILLION = 1_000_000
ORDERS = {
    "shuffled": {},
    "sequential": {"shuffle": False},
    "distributed": {"sampler": {"distributed": {"num_replicas": 2, "rank": 0, "seed": 3}}},
    "generator": {"generator": 5},
}


def first_batch(plain, state):
    loader = build(plain)
    loader.load_state_dict(state)
    live = iter(loader)
    return take(live, 1)


def whole_order(plain):
    """The indices of epoch 0 on this rank, had from the order alone and from torch where it is torch's."""
    if "generator" in plain:
        generator = torch.Generator().manual_seed(plain["generator"])
        torch.empty((), dtype=torch.int64).random_(
            generator=generator
        )  # DataLoader draws a worker seed first
        return torch.randperm(MILLION, generator=generator).tolist()
    loader = build(plain)
    return list(loader.sampler)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_w36_no_skipped_sample_is_read(fresh, tmp_path, workers, kind):
    log = tmp_path / "accesses"
    plain = recipe(MILLION, 10, data="logged", data_args=[str(log)], num_workers=workers, **ORDERS[kind])
    loader = build(plain)
    number = len(loader) * 9 // 10
    loader.seek(0, number)
    state = loader.state_dict() | {"skipped": []}  # as a run that delivered them would have it
    assert state["batch_in_epoch"] == number
    (batch,) = fresh(first_batch, plain=plain, state=state)
    expected = whole_order(plain)[number * 10 : number * 10 + 50]
    assert batch == expected[:10]
    # with workers, 2 x 2 batches may be under way besides the one that was handed over
    accesses = [int(line) for line in log.read_text().split()]
    assert set(batch) <= set(accesses) <= set(expected)
    assert len(accesses) == len(set(accesses))
    assert workers > 0 or accesses == expected[:10]


# ── gradient accumulation ────────────────────────────────────────────────────────────────────────────


class Trainer:
    """Three batches to an optimizer step, over a net with dropout; saved with gradients and RNG."""

    def __init__(self, plain):
        torch.manual_seed(0)
        self.loader = build(plain)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.step = 0

    def losses(self, epochs):
        for _ in self.loader.epochs(epochs):
            for batch in self.loader:
                x = batch.to(torch.float32)[:, None] / 21
                loss = (self.net(x) - x.square()).square().mean()
                (loss / 3).backward()
                self.step += 1
                if self.step % 3 == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield loss.item()

    def save(self):
        buffer = io.BytesIO()
        state = {
            "net": self.net.state_dict(),
            "grads": [parameter.grad for parameter in self.net.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "rng": torch.get_rng_state(),
            "data": self.loader.state_dict(),
        }
        torch.save(state, buffer)
        return buffer.getvalue().hex()

    def load(self, text, with_rng):
        state = torch.load(io.BytesIO(bytes.fromhex(text)), weights_only=True)
        self.net.load_state_dict(state["net"])
        for parameter, grad in zip(self.net.parameters(), state["grads"], strict=True):
            parameter.grad = grad
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.loader.load_state_dict(state["data"])
        if with_rng:
            torch.set_rng_state(state["rng"])


def trained_on(plain, saves, with_rng=True):
    """The losses of the rest of three epochs after each of several saves."""
    results = []
    for text in saves:
        trainer = Trainer(plain)
        trainer.load(text, with_rng)
        results.append(list(trainer.losses(3)))
    return results


def accumulated(plain, at):
    """All losses of three epochs, and saves after ``at`` batches."""
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(plain)
        saves, losses = [], []
        for loss in trainer.losses(3):
            losses.append(loss)
            if len(losses) in at:
                saves.append(trainer.save())
    return losses, saves


def test_w38_saves_anywhere_in_an_accumulation_window_give_equal_losses(fresh, crew):
    plain = recipe(21, 3, **crew)
    at = range(1, 22) if crew["num_workers"] == 0 else (2, 7, 8, 15)  # starting workers takes its time
    losses, saves = accumulated(plain, at)
    assert len(losses) == 21
    assert fresh(trained_on, plain=plain, saves=saves) == [losses[k:] for k in at]


def test_w38_control_a_save_without_the_rng_fails(fresh):
    plain = recipe(21, 3)
    losses, saves = accumulated(plain, [8])
    (without,) = fresh(trained_on, plain=plain, saves=saves, with_rng=False)
    assert len(without) == len(losses[8:])
    assert without != losses[8:]


# ── the interpreter itself ───────────────────────────────────────────────────────────────────────────


def draws_and_pid():
    return [torch.rand(1).item(), os.getpid()]


def breaks():
    raise OSError("on purpose")


def test_a_fresh_interpreter_has_other_streams_each_time_and_reports_errors(fresh):
    first, second = fresh(draws_and_pid), fresh(draws_and_pid)
    assert first[0] != second[0]
    assert first[1] == second[1] != os.getpid()
    with pytest.raises(CallFailedError, match="OSError: on purpose"):
        fresh(breaks)
    assert fresh(draws_and_pid)[1] == first[1]


@pytest.mark.nightly
@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_newborn_interpreter_resumes_as_a_used_one(newborn, crew, epoch):
    plain = recipe(20, 2, data="augmented", **crew)
    whole = uninterrupted(plain, epoch + 2)
    loader = build(plain)
    run_to(loader, epoch, 3)
    assert newborn(resumed, plain=plain, state=loader.state_dict(), count=2) == [
        whole[epoch][3:],
        whole[epoch + 1],
    ]


def test_the_sampler_of_a_recipe_is_the_one_it_names():
    assert sampler(range(4), {"random": 1}).generator.initial_seed() == 1
    assert sampler(range(4), {"distributed": {"num_replicas": 2, "rank": 1}}).rank == 1
