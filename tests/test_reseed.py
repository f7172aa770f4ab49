"""Generators of the dataset's own: found, named, reseeded, and the word for those who seed themselves."""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.datasets import Indices, keep
from support.runs import passes, plainly
from torch.utils.data import ConcatDataset, Subset

from resumable_data import ResumableLoader, reseeders, sample_seed
from resumable_data.reseeders import find_generators, reseed_held

pytest_plugins = ["support.plugin"]


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, value):
        return value, plain_draw(self.rng)


def plain_draw(rng):
    if isinstance(rng, torch.Generator):
        return torch.rand(1, generator=rng).item()
    return float(rng.random()) if not isinstance(rng, np.random.RandomState) else float(rng.rand())


class Compose:
    def __init__(self, *steps):
        self.transforms = list(steps)

    def __call__(self, value):
        return [step(value) for step in self.transforms]


class Transformed(Indices):
    """Item i is what the transform makes of i."""

    def __init__(self, n, transform, **more):
        super().__init__(n)
        for name, value in more.items():
            setattr(self, name, value)
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(index)


class Library:
    """As albumentations: a setter that checks for 32 bits, and a generator out of sight."""

    __slots__ = ("_hidden",)

    def __init__(self):
        self._hidden = random.Random(0)

    def set_random_seed(self, seed):
        assert type(seed) is int
        assert 0 <= seed < 2**32
        self._hidden = random.Random(seed)

    def __call__(self, value):
        return value, self._hidden.random()


class Monai:
    """As MONAI: the seed is a keyword."""

    __slots__ = ("_hidden",)

    def __init__(self):
        self._hidden = random.Random(0)

    def __call__(self, value):
        return value, self._hidden.random()

    def set_random_state(self, seed=None, state=None):
        assert state is None
        assert 0 <= seed < 2**32
        self._hidden = random.Random(seed)


GENERATORS = {
    "PCG64": lambda: np.random.default_rng(0),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(0)),
    "RandomState": lambda: np.random.RandomState(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "random": lambda: random.Random(0),
}
DRAWN = {
    **{name: partial(lambda name: Jitter(GENERATORS[name]()), name) for name in GENERATORS},
    "set_random_seed": Library,
    "set_random_state": Monai,
    "several": lambda: Compose(Jitter(np.random.default_rng(0)), Jitter(random.Random(0)), Library()),
}


def make(kind, seeding="batch", **crew):
    reseed = crew.pop("reseed", reseed_held)
    return ResumableLoader(
        Transformed(12, DRAWN[kind]()),
        3,
        True,
        seed=5,
        seeding=seeding,
        reseed=reseed,
        collate_fn=keep,
        **crew,
    )


def resumed(kind, seeding, state, crew):
    loader = make(kind, seeding, **crew)
    loader.load_state_dict(state)
    return passes(loader, 2)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_reseeded_generators_are_functions_of_the_place(fresh, kind, seeding):
    whole = passes(make(kind, seeding), 3)
    loader = make(kind, seeding)
    list(loader)
    live = iter(loader)
    next(live)
    state = loader.state_dict()
    assert fresh(resumed, kind=kind, seeding=seeding, state=state, crew={}) == [whole[1][1:], whole[2]]
    draws = [str(sample[1:]) for epoch in whole for batch in epoch for sample in batch]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("kind", ["several", "torch"])
def test_workers_do_not_show_in_reseeded_generators(fresh, kind):
    whole = passes(make(kind), 3)
    loader = make(kind, num_workers=2, persistent_workers=True)
    assert plainly(list(loader)) == whole[0]
    state = loader.state_dict()
    assert fresh(resumed, kind=kind, seeding="batch", state=state, crew={"num_workers": 2}) == whole[1:]


@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_control_generators_that_nobody_reseeds_do_not_resume(kind):
    def run(state=None, count=2):
        loader = make(kind, reseed=None)
        if state is not None:
            loader.load_state_dict(state)
        return passes(loader, count), loader.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, second), _ = run()
        _, state = run(count=1)
        (again,), _ = run(state, 1)
    assert second != again
    assert first != second


def test_the_reseeder_is_called_wherever_the_streams_are_seeded():
    calls = []
    data = Indices(4)

    def note(dataset, word):
        assert dataset is data
        calls.append(word)

    for seeding, expected in (("batch", 2 * (1 + 1)), ("sample", 4 + 2)):
        calls.clear()
        loader = ResumableLoader(data, 2, seed=5, seeding=seeding, reseed=note)
        list(loader)
        assert len(calls) == len(set(calls)) == expected
        assert all(type(word) is int and 0 <= word < 2**64 for word in calls)


@pytest.mark.parametrize("wrong", [3, "reseed", [1]])
def test_a_reseeder_that_cannot_be_called_is_refused(wrong):
    with pytest.raises(TypeError, match="reseed"):
        ResumableLoader(Indices(3), reseed=wrong)


def test_a_reseeder_without_seeding_is_refused():
    with pytest.raises(ValueError, match="seeding=None"):
        ResumableLoader(Indices(3), reseed=reseed_held, seeding=None)


# ── found ────────────────────────────────────────────────────────────────────────────────────────────


def rng():
    return np.random.default_rng(0)


PLACES = {
    ".rng": lambda: Transformed(4, None, rng=rng()),
    ".transform.rng": lambda: Transformed(4, Jitter(rng())),
    ".transform.transforms[1].rng": lambda: Transformed(4, Compose(len, Jitter(rng()))),
    ".dataset.transform.rng": lambda: Subset(Transformed(4, Jitter(rng())), [0, 1]),
    ".datasets[1].transform.rng": lambda: ConcatDataset([Indices(3), Transformed(4, Jitter(rng()))]),
    ".by_name['train'].rng": lambda: Transformed(4, None, by_name={"test": len, "train": Jitter(rng())}),
}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_generators_are_found_where_they_are_held(place):
    assert [path for path, _ in find_generators(PLACES[place]())] == [place]


SAMPLES = {
    "names": ["file"] * 5000,
    "pairs": [(f"file{at}", at) for at in range(5000)],
    "few pairs": [(f"file{at}", at) for at in range(600)],
    "a dict": {f"file{at}": {"label": at} for at in range(5000)},
    "arrays": [np.zeros(2) for _ in range(5000)],
}


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_a_list_of_samples_hides_no_generator_beside_it(kind):
    data = Transformed(
        4, Compose(Jitter(rng())), samples=SAMPLES[kind], imgs=SAMPLES[kind], targets=[0] * 5000
    )
    assert [path for path, _ in find_generators(data)] == [".transform.transforms[0].rng"]


def test_searching_ends_in_circles_and_finds_an_object_once():
    data = Transformed(4, Jitter(rng()))
    data.itself, data.again = data, data.transform
    assert len(find_generators(data)) == 1


def test_searching_is_quick_whatever_the_data():
    data = Transformed(4, None, tree={at: [{"x": (at,)} for _ in range(100)] for at in range(2000)})
    looked = []

    class Probe:
        @property
        def __dict__(self):
            looked.append(1)
            return {}

    data.probes = [Probe() for _ in range(10_000)]
    assert find_generators(data) == []
    assert len(looked) <= 2 * reseeders.BREADTH


# ── named ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("kind", ["PCG64", "torch", "random"])
def test_r8_a_generator_that_nobody_reseeds_is_named_in_one_warning(kind, workers):
    loader = ResumableLoader(
        Transformed(12, Jitter(GENERATORS[kind]())), 3, seed=5, collate_fn=keep, num_workers=workers
    )
    with pytest.warns(UserWarning, match=r"dataset\.transform\.rng \((Generator|Random)\)") as caught:
        passes(loader, 2)
    (warning,) = [one for one in caught if "dataset.transform" in str(one.message)]
    assert "sample_seed()" in str(warning.message)
    assert "reseed_held" in str(warning.message)
    assert Path(warning.filename).parent.name == "support", "it points at the line that began the pass"


@pytest.mark.parametrize("arguments", [{"reseed": reseed_held}, {"seeding": None}])
def test_r8_nothing_is_said_where_it_is_taken_care_of_or_not_promised(arguments):
    loader = ResumableLoader(Transformed(12, Jitter(rng())), 3, seed=5, collate_fn=keep, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


def test_r8_a_dataset_without_generators_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(ResumableLoader(Transformed(12, str, samples=["a"] * 10, names={"a": 1}), 3, seed=5))


# ── sample_seed ──────────────────────────────────────────────────────────────────────────────────────


class SeedingItself(Indices):
    """Item i is i and a draw from a generator seeded for it."""

    def __getitem__(self, index):
        return index, sample_seed(), np.random.default_rng(sample_seed()).random()


def with_word(samples):
    return samples, sample_seed()


def own(seeding, **crew):
    return ResumableLoader(SeedingItself(12), 3, True, seed=5, seeding=seeding, collate_fn=with_word, **crew)


def own_resumed(seeding, state, crew):
    loader = own(seeding, **crew)
    loader.load_state_dict(state)
    return passes(loader, 2)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_r8_sample_seed_belongs_to_the_sample_however_often_the_run_is_killed(fresh, crew, seeding):
    whole = passes(own(seeding), 3)
    loader = own(seeding, **crew)
    assert plainly(list(loader)) == whole[0]
    live = iter(loader)
    next(live)
    rest = fresh(own_resumed, seeding=seeding, state=loader.state_dict(), crew=crew)
    assert rest == [whole[1][1:], whole[2]]


def test_words_of_samples_and_batches():
    by_batch, by_sample = passes(own("batch"), 2), passes(own("sample"), 2)
    words = [[word for _, word, _ in samples] for epoch in by_batch for samples, _ in epoch]
    assert all(len(set(batch)) == 1 for batch in words)
    assert len({batch[0] for batch in words}) == len(words)
    words = [word for epoch in by_sample for samples, _ in epoch for _, word, _ in samples]
    assert len(set(words)) == len(words)
    # under "sample" the word does not depend on the batch size
    other = ResumableLoader(SeedingItself(12), 12, True, seed=5, seeding="sample", collate_fn=keep)
    assert [list(sample) for batch in other for sample in batch] == [
        sample for samples, _ in by_sample[0] for sample in samples
    ]


def test_a_dataset_inside_a_loader_inside_a_dataset_keeps_its_word():
    class Outer(Indices):
        def __getitem__(self, index):
            before = sample_seed()
            inner = list(own("sample"))
            assert sample_seed() == before
            return index, before, len(inner)

    loader = ResumableLoader(Outer(4), 2, seed=5, seeding="sample", collate_fn=keep)
    assert [sample[2] for batch in loader for sample in batch] == [4] * 4


def test_elsewhere_there_is_no_word():
    list(own("sample"))
    list(ResumableLoader(Indices(4), sampler=np.random.permutation(4).tolist(), seed=5))
    with pytest.raises(RuntimeError, match="sample_seed"):
        sample_seed()
    with pytest.raises(RuntimeError, match="sample_seed"):
        list(ResumableLoader(SeedingItself(4), 2, seed=5, seeding=None, collate_fn=keep))
