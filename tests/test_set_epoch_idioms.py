"""The loops people have: told to the sampler, to the loader, to both, to nobody, resumed at any place."""

from __future__ import annotations

import json

import pytest
from support.datasets import Augmented, keep
from support.runs import plainly
from support.samplers import ByEpoch, ByLength, N, Skipping
from torch.utils.data import BatchSampler, DistributedSampler

from resumable_data import ResumableLoader, StateMismatchError

pytest_plugins = ["support.plugin"]


def distributed():
    return DistributedSampler(range(N), 2, 1, seed=9)


#: (what the loop calls set_epoch on, the loader's arguments); made anew for each process.
def _made(kind):
    inner = distributed()
    if kind == "distributed":
        return inner, {"sampler": inner, "batch_size": 4}
    if kind == "by_epoch":
        inner = ByEpoch(N)
        return inner, {"sampler": inner, "batch_size": 4}
    if kind == "torchs_batch_sampler":
        return inner, {"batch_sampler": BatchSampler(inner, 4, False)}
    if kind == "nested":
        return inner, {"batch_sampler": ByLength(inner, 4)}
    return inner, {"batch_sampler": Skipping(ByLength(inner, 4))}


KINDS = ["distributed", "by_epoch", "torchs_batch_sampler", "nested", "nested_twice"]
TOLD = ["sampler", "loader_sampler", "loader", "both", "nobody"]


def build(kind, **crew):
    told, arguments = _made(kind)
    loader = ResumableLoader(
        Augmented(N), seed=None if kind == "distributed" else 3, collate_fn=keep, **arguments, **crew
    )
    return told, loader


def tell(who, inner, loader, epoch):
    if who in ("sampler", "both"):
        inner.set_epoch(epoch)
    if who == "loader_sampler":
        loader.sampler.set_epoch(epoch)
    if who in ("loader", "both"):
        loader.set_epoch(epoch)


def old_script(kind, who, epochs, state=None, stop=None, **crew):
    """A loop that counts its epochs itself; stops after so many batches of its own. What it saw, the state."""
    inner, loader = build(kind, **crew)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in range(loader.epoch, epochs):
        tell(who, inner, loader, epoch)
        for batch in loader:
            seen.append([epoch, plainly(batch)])
            if len(seen) == stop:
                return seen, json.loads(json.dumps(loader.state_dict()))
    return seen, None


def scripts(kind, jobs, crew):
    return [old_script(kind, who, 4, state, **crew)[0] for who, state in jobs]


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), ("distributed", 2), ("nested", 2)]
)
def test_every_idiom_gives_the_same_epochs_and_resumes_in_them(fresh, kind, workers):
    whole, _ = old_script(kind, "nobody", 4)
    orders = [[[s[0] for s in batch] for epoch, batch in whole if epoch == e] for e in range(4)]
    assert all(one != other for at, one in enumerate(orders) for other in orders[:at])
    per_epoch = len(orders[0])
    # in the middle of epochs 1 and 2, and with one batch left; a batch sampler's loader shows no own sampler
    tellers = (
        TOLD if kind in ("distributed", "by_epoch") else [who for who in TOLD if who != "loader_sampler"]
    )
    jobs, stops = [], []
    for who in tellers:
        for stop in (per_epoch + 2, 3 * per_epoch - 1):
            head, state = old_script(kind, who, 4, stop=stop)
            assert head == whole[:stop], who
            jobs.append([who, state])
            stops.append(stop)
    crew = {"num_workers": workers}
    results = fresh(scripts, kind=kind, jobs=jobs, crew=crew)
    for stop, (who, _), seen in zip(stops, jobs, results, strict=True):
        assert whole[:stop] + seen == whole, who


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_script_stopped_after_the_last_batch_goes_on_with_the_next_epoch(kind):
    whole, _ = old_script(kind, "sampler", 4)
    per_epoch = sum(epoch == 0 for epoch, _ in whole)
    head, state = old_script(kind, "sampler", 4, stop=2 * per_epoch)
    assert (state["epoch"], state["batch_in_epoch"]) == (1, per_epoch)
    # its loop begins at loader.epoch: the pass of epoch 1 is empty, then 2 and 3 come
    assert head + old_script(kind, "sampler", 4, state)[0] == whole
    inner, loader = build(kind)
    loader.load_state_dict(state)
    inner.set_epoch(2)  # and one that begins at the next epoch finds it whole
    assert [[2, plainly(batch)] for batch in loader] == [event for event in whole if event[0] == 2]


@pytest.mark.parametrize("who", ["sampler", "loader"])
@pytest.mark.parametrize("kind", KINDS)
def test_set_epoch_0_over_a_loaded_place_is_refused_and_nothing_moves(kind, who):
    inner, loader = build(kind)
    loader.set_epoch(3)
    live = iter(loader)
    next(live)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(live)
    inner, loader = build(kind)
    loader.load_state_dict(state)
    if who == "sampler":  # found at the next iter()
        inner.set_epoch(0)
    with pytest.raises(StateMismatchError, match=r"set_epoch\(0\)") as caught:
        iter(loader) if who == "sampler" else loader.set_epoch(0)
    assert caught.value.fields == {"epoch": (3, 0)}
    assert json.loads(json.dumps(loader.state_dict())) == state
    inner.set_epoch(3)
    assert list(loader) == rest
    assert rest


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_told_to_the_sampler_is_a_jump_of_the_loader(kind):
    whole, _ = old_script(kind, "nobody", 4)
    inner, loader = build(kind)
    inner.set_epoch(2)
    assert [[2, plainly(batch)] for batch in loader] == [event for event in whole if event[0] == 2]
    assert loader.epoch == 3
    inner.set_epoch(1)
    assert [[1, plainly(batch)] for batch in loader] == [event for event in whole if event[0] == 1]
    assert inner.epoch == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_keeps_the_samplers_own_epoch_in_step(kind):
    inner, loader = build(kind)
    for epoch in range(3):
        live = iter(loader)
        next(live)
        assert inner.epoch == epoch
        list(live)
    state = loader.state_dict()
    inner, loader = build(kind)
    loader.load_state_dict(state)
    assert inner.epoch == 3


def test_control_an_order_that_forgets_its_epoch_repeats_itself():
    loader = ResumableLoader(range(N), 4, sampler=list(range(N)), seed=3, collate_fn=keep)
    assert list(loader) == list(loader)
