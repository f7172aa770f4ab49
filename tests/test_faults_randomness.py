"""Faults of randomness and of dying workers; the rows are those of docs/reference/faults.md.

A test runs uninterrupted here and is resumed in a fresh interpreter in which every global stream has been
drawn from. Draws are compared with ``==``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import traceback
import warnings

import numpy as np
import pytest
import torch
from support.fresh import no_hang
from support.runs import (
    build,
    collect,
    passes,
    plainly,
    recipe,
    rest,
    resumed,
    resumed_each,
    samples,
    saves,
    streams,
    take,
    uninterrupted,
)

import resumable_data.permutation
import resumable_data.seeding
from resumable_data import StaleIteratorError, capture_rng_state, restore_rng_state
from resumable_data.seeding import draw_base_seed, worker_generator
from resumable_data.splitmix import derive

pytest_plugins = ["support.plugin"]

LIBRARIES = {"torch": 1, "numpy": 2, "python": 3}  # where Augmented puts their draws
SEEDINGS = ["batch", "sample"]


def noise(one):
    """index -> its draws, of one pass over ``Augmented``."""
    return {index: draws for index, *draws in samples(one)}


# ── draws of the dataset ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r1_draws_are_distinct_in_every_library_and_come_again(fresh, seeding):
    plain = recipe(64, 4, data="augmented", num_workers=4, seeding=seeding)
    loader = build(plain)
    state = loader.state_dict()
    two = passes(loader, 2)
    drawn = [sample for one in two for sample in samples(one)]
    assert len(drawn) == 128
    for column in LIBRARIES.values():
        assert len({sample[column] for sample in drawn}) == 128
    assert fresh(resumed, plain=plain, state=state, count=2) == two


def test_r1_control_workers_that_share_a_seed_repeat_draws(monkeypatch):
    # the fault: every batch is seeded alike
    monkeypatch.setattr(
        "resumable_data.fetch.batch_words", lambda *_: resumable_data.seeding.Words(1, 2, 3, 4)
    )
    drawn = samples(rest(build(recipe(64, 4, data="augmented"))))
    for column in LIBRARIES.values():
        assert len({sample[column] for sample in drawn}) == 4


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r2_noise_does_not_depend_on_the_number_of_workers(fresh, seeding):
    plain = recipe(40, 4, data="augmented", seeding=seeding)
    whole = passes(build(plain), 2)
    for workers in (1, 2, 4):
        assert rest(build(plain | {"num_workers": workers})) == whole[0]
    for epoch, state in enumerate(saves(plain, 3, 2)):
        for workers in (0, 2):
            other = plain | {"num_workers": workers}
            assert fresh(resumed, plain=other, state=state, count=1) == [whole[epoch][3:]]


def test_r2_sample_noise_does_not_depend_on_the_batch_size_either():
    by_four, by_ten = (rest(build(recipe(40, size, data="augmented", seeding="sample"))) for size in (4, 10))
    assert samples(by_four) == samples(by_ten)
    assert samples(rest(build(recipe(40, 4, data="augmented")))) != samples(
        rest(build(recipe(40, 10, data="augmented")))
    )


def test_r2_control_without_seeding_the_noise_is_another_in_each_run():
    plain = recipe(40, 4, data="augmented", seeding=None)
    before = streams()
    try:
        first, second = rest(build(plain)), rest(build(plain))
    finally:
        set_streams(before)
    assert [sample[0] for sample in samples(first)] == [sample[0] for sample in samples(second)]
    assert samples(first) != samples(second)


def set_streams(plain):
    python, legacy, torch_state = plain
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state(legacy | {"state": legacy["state"] | {"key": np.array(legacy["state"]["key"])}})
    torch.default_generator.set_state(torch.tensor(torch_state, dtype=torch.uint8))


def no_noise_comes_twice(plain, epochs=3):
    passed = [noise(one) for one in passes(build(plain), epochs)]
    for column in range(3):
        drawn = [draws[column] for one in passed for draws in one.values()]
        assert len(set(drawn)) == len(drawn)
    return passed


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r3_no_epochs_noise_equals_anothers(fresh, crew, seeding):
    plain = recipe(16, 2, data="augmented", seeding=seeding, **crew)
    passed = no_noise_comes_twice(plain)
    states = saves(plain, 5)
    for epoch, (state_rest, following) in enumerate(fresh(resumed_each, plain=plain, states=states, count=2)):
        assert noise(state_rest).items() <= passed[epoch].items()
        assert len(noise(state_rest)) == 6
        if epoch < 2:
            assert noise(following) == passed[epoch + 1]


def forget_the_epoch(monkeypatch):
    """The fault of R3: words that do not know the epoch."""
    _words_of(monkeypatch, lambda seed, epoch: (seed, 0))


def _words_of(monkeypatch, changed):
    """Words of samples and batches from other coordinates than their own."""
    original = resumable_data.seeding._epoch_state
    monkeypatch.setattr(
        resumable_data.seeding,
        "_epoch_state",
        lambda tag, seed, epoch: original(tag, *changed(seed, epoch)),
    )


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r3_control_forgetting_the_epoch_fails(monkeypatch, seeding):
    plain = recipe(16, 2, data="augmented", seeding=seeding)
    no_noise_comes_twice(plain)
    forget_the_epoch(monkeypatch)
    with pytest.raises(AssertionError):
        no_noise_comes_twice(plain)


# ── seeds ────────────────────────────────────────────────────────────────────────────────────────────


def seeds_are_distinct(seeds, workers=8, epochs=50):
    """Worker seeds as torch makes them: the base seed of the epoch plus the worker's number."""
    found = [
        draw_base_seed(worker_generator(seed, epoch, 0)) + worker
        for seed in seeds
        for epoch in range(epochs)
        for worker in range(workers)
    ]
    assert len(set(found)) == len(found) == len(seeds) * epochs * workers


def runs_have_nothing_in_common(seeding):
    """Neighbouring seeds in neighbouring epochs: no order and no noise in common."""
    found = []
    for seed in (0, 1, 2):
        found += passes(build(recipe(16, 2, data="augmented", seeding=seeding) | {"seed": seed}), 3)
    orders = [[index for index, *_ in samples(one)] for one in found]
    assert len({tuple(order) for order in orders}) == 9
    for column in LIBRARIES.values():
        assert len({sample[column] for one in found for sample in samples(one)}) == 9 * 16


def test_r4_seeds_of_workers_epochs_and_runs_never_collide():
    seeds_are_distinct([0, 1, 2])


def seen_seeds(plain, epochs):
    """What ``get_worker_info().seed`` was, epoch by epoch, in the workers themselves."""
    return [sorted({seed for batch in one for seed in batch[2]}) for one in passes(build(plain), epochs)]


@pytest.mark.parametrize("persistent", [False, True])
def test_r4_workers_see_the_seeds_of_their_epoch(fresh, persistent):
    plain = recipe(16, 2, data="located", num_workers=2, persistent_workers=persistent)
    expected = []
    for epoch in range(3):
        base = draw_base_seed(worker_generator(7, epoch, 0))
        expected.append([base, base + 1])
    assert fresh(seen_seeds, plain=plain, epochs=3) == expected


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r4_runs_of_neighbouring_seeds_have_nothing_in_common(seeding):
    runs_have_nothing_in_common(seeding)


def seed_by_addition(monkeypatch):
    """The fault of R4: words of seed + epoch, so that (0, 1) and (1, 0) are the same run."""

    def added(tag, seed, epoch, *more, count):
        return derive(tag, seed + epoch, *more, count=count)

    monkeypatch.setattr(resumable_data.seeding, "derive", added)
    monkeypatch.setattr(
        resumable_data.permutation,
        "derive",
        lambda tag, n, seed, epoch, *, count: derive(tag, n, seed + epoch, count=count),
    )
    _words_of(monkeypatch, lambda seed, epoch: (seed + epoch, 0))


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r4_control_seeding_by_addition_fails(monkeypatch, seeding):
    seed_by_addition(monkeypatch)
    with pytest.raises(AssertionError):
        runs_have_nothing_in_common(seeding)


def test_r4_control_worker_seeds_by_addition_collide(monkeypatch):
    seed_by_addition(monkeypatch)
    with pytest.raises(AssertionError):
        seeds_are_distinct([0, 1, 2])


# ── the training process's own streams ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("data", ["indices", "augmented"])
@pytest.mark.parametrize("seed", [7, None])
def test_r5_fetching_leaves_the_global_streams_alone(crew, data, seed):
    random.gauss(0, 1)
    np.random.standard_normal()  # both keep a second Gaussian for the next call
    before = streams()
    loader = build(recipe(16, 2, data=data, **crew) | {"seed": seed})
    live = iter(loader)
    next(live)
    loader.peek()
    loader.load_state_dict(loader.state_dict())
    rest(loader)
    assert streams() == before


def test_r5_control_torchs_loader_moves_the_global_stream():
    with torch.random.fork_rng(devices=[]):
        before = streams()
        next(iter(torch.utils.data.DataLoader(range(16), shuffle=True)))
        assert streams() != before


class DropoutTrainer:
    """Twenty steps over a net with dropout."""

    def __init__(self, plain, evaluation=None):
        torch.manual_seed(0)
        self.loader = build(plain)
        self.evaluation = build(evaluation) if evaluation else None
        self.batches = None
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def losses(self, first, last):
        found = []
        self.batches = self.batches or self.loader.cycle()
        for step in range(first, last):
            indices, *draws = next(self.batches)
            x = torch.stack([indices / 16, *draws], dim=1).sum(dim=1, keepdim=True).to(torch.float32)
            loss = (self.net(x) - x.square()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            found.append(loss.item())
            if self.evaluation is not None and step % 3 == 2:
                self.net.eval()
                rest(self.evaluation)
                self.net.train()
        return found

    def save(self):
        return {
            "net": {name: value.tolist() for name, value in self.net.state_dict().items()},
            "rng": capture_rng_state(),
            "data": self.loader.state_dict(),
        }

    def load(self, state, with_rng):
        self.net.load_state_dict({name: torch.tensor(value) for name, value in state["net"].items()})
        self.loader.load_state_dict(state["data"])
        if with_rng:
            restore_rng_state(state["rng"])


def train_rest(plain, evaluation, state, first, with_rng):
    trainer = DropoutTrainer(plain, evaluation)
    trainer.load(state, with_rng)
    return trainer.losses(first, 20)


@pytest.fixture
def _streams_as_before():
    before = streams()
    yield
    set_streams(before)


@pytest.mark.usefixtures("_streams_as_before")
def test_r6_evaluation_passes_do_not_change_the_losses(fresh, crew):
    plain = recipe(16, 2, data="augmented", **crew)
    evaluation = recipe(8, 4, data="augmented", **crew)
    alone = DropoutTrainer(plain).losses(0, 20)
    trainer = DropoutTrainer(plain, evaluation)
    losses = trainer.losses(0, 11)
    state = trainer.save()
    assert losses + trainer.losses(11, 20) == alone
    for beside in (None, evaluation):
        assert (
            fresh(train_rest, plain=plain, evaluation=beside, state=state, first=11, with_rng=True)
            == alone[11:]
        )


@pytest.mark.usefixtures("_streams_as_before")
def test_r6_control_saving_without_the_rng_fails(fresh):
    plain = recipe(16, 2, data="augmented")
    trainer = DropoutTrainer(plain)
    trainer.losses(0, 11)
    state = trainer.save()
    expected = trainer.losses(11, 20)
    arguments = {"plain": plain, "evaluation": None, "state": state, "first": 11}
    assert fresh(train_rest, **arguments, with_rng=True) == expected
    assert fresh(train_rest, **arguments, with_rng=False) != expected


def restored_then_built(plain, rng, state):
    restore_rng_state(rng)
    before = streams()
    first, second = build(plain), build(plain)
    first.load_state_dict(state)
    live = iter(first)
    batch = take(live, 1)
    return [
        streams() == before,
        before,
        len(second),
        batch,
        [random.random(), np.random.rand(), torch.rand(1).item()],
    ]


@pytest.mark.usefixtures("_streams_as_before")
def test_r7_a_restored_rng_outlives_the_building_of_loaders(fresh, crew):
    plain = recipe(16, 2, data="augmented", **crew)
    random.gauss(0, 1)
    np.random.standard_normal()
    rng, now = capture_rng_state(), streams()
    state = build(plain).state_dict()
    expected = [True, now, 8, uninterrupted(plain, 1)[0][:1]]
    draws = [random.random(), np.random.rand(), torch.rand(1).item()]
    assert fresh(restored_then_built, plain=plain, rng=rng, state=state) == [*expected, draws]


# ── generators, collate ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seeding", ["batch", pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore:nothing reseeds")
def test_r9_generators_in_loader_and_dataset_go_through_spawn(fresh, seeding):
    plain = recipe(
        8, 2, data="owning", generator=5, num_workers=1, multiprocessing_context="spawn", seeding=seeding
    )
    whole = uninterrupted(plain, 2)
    state = saves(plain, 2, 1)[0]
    said = fresh(resumed_with_warnings, plain=plain, state=state, count=1)
    assert said == [[whole[0][2:]], [] if seeding else ["resumed with seeding=None"]]


@pytest.mark.filterwarnings("ignore:nothing reseeds")
def test_r9_a_torch_generator_in_the_dataset_goes_through_spawn(fresh):
    plain = recipe(8, 2, data="owning_torch", num_workers=1, multiprocessing_context="spawn")
    assert fresh(first_pass, plain=plain) == uninterrupted(plain, 1)[0]


def first_pass(plain):
    with warnings.catch_warnings():
        # the dataset sets its own generator for each item
        warnings.filterwarnings("ignore", "nothing reseeds", UserWarning)
        return rest(iter(build(plain)))


def resumed_with_warnings(plain, state, count):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = resumed(plain, state, count)
    told = ("worker processes", "nothing reseeds")  # the dataset sets its own generators for each item
    said = [str(one.message) for one in caught if not any(part in str(one.message) for part in told)]
    return [found, [text.partition(":")[0] for text in said]]


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_r14_random_collate_transform_and_order_resume_together(fresh, crew, seeding):
    plain = recipe(22, 4, data="augmented", collate_fn="mixup", seeding=seeding, **crew)
    whole = uninterrupted(plain, 4)
    weights = [batch["weight"] for one in whole for batch in one]
    assert len(set(weights)) == len(weights) == 24
    assert fresh(resumed_each, plain=plain, states=saves(plain, 2), count=2) == [
        [whole[epoch][2:], whole[epoch + 1]] for epoch in range(3)
    ]


# ── workers that die, datasets that raise ────────────────────────────────────────────────────────────


def let_go(caught):
    """Free the failed iterator now: torch's error holds it in a cycle, from which workers take 5 s to end."""
    error = caught.value
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def children():
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.parametrize("batches", ["lists", "tensors"])
@pytest.mark.parametrize("persistent", [False, True])
def test_p2_a_killed_worker_is_named_and_the_position_stays(fresh, persistent, batches):
    # lists come through the pipe whole; for a tensor the loader asks the worker, which may be gone by then.
    # The slow dataset keeps the loader waiting when the worker dies.
    plain = recipe(40, 2, data="slow", num_workers=2, persistent_workers=persistent, prefetch_factor=2)
    if batches == "lists":
        plain["collate_fn"] = "keep"
    whole = uninterrupted(plain | {"data": ["indices", 40]}, 2)
    loader = build(plain)
    before = children()
    with no_hang():
        live = iter(loader)
        seen = take(live, 3)
        victim = min(children() - before)
        killer = threading.Timer(0.05, os.kill, (victim, signal.SIGKILL))
        with pytest.raises(RuntimeError, match=rf"pid\D*{victim}\b"):
            collect(begun_with(killer.start, live), seen)
        assert 3 <= len(seen) < 20
        state = loader.state_dict()
        assert (state["epoch"], state["batch_in_epoch"]) == (0, len(seen))
        with pytest.raises(StaleIteratorError):
            next(live)
        assert loader.state_dict() == state
        assert seen + rest(loader) == whole[0]
        assert rest(loader) == whole[1]
    assert fresh(resumed, plain=plain, state=state, count=2) == [whole[0][len(seen) :], whole[1]]


def begun_with(act, iterator):
    act()
    yield from iterator


@pytest.mark.parametrize("persistent", [False, True])
def test_p2_a_worker_that_dies_of_a_sample_leaves_the_batch_before_it_delivered(fresh, tmp_path, persistent):
    fuse = tmp_path / "fuse"
    plain = recipe(
        20,
        2,
        data="deadly",
        data_args=[13, str(fuse)],
        collate_fn="keep",
        num_workers=2,
        persistent_workers=persistent,
    )
    whole = uninterrupted(plain, 2)
    bad = next(number for number, batch in enumerate(whole[0]) if 13 in batch)
    fuse.touch()
    loader = build(plain)
    with no_hang():
        live = iter(loader)
        seen = []
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal") as caught:
            collect(live, seen)
        assert fuse.read_text() in str(caught.value)
        state = loader.state_dict()
        assert state["batch_in_epoch"] == len(seen) <= bad
        assert seen == whole[0][: len(seen)]
        fuse.unlink()
        assert seen + rest(loader) == whole[0]
    assert fresh(resumed, plain=plain, state=state, count=2) == [whole[0][len(seen) :], whole[1]]


def test_p2_a_dataset_that_raises_shows_its_own_traceback_and_can_be_tried_again(fresh, crew, tmp_path):
    fuse = tmp_path / "fuse"
    plain = recipe(20, 2, data="raising", data_args=[13, str(fuse)], **crew)
    whole = uninterrupted(plain, 2)
    bad = next(number for number, batch in enumerate(whole[0]) if 13 in batch)
    fuse.touch()
    loader = build(plain)
    for _ in range(2):
        live = iter(loader)
        with pytest.raises(KeyError, match="item 13 cannot be read") as caught:
            rest(live)
        if crew["num_workers"]:
            assert "Traceback" in str(caught.value)
            assert "in __getitem__" in str(caught.value)
            assert "datasets.py" in str(caught.value)
        state = loader.state_dict()
        assert (state["epoch"], state["batch_in_epoch"]) == (0, bad)
        with pytest.raises(StaleIteratorError):
            next(live)
    fuse.unlink()
    assert fresh(resumed, plain=plain, state=state, count=2) == [whole[0][bad:], whole[1]]
    assert [rest(loader), rest(loader)] == [whole[0][bad:], whole[1]]


def test_p2_control_torchs_iterator_goes_on_past_the_failed_batch(tmp_path):
    fuse = tmp_path / "fuse"
    fuse.touch()
    plain = recipe(20, 2, data="raising", data_args=[13, str(fuse)], num_workers=2) | {"shuffle": False}
    live = iter(build(plain, torch.utils.data.DataLoader))
    with pytest.raises(KeyError) as caught:
        rest(live)
    assert plainly(next(live)) == [14, 15]
    del live
    let_go(caught)
