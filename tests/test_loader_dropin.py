"""A swap of one word: what DataLoader takes, refuses, shows and delivers, ResumableLoader does too."""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from support_law import Batched, Noted, Plain, as_is, global_streams, position
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from resumable_data import ResumableLoader

ATTRIBUTES = [
    "dataset",
    "batch_size",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
    "collate_fn",
]


def outcome(kind, arguments):
    """A loader, or the exception it is refused with."""
    try:
        return kind(**arguments)
    except Exception as error:  # noqa: BLE001  # whatever it is, both must raise the same
        return error


def init(worker_id):
    pass


DATA = Plain(10)
GENERATOR = torch.Generator()
GRID = {
    "dataset": [DATA, Plain(0), [1, 2, 3], TensorDataset(torch.arange(6)), Subset(DATA, [1, 2, 3])],
    "batch_size": [1, 3, 0, -1, 2.0, True, "2"],
    "shuffle": [None, False, True],
    "num_workers": [0, 2, -1],
    "collate_fn": [None, as_is],
    "pin_memory": [False, True],
    "drop_last": [False, True, None, 1],
    "timeout": [0, 5, -1, 0.5],
    "worker_init_fn": [None, init],
    "multiprocessing_context": [None, "fork", "spawn", "nonsense", 3, multiprocessing.get_context("fork")],
    "generator": [None, GENERATOR],
    "prefetch_factor": [None, 3, -1, 0],
    "persistent_workers": [False, True],
}
#: One value of each argument varied at a time, then every pair of these.
PAIRS = [
    "batch_size",
    "shuffle",
    "num_workers",
    "drop_last",
    "timeout",
    "prefetch_factor",
    "persistent_workers",
]


def grid():
    seen = []
    for name, values in GRID.items():
        seen += [{"dataset": DATA, name: value} for value in values]
    for first, second in itertools.combinations(PAIRS, 2):
        seen += [{"dataset": DATA, first: a, second: b} for a, b in product(GRID[first], GRID[second])]
    for name, values in GRID.items():
        seen += [{"dataset": DATA, "num_workers": 2, name: value} for value in values]
    for sampler in (DistributedSampler(DATA, 2, 0), RandomSampler(DATA, generator=GENERATOR)):
        seen += [
            {"dataset": DATA, "sampler": sampler, "shuffle": shuffle, "batch_size": size, "drop_last": drop}
            for shuffle, size, drop in product([None, False, True], [1, 3, 0], [False, True])
        ]
    return seen


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_accepts_and_refuses_what_dataloader_does_and_shows_the_same_attributes():
    refused = accepted = 0
    for arguments in grid():
        theirs, ours = outcome(DataLoader, arguments), outcome(ResumableLoader, arguments)
        if isinstance(theirs, Exception):
            refused += 1
            assert type(ours) is type(theirs), arguments
            assert str(ours) == str(theirs), arguments
            continue
        accepted += 1
        assert isinstance(ours, ResumableLoader), (arguments, ours)
        assert len(ours) == len(theirs), arguments
        for name in ATTRIBUTES:
            assert getattr(ours, name) is getattr(theirs, name) or (
                getattr(ours, name) == getattr(theirs, name)
            ), (name, arguments)
        assert type(ours.multiprocessing_context) is type(theirs.multiprocessing_context), arguments
        assert isinstance(ours.sampler, type(theirs.sampler)), arguments
        assert type(ours.batch_sampler) is type(theirs.batch_sampler), arguments
        assert len(ours.batch_sampler) == len(theirs.batch_sampler), arguments
        assert ours.batch_sampler.sampler is ours.sampler
        assert len(ours.sampler) == len(theirs.sampler), arguments
    assert refused > 100
    assert accepted > 100


def test_arguments_go_by_position_in_dataloaders_order():
    g = torch.Generator()
    positional = (DATA, 3, True, None, None, 2, as_is, False, True, 7, init, "fork", g)
    ours, theirs = ResumableLoader(*positional), DataLoader(*positional)
    for name in ATTRIBUTES:
        assert getattr(ours, name) == getattr(theirs, name)


def test_attributes_are_read_only():
    loader = ResumableLoader(DATA)
    for name in (*ATTRIBUTES, "sampler", "batch_sampler", "multiprocessing_context"):
        with pytest.raises(AttributeError):
            setattr(loader, name, None)


def test_it_is_no_dataloader_it_has_one():
    assert not issubclass(ResumableLoader, DataLoader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "dataset",
    [
        list(range(11)),
        [{"x": float(i), "y": np.float32(i)} for i in range(11)],
        TensorDataset(torch.arange(11), torch.randn(11, 3, generator=torch.Generator().manual_seed(0))),
        Subset(TensorDataset(torch.arange(20)), list(range(0, 20, 2))),
        Batched(9),
    ],
    ids=["list", "dicts", "tensors", "subset", "getitems"],
)
def test_in_order_the_batches_are_dataloaders(dataset, drop_last, workers):
    options = {"batch_size": 4, "drop_last": drop_last, "num_workers": workers}
    if isinstance(dataset, Batched):
        options["collate_fn"] = first_of_each
    theirs, ours = DataLoader(dataset, **options), ResumableLoader(dataset, **options)
    for _ in range(2):
        assert_equal(list(ours), list(theirs))


def first_of_each(samples):
    return [sample[0] for sample in samples]


def assert_equal(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.equal(theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        assert_equal(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for mine, torchs in zip(ours, theirs, strict=True):
            assert_equal(mine, torchs)
    else:
        assert ours == theirs


# -- DistributedSampler -------------------------------------------------------------------------


def test_a_distributed_samplers_batches_are_dataloaders_in_every_epoch():
    cases = 0
    for n, width, size, drop, sampler_drop, shuffle in product(
        [1, 2, 5, 12, 23], [1, 2, 3, 5], [1, 4], [False, True], [False, True], [False, True]
    ):
        for rank in {0, width - 1}:
            options = {"num_replicas": width, "rank": rank, "shuffle": shuffle, "seed": 3}
            data = Plain(n)
            theirs_sampler = DistributedSampler(data, drop_last=sampler_drop, **options)
            theirs = DataLoader(data, size, sampler=theirs_sampler, drop_last=drop, collate_fn=as_is)
            ours_sampler = DistributedSampler(data, drop_last=sampler_drop, **options)
            ours = ResumableLoader(data, size, sampler=ours_sampler, drop_last=drop, collate_fn=as_is)
            assert len(ours) == len(theirs)
            assert ours.sampler is ours_sampler
            for epoch in range(3):
                theirs_sampler.set_epoch(epoch)
                assert list(ours) == list(theirs), (n, width, size, drop, sampler_drop, shuffle, rank, epoch)
                assert ours_sampler.epoch == epoch
            cases += 1
    assert cases > 400


@pytest.mark.parametrize("teller", ["loader", "sampler", "nobody"])
def test_whoever_tells_the_epoch_the_order_is_torchs(teller):
    data = Plain(20)
    reference = DistributedSampler(data, 2, 1)
    sampler = DistributedSampler(data, 2, 1)
    loader = ResumableLoader(data, 3, sampler=sampler, collate_fn=as_is, num_workers=2)
    for epoch in [0, 1, 2] if teller == "nobody" else [0, 1, 5, 2]:
        if teller != "nobody":
            {"loader": loader, "sampler": sampler}[teller].set_epoch(epoch)
        reference.set_epoch(epoch)
        assert [i for batch in loader for i in batch] == list(reference)
        assert sampler.epoch == epoch


def test_a_loaded_state_tells_the_sampler_its_epoch():
    data = Plain(20)

    def new():
        sampler = DistributedSampler(data, 2, 1)
        return sampler, ResumableLoader(data, 3, sampler=sampler, collate_fn=as_is)

    _, loader = new()
    list(loader)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    sampler, copy = new()
    copy.load_state_dict(loader.state_dict())
    assert sampler.epoch == 2
    assert list(copy) == list(iterator)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shown_sampler_lists_this_ranks_indices_and_takes_set_epoch(shuffle):
    loader = ResumableLoader(Plain(11), 2, shuffle=shuffle, seed=1, num_replicas=2, rank=1, collate_fn=as_is)
    for epoch in (0, 4):
        loader.sampler.set_epoch(epoch)
        assert loader.epoch == epoch
        listed = list(loader.sampler)
        assert len(loader.sampler) == len(listed)
        assert [i for batch in loader for i in batch] == listed
    loader.batch_sampler.sampler.set_epoch(9)
    assert position(loader) == (9, 0)
    assert isinstance(loader.sampler, RandomSampler if shuffle else SequentialSampler)


# -- generator= ---------------------------------------------------------------------------------


def run_generator(kind, n, size, drop_last, workers, sampler, between, epochs=3):
    """Batches of some epochs and the generator's state, with the user drawing from it in between."""
    g = torch.Generator().manual_seed(42)
    options = {"batch_size": size, "drop_last": drop_last, "num_workers": workers, "collate_fn": as_is}
    if sampler == "shuffle":
        options |= {"shuffle": True, "generator": g}
    elif sampler == "in order":
        options |= {"generator": g}
    elif sampler == "both":
        options |= {"sampler": RandomSampler(Plain(n), generator=g), "generator": g}
    elif sampler == "two generators":
        own = torch.Generator().manual_seed(7)
        options |= {"sampler": RandomSampler(Plain(n), generator=own), "generator": g}
    elif sampler == "replacement":
        options |= {"sampler": RandomSampler(Plain(n), True, generator=g)}
    elif sampler == "45 with replacement":
        options |= {"sampler": RandomSampler(Plain(n), True, 45, generator=g)}
    elif sampler == "64 with replacement":
        options |= {"sampler": RandomSampler(Plain(n), True, 64, generator=g)}
    elif sampler == "more than there are":
        options |= {"sampler": RandomSampler(Plain(n), False, 2 * n + 3, generator=g)}
    elif sampler == "fewer than there are":
        options |= {"sampler": RandomSampler(Plain(n), False, n // 2, generator=g)}
    else:
        options |= {"sampler": RandomSampler(Plain(n), generator=g)}
    loader = kind(Plain(n), **options)
    seen = []
    for _ in range(epochs):
        last = len(loader) - 1
        for number, batch in enumerate(loader):
            seen.append(batch)
            # torch makes its last draw with the last, partial batch; ours waits for the pass's end
            if between == "batches" and number < last - 1:
                seen.append(int(torch.randint(1000, (), generator=g)))
        if between:
            seen.append(int(torch.randint(1000, (), generator=g)))
    return seen, g.get_state().tolist()


SAMPLERS = [
    "shuffle",
    "in order",
    "both",
    "two generators",
    "sampler alone",
    "replacement",
    "45 with replacement",
    "64 with replacement",
    "more than there are",
    "fewer than there are",
]
#: These draw once an epoch, whatever the number of batches: torch draws the others bit by bit.
AT_ONCE = ["shuffle", "in order", "both", "two generators", "sampler alone", "fewer than there are"]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("between", [None, "epochs", "batches"])
def test_a_generators_batches_and_draws_are_dataloaders(sampler, between):
    if between == "batches" and sampler not in AT_ONCE:
        between = "epochs"
    for n, size, drop_last in product([5, 12, 30], [1, 4], [False, True]):
        case = (n, size, drop_last, 0, sampler, between)
        assert run_generator(ResumableLoader, *case) == run_generator(DataLoader, *case), case


@pytest.mark.parametrize("sampler", ["shuffle", "in order", "45 with replacement"])
def test_a_generators_batches_and_draws_are_dataloaders_with_workers(sampler):
    for n, size, drop_last in [(12, 4, False), (11, 4, False), (11, 4, True)]:
        case = (n, size, drop_last, 2, sampler, "epochs")
        assert run_generator(ResumableLoader, *case) == run_generator(DataLoader, *case), case


def test_control_another_generator_gives_other_batches():
    first, second = (
        [
            list(ResumableLoader(Plain(12), 4, shuffle=True, generator=g, collate_fn=as_is))
            for g in [torch.Generator().manual_seed(seed)]
        ]
        for seed in (1, 2)
    )
    assert first != second


class Seen(Noted):
    """Item i is what a worker can know of itself."""

    started = None

    def __getitem__(self, index):
        info = get_worker_info()
        return index, info.id, info.num_workers, info.seed, type(info.dataset).__name__, info.dataset is self


@pytest.mark.parametrize("batch_size", [1, 3])
def test_unseeded_workers_get_the_seeds_that_torch_would_draw(batch_size):
    def run(kind, **more):
        g = torch.Generator().manual_seed(5)
        loader = kind(Seen(6), batch_size, shuffle=True, num_workers=2, generator=g, collate_fn=as_is, **more)
        return [list(loader) for _ in range(3)], g.get_state().tolist()

    assert run(ResumableLoader, seeding=None) == run(DataLoader)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_users_dataset_and_a_seed_of_their_epoch(persistent):
    def run(seed, rank=0):
        loader = ResumableLoader(
            Seen(6),
            1,
            num_workers=2,
            persistent_workers=persistent,
            collate_fn=as_is,
            seed=seed,
            num_replicas=2,
            rank=rank,
        )
        return [[sample for (sample,) in loader] for _ in range(3)]

    epochs = run(3)
    for samples in epochs:
        for _, worker, workers, seed, name, same in samples:
            assert (workers, name, same) == (2, "Seen", True)
            assert seed - worker == samples[0][3] - samples[0][1]
    seeds = [{sample[3] for sample in samples} for samples in epochs]
    assert len(set.union(*seeds)) == 6, "no seed comes back in another epoch"
    assert run(3) == epochs
    assert run(4)[0][0][3] != epochs[0][0][3]
    assert run(3, 1)[0][0][3] != epochs[0][0][3]


def test_the_workers_seeds_do_not_depend_on_persistence_or_a_resume():
    def new(persistent):
        return ResumableLoader(
            Seen(6), 1, num_workers=2, persistent_workers=persistent, collate_fn=as_is, seed=3
        )

    def seeds(loader):
        return [sample[3] - sample[1] for (sample,) in loader]

    one, two, resumed = new(False), new(True), new(True)
    first, second = seeds(one), seeds(one)
    assert [seeds(two), seeds(two)] == [first, second]
    resumed.seek(1, 2)
    assert seeds(resumed) == second[2:]


def note_start(worker_id):
    info = get_worker_info()
    info.dataset.started = (worker_id, torch.initial_seed() == info.seed, type(info.dataset).__name__)


class Started(Noted):
    started = None

    def __getitem__(self, index):
        return self.started


def test_worker_init_fn_sees_the_users_dataset_and_the_derived_seed():
    loader = ResumableLoader(
        Started(4), 1, num_workers=2, worker_init_fn=note_start, collate_fn=as_is, seed=3
    )
    assert [started for (started,) in loader] == [(number % 2, True, "Started") for number in range(4)]


# -- the process's own streams ------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_moves_the_streams_of_the_training_process(workers, shuffle):
    before = global_streams()
    loader = ResumableLoader(Noted(6), 2, shuffle=shuffle, num_workers=workers)
    for _ in loader:
        loader.peek()
        loader.state_dict()
        break
    loader.load_state_dict(loader.state_dict())
    list(loader)
    loader.batch_at(0, 1)
    loader.seek(3, 1)
    list(loader)
    assert global_streams() == before


def test_unseeded_and_without_workers_the_dataset_draws_from_the_process():
    def run(kind, **more):
        torch.manual_seed(0)
        np.random.seed(0)
        __import__("random").seed(0)
        g = torch.Generator().manual_seed(0)
        return list(kind(Noted(6), 2, shuffle=True, generator=g, collate_fn=as_is, **more))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(ResumableLoader, seeding=None) == run(DataLoader)
