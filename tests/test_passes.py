"""The pass table, row by row: what each call makes of the position, with and without workers."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
from functools import lru_cache, partial
from itertools import count, islice

import numpy as np
import pytest
import torch
from support_law import Noted, error_from, global_streams, make, noted, position, through_json, whole_epochs

from resumable_data import ResumableLoader, StaleIteratorError, StateMismatchError

MODES = {
    "workers 0": {},
    "workers 2": {"num_workers": 2},
    "workers 2, persistent": {"num_workers": 2, "persistent_workers": True},
}
#: Batches of an epoch of ``make()``.
B = 5
LEFT_OUT = "left out"

ROWS = []


def row(text):
    """Register a function as the test of one row of the table, in every mode."""

    def add(function):
        ROWS.append(pytest.param(function, id=text))
        return function

    return add


@lru_cache(maxsize=1)
def truth():
    """EPOCHS[e][k]: the batch that an uninterrupted run delivers there."""
    return whole_epochs(6)


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def new(request):
    """Makes the loader of this mode."""
    return lambda **options: make(**{**request.param, **options})


@pytest.mark.parametrize("check", ROWS)
def test_the_pass_table(check, new):
    check(new)


def state_at(epoch, batch):
    """The state of a run that was killed there; at (e, B) before it asked for one more."""
    loader = make()
    for _ in range(epoch):
        list(loader)
    taken = list(islice(loader, batch))
    assert len(taken) == batch
    assert position(loader) == (epoch, batch)
    return through_json(loader.state_dict())


def loaded(new, epoch, batch, **options):
    loader = new(**options)
    loader.load_state_dict(state_at(epoch, batch))
    assert position(loader) == (epoch, batch)
    return loader


def broken_off(new, batch):
    """A loader whose caller broke out of epoch 0 after so many batches."""
    loader = new()
    for number, _ in enumerate(loader, 1):
        if number == batch:
            break
    return loader


@row("fresh loader: position (0, 0)")
def _(new):
    loader = new()
    assert position(loader) == (0, 0)
    assert (loader.samples_in_epoch, loader.consumed_samples, loader.batches_remaining) == (0, 0, B)
    assert not loader.resumed


@row("iter() the first time continues from the position")
def _(new):
    assert list(new()) == truth()[0]


@row("iter() the first time after load_state_dict continues from the position")
def _(new):
    for place in [(0, 0), (0, 1), (1, 4), (2, 2)]:
        loader = loaded(new, *place)
        assert loader.resumed
        assert list(loader) == truth()[place[0]][place[1] :]
        assert not loader.resumed
        assert list(loader) == truth()[place[0] + 1]


@row("iter() the first time after seek continues from the position")
def _(new):
    loader = new()
    for place in [(0, 3), (4, 1), (0, 0), (2, 4)]:
        loader.seek(*place)
        assert position(loader) == place
        assert list(loader) == truth()[place[0]][place[1] :]
        assert not loader.resumed


@row("the pass hands over its batch k: position (e, k+1) from that moment")
def _(new):
    loader = new(prefetch_factor=4) if new().num_workers else new()
    for epoch in range(2):
        for k, batch in enumerate(loader):
            assert batch == truth()[epoch][k]
            assert position(loader) == (epoch, k + 1)
            assert loader.samples_in_epoch == 2 * (k + 1)
            assert loader.consumed_samples == 10 * epoch + 2 * (k + 1)
            assert loader.batches_remaining == B - k - 1
            assert loader.state_dict()["batch_in_epoch"] == k + 1


@row("one more asked for after the last batch: StopIteration, position (e+1, 0)")
def _(new):
    loader = new()
    iterator = iter(loader)
    for _ in range(B):
        next(iterator)
    assert position(loader) == (0, B)
    with pytest.raises(StopIteration):
        next(iterator)
    assert position(loader) == (1, 0)


@row("state taken at (e, B), loaded: the next pass yields nothing and closes the epoch")
def _(new):
    loader = loaded(new, 1, B)
    assert loader.batches_remaining == 0
    assert list(loader) == []
    assert position(loader) == (2, 0)
    assert list(loader) == truth()[2]


@row("iter() after an iter() that delivered nothing: the same position again")
def _(new):
    loader = new()
    iter(loader)
    iter(loader)
    assert position(loader) == (0, 0)
    assert list(loader) == truth()[0]
    loader = loaded(new, 1, 3)
    for _ in range(3):
        held = iter(loader)
        assert position(loader) == (1, 3)
        assert loader.resumed
    assert list(held) == truth()[1][3:]


@row("iter() at (e, B) on the object that delivered them: a whole pass of epoch e+1, no warning")
def _(new):
    loader = new()
    for epoch in range(3):
        assert list(islice(loader, B)) == truth()[epoch]
        assert position(loader) == (epoch, B)


@row("break, then state_dict(): (e, k), a loaded copy continues at k")
def _(new):
    loader = broken_off(new, 3)
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["batch_in_epoch"]) == (0, 3)
    copy = new()
    copy.load_state_dict(state)
    assert list(copy) == truth()[0][3:]
    assert list(copy) == truth()[1]


@row("break, then iter() on the same object: (e+1, 0) and one warning a loader")
def _(new):
    loader = broken_off(new, 3)
    with pytest.warns(UserWarning, match=LEFT_OUT) as caught:
        iterator = iter(loader)
    (warning,) = caught
    assert warning.filename == __file__
    for part in ("epoch 0", "batch 3 of 5", "batches_per_epoch", "enumerate", "peek", "seek"):
        assert part in str(warning.message)
    assert position(loader) == (1, 0)
    assert list(iterator) == truth()[1]
    # the second time it is said no more
    assert list(islice(loader, 1)) == truth()[2][:1]
    assert list(loader) == truth()[3]


@row("end_epoch(): (e+1, 0), said on purpose, no warning")
def _(new):
    loader = broken_off(new, 3)
    loader.end_epoch()
    assert position(loader) == (1, 0)
    loader.end_epoch()  # nothing of epoch 1 was delivered: there is nothing to leave
    assert position(loader) == (1, 0)
    assert list(loader) == truth()[1]
    loader.end_epoch()  # nor here, after a completed pass
    assert position(loader) == (2, 0)
    iterator = iter(loader)
    next(iterator)
    loader.end_epoch()
    with pytest.raises(StaleIteratorError):
        next(iterator)
    loader = loaded(new, 1, B)
    loader.end_epoch()
    assert position(loader) == (2, 0)
    assert list(loader) == truth()[2]


@row("set_epoch(e), a loaded or sought position stands in epoch e: nothing changes")
def _(new):
    for moved in (loaded(new, 1, 3), sought(new, 1, 3)):
        moved.set_epoch(1)
        moved.set_epoch(1)
        assert position(moved) == (1, 3)
        assert list(moved) == truth()[1][3:]


def sought(new, epoch, batch):
    loader = new()
    loader.seek(epoch, batch)
    return loader


@row("set_epoch(e+1), a loaded or sought position stands at (e, B): (e+1, 0)")
def _(new):
    for moved in (loaded(new, 1, B), sought(new, 1, B)):
        moved.set_epoch(2)
        assert position(moved) == (2, 0)
        assert list(moved) == truth()[2]


@row("set_epoch(other), a loaded or sought position is pending: StateMismatchError")
def _(new):
    for moved in (loaded(new, 1, 3), sought(new, 1, 3)):
        for other in (0, 2, 7):
            message, fields = error_from(StateMismatchError, partial(moved.set_epoch, other))
            assert f"set_epoch({other})" in message
            assert f"seek({other}, 0)" in message
            assert fields == {"epoch": (1, other)}
            assert position(moved) == (1, 3)
        assert list(moved) == truth()[1][3:]
    moved = loaded(new, 1, 3)
    moved.seek(4, 0)
    moved.set_epoch(4)
    assert list(moved) == truth()[4]


@row("set_epoch(other) otherwise: (other, 0), a live iterator goes stale")
def _(new):
    loader = new()
    loader.set_epoch(3)
    assert position(loader) == (3, 0)
    iterator = iter(loader)
    assert next(iterator) == truth()[3][0]
    loader.set_epoch(1)
    assert position(loader) == (1, 0)
    with pytest.raises(StaleIteratorError):
        next(iterator)
    assert list(loader) == truth()[1]
    loader.set_epoch(1)  # also back to an epoch that is over
    assert list(loader) == truth()[1]


@row("iter(), then set_epoch(other) before the first batch: that iterator is stale, the epoch is the new one")
def _(new):
    loader = new()
    iterator = iter(loader)
    loader.set_epoch(3)
    with pytest.raises(StaleIteratorError):
        list(iterator)
    assert list(loader) == truth()[3]


@row("set_epoch(e) of the pass's own epoch leaves that pass alone; the next iter() begins (e, 0)")
def _(new):
    loader = new()
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    loader.set_epoch(0)
    assert position(loader) == (0, 2)
    assert first + list(iterator) == truth()[0]
    assert list(loader) == truth()[0]
    assert list(loader) == truth()[1]
    # before its first batch the pass is that next iter() itself
    iterator = iter(loader)
    loader.set_epoch(2)
    assert list(iterator) == truth()[2]
    assert list(loader) == truth()[3]


@row("break, then set_epoch(e) and iter(): the epoch again from its start, no warning")
def _(new):
    loader = broken_off(new, 2)
    loader.set_epoch(0)
    assert list(loader) == truth()[0]


@row("epochs(stop): yields the epochs still to do, the current one first")
def _(new):
    loader = new()
    seen = [(epoch, list(loader)) for epoch in loader.epochs(3)]
    assert seen == [(epoch, truth()[epoch]) for epoch in range(3)]
    assert list(loader.epochs(3)) == []
    loader = loaded(new, 1, 3)
    seen = [(epoch, list(loader)) for epoch in loader.epochs(3)]
    assert seen == [(1, truth()[1][3:]), (2, truth()[2])]
    loader = loaded(new, 1, B)
    assert [(epoch, len(list(loader))) for epoch in loader.epochs(3)] == [(1, 0), (2, B)]


@row("epochs(stop): a body that did not finish the epoch ends it, no warning")
def _(new):
    loader = new()
    seen = []
    for epoch in loader.epochs(3):
        for batch in loader:
            seen.append((epoch, batch))
            if loader.batch_in_epoch == 2:
                break
    assert seen == [(epoch, batch) for epoch in range(3) for batch in truth()[epoch][:2]]
    assert position(loader) == (3, 0)
    # a body that never iterates ends it too; leaving the outer loop does not
    loader = new()
    assert list(loader.epochs(2)) == [0, 1]
    for _ in loader.epochs(4):
        next(iter(loader))
        break
    assert position(loader) == (2, 1)


@row("epochs(stop): a load or seek inside the body is respected")
def _(new):
    loader = new()
    seen = []
    for epoch in loader.epochs(2):
        seen.append(epoch)
        batches = list(loader)
        if len(seen) == 1:
            loader.seek(0, 4)
        elif len(seen) == 2:
            assert batches == truth()[0][4:]
            loader.load_state_dict(state_at(1, 1))
        else:
            assert batches == truth()[1][1:]
    assert seen == [0, 0, 1]


@row("a second iter() while a pass is live: the older one is stale, nothing of it leaks")
def _(new):
    loader = new()
    older = iter(loader)
    assert next(older) == truth()[0][0]
    with pytest.warns(UserWarning, match=LEFT_OUT):
        newer = iter(loader)
    for _ in range(2):
        with pytest.raises(StaleIteratorError, match="newest iterator"):
            next(older)
    assert list(newer) == truth()[1]
    with pytest.raises(StaleIteratorError):
        next(older)
    for epoch in range(2, 5):
        assert next(iter(loader)) == truth()[epoch][0]
    assert list(loader) == truth()[5]


@row("load_state_dict or seek while a pass is live: the iterator goes stale, the next pass stands there")
def _(new):
    for move in (
        lambda loader: loader.load_state_dict(state_at(2, 1)),
        lambda loader: loader.seek(2, 1),
    ):
        loader = new()
        iterator = iter(loader)
        next(iterator)
        move(loader)
        assert position(loader) == (2, 1)
        with pytest.raises(StaleIteratorError):
            next(iterator)
        newer = iter(loader)
        assert next(newer) == truth()[2][1]
        assert position(loader) == (2, 2)
        assert list(newer) == truth()[2][2:]


@row("state_dict(), len(), peek(), batch_at(), check_state_dict() at any time: no side effect")
def _(new):
    loader = new()
    other = state_at(2, 2)

    def look():
        before = loader.state_dict()
        for _ in range(3):
            assert len(loader) == B
            if loader.batches_remaining:
                assert loader.peek() == truth()[loader.epoch][loader.batch_in_epoch]
            assert loader.batch_at(0, 1) == truth()[0][1]
            assert loader.batch_at(3, 4) == truth()[3][4]
            loader.check_state_dict(other)
            assert loader.state_dict() == before
            assert loader.state_dict() is not before

    seen = []
    look()
    for _ in range(2):
        for batch in loader:
            seen.append(batch)
            look()
        look()
    assert seen == truth()[0] + truth()[1]


@row("load then state_dict is the identity, at every moment")
def _(new):
    for place in [(0, 0), (0, 2), (0, B), (1, 0), (1, 1)]:
        state = state_at(*place)
        loader = new()
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iter(loader)
        assert loader.state_dict() == state


@row("resume, then later epochs: full length")
def _(new):
    loader = loaded(new, 1, 2)
    assert [list(loader) for _ in range(4)] == [truth()[1][2:], *truth()[2:5]]


class Failing(Noted):
    """Raises wherever ``fail`` holds the index; a file, so that workers see it change."""

    def __init__(self, n, index, flag):
        super().__init__(n)
        self.index = index
        self.flag = flag

    def __getitem__(self, index):
        if index == self.index and self.flag.exists():
            raise ArithmeticError(f"cannot read item {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_dataset_that_raises_leaves_the_position_and_the_next_pass_begins_at_that_batch(
    options, at, tmp_path
):
    flag = tmp_path / "broken"
    flag.touch()
    bad = truth()[0][at][0][1][0]
    loader = ResumableLoader(Failing(10, bad, flag), 2, shuffle=True, seed=7, collate_fn=noted, **options)
    iterator = iter(loader)
    assert list(islice(iterator, at)) == truth()[0][:at]
    for _ in range(2):
        message, _ = error_from(ArithmeticError, iterator.__next__)
        assert f"cannot read item {bad}" in message
        if options:
            assert "Traceback" in message
            assert "__getitem__" in message
        assert position(loader) == (0, at)
        with pytest.raises(StaleIteratorError):
            next(iterator)
        iterator = iter(loader)
    flag.unlink()
    loader.set_epoch(0)  # an old loop says it every epoch: no change here
    assert list(loader) == truth()[0][at:]
    assert list(loader) == truth()[1]


@row("an exhausted iterator asked again: StopIteration, however late")
def _(new):
    loader = new()
    iterator = iter(loader)
    assert list(iterator) == truth()[0]
    assert list(iterator) == []
    second = iter(loader)
    next(second)
    assert list(iterator) == []
    loader.seek(0, 1)
    assert next(iterator, "nothing") == "nothing"
    assert position(loader) == (0, 1)


@row("seek, batch_at, peek past the end: IndexError")
def _(new):
    loader = new()
    for call in (
        lambda: loader.seek(0, B + 1),
        lambda: loader.seek(9, 10**12),
        lambda: loader.batch_at(0, B),
        lambda: loader.batch_at(5, B + 3),
    ):
        with pytest.raises(IndexError, match="batch_in_epoch must be in"):
            call()
        assert position(loader) == (0, 0)
    loader.seek(0, B)
    with pytest.raises(IndexError, match="peek past the end: epoch 0 has 5 batches"):
        loader.peek()
    assert list(loader) == []


@row("cycle over an empty loader: ValueError")
def _(new):
    loader = new(n=3, batch_size=4, drop_last=True)
    assert len(loader) == 0
    with pytest.raises(ValueError, match="length is 0"):
        loader.cycle()


@row("cycle(): batches without end, across epochs and after a load")
def _(new):
    loader = new()
    assert list(islice(loader.cycle(), 12)) == [*truth()[0], *truth()[1], *truth()[2][:2]]
    assert position(loader) == (2, 2)
    loader = loaded(new, 1, 3)
    assert list(islice(loader.cycle(), 5)) == [*truth()[1][3:], *truth()[2][:3]]


@row("enumerate(): numbers batches from batch_in_epoch")
def _(new):
    loader = loaded(new, 1, 3)
    assert list(loader.enumerate()) == list(zip(range(3, B), truth()[1][3:], strict=True))
    assert list(loader.enumerate()) == list(zip(count(), truth()[2], strict=False))


@row("seek forward and back: what is passed over is on record until it is delivered after all")
def _(new):
    loader = new()
    iterator = iter(loader)
    next(iterator)
    loader.seek(0, 3)
    assert loader.state_dict()["skipped"] == [0, 1, 3]
    loader.seek(2, 2)
    assert loader.state_dict()["skipped"] == [0, 1, 3, 0, 3, B, 2, 0, 2]
    state = through_json(loader.state_dict())
    assert list(loader) == truth()[2][2:]
    copy = new()
    copy.load_state_dict(state)
    assert copy.state_dict() == state
    assert copy.consumed_samples == 2
    assert list(copy) == truth()[2][2:]
    copy.seek(0, 4)
    assert copy.state_dict()["skipped"] == [0, 1, 3, 0, 3, 4]
    copy.seek(0, 0)
    assert copy.state_dict()["skipped"] == []
    assert list(copy) == truth()[0]


@row("batch_at equals the batch delivered in any past epoch, augmentations included")
def _(new):
    loader = new()
    delivered = [list(loader) for _ in range(3)]
    assert delivered == truth()[:3]
    assert [[loader.batch_at(epoch, k) for k in range(B)] for epoch in range(3)] == delivered


# -- what a load says ---------------------------------------------------------------------------


def test_a_resume_at_an_epochs_end_is_warned_of_once_it_is_iterated(new, caplog):
    with caplog.at_level(logging.INFO, logger="resumable_data"):
        loader = loaded(new, 1, B)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert list(loader) == []
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert "epochs(stop)" in caplog.records[1].getMessage()
    assert "set_epoch()" in caplog.records[1].getMessage()


@pytest.mark.parametrize("way", ["epochs", "set_epoch", "cycle"])
def test_a_resume_at_an_epochs_end_needs_no_warning_where_the_loader_is_asked_for_the_epoch(way, caplog):
    loader = loaded(make, 1, B)
    if way == "epochs":
        assert [len(list(loader)) for _ in loader.epochs(3)] == [0, B]
    elif way == "set_epoch":
        loader.set_epoch(1)
        assert list(loader) == []
    else:
        assert next(loader.cycle()) == truth()[2][0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_resume_logs_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="resumable_data"):
        list(loaded(make, 1, 3))
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("epoch 1", "batch 3 of 5", "6 of 10 samples", "1 x 2 saved -> 1 x 2 now", "shuffled.v1"):
        assert part in line


# -- interruptions ------------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818  # an alarm, not a fault
    pass


class Pressed(Noted):
    """Presses ^C while the batch at hand is being fetched."""

    at = None

    def __getitem__(self, index):
        if index == self.at:
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)


@pytest.mark.parametrize("at", range(B))
def test_an_interrupt_in_the_middle_of_a_fetch_loses_nothing(at):
    dataset = Pressed(10)
    loader = ResumableLoader(dataset, 2, shuffle=True, seed=7, collate_fn=noted)
    dataset.at = truth()[0][at][0][1][0]
    streams = global_streams()
    received = []
    error_from(KeyboardInterrupt, lambda: received.extend(loader))
    assert received == truth()[0][:at]
    assert position(loader) == (0, at)
    assert global_streams() == streams
    dataset.at = None
    copy = make()
    copy.load_state_dict(through_json(loader.state_dict()))
    assert received + list(copy) == truth()[0]
    assert received + list(loader) == truth()[0]


@pytest.mark.parametrize("options", list(MODES.values())[1:], ids=list(MODES)[1:])
def test_an_interrupt_while_waiting_for_a_worker_loses_nothing(options, tmp_path):
    loader = ResumableLoader(
        Slow(10, truth()[0][2][0][0][0]), 2, shuffle=True, seed=7, collate_fn=noted, **options
    )
    iterator = iter(loader)
    received = [next(iterator), next(iterator)]
    with alarm_in(0.2):
        error_from(Stopped, iterator.__next__)
    assert position(loader) == (0, 2)
    loader.dataset.slow = None
    assert received + list(loader) == truth()[0]


class Slow(Noted):
    """Takes a second over one item."""

    def __init__(self, n, slow):
        super().__init__(n)
        self.slow = slow

    def __getitem__(self, index):
        if index == self.slow:
            signal.sigtimedwait([signal.SIGUSR1], 1)
        return super().__getitem__(index)


class alarm_in:  # noqa: N801  # a context manager that reads like a call
    """Raise ``Stopped`` after so many seconds, wherever the main thread then is."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        def stop(*_):
            raise Stopped

        self.old = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.old)


@pytest.mark.parametrize("walk", ["for", "enumerate", "cycle"])
def test_an_alarm_at_any_bytecode_finds_the_position_before_or_after_a_batch(walk):
    whole = whole_epochs(1, n=40)[0]
    moments = np.random.default_rng(20).uniform(1e-5, 2.5e-3, 250)
    stopped = 0
    for moment in moments.tolist():
        loader = make(n=40)
        iterator = {"for": loader.__iter__, "enumerate": loader.enumerate, "cycle": loader.cycle}[walk]()
        received = []
        try:
            with alarm_in(moment):
                # exactly a loop's own work: nothing between a batch's arrival and the note of it
                if walk == "enumerate":
                    for _, batch in iterator:
                        received.append(batch)
                else:
                    for batch in iterator:
                        received.append(batch)
                        if len(received) == len(whole):
                            break
        except Stopped:
            stopped += 1
        assert received == whole[: len(received)]
        assert loader.consumed_samples == 2 * len(received)
        copy = make(n=40)
        copy.load_state_dict(through_json(loader.state_dict()))
        rest = list(copy) if loader.epoch == 0 else []
        assert received + rest == whole
    assert stopped > len(moments) / 2, "the alarm must strike while the loader works"


# -- workers ------------------------------------------------------------------------------------


def test_workers_leave_with_a_pass_that_was_broken_off():
    loader = make(num_workers=2)
    for _ in loader:
        break
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("options", list(MODES.values())[1:], ids=list(MODES)[1:])
def test_workers_are_gone_once_their_pass_has_failed(options, tmp_path):
    # torch's own frames hold the iterator in a cycle: collected out of it, each worker costs five seconds
    flag = tmp_path / "broken"
    flag.touch()
    gc.collect()
    gc.disable()
    try:
        loader = ResumableLoader(Failing(10, 3, flag), 2, collate_fn=noted, seed=7, **options)
        error_from(ArithmeticError, lambda: list(loader))
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_persistent_workers_stay_for_the_next_pass():
    loader = make(num_workers=2, persistent_workers=True)
    list(loader)
    first = {child.pid for child in multiprocessing.active_children()}
    loader.seek(0, 1)
    assert list(loader) == truth()[0][1:]
    assert {child.pid for child in multiprocessing.active_children()} == first
    assert len(first) == 2


def test_a_dataset_that_changed_its_length_is_refused():
    dataset = Noted(10)
    loader = ResumableLoader(dataset, 2, shuffle=True, seed=7)
    dataset.n = 11
    message, fields = error_from(StateMismatchError, loader.__iter__)
    assert "has 11 items now and had 10" in message
    assert fields == {"dataset_size": (10, 11)}
    assert position(loader) == (0, 0)


class Ending(Noted):
    def __getitem__(self, index):
        raise StopIteration


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch(new):
    options = {name: getattr(new(), name) for name in ("num_workers", "persistent_workers")}
    loader = ResumableLoader(Ending(10), 2, seed=7, **options)
    message, _ = error_from(RuntimeError, lambda: list(loader))
    assert "StopIteration" in message
    assert position(loader) == (0, 0)


def test_an_alarm_at_any_bytecode_leaves_the_process_its_own_streams():
    threads = torch.get_num_threads()
    moments = np.random.default_rng(21).uniform(1e-5, 2.5e-3, 1000)
    moved = 0
    for moment in moments.tolist():
        loader = make(n=40)
        before = global_streams()
        try:
            with alarm_in(moment):
                for _ in loader:
                    pass
        except Stopped:
            pass
        moved += global_streams() != before or torch.get_num_threads() != threads
        torch.set_num_threads(threads)
    assert moved == 0
