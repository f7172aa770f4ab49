"""Start methods, workers that come and go, and the one interface to them."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from support_law import Noted, Plain, as_is, global_streams, indices_of, make, noted, whole_epochs

from resumable_data import ResumableLoader
from resumable_data.deals import Coordinates, PositionDeal
from resumable_data.engines import MapEngine
from resumable_data.fetch import Fetcher
from resumable_data.orders import Sequential
from resumable_data.plan import Plan


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method_delivers_the_same_and_resumes(method):
    whole = whole_epochs(2)
    loader = make(num_workers=1, multiprocessing_context=method)
    loader.seek(0, 2)
    state = loader.state_dict()
    copy = make(num_workers=1, multiprocessing_context=method, persistent_workers=True)
    copy.load_state_dict(state)
    assert list(copy) == whole[0][2:]
    assert list(copy) == whole[1]


class OwnGenerator(Plain):
    """Holds a generator of its own, as a dataset of a user may."""

    def __init__(self, n):
        super().__init__(n)
        self.generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index):
        # read, not moved: nothing reseeds a dataset's own generators
        return index, self.torch_generator.initial_seed(), self.generator.bit_generator.state["state"]["inc"]


def test_generators_in_the_loader_and_in_the_dataset_do_not_hinder_spawn():
    def run(**options):
        g = torch.Generator().manual_seed(1)
        loader = ResumableLoader(
            OwnGenerator(6), 2, shuffle=True, generator=g, collate_fn=as_is, seed=1, **options
        )
        with pytest.warns(UserWarning, match="nothing reseeds"):
            batches = list(loader)
        return batches, g.get_state().tolist()

    assert run(num_workers=1, multiprocessing_context="spawn") == run()


def tickets(n=10, batch_size=2):
    order = Sequential(n).look(0, 0)
    return PositionDeal(Plan(n, batch_size, 1, 0, False), lambda: order).tickets(0, (), Coordinates(0, 7, 0))


def engine(**options):
    template = torch.utils.data.DataLoader(Noted(10), 2, collate_fn=noted, **options)
    return MapEngine(
        template, lambda aside: Fetcher(template.dataset, template.collate_fn, "batch.v1", 0, aside=aside)
    )


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_tickets_go_in_and_numbered_batches_come_out_in_order(options):
    this = engine(**options)
    for _ in range(2):
        numbered = list(this.start(tickets(), torch.Generator()))
        assert [number for number, _ in numbered] == list(range(5))
        assert [i for _, batch in numbered for i in indices_of(batch)] == list(range(10))
    this.drop()
    assert multiprocessing.active_children() == []
    assert len(list(this.start(tickets(), torch.Generator()))) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_single_batch_is_fetched_here_and_disturbs_no_pass(workers):
    this = engine(num_workers=workers)
    running = this.start(tickets(), torch.Generator())
    first = next(running)
    before = global_streams()
    assert this.fetch_one(next(tickets())) == first[1]
    assert global_streams() == before
    assert [number for number, _ in running] == [1, 2, 3, 4]


def test_a_new_start_takes_nothing_of_what_was_in_flight():
    this = engine(num_workers=2, persistent_workers=True, prefetch_factor=4)
    running = this.start(tickets(), torch.Generator())
    next(running)
    again = list(this.start(tickets(), torch.Generator()))
    assert [number for number, _ in again] == list(range(5))
    this.drop()


def test_workers_never_see_more_than_is_prefetched():
    """What lies ahead is not fetched, and what lies behind a resume is never fetched."""
    loader = ResumableLoader(Counting(1000), 1, collate_fn=as_is, seed=1)
    loader.seek(0, 900)
    iterator = iter(loader)
    next(iterator)
    assert loader.dataset.asked == [900]


class Counting(Plain):
    def __init__(self, n):
        super().__init__(n)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return index
