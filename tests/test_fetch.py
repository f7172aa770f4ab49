"""What runs beside the dataset: how samples are had, seeded and collated."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from support_law import Noted, Plain, as_is, draws, global_streams, noted
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from resumable_data import ResumableLoader
from resumable_data.fetch import Fetcher, Ticket, WorkerInit

KEYS = [5, 0, 3]


def ticket(keys=KEYS, *, number=4, epoch=1, seed=7, first=12, stride=1):
    return Ticket(number, epoch, seed, 99, first, stride, np.array(keys, dtype="<i8").tobytes())


def fetcher(dataset, collate_fn=noted, seeding="batch.v1", rank=0, aside=True):
    return Fetcher(dataset, collate_fn, seeding, rank, aside=aside)


def test_a_batch_comes_back_with_its_number():
    number, batch = fetcher(Plain(9), as_is)[ticket()]
    assert (number, batch) == (4, KEYS)


def test_keys_are_plain_ints_as_torchs_samplers_give_them():
    class Picky(Plain):
        def __getitem__(self, index):
            assert type(index) is int
            return index

    for seeding in ("batch.v1", "sample.v1", "none"):
        assert fetcher(Picky(9), as_is, seeding)[ticket()] == (4, KEYS)


def test_a_batch_is_a_function_of_its_ticket():
    for seeding in ("batch.v1", "sample.v1"):
        one, other = (fetcher(Noted(9), seeding=seeding) for _ in range(2))
        first = one[ticket()]
        other[ticket([1, 2], first=0)]
        assert other[ticket()] == first


@pytest.mark.parametrize(
    "change", [{"epoch": 2}, {"seed": 8}, {"first": 13}], ids=lambda change: next(iter(change))
)
@pytest.mark.parametrize("seeding", ["batch.v1", "sample.v1"])
def test_every_coordinate_changes_every_draw(seeding, change):
    _, one = fetcher(Noted(9), seeding=seeding)[ticket()]
    _, other = fetcher(Noted(9), seeding=seeding)[ticket(**change)]
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine[0] == theirs[0]
        assert all(a != b for a, b in zip(mine[1:], theirs[1:], strict=True))
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


def test_ranks_draw_apart_per_batch_and_alike_per_sample():
    def run(seeding, rank):
        return fetcher(Noted(9), seeding=seeding, rank=rank)[ticket()][1]

    assert run("batch.v1", 0)[0] != run("batch.v1", 1)[0]
    assert run("sample.v1", 0)[0] == run("sample.v1", 1)[0]
    # collate draws belong to the batch in both
    assert run("sample.v1", 0)[1:] != run("sample.v1", 1)[1:]


def test_collate_draws_do_not_depend_on_the_samples():
    class Greedy(Noted):
        def __getitem__(self, index):
            torch.rand(index)
            return super().__getitem__(index)

    assert fetcher(Noted(9))[ticket()][1][1:] == fetcher(Greedy(9))[ticket()][1][1:]


def test_a_repeat_that_pads_draws_for_itself():
    _, (samples, *_) = fetcher(Noted(9), seeding="sample.v1")[ticket([2, 2])]
    assert samples[0][0] == samples[1][0]
    assert samples[0][1:] != samples[1][1:]


def test_the_processes_streams_stay_also_where_the_dataset_raises():
    class Raising(Noted):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError(index)
            return super().__getitem__(index)

    before = global_streams()
    with pytest.raises(KeyError):
        fetcher(Raising(9))[ticket()]
    assert global_streams() == before


class Asked(Plain):
    """Notes how it is asked for samples."""

    def __init__(self, n):
        super().__init__(n)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return index


class AskedForBatches(Asked):
    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return list(indices)


@pytest.mark.parametrize("seeding", ["batch.v1", "sample.v1", "none"])
def test_samples_are_had_as_torch_has_them(seeding):
    items = Asked(9)
    assert fetcher(items, as_is, seeding)[ticket()] == (4, KEYS)
    assert items.asked == KEYS
    if seeding != "sample.v1":
        whole = AskedForBatches(9)
        assert fetcher(whole, as_is, seeding)[ticket()] == (4, KEYS)
        assert whole.asked == [KEYS]


def test_a_subset_seeded_by_sample_is_fetched_item_by_item():
    whole = AskedForBatches(9)
    # a subset hands its own keys on; seeded before each sample it is asked for one at a time
    assert fetcher(Subset(whole, range(9)), as_is, "sample.v1")[ticket()] == (4, KEYS)
    assert whole.asked == KEYS
    with pytest.raises(ValueError, match=r"seeding='sample'.*AskedForBatches.*__getitems__"):
        fetcher(whole, as_is, "sample.v1")


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "taken"),
    [
        (TensorDataset(torch.arange(9)), default_collate, True),
        (TensorDataset(torch.arange(9)), as_is, False),
        (TensorDataset(torch.arange(18)[::2]), default_collate, False),
        (TensorDataset(torch.ones(9, requires_grad=True)), default_collate, False),
        (Subset(TensorDataset(torch.arange(9)), [1]), default_collate, False),
    ],
)
@pytest.mark.parametrize("seeding", ["batch.v1", "sample.v1", "none"])
def test_tensors_are_taken_whole_only_where_it_cannot_be_told(dataset, collate_fn, taken, seeding):
    assert fetcher(dataset, collate_fn, seeding)._whole_tensors is taken
    reseeded = Fetcher(
        dataset, collate_fn, "batch.v1", 0, aside=True, reseed=lambda dataset, word: None
    )  # a function of the user's may draw
    assert not reseeded._whole_tensors


@pytest.mark.parametrize("keys", [["a", "c"], [(0, 3)], [np.int64(2)]], ids=str)
def test_a_samplers_keys_reach_the_dataset_as_they_are(keys):
    class Named:
        def __getitem__(self, key):
            return type(key), key

    given = ticket()._replace(keys=keys)
    for seeding in ("batch.v1", "sample.v1", "none"):
        assert fetcher(Named(), as_is, seeding)[given] == (4, [(type(key), key) for key in keys])


def test_a_single_sample_is_not_put_into_a_list():
    for seeding in ("batch.v1", "sample.v1", "none"):
        this = Fetcher(Plain(9), as_is, seeding, 0, aside=True, single=True)
        assert this[ticket([5])] == (4, 5)
        whole = Fetcher(AskedForBatches(9), as_is, seeding, 0, aside=True, single=True)
        assert whole[ticket([5])] == (4, 5)


def test_a_single_sample_draws_as_the_batch_of_it_would():
    for seeding in ("batch.v1", "sample.v1"):
        single = Fetcher(Noted(9), as_is, seeding, 0, aside=True, single=True)
        assert single[ticket([5])][1] == fetcher(Noted(9), as_is, seeding)[ticket([5])][1][0]


class Epochs(Plain):
    """Notes the epochs it is told, each with a draw from every library."""

    def __init__(self, n):
        super().__init__(n)
        self.told = []

    def set_epoch(self, epoch):
        self.told.append((epoch, *draws()))


def told(seeding="batch.v1", rank=0, epochs=(0, 0, 1, 1, 0)):
    dataset = Epochs(9)
    this = fetcher(dataset, as_is, seeding, rank)
    for number, epoch in enumerate(epochs):
        this[ticket(epoch=epoch, first=number)]
    return dataset.told


def test_a_dataset_is_told_the_epoch_where_it_changes_and_draws_the_same_everywhere():
    assert [epoch for epoch, *_ in told()] == [0, 1, 0]
    assert told() == told(rank=3) == told("sample.v1")
    first, second, again = told()
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))
    assert [epoch for epoch, *_ in told("none")] == [0, 1, 0]


def test_control_an_unseeded_datasets_epoch_draws_differ():
    assert told("none") != told("none")


class Changed(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + 100


def test_a_subclass_of_tensor_dataset_keeps_its_own_getitem():
    (batch,) = ResumableLoader(Changed(torch.arange(3)), 3)
    assert batch.tolist() == [100, 101, 102]


def test_whole_tensors_move_no_stream_and_share_nothing():
    data = torch.arange(12.0).reshape(6, 2)
    before = global_streams()
    for (batch,) in ResumableLoader(TensorDataset(data), 4):
        batch.zero_()
    assert global_streams() == before
    assert data.equal(torch.arange(12.0).reshape(6, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_tensors_are_shuffled_and_resumed_like_any_data(workers):
    def new(dataset):
        return ResumableLoader(dataset, 4, shuffle=True, seed=3, num_workers=workers)

    tensors, items = new(TensorDataset(torch.arange(10))), new(list(range(10)))
    expected = [batch.tolist() for _ in range(2) for batch in items]
    assert [batch.tolist() for _ in range(2) for (batch,) in tensors] == expected
    tensors.seek(1, 1)
    assert [batch.tolist() for (batch,) in tensors] == expected[4:]


def test_it_pickles_with_its_dataset_and_without_streams():
    used = fetcher(Noted(9))
    batch = used[ticket()]
    fresh = pickle.loads(pickle.dumps(fetcher(Noted(9))))
    assert fresh[ticket()] == batch


# -- torch's WorkerInfo -------------------------------------------------------------------------


def test_upstreams_worker_info_is_still_what_the_adapter_reaches_behind():
    """Fails when torch changes WorkerInfo: then look at WorkerInit and _keep_worker_seed again."""
    info = WorkerInfo(id=1, num_workers=2, seed=5, dataset=fetcher(Plain(3)))
    with pytest.raises((AttributeError, RuntimeError)):
        info.seed = 6  # frozen: a plain assignment must not work, or the adapter is not needed
    object.__setattr__(info, "seed", 6)
    object.__setattr__(info, "dataset", info.dataset.dataset)
    assert info.seed == 6
    assert isinstance(info.dataset, Plain)
    assert {"id", "num_workers", "seed", "dataset"} <= {field.name for field in fields(info)}


class Told(Plain):
    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.seed, type(info.dataset).__name__


def test_the_adapter_works_inside_a_real_worker():
    loader = ResumableLoader(Told(4), 1, num_workers=2, collate_fn=as_is, seed=1, persistent_workers=True)
    for _ in range(2):
        told = [item for (item,) in loader]
        assert {name for _, _, name in told} == {"Told"}
        assert len({seed - worker for worker, seed, _ in told}) == 1


def test_outside_a_worker_the_adapter_only_calls_the_users_function():
    called = []
    WorkerInit(called.append)(3)
    WorkerInit(None)(3)
    assert called == [3]


def test_data_that_is_none_is_data():
    class Holes:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return [1, None, 2][index]

    for workers in (0, 2):
        loader = ResumableLoader(Holes(), 1, collate_fn=as_is, num_workers=workers)
        assert list(loader) == [[1], [None], [2]]
        loader = ResumableLoader(Holes(), 1, collate_fn=nothing, num_workers=workers)
        assert list(loader) == [None, None, None]


def nothing(samples):
    return None


def test_pinning_without_an_accelerator_is_dataloaders():
    def run(kind):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [
                batch.tolist() for (batch,) in kind(TensorDataset(torch.arange(6)), 2, pin_memory=True)
            ]
        return batches, {str(warning.message) for warning in caught}

    assert run(ResumableLoader) == run(DataLoader)
