"""Another number of ranks and another batch size in the middle of an epoch, generated.

With ``seeding="sample"`` a sample and its augmentations are a function of the position alone, so whatever ranks
and batch sizes a plan goes through, the ranks' batches put together must be one uninterrupted pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_law import Noted, as_is, through_json

from resumable_data import ResumableLoader, StateError
from resumable_data.plan import Plan

from .strategies import examples, tried

SEED = 7


@dataclass(frozen=True)
class Run:
    """What stays the same while the topology changes."""

    n: int
    tail: str
    drop_last: bool
    shuffle: bool
    epoch: int
    seeding: str = "sample"

    def loaders(self, width, batch_size, state=None, num_workers=0):
        """One for each rank, at the epoch's start or at a state."""
        made = [
            ResumableLoader(
                Noted(self.n),
                batch_size,
                shuffle=self.shuffle,
                seed=SEED,
                seeding=self.seeding,
                num_replicas=width,
                rank=rank,
                tail=self.tail,
                drop_last=self.drop_last,
                collate_fn=as_is,
                num_workers=num_workers,
            )
            for rank in range(width)
        ]
        for loader in made:
            if state is None:
                loader.set_epoch(self.epoch)
            else:
                loader.load_state_dict(state)
                assert loader.resumed
        return made

    def whole(self):
        """The epoch's samples in global order, from a pass that nothing interrupts."""
        loader = ResumableLoader(
            Noted(self.n), self.n, shuffle=self.shuffle, seed=SEED, seeding="sample", collate_fn=as_is
        )
        loader.set_epoch(self.epoch)
        (samples,) = loader
        return samples


def step(passes):
    """The t-th batches of all ranks as one stretch of the global order."""
    batches = [next(this, []) for this in passes]
    longest = max(map(len, batches))
    return [batch[at] for at in range(longest) for batch in batches if at < len(batch)]


def lost_at_most(run, width, batch_size):
    """Samples that the tail of an epoch may leave out under this topology; written here once more."""
    if run.drop_last:
        return width * batch_size - 1
    return width - 1 if run.tail == "drop" else 0


def leg(run, width, batch_size, steps, state, number_before, got, num_workers=0):
    """Steps of one topology; the state after them. ``steps=None`` goes to the epoch's end."""
    loaders = run.loaders(width, batch_size, state, num_workers)
    start = [min(run.n, len(got)), number_before] if number_before else [0, 0]
    if (width, batch_size) == topology(state):
        start = state["segment"]
    passes = [iter(loader) for loader in loaders]
    remaining = [loader.batches_remaining for loader in loaders]
    assert max(remaining) - min(remaining) <= (1 if run.tail == "uneven" and not run.drop_last else 0)
    count = max(remaining) if steps is None else min(steps, *remaining)
    for done in range(1, count + 1):
        got += step(passes)
        if done <= min(remaining):
            assert [loader.batches_remaining for loader in loaders] == [left - done for left in remaining]
            assert all(loader.batch_in_epoch == number_before + done for loader in loaders)
    states = [loader.state_dict() for loader in loaders]
    if steps is not None or max(remaining) == min(remaining):
        assert all(state == states[0] for state in states)
        assert states[0]["samples_in_epoch"] == states[0]["consumed_samples"] == min(run.n, len(got))
        assert states[0]["segment"] == start
    if steps is None:
        for loader, this in zip(loaders, passes, strict=True):
            assert next(this, None) is None
            assert (loader.epoch, loader.batch_in_epoch) == (run.epoch + 1, 0)
            assert loader.state_dict()["segment"] == [0, 0]
    return loaders, through_json(states[0])


def topology(state):
    return None if state is None else (state["num_replicas"], state["batch_size"])


def check_elastic(run, plan, workers=(0,)):
    got, state, number = [], None, 0
    for at, (width, batch_size, steps) in enumerate(plan):
        crew = workers[at % len(workers)]
        loaders, state = leg(run, width, batch_size, steps, state, number, got, crew)
        number = state["batch_in_epoch"]
    samples = run.whole()
    kept = samples[: len(got)]
    assert got[: run.n] == kept, "the global order of one uninterrupted pass, nothing twice, nothing left out"
    lost = run.n - len(got)
    worst = max(lost_at_most(run, width, batch_size) for width, batch_size, _ in plan)
    widest = max(width for width, _, _ in plan)
    if lost <= 0:
        assert -lost < widest if run.tail == "pad" and not run.drop_last else lost == 0
        # repeats are the epoch's start again; a repeat has a position, hence augmentations, of its own
        assert [s[0] for s in got[run.n :]] == [samples[p % run.n][0] for p in range(run.n, len(got))]
    assert max(lost, 0) <= worst
    return loaders


widths, batch_sizes = st.integers(1, 6), st.integers(1, 9)
legs = st.lists(st.tuples(widths, batch_sizes, st.integers(0, 6)), min_size=1, max_size=5)
runs = st.builds(
    Run,
    n=st.integers(1, 300),
    tail=st.sampled_from(["pad", "drop", "uneven"]),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
ends = st.tuples(widths, batch_sizes, st.none())


@settings(max_examples=examples(250))
@given(run=runs, plan=legs, end=ends)
def test_any_plan_of_ranks_and_batch_sizes_is_one_uninterrupted_pass(run, plan, end):
    loaders = check_elastic(run, [*plan, end])
    # the offset belonged to one epoch: the next is whole, and that of a run that was never resumed
    whole = run.loaders(*end[:2])[-1]
    whole.seek(run.epoch + 1, 0)
    assert len(loaders[-1]) == len(whole)
    assert list(loaders[-1]) == list(whole)
    tried("elastic plans, workers 0", run, *plan, end)


@settings(max_examples=examples(8))
@given(run=runs, plan=st.lists(st.tuples(st.integers(1, 2), batch_sizes, st.integers(0, 6)), max_size=2))
def test_workers_do_not_show_in_an_elastic_plan(run, plan):
    check_elastic(run, [*plan, (2, 4, 3), (1, 3, None)], workers=(2, 0))
    tried("elastic plans, workers 2", run, *plan)


@settings(max_examples=examples(40))
@given(run=runs, plan=legs)
def test_a_resume_of_the_same_topology_keeps_its_segment(run, plan):
    run = Run(**{**run.__dict__, "seeding": "batch"})
    got, state, number = [], None, 0
    for width, batch_size, steps in plan:
        _, state = leg(run, width, batch_size, steps, state, number, got)
        number = state["batch_in_epoch"]
    for rank in range(state["num_replicas"]):
        straight, chained = (run.loaders(*topology(state), state)[rank] for _ in range(2))
        rest = list(straight)
        head, ahead = [], iter(chained)
        for _ in range(len(rest) // 2):
            head.append(next(ahead))
        saved = through_json(chained.state_dict())
        again = run.loaders(*topology(state), saved)[rank]
        assert again.state_dict() == saved, "load then state_dict is the identity"
        assert head + list(again) == rest
    tried("elastic, then resumed as it was", run, *plan)


ELASTIC = Run(n=50, tail="pad", drop_last=False, shuffle=True, epoch=1)
PLAN = [(2, 3, 2), (3, 2, 2), (1, 5, None)]


def test_control_dealing_the_rest_without_the_segment_fails(monkeypatch):
    check_elastic(ELASTIC, PLAN)
    monkeypatch.setattr(Plan, "first", lambda plan, batch: batch * plan.block + plan.rank)
    with pytest.raises(AssertionError, match="one uninterrupted pass"):
        check_elastic(ELASTIC, PLAN)


def test_control_a_state_that_forgets_its_segment_is_refused():
    _, state = leg(ELASTIC, 2, 3, 2, None, 0, got := [])
    _, state = leg(ELASTIC, 3, 2, 2, state, 2, got)
    assert state["segment"] == [12, 2]
    with pytest.raises(StateError, match="samples_in_epoch"):
        ELASTIC.loaders(3, 2, {**state, "segment": [0, 0], "batch_in_epoch": 3})


def test_control_batch_seeding_depends_on_the_topology():
    # why the samples above are compared under seeding="sample" only
    run = Run(**{**ELASTIC.__dict__, "seeding": "batch"})
    with pytest.raises(AssertionError, match="one uninterrupted pass"):
        check_elastic(run, PLAN)
