"""Loaders that exist already, made resumable."""

from __future__ import annotations

import pytest
import torch
from support.datasets import Augmented, Indices, keep
from support.samplers import ByLength, N, Python, Stateful
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from resumable_data import ResumableLoader

DATA = Indices(N)


def seeded():
    return torch.Generator().manual_seed(5)


def note_worker(worker_id):
    assert worker_id >= 0


SAME = {
    "plain": lambda: {},
    "batches": lambda: {"batch_size": 4},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()},
    "random_sampler": lambda: {"batch_size": 4, "sampler": RandomSampler(DATA, generator=seeded())},
    "replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(DATA, True, 45, generator=seeded())},
    "weighted": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0] * N, 30, generator=seeded()),
    },
    "sequential": lambda: {"batch_size": 4, "sampler": SequentialSampler(DATA)},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(DATA, 2, 1, seed=3)},
    "a_list": lambda: {"batch_size": 4, "sampler": list(range(5, 15))},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, True)},
    "batches_of_others": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "single": lambda: {"batch_size": None},
    "single_list": lambda: {"batch_size": None, "sampler": [3, 1, 2]},
    "workers": lambda: {"batch_size": 4, "num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},
}
ATTRIBUTES = [
    "batch_size",
    "drop_last",
    "num_workers",
    "collate_fn",
    "timeout",
    "worker_init_fn",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
    "generator",
    "dataset",
]


# torchdata draws an order of its own from a generator
BOTH = [(case, kind) for case in sorted(SAME) for kind in (DataLoader, StatefulDataLoader)]


@pytest.mark.parametrize(
    ("case", "kind"), [pair for pair in BOTH if pair != ("generator", StatefulDataLoader)]
)
def test_a_wrapped_loader_gives_the_loaders_own_batches(case, kind):
    arguments = {"collate_fn": keep, "worker_init_fn": note_worker, **SAME[case]()}
    if arguments.get("batch_size", 1) is None:
        del arguments["collate_fn"]
    theirs = kind(DATA, **arguments)
    ours = ResumableLoader.wrap(kind(DATA, **{**arguments, **SAME[case]()}), seed=3)
    assert type(ours) is ResumableLoader
    for name in ATTRIBUTES:
        if name != "generator":
            assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert [plain(batch) for batch in ours] == [plain(batch) for batch in theirs]
    state = ours.state_dict()
    assert (state["epoch"], state["seed"]) == (1, 3)


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_its_own_random_sampler_becomes_shuffle(kind):
    before = torch.random.get_rng_state()
    theirs = kind(DATA, 4, shuffle=True, collate_fn=keep)
    torch.random.set_rng_state(before)  # torchdata seeds its sampler from the global stream when it is built
    ours = ResumableLoader.wrap(theirs, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert ours.state_dict()["order"] == "shuffled.v1"
    assert list(ours) == list(ResumableLoader(DATA, 4, shuffle=True, seed=3, collate_fn=keep))


def test_a_random_sampler_of_other_data_or_other_size_stays_what_it_is():
    for sampler in (RandomSampler(range(10)), RandomSampler(DATA, True), RandomSampler(DATA, num_samples=5)):
        ours = ResumableLoader.wrap(DataLoader(DATA, 4, sampler=sampler), seed=3)
        assert ours.state_dict()["order"] == "sampler"
        assert ours.sampler is sampler
    assert ResumableLoader.wrap(DataLoader(DATA, 4, sampler=RandomSampler(DATA)), seed=3).state_dict()[
        "order"
    ] == ("shuffled.v1")


def test_own_samplers_are_carried_over():
    nested = ByLength(DistributedSampler(DATA, 2, 1), 4)
    for sampler, arguments in [
        (Python(N), {"batch_size": 4}),
        (Stateful(N), {"batch_size": 4}),
        (StatefulDistributedSampler(DATA, 2, 1), {"batch_size": 4}),
    ]:
        ours = ResumableLoader.wrap(DataLoader(DATA, sampler=sampler, **arguments), seed=3)
        assert ours.sampler is sampler
        assert ours.batch_size == 4
    ours = ResumableLoader.wrap(StatefulDataLoader(DATA, batch_sampler=nested), seed=3)
    assert ours.batch_sampler is nested
    assert ours.batch_size is None


def test_options_of_ours_are_passed_on():
    loader = DataLoader(Augmented(N), 4, shuffle=True, collate_fn=keep)
    ours = ResumableLoader.wrap(loader, seed=3, seeding="sample", num_replicas=2, rank=1, tail="drop")
    straight = ResumableLoader(
        Augmented(N), 4, True, collate_fn=keep, seed=3, seeding="sample", num_replicas=2, rank=1, tail="drop"
    )
    assert list(ours) == list(straight)
    with pytest.raises(TypeError):
        ResumableLoader.wrap(loader, batch_size=5)


def test_a_stopped_wrapped_loader_goes_on():
    whole = ResumableLoader.wrap(DataLoader(Augmented(N), 4, shuffle=True, collate_fn=keep), seed=3)
    live = iter(whole)
    head = [next(live), next(live)]
    state = whole.state_dict()
    rest = list(live)
    again = ResumableLoader.wrap(
        StatefulDataLoader(Augmented(N), 4, shuffle=True, collate_fn=keep, num_workers=2), seed=3
    )
    again.load_state_dict(state)
    assert list(again) == rest
    assert head


def test_the_loader_it_came_from_is_left_alone():
    loader = DataLoader(DATA, 4, shuffle=True, generator=seeded(), collate_fn=keep)
    state = loader.generator.get_state()
    ResumableLoader.wrap(loader, seed=3)
    assert torch.equal(loader.generator.get_state(), state)
    assert list(loader) == list(DataLoader(DATA, 4, shuffle=True, generator=seeded(), collate_fn=keep))


class Augmenting(DataLoader):
    """Does something to every batch."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


class Renamed(DataLoader):
    """Adds nothing to the iteration."""


def test_what_has_an_iteration_of_its_own_is_refused():
    with pytest.raises(TypeError, match=r"Augmenting.*__iter__"):
        ResumableLoader.wrap(Augmenting(DATA))
    assert len(list(ResumableLoader.wrap(Renamed(DATA, 4), seed=1))) == 6


@pytest.mark.parametrize("other", [DATA, None, [1, 2], ResumableLoader(DATA, 4)])
def test_what_is_no_loader_is_refused(other):
    with pytest.raises(TypeError, match="wrap"):
        ResumableLoader.wrap(other)


def test_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(3)

    with pytest.raises(NotImplementedError, match="dataset"):
        ResumableLoader.wrap(DataLoader(Stream()))
