"""An epoch's global order, and the digest of orders that come from outside."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from support_law import Plain
from torch.utils.data import DistributedSampler, RandomSampler

from resumable_data.dealers import PositionDealer
from resumable_data.draws import GeneratorDraws
from resumable_data.orders import Distributed, Generated, Order, Sequential, Shuffled, Stored
from resumable_data.permutation import Permutation
from resumable_data.plan import Plan


def whole(order, epoch=0, seed=0):
    return order.look(epoch, seed).take(0, order.length, 1).tolist()


def digest_by_hand(indices):
    return hashlib.sha256(np.array(indices, dtype="<i8").tobytes()).hexdigest()[:32]


def test_sequential():
    assert whole(Sequential(5)) == [0, 1, 2, 3, 4]
    assert Sequential(5).look(3, 9).take(1, 4, 2).tolist() == [1, 3, 0, 2]


def test_shuffled_is_the_permutation_of_its_coordinates():
    order = Shuffled(50)
    positions = np.arange(50)
    for epoch, seed in [(0, 0), (1, 0), (0, 1), (1, 0)]:
        assert whole(order, epoch, seed) == Permutation(50, seed, epoch).take(positions).tolist()
    assert len({tuple(whole(order, epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_an_epoch_that_was_looked_up_stays_what_it_is():
    order = Shuffled(50)
    first = order.look(0, 0)
    before = first.take(0, 50, 1).tolist()
    order.look(1, 0)
    assert first.take(0, 50, 1).tolist() == before


@pytest.mark.parametrize("order", [Sequential(0), Shuffled(0), Stored(np.empty(0, np.int64))])
def test_nothing_has_nothing_in_it(order):
    epoch = order if isinstance(order, Stored) else order.look(0, 0)
    assert epoch.take(0, 0, 1).tolist() == []


def test_built_in_orders_need_no_digest():
    for order in (Sequential(9), Shuffled(9)):
        assert order.random_access
        assert not order.digested
        assert order.digest(0, 5, 0) == ""
        assert order.told() is None


def test_the_base_class_reads_nothing():
    with pytest.raises(NotImplementedError):
        Order(3).look(0, 0)


def test_a_digest_is_of_the_indices_so_far():
    order = Distributed(DistributedSampler(Plain(20), 2, 0, seed=4))
    indices = whole(order, 3)
    for samples in (6, 12, 20, 6):  # forward, and back again
        assert order.digest(3, samples, 0) == digest_by_hand(indices[:samples])
    assert order.digest(2, 6, 0) == digest_by_hand(whole(order, 2)[:6]) != digest_by_hand(indices[:6])


def test_where_nothing_was_delivered_the_digest_is_of_what_the_order_is_made_of():
    def digest(**options):
        return Distributed(DistributedSampler(Plain(20), 2, 0, **options)).digest(3, 0, 0)

    assert digest(seed=4) == digest(seed=4)
    assert len({digest(seed=4), digest(seed=5), digest(seed=4, shuffle=False)}) == 3


def test_a_digest_extends_what_it_has_and_reads_nothing_twice():
    class Counted(Stored):
        taken = 0

        def take(self, first, count, stride):
            self.taken += count
            return super().take(first, count, stride)

    class Given(Sequential):
        digested = True
        indices = Counted(np.arange(100)[::-1].copy())

        def look(self, epoch, seed):
            return self.indices

    order = Given(100)
    for samples in range(0, 101, 10):
        order.digest(0, samples, 0)
        order.digest(0, samples, 0)
    assert order.indices.taken == 100
    assert order.digest_of(order.indices, 100) == order.digest(0, 100, 0)
    order.forget()
    order.digest(0, 100, 0)
    assert order.indices.taken == 300


def test_a_distributed_order_is_the_datasets_and_repeats_its_start_as_torch_does():
    for drop_last in (False, True):
        order = Distributed(DistributedSampler(Plain(10), 4, 1, shuffle=False, drop_last=drop_last))
        assert order.length == 10, "padding and cutting are the plan's"
        assert whole(order) == [*range(10)]
        assert order.look(0, 0).take(0, 12, 1).tolist() == [*range(10), 0, 1]
    tiny = Distributed(DistributedSampler(Plain(2), 5, 1, shuffle=False))
    assert tiny.look(0, 0).take(0, 5, 1).tolist() == [0, 1, 0, 1, 0]


def test_a_sampler_that_was_told_its_epoch_is_noticed_once():
    sampler = DistributedSampler(Plain(10), 2, 0)
    order = Distributed(sampler)
    assert order.told() is None
    sampler.set_epoch(4)
    assert order.told() == 4
    order.announce(4)
    assert order.told() is None
    order.announce(5)
    assert sampler.epoch == 5
    assert order.told() is None


def test_looking_leaves_the_users_sampler_alone():
    sampler = DistributedSampler(Plain(10), 2, 0)
    whole(Distributed(sampler), 7)
    assert sampler.epoch == 0


def test_a_pass_makes_the_generators_draws_and_looking_makes_none():
    g = torch.Generator().manual_seed(0)
    order = Sequential(5, GeneratorDraws(g, None))
    dealer = PositionDealer(order, Plan(5, 2, 1, 0, False), lambda: 0)
    before = g.get_state()
    order.look(0, 0)
    dealer.deal(0).open()
    assert g.get_state().equal(before)
    dealer.prepare(0)
    opened = g.get_state()
    assert not opened.equal(before)
    dealer.prepare(0)
    assert g.get_state().equal(opened)


def generated(seed=0):
    g = torch.Generator().manual_seed(seed)
    return g, Generated(GeneratorDraws(g, RandomSampler(Plain(10), generator=g)))


def test_a_generated_order_is_the_open_epochs_or_the_one_before():
    _, order = generated()
    assert not order.random_access
    order.draws.open(0)
    first = whole(order, 0)
    assert sorted(first) == [*range(10)]
    order.draws.close()
    order.draws.open(1)
    assert whole(order, 1) != first
    assert whole(order, 0) == first


def test_the_digest_of_a_saved_order_moves_no_generator():
    _, order = generated()
    order.draws.open(0)
    saved = order.draws.check(order.draws.capture(0))
    g, other = generated(seed=77)
    before = g.get_state()
    digest = other.digest_saved(0, 6, 0, saved)
    assert digest == digest_by_hand(whole(order)[:6])
    assert other.digest_saved(0, 6, 0, None) == digest_by_hand(whole(other)[:6]) != digest
    assert g.get_state().equal(before)


def test_the_digest_of_a_saved_order_is_the_digest_there():
    order = Distributed(DistributedSampler(Plain(20), 2, 0, seed=4))
    assert order.digest_saved(3, 6, 0, None) == order.digest(3, 6, 0) == digest_by_hand(whole(order, 3)[:6])
    assert Shuffled(20).digest_saved(3, 6, 0, None) == ""
