"""What the loader refuses: every message names the argument, the value and what would have been right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_law import Batched, Noted, Plain, as_is, make, position, through_json
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from resumable_data import ResumableLoader, StateMismatchError

TOP = 2**64 - 1


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"seed": -1}, ValueError, ["seed", "-1", "[0, 18446744073709551615]"]),
        ({"seed": TOP + 1}, ValueError, ["seed", str(TOP + 1)]),
        ({"seed": 1.0}, TypeError, ["seed", "1.0", "int"]),
        ({"seed": "7"}, TypeError, ["seed", "'7'"]),
        ({"seed": True}, TypeError, ["seed", "True"]),
        ({"num_replicas": 0}, ValueError, ["num_replicas", "0", "[1, "]),
        ({"num_replicas": 2.0, "rank": 0}, TypeError, ["num_replicas", "2.0"]),
        ({"num_replicas": True, "rank": 0}, TypeError, ["num_replicas", "True"]),
        ({"num_replicas": 2, "seed": 1}, ValueError, ["num_replicas=2", "rank", "[0, 1]", "None"]),
        ({"num_replicas": 2, "rank": 2, "seed": 1}, ValueError, ["rank", "2", "[0, 1]"]),
        ({"num_replicas": 2, "rank": -1, "seed": 1}, ValueError, ["rank", "-1", "[0, 1]"]),
        ({"num_replicas": 2, "rank": "0", "seed": 1}, TypeError, ["rank", "'0'"]),
        ({"rank": 0}, ValueError, ["rank=0", "without num_replicas"]),
        ({"num_replicas": 2, "rank": 0}, ValueError, ["seed", "num_replicas=2", "None"]),
        ({"tail": "wrap"}, ValueError, ["tail", "'pad', 'drop' or 'uneven'", "'wrap'"]),
        ({"tail": None}, ValueError, ["tail", "None"]),
        ({"seeding": "none"}, ValueError, ["seeding", "'batch', 'sample' or None", "'none'"]),
        ({"seeding": ["batch"]}, ValueError, ["seeding", "['batch']"]),
        ({"seeding": 1}, ValueError, ["seeding", "1"]),
        ({"dataset_id": 3}, TypeError, ["dataset_id", "3"]),
        ({"snapshot_every_n_steps": 0}, ValueError, ["snapshot_every_n_steps", "0", "[1, "]),
        ({"snapshot_every_n_steps": 1.5}, TypeError, ["snapshot_every_n_steps", "1.5"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_types_and_ranges(arguments, error, parts):
    with pytest.raises(error) as caught:
        ResumableLoader(Plain(10), **arguments)
    for part in parts:
        assert part in str(caught.value)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Stateful(Plain):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OwnDistributedSampler(DistributedSampler):
    pass


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Stream(), "dataset (an IterableDataset)"),
        (Stateful(10), "dataset (with a state_dict of its own)"),
    ],
    ids=["a stream", "a stateful dataset"],
)
def test_what_this_version_cannot_do_is_named(dataset, name):
    with pytest.raises(NotImplementedError) as caught:
        ResumableLoader(dataset)
    assert str(caught.value).startswith(name + " is not supported")


class Descending:
    """A sampler of the user's."""

    def __iter__(self):
        return iter(range(9, -1, -1))

    def __len__(self):
        return 10


def carried(kind, *arguments, **options):
    return kind(*arguments, generator=torch.Generator().manual_seed(3), **options)


TAKEN = {
    "tail='drop'": (lambda: {"tail": "drop", "num_replicas": 4, "rank": 1, "seed": 1}, "sequential"),
    "tail='uneven'": (lambda: {"tail": "uneven", "num_replicas": 4, "rank": 1, "seed": 1}, "sequential"),
    "batches_per_epoch": (lambda: {"batches_per_epoch": 3}, "sequential"),
    "reseed": (lambda: {"reseed": lambda dataset, word: None}, "sequential"),
    "in_order=False": (lambda: {"in_order": False}, "sequential"),
    "batch_size=None": (lambda: {"batch_size": None}, "sequential"),
    "torch's batch sampler": (lambda: {"batch_sampler": BatchSampler(range(10), 2, False)}, "sampler"),
    "a batch sampler": (lambda: {"batch_sampler": [[1, 2], [3], [0, 4, 5]]}, "batch_sampler"),
    "RandomSampler": (lambda: {"sampler": RandomSampler(Plain(10))}, "sampler"),
    "RandomSampler with a generator": (lambda: {"sampler": carried(RandomSampler, Plain(10))}, "generator"),
    "SubsetRandomSampler with a generator": (
        lambda: {"sampler": carried(SubsetRandomSampler, range(4))},
        "generator",
    ),
    "WeightedRandomSampler with a generator": (
        lambda: {"sampler": carried(WeightedRandomSampler, [1.0] * 10, 5)},
        "generator",
    ),
    "SequentialSampler": (lambda: {"sampler": SequentialSampler(Plain(10))}, "sampler"),
    "SubsetRandomSampler": (lambda: {"sampler": SubsetRandomSampler([1, 2])}, "sampler"),
    "a DistributedSampler": (lambda: {"sampler": DistributedSampler(Plain(10), 2, 0)}, "distributed"),
    "a subclass of DistributedSampler": (
        lambda: {"sampler": OwnDistributedSampler(Plain(10), 2, 0)},
        "sampler",
    ),
    "a list": (lambda: {"sampler": [1, 2, 3]}, "sampler"),
    "a sampler": (lambda: {"sampler": Descending()}, "sampler"),
}


@pytest.mark.parametrize(("arguments", "order"), TAKEN.values(), ids=TAKEN)
def test_every_argument_is_taken_and_its_order_resumed(arguments, order):
    def new():
        options = arguments()
        sized = {} if "batch_sampler" in options or "batch_size" in options else {"batch_size": 1}
        return ResumableLoader(Plain(10), **{"seed": 5, "collate_fn": as_is, **sized, **options})

    loader = new()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["order"] == order
    rest = list(iterator)
    assert rest
    copy = new()
    copy.load_state_dict(through_json(state))
    assert list(copy) == rest
    assert list(copy) == list(loader)


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"process_group": "world"}, TypeError, ["process_group", "ProcessGroup or a DeviceMesh"]),
        ({"process_group": 3, "rank": 0}, ValueError, ["process_group", "rank=0", "pass the group, or"]),
        ({"batches_per_epoch": 0}, ValueError, ["batches_per_epoch", "0", "[1, "]),
        ({"batches_per_epoch": 2.0}, TypeError, ["batches_per_epoch", "2.0"]),
        ({"reseed": 3}, TypeError, ["reseed", "3"]),
        ({"reseed": print, "seeding": None}, ValueError, ["reseed", "seeding=None"]),
        ({"in_order": False, "num_workers": -1}, ValueError, ["num_workers"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_values_of_what_is_taken(arguments, error, parts):
    with pytest.raises(error) as caught:
        ResumableLoader(Plain(10), **arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda loader, value: loader.seek(value, 0),
        lambda loader, value: loader.seek(0, value),
        lambda loader, value: loader.set_epoch(value),
        lambda loader, value: loader.batch_at(value, 0),
        lambda loader, value: loader.batch_at(0, value),
        lambda loader, value: loader.epochs(value),
        lambda loader, value: loader.state_dict(in_flight=value),
    ],
    ids=["seek epoch", "seek batch", "set_epoch", "batch_at epoch", "batch_at batch", "epochs", "in_flight"],
)
def test_numbers_given_to_methods(call):
    loader = make()
    for value in (1.0, "1", None, True):
        with pytest.raises(TypeError, match="must be an int"):
            call(loader, value)
    with pytest.raises(ValueError, match=r"must be in \[0, .*found -1"):
        call(loader, -1)
    assert position(loader) == (0, 0)


def test_integers_of_other_libraries_are_integers():
    loader = ResumableLoader(Plain(10), 2, seed=np.int64(3), num_replicas=np.int32(2), rank=np.uint8(1))
    loader.seek(np.int64(1), np.int64(1))
    state = loader.state_dict()
    assert (type(state["seed"]), type(state["epoch"]), type(state["num_replicas"])) == (int, int, int)


def test_a_dataset_without_a_length_is_pythons_own_error():
    class Endless:
        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError, match="len"):
        ResumableLoader(Endless(), 2)


def test_sample_seeding_refuses_a_dataset_of_whole_batches():
    with pytest.raises(ValueError, match=r"seeding='sample'.*Batched.*__getitems__"):
        ResumableLoader(Batched(10), 2, seeding="sample")
    subset = torch.utils.data.Subset(Noted(10), range(4))
    first = list(ResumableLoader(subset, 2, seeding="sample", seed=1, collate_fn=as_is))
    assert first == list(ResumableLoader(subset, 2, seeding="sample", seed=1, collate_fn=as_is))


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_a_sampler_is_never_sharded_again(tail):
    data = Plain(10)

    def batches(rank, sampler):
        options = {"seed": 1, "collate_fn": as_is, "tail": tail}
        return list(ResumableLoader(data, 4, sampler=sampler, num_replicas=2, rank=rank, **options))

    whole = [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    assert batches(0, Descending()) == batches(1, Descending()) == whole
    with pytest.raises(ValueError, match=r"\(3, 0\) with a DistributedSampler of \(2, 0\)"):
        ResumableLoader(data, sampler=DistributedSampler(data, 2, 0), num_replicas=3, rank=0, seed=1)
    if tail != "pad":
        with pytest.raises(ValueError, match=f"tail='{tail}' with a DistributedSampler"):
            ResumableLoader(data, sampler=DistributedSampler(data, 2, 0), tail=tail)


def test_a_generators_draws_are_not_dealt_out():
    for options in (
        {"shuffle": True, "generator": torch.Generator()},
        {"generator": torch.Generator()},
        {"sampler": carried(RandomSampler, Plain(10))},
    ):
        with pytest.raises(ValueError, match="num_replicas=2 with a generator"):
            ResumableLoader(Plain(10), num_replicas=2, rank=0, seed=1, **options)


def test_what_is_not_a_function_of_the_position_is_refused():
    data = Plain(10)
    loader = ResumableLoader(data, 2, shuffle=True, generator=torch.Generator(), collate_fn=as_is)
    for call in (
        lambda: loader.batch_at(0, 0),
        lambda: loader.seek(1, 0),
        lambda: loader.set_epoch(1),
    ):
        with pytest.raises(ValueError, match="generator"):
            call()
    first = loader.peek()
    assert next(iter(loader)) == first
    loader.seek(0, 1)  # within the epoch it may move
    unseeded = ResumableLoader(data, 2, seeding=None, num_workers=2)
    with pytest.raises(ValueError, match="seeding=None"):
        unseeded.peek()
    with pytest.raises(ValueError, match="seeding=None"):
        unseeded.batch_at(0, 0)


# -- the seed -----------------------------------------------------------------------------------


def test_an_adopted_seed_is_torchs_initial_seed_at_first_use_then_frozen():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        loader = ResumableLoader(Plain(10), 2, shuffle=True)
        torch.manual_seed(12)
        before = torch.get_rng_state()
        assert loader.state_dict()["seed"] == 12
        assert torch.get_rng_state().equal(before), "read, never drawn from"
        torch.manual_seed(13)
        assert loader.state_dict()["seed"] == 12
        assert [b.tolist() for b in loader] == [
            b.tolist() for b in ResumableLoader(Plain(10), 2, shuffle=True, seed=12)
        ]


def test_an_adopted_seed_gives_way_to_a_loaded_one_also_after_use():
    saved = ResumableLoader(Plain(10), 2, shuffle=True, seed=5, collate_fn=as_is)
    whole = list(saved)
    loader = ResumableLoader(Plain(10), 2, shuffle=True, collate_fn=as_is)
    list(loader)
    saved.seek(0, 2)
    loader.load_state_dict(saved.state_dict())
    assert loader.state_dict()["seed"] == 5
    assert list(loader) == whole[2:]


def test_an_explicit_seed_must_match():
    state = ResumableLoader(Plain(10), 2, shuffle=True, seed=5).state_dict()
    loader = ResumableLoader(Plain(10), 2, shuffle=True, seed=6)
    with pytest.raises(StateMismatchError, match="seed: saved 5, current 6"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, override={"seed"})
    assert loader.state_dict()["seed"] == 6


def test_a_distributed_sampler_brings_its_seed():
    data = Plain(10)
    loader = ResumableLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=9))
    assert loader.state_dict()["seed"] == 9
    assert loader.state_dict()["num_replicas"] == 2
    other = ResumableLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=8))
    with pytest.raises(StateMismatchError, match="seed"):
        other.load_state_dict(loader.state_dict())


def test_the_largest_seed_and_epoch_are_fine():
    loader = ResumableLoader(TensorDataset(torch.arange(6)), 2, shuffle=True, seed=TOP)
    loader.seek(TOP, 1)
    state = loader.state_dict()
    assert (state["seed"], state["epoch"]) == (TOP, TOP)
    loader.load_state_dict(state)
    assert len(list(loader)) == 2
