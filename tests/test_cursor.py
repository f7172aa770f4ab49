"""The loader against a model of the pass table, driven by random calls."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from support_law import make, position, through_json

from resumable_data import StaleIteratorError, StateMismatchError
from resumable_data.cursor import HISTORY, Cursor, Place, Standing
from resumable_data.plan import Plan

B = 3
EPOCHS = range(4)
TRUTH = {}


def truth(epoch, batch):
    """The batch that stands there, computed once by a loader that does nothing else."""
    if not TRUTH:
        loader = make(n=6)
        for e in range(40):
            for k, delivered in enumerate(loader):
                TRUTH[e, k] = delivered
    return TRUTH[epoch, batch]


class Model:
    """The table in the words of its rows: where it stands, and what the next iter() does."""

    def __init__(self):
        self.epoch = 0
        self.batch = 0
        self.begun = False  # a pass has delivered from this epoch on this object
        self.moved = False  # a loaded or sought position that no pass has delivered from
        self.resumed = False
        self.consumed = 0
        self.running = None  # the iterator that may still deliver
        self.again = False  # set_epoch(e) was called while e's own pass had begun
        self.ever_in = None  # the epoch of the running pass
        self.past = []  # the places before each delivery since the last move

    def go(self, epoch, batch=0, *, moved=False, resumed=False):
        self.epoch, self.batch, self.begun = epoch, batch, False
        self.moved, self.resumed, self.again = moved, resumed, False
        self.running = None

    def close(self):
        self.go(self.epoch if self.again else self.epoch + 1)

    def iterate(self, name):
        """Whether batches are left out without having said so."""
        left = self.begun and self.batch < B and not self.again
        if self.begun:
            self.close()
        self.running = name
        return left

    def take(self):
        """The batch to come, or None where the pass is over."""
        if self.batch == B:
            self.close()
            return None
        self.past.append((self.epoch, self.batch, self.consumed))
        self.batch += 1
        self.consumed += 2
        self.begun, self.moved = True, False
        return self.epoch, self.batch - 1

    def set_epoch(self, epoch):
        if self.moved:
            if epoch == self.epoch:
                return
            if epoch == self.epoch + 1 and self.batch == B:
                self.move(epoch)
                return
            raise StateMismatchError("", fields={})
        if self.running is not None and epoch == self.epoch:
            self.again = self.begun
        elif epoch != self.epoch:
            self.move(epoch)

    def move(self, epoch, batch=0, **flags):
        self.go(epoch, batch, **flags)
        self.past = []

    def leave(self):
        """The epoch is closed on purpose, not by a pass."""
        self.close()
        self.past = []

    def end_epoch(self):
        if self.batch:
            self.leave()


class PassTable(RuleBasedStateMachine):
    passes = Bundle("passes")
    states = Bundle("states")

    def __init__(self):
        super().__init__()
        self.loader = make(n=6)
        self.model = Model()
        self.exhausted = set()
        self.warned = False
        self.names = 0
        self.newest = None
        self.killed = 0  # iterators up to this name

    @rule(target=passes, steps=st.integers(0, B + 1))
    def begin(self, steps):
        self.names += 1
        left = self.model.iterate(self.names)
        if left and not self.warned:
            self.warned = True
            with pytest.warns(UserWarning, match="left out"):
                self.newest = self.names, iter(self.loader)
        else:
            self.newest = self.names, iter(self.loader)
        for _ in range(steps):
            self.take_one(*self.newest)
        return self.newest

    @precondition(lambda self: self.newest is not None)
    @rule(steps=st.integers(1, B + 1))
    def take_several(self, steps):
        for _ in range(steps):
            self.take_one(*self.newest)

    @rule(held=passes)
    def take(self, held):
        self.take_one(*held)

    def take_one(self, name, iterator):
        if name <= self.killed:
            return  # it belonged to another process
        if name in self.exhausted:
            assert next(iterator, None) is None
        elif name != self.model.running:
            with pytest.raises(StaleIteratorError):
                next(iterator)
        else:
            place = self.model.take()
            if place is None:
                self.exhausted.add(name)
                assert next(iterator, None) is None
            else:
                assert next(iterator) == truth(*place)

    @rule(held=consumes(passes))
    def let_go(self, held):
        if held == self.newest:
            self.newest = None

    @rule(target=states)
    def save(self):
        return through_json(self.loader.state_dict())

    @rule(state=states)
    def load(self, state):
        self.loader.load_state_dict(state)
        assert self.loader.state_dict() == state
        self.model.move(state["epoch"], state["batch_in_epoch"], moved=True, resumed=True)
        self.model.consumed = state["consumed_samples"]

    @rule(state=states)
    def kill_and_start_again(self, state):
        self.loader = make(n=6)
        self.model = Model()
        self.warned = False
        self.newest = None
        self.killed = self.names
        self.load(state)

    @rule(epoch=st.sampled_from(EPOCHS), batch=st.integers(0, B))
    def seek(self, epoch, batch):
        self.loader.seek(epoch, batch)
        self.model.move(epoch, batch, moved=True)

    @rule(epoch=st.sampled_from(EPOCHS))
    def set_epoch(self, epoch):
        try:
            self.model.set_epoch(epoch)
        except StateMismatchError:
            with pytest.raises(StateMismatchError):
                self.loader.set_epoch(epoch)
        else:
            self.loader.set_epoch(epoch)

    @rule()
    def set_epoch_as_it_is(self):
        self.set_epoch(self.model.epoch)

    @rule()
    def end_epoch(self):
        self.model.end_epoch()
        self.loader.end_epoch()

    @rule(more=st.integers(0, 2), steps=st.integers(0, B + 1))
    def train_with_epochs(self, more, steps):
        if self.model.begun:  # epochs() closes what an earlier loop left; said once where batches remain
            if self.model.batch < B and not self.warned:
                self.warned = True
                warned = pytest.warns(UserWarning, match="left out")
            else:
                warned = warnings.catch_warnings()
            self.model.leave()
        else:
            warned = warnings.catch_warnings()
        stop = self.model.epoch + more
        with warned:
            run = iter(self.loader.epochs(stop))
            first = next(run, None)
        while first is not None:
            assert first == self.model.epoch
            self.names += 1
            self.model.iterate(self.names)
            iterator = iter(self.loader)
            over = False
            for _ in range(steps):
                place = self.model.take()
                over = place is None
                assert next(iterator, None) == (None if over else truth(*place))
                if over:
                    break
            if not over:
                self.model.leave()
            first = next(run, None)
        assert self.model.epoch == stop

    @rule(target=states, back=st.integers(1, 8))
    def save_as_of_some_batches_ago(self, back):
        past = self.model.past
        if back > len(past):
            with pytest.raises(ValueError, match=rf"in \[0, {len(past)}\]"):
                self.loader.state_dict(in_flight=back)
            return multiple()
        state = through_json(self.loader.state_dict(in_flight=back))
        assert (state["epoch"], state["batch_in_epoch"], state["consumed_samples"]) == past[-back]
        return state

    @precondition(lambda self: self.model.batch < B)
    @rule()
    def peek(self):
        assert self.loader.peek() == truth(self.model.epoch, self.model.batch)

    @rule(epoch=st.sampled_from(EPOCHS), batch=st.integers(0, B - 1))
    def batch_at(self, epoch, batch):
        assert self.loader.batch_at(epoch, batch) == truth(epoch, batch)

    @invariant()
    def stands_where_the_table_says(self):
        loader, model = self.loader, self.model
        assert position(loader) == (model.epoch, model.batch)
        assert loader.samples_in_epoch == 2 * model.batch
        assert loader.batches_remaining == B - model.batch
        assert loader.consumed_samples == model.consumed
        assert loader.resumed == model.resumed
        state = loader.state_dict()
        assert (state["epoch"], state["batch_in_epoch"]) == (model.epoch, model.batch)
        assert state["samples_in_epoch"] == 2 * model.batch


PassTable.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestPassTable = PassTable.TestCase


# -- the cursor by itself -----------------------------------------------------------------------


class Marked:
    """An epoch of ten positions by default, with a mark at every batch."""

    def __init__(self, epoch=0, *, n=10, batch_size=2, num_replicas=2, start=(0, 0), known=True):
        self.plan = Plan(n, batch_size, num_replicas, 0, False, start=start)
        self.epoch = epoch
        self.known = known

    @property
    def batches(self):
        return self.plan.batches if self.known else None

    def samples_at(self, batch):
        return self.plan.samples_at(batch) if self.known else None

    def mark_at(self, batch):
        return self.epoch, batch


def cursor(left=lambda: None, **options):
    return Cursor(lambda epoch: Marked(epoch, **options), left)


def many(n=10):
    """A cursor over n batches of one sample."""
    return cursor(n=n, batch_size=1, num_replicas=1)


def take(here, *numbers):
    """Deliver these batches, as a pass does."""
    for number in numbers:
        after = here.delivered(number)
        here.history.append(here.place)
        here.place = after


def test_delivered_answers_and_moves_nothing():
    here = cursor()
    here.begin()
    after = here.delivered(0)
    assert (here.place.batch, here.place.standing) == (0, Standing.READY)
    assert (after.batch, after.samples, after.consumed, after.standing) == (1, 4, 4, Standing.OPEN)
    assert (after.ahead, after.mark, after.start) == ((), (0, 1), (0, 0))


def test_padding_is_not_counted_as_consumed():
    here = cursor()
    here.begin()
    take(here, *range(here.deal.batches))
    assert here.deal.batches == 3
    assert here.place.consumed == here.place.samples == 10


def test_what_is_not_known_stays_unknown():
    here = cursor(known=False)
    here.begin()
    take(here, 0, 1)
    assert (here.place.batch, here.place.samples, here.place.consumed) == (2, None, None)
    assert not here.unfinished
    assert not here.at_end
    assert here.begin().left is None, "whether batches are left is unknown too"


def test_leaving_an_epoch_is_announced_before_the_position_moves():
    seen = []
    here = cursor(lambda: seen.append(here.place.epoch), n=4)
    here.begin()
    take(here, 0)
    here.exhaust()
    here.seek(5, 1, Marked(5))
    here.seek(5, 0, Marked(5))
    here.close_epoch()
    here.set_epoch(9)
    assert seen == [0, 1, 5, 6]
    assert here.place.epoch == 9


def loaded(here, epoch=1, batch=0, *, deal=None, ahead=(), start=(0, 0), skipped=()):
    """Continue from a saved position."""
    deal = Marked(epoch) if deal is None else deal
    samples = deal.samples_at(batch - len(ahead))
    here.load(Place(epoch, batch, samples, 7, Standing.PENDING, ahead, None, start), deal, skipped)


def test_every_begin_load_and_seek_makes_the_passes_before_stale():
    here = cursor()
    serials = []
    for step in (lambda: None, lambda: here.seek(0, 1, Marked()), lambda: loaded(here)):
        step()
        serials.append(here.begin().serial)
        here.check(serials[-1])
        for older in serials[:-1]:
            with pytest.raises(StaleIteratorError) as caught:
                here.check(older)
            assert caught.value.found == older
    assert len(set(serials)) == 3


def test_a_failed_pass_stands_at_the_failed_batch():
    here = cursor()
    serial = here.begin().serial
    take(here, 0)
    here.fail()
    with pytest.raises(StaleIteratorError):
        here.check(serial)
    assert here.begin().left is None
    assert here.place[:2] == (0, 1)


def test_the_mark_of_an_opened_epoch_is_the_prefixs():
    here = cursor()
    loaded(here, 1, 3, ahead=(2, 4))
    assert here.place.mark is None
    here.opened()
    assert here.place.mark == (1, 1)
    assert here.place.batch == 3


# -- batches that overtake each other -----------------------------------------------------------


@given(order=st.permutations(range(8)), replicas=st.integers(1, 3), batch_size=st.integers(1, 3))
def test_the_position_names_what_came_ahead_and_counts_everything_that_came(order, replicas, batch_size):
    # the last batch is one sample short where that leaves a batch at all
    short = min(1, replicas * batch_size - 1)
    here = cursor(n=8 * replicas * batch_size - short, batch_size=batch_size, num_replicas=replicas)
    assert here.deal.batches == 8
    here.begin()
    for count, number in enumerate(order, start=1):
        take(here, number)
        came = set(order[:count])
        prefix = next(k for k in range(9) if k not in came)
        place = here.place
        assert (place.batch, place.prefix) == (count, prefix)
        assert place.ahead == tuple(sorted(k for k in came if k > prefix))
        assert place.samples == here.deal.samples_at(prefix)
        assert place.mark == (0, prefix)
        assert place.consumed == sum(here.deal.samples_at(k + 1) - here.deal.samples_at(k) for k in came)
    assert here.at_end
    assert (here.place.ahead, here.place.consumed) == ((), here.deal.plan.length)


def test_a_loaded_gap_is_filled():
    here = cursor(batch_size=1, num_replicas=1)
    loaded(here, 1, 4, deal=Marked(1, batch_size=1, num_replicas=1), ahead=(3, 5))
    here.begin()
    take(here, 2)
    assert (here.place.batch, here.place.prefix, here.place.ahead) == (5, 4, (5,))
    take(here, 4)
    assert (here.place.batch, here.place.prefix, here.place.ahead) == (6, 6, ())
    assert here.place.consumed == 9


def test_another_topologys_start_stays_with_the_epoch_and_ends_with_it():
    here = cursor()
    loaded(here, 1, 2, deal=Marked(1, start=(5, 2)), start=(5, 2))
    here.begin()
    take(here, 2)
    assert (here.place.samples, here.place.start) == (9, (5, 2))
    here.seek(1, 2, here.deal)
    assert (here.place.samples, here.place.start) == (5, (5, 2))
    here.begin()
    take(here, 2, 3)
    here.exhaust()
    assert (here.place.epoch, here.place.start, here.deal.plan.start) == (2, (0, 0), (0, 0))


def test_seeking_to_the_start_gives_the_other_topology_up():
    here = cursor()
    loaded(here, 1, 2, deal=Marked(1, start=(5, 2)), start=(5, 2))
    here.seek(1, 0, Marked(1))
    assert here.place.start == (0, 0)


# -- what was passed over -----------------------------------------------------------------------


def sought(*steps):
    """The record after these seeks, from a cursor over epochs of ten batches."""
    here = many()
    for epoch, batch in steps:
        here.seek(epoch, batch, Marked(epoch, n=10, batch_size=1, num_replicas=1))
    return here.skipped


def test_forward_seeks_are_recorded():
    assert sought((0, 3)) == (0, 0, 3)
    assert sought((0, 3), (0, 5)) == (0, 0, 3, 0, 3, 5)
    assert sought((2, 4)) == (2, 0, 4)
    assert sought((0, 3), (2, 4)) == (0, 0, 3, 0, 3, 10, 2, 0, 4)
    assert sought((0, 10), (1, 0)) == (0, 0, 10), "nothing is passed over from an epoch's end"


def test_what_comes_again_is_taken_off_the_record():
    assert sought((0, 5), (0, 2)) == (0, 0, 2)
    assert sought((0, 5), (0, 0)) == ()
    assert sought((2, 4), (1, 6)) == (), "only what a forward seek passes over is recorded"
    assert sought((0, 3), (2, 4), (0, 7)) == (0, 0, 3, 0, 3, 7)


def begun(*numbers):
    here = many()
    here.begin()
    take(here, *numbers)
    return here


@pytest.mark.parametrize(
    ("batch", "passed"),
    [
        (0, ()),
        (1, ()),
        (2, (0, 1, 2)),
        (4, (0, 1, 2, 0, 3, 4)),
        (6, (0, 1, 2, 0, 3, 5)),
        (9, (0, 1, 2, 0, 3, 5, 0, 7, 9)),
    ],
)
def test_seeking_over_gaps_records_the_gaps_alone(batch, passed):
    here = begun(0, 2, 5, 6)
    here.seek(0, batch, here.deal)
    assert here.skipped == passed
    assert (here.place.batch, here.place.ahead) == (batch, ())


def test_leaving_an_epoch_with_gaps_by_a_seek_records_the_gaps_alone():
    here = begun(0, 2, 5, 6)
    here.seek(1, 0, Marked(1, n=10, batch_size=1, num_replicas=1))
    assert here.skipped == (0, 1, 2, 0, 3, 5, 0, 7, 10)


# -- so many batches ago ------------------------------------------------------------------------


def test_every_position_that_was_passed_is_remembered_across_an_epochs_end():
    here = many(3)
    passed = []
    for _ in range(2):
        here.begin()
        for number in range(3):
            passed.append(here.place)
            take(here, number)
        here.exhaust()
    assert here.ago(0) == here.place
    assert [here.ago(back) for back in range(1, 7)] == passed[::-1]
    with pytest.raises(ValueError, match=r"in \[0, 6\].*found 7"):
        here.ago(7)


def test_gaps_are_remembered_as_they_were():
    here = begun(2, 0, 3)
    assert [here.ago(back)[1:2] + here.ago(back)[5:6] for back in range(4)] == [
        (3, (2, 3)),
        (2, (2,)),
        (1, (2,)),
        (0, ()),
    ]


@pytest.mark.parametrize(
    "move",
    [
        lambda here: here.seek(0, 1, Marked()),
        lambda here: loaded(here),
        lambda here: here.set_epoch(4),
        lambda here: here.close_epoch(),
    ],
    ids=["seek", "load", "set_epoch", "close_epoch"],
)
def test_what_was_before_a_move_is_not_so_many_batches_ago(move):
    here = begun(0, 1)
    assert here.ago(2).batch == 0
    move(here)
    assert here.ago(0) == here.place
    with pytest.raises(ValueError, match=r"in \[0, 0\].*found 1"):
        here.ago(1)


def test_a_batch_that_failed_and_came_after_all_counts_once():
    here = begun(0, 1)
    here.history.append(here.place)  # noted, and then its delivery failed
    here.fail()
    assert [here.ago(back).batch for back in range(3)] == [2, 1, 0]
    here.begin()
    take(here, 2)
    assert [here.ago(back).batch for back in range(4)] == [3, 2, 1, 0]


def test_an_epoch_that_is_begun_again_counts_its_batches_twice():
    here = begun(0)
    here.set_epoch(0)
    here.begin()
    assert here.place[:2] == (0, 0)
    assert here.ago(1).consumed == 0
    take(here, 0, 1)
    assert [here.ago(back).consumed for back in range(4)] == [3, 2, 1, 0]


def test_no_more_than_the_latest_are_remembered():
    here = many(HISTORY + 10)
    here.begin()
    take(here, *range(HISTORY + 5))
    assert here.ago(HISTORY).batch == 5
    with pytest.raises(ValueError, match="remembered"):
        here.ago(HISTORY + 1)
