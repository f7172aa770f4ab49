"""The loader against a model of the pass table, driven by random calls."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from support_law import make, position, through_json

from resumable_data import StaleIteratorError, StateMismatchError
from resumable_data.cursor import Cursor, Standing
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
        self.batch += 1
        self.consumed += 2
        self.begun, self.moved = True, False
        return self.epoch, self.batch - 1

    def set_epoch(self, epoch):
        if self.moved:
            if epoch == self.epoch:
                return
            if epoch == self.epoch + 1 and self.batch == B:
                self.go(epoch)
                return
            raise StateMismatchError("", fields={})
        if self.running is not None and epoch == self.epoch:
            self.again = self.begun
        elif epoch != self.epoch:
            self.go(epoch)

    def end_epoch(self):
        if self.batch:
            self.close()


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
        self.model.go(state["epoch"], state["batch_in_epoch"], moved=True, resumed=True)
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
        self.model.go(epoch, batch, moved=True)

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
            self.model.close()
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
                self.model.close()
            first = next(run, None)
        assert self.model.epoch == stop

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


def cursor(left=None):
    plan = Plan(length=10, real=10, batch_size=2, num_replicas=2, rank=0, drop_last=False)
    return Cursor(plan, left.append if callable(left) else (lambda: None))


def test_delivered_answers_and_moves_nothing():
    here = cursor()
    here.begin()
    after = here.delivered()
    assert (here.place.batch, here.place.standing) == (0, Standing.READY)
    assert (after.batch, after.consumed, after.standing) == (1, 4, Standing.OPEN)


def test_padding_is_not_counted_as_consumed():
    here = cursor()
    here.begin()
    for _ in range(here.plan.batches):
        here.place = here.delivered()
    assert here.plan.batches == 3
    assert here.place.consumed == 10


def test_leaving_an_epoch_is_announced_before_the_position_moves():
    plan = Plan(length=4, real=4, batch_size=2, num_replicas=1, rank=0, drop_last=False)
    seen = []
    here = Cursor(plan, lambda: seen.append(here.place.epoch))
    here.begin()
    here.place = here.delivered()
    here.exhaust()
    here.seek(5, 1)
    here.seek(5, 0)
    here.close_epoch()
    here.set_epoch(9)
    assert seen == [0, 1, 5, 6]
    assert here.place.epoch == 9


def test_every_begin_load_and_seek_makes_the_passes_before_stale():
    here = cursor()
    serials = []
    for step in (lambda: None, lambda: here.seek(0, 1), lambda: here.load(1, 0, 0, ())):
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
    here.place = here.delivered()
    here.fail()
    with pytest.raises(StaleIteratorError):
        here.check(serial)
    assert here.begin().left is None
    assert here.place[:2] == (0, 1)
