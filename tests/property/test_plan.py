"""The fast paths give what the plain definitions give: tickets in chunks, orders as slices, whole tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumable_data import ResumableLoader
from resumable_data.deals import Coordinates, PositionDeal
from resumable_data.orders import Distributed, Sequential, Shuffled, Stored
from resumable_data.permutation import Permutation
from resumable_data.plan import Plan

from .strategies import examples, tried

WORDS = st.integers(0, 2**64 - 1)
TAILS = ("pad", "drop", "uneven")


@st.composite
def plans(draw, max_n=200):
    replicas = draw(st.integers(1, 5))
    length = draw(st.integers(0, max_n))
    begun = draw(st.integers(0, length))
    tail = draw(st.sampled_from(TAILS))
    return Plan(
        length=length,
        batch_size=draw(st.integers(1, 12)),
        num_replicas=replicas,
        rank=draw(st.integers(0, replicas - 1)),
        drop_last=draw(st.booleans()),
        tail=tail,
        # a DistributedSampler pads or drops
        pads_first=tail != "uneven" and draw(st.booleans()),
        # another topology may have delivered so many samples in any number of batches that holds them
        start=(begun, draw(st.integers(min(1, begun), begun))),
        limit=draw(st.none() | st.integers(1, max_n)),
    )


def ranks_of(plan):
    return [replace(plan, rank=rank) for rank in range(plan.num_replicas)]


def positions(plan, batch):
    return [plan.first(batch) + place * plan.num_replicas for place in range(plan.count(batch))]


@settings(max_examples=examples(300))
@given(plan=plans(), where=st.builds(Coordinates, WORDS, WORDS, WORDS), data=st.data())
def test_tickets_made_in_chunks_are_made_one_by_one_but_those_that_came_already(plan, where, data):
    begin = data.draw(st.integers(plan.start[1], plan.batches + 1), label="begin")
    ahead = data.draw(st.sets(st.integers(begin, begin + 40), max_size=5), label="ahead")
    order = Shuffled(plan.length).look(where.epoch, where.seed)
    deal = PositionDeal(plan, lambda: order)
    numbers = [number for number in range(begin, plan.batches) if number not in ahead]
    tickets = list(deal.tickets(begin, ahead, where))
    assert tickets == [deal.ticket(number, where) for number in numbers]
    for ticket in tickets:
        wanted = [
            int(order.take(position % plan.length, 1, 1)[0]) for position in positions(plan, ticket.number)
        ]
        assert np.frombuffer(ticket.keys, "<i8").tolist() == wanted
        assert ticket[1:4] == tuple(where)
        assert (ticket.first, ticket.stride) == (plan.first(ticket.number), plan.num_replicas)
    tried("tickets", plan, begin, *sorted(ahead))


def test_tickets_of_an_epoch_longer_than_a_chunk():
    plan = Plan(length=100_003, batch_size=7, num_replicas=2, rank=1, drop_last=False)
    order = Sequential(plan.length).look(0, 0)
    tickets = list(PositionDeal(plan, lambda: order).tickets(3, (), Coordinates(0, 0, 0)))
    assert [ticket.number for ticket in tickets] == list(range(3, plan.batches))
    keys = [key for ticket in tickets for key in np.frombuffer(ticket.keys, "<i8").tolist()]
    assert keys == [p % plan.length for p in range(3 * 14 + 1, 2 * plan.samples, 2)]


@settings(max_examples=examples(500))
@given(plan=plans())
def test_dealing_is_a_partition_of_the_rest_in_contiguous_blocks(plan):
    plan = replace(plan, limit=None)
    ranks = ranks_of(plan)
    begun, number = plan.start
    batches = [this.batches for this in ranks]
    assert max(batches) - min(batches) <= (plan.tail == "uneven")
    covered = []
    for batch in range(number, max(batches)):
        block = sorted(p for this in ranks if batch < this.batches for p in positions(this, batch))
        assert block, "no batch is empty"
        assert block == list(range(begun + len(covered), begun + len(covered) + len(block)))
        covered += block
        assert {this.samples_at(batch + 1) for this in ranks} == {min(plan.length, begun + len(covered))}
    assert len(covered) == sum(this.samples for this in ranks)
    assert {this.samples_at(number) for this in ranks} == {begun}
    assert len(covered) == dealt_by_the_book(plan)
    tried("plan", plan)


def dealt_by_the_book(plan):
    """How many positions of the rest all ranks together get, repeats included; written here once more."""
    rest, width, block = plan.length - plan.start[0], plan.num_replicas, plan.block
    if plan.drop_last and not plan.pads_first:
        return rest - rest % block
    if plan.tail == "pad":
        rest += -rest % width
    elif plan.tail == "drop":
        rest -= rest % width
    return rest - rest % block if plan.drop_last else rest


@settings(max_examples=examples(300))
@given(plan=plans(), limit=st.integers(1, 200))
def test_a_limit_is_the_first_batches_of_the_epoch(plan, limit):
    whole, limited = replace(plan, limit=None), replace(plan, limit=limit)
    assert limited.batches == len(
        [number for number in range(whole.batches) if number < limit or number < plan.start[1]]
    )
    for batch in range(plan.start[1], limited.batches):
        assert positions(limited, batch) == positions(whole, batch)
        assert limited.samples_at(batch + 1) == whole.samples_at(batch + 1)


LEGS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12), st.integers(0, 9)), max_size=6)


def chain(n, legs, last, options):
    """Positions that one topology after another delivers of an epoch, and the number of batches."""
    delivered, start = [], (0, 0)
    for width, batch_size, steps in [*legs, (*last, None)]:
        ranks = [Plan(n, batch_size, width, rank, **options).starting(start) for rank in range(width)]
        ends = [this.batches for this in ranks]
        stop = max(ends) if steps is None else min(start[1] + steps, *ends)
        for batch in range(start[1], stop):
            delivered += sorted(p for this in ranks if batch < this.batches for p in positions(this, batch))
        start = (ranks[0].samples_at(stop), stop)
    return delivered, start[1]


@settings(max_examples=examples(500))
@given(
    n=st.integers(0, 400),
    legs=LEGS,
    last=st.tuples(st.integers(1, 7), st.integers(1, 12)),
    drop_last=st.booleans(),
    tail=st.sampled_from(TAILS),
    limit=st.none() | st.integers(1, 40),
)
def test_a_chain_of_topologies_delivers_every_position_once(n, legs, last, drop_last, tail, limit):
    options = {"drop_last": drop_last, "tail": tail, "limit": limit}
    delivered, batches = chain(n, legs, last, options)
    assert delivered == list(range(len(delivered)))
    if limit is not None:
        assert batches <= limit
    if limit is None or batches < limit:
        width, batch_size = last
        if drop_last:
            assert n - width * batch_size < len(delivered) <= n
        elif tail == "drop":
            assert n - width < len(delivered) <= n
        else:
            widest = max(width for width, *_ in [*legs, last])
            assert n <= len(delivered) < n + (widest if tail == "pad" else 1)
    tried("chains", n, *legs, last, drop_last, tail, limit)


def test_control_a_chain_that_begins_each_leg_anew_repeats_positions(monkeypatch):
    legs, last, options = [(2, 3, 2), (3, 2, 2)], (1, 5), {"drop_last": False}
    delivered, _ = chain(40, legs, last, options)
    assert delivered == list(range(40))
    monkeypatch.setattr(Plan, "first", lambda plan, batch: batch * plan.block + plan.rank)
    delivered, _ = chain(40, legs, last, options)
    assert sorted(delivered) != list(range(40))


def by_definition(whole, first, count, stride):
    return [whole[(first + i * stride) % len(whole)] for i in range(count)] if whole else []


@settings(max_examples=examples(300))
@given(
    n=st.integers(1, 300),
    first=st.integers(0, 400),
    count=st.integers(0, 400),
    stride=st.integers(1, 7),
    seed=WORDS,
    epoch=WORDS,
)
def test_orders_take_what_their_elements_say(n, first, count, stride, seed, epoch):
    permutation = Permutation(n, seed, epoch)
    wholes = {
        Sequential(n): list(range(n)),
        Shuffled(n): [int(permutation.take(np.array([i]))[0]) for i in range(n)],
    }
    for order, whole in wholes.items():
        taken = order.look(epoch, seed).take(first, count, stride)
        assert taken.dtype == np.int64
        assert taken.tolist() == by_definition(whole, first, count, stride)
    whole = wholes[next(iter(wholes))]
    assert Stored(np.array(whole)).take(first, count, stride).tolist() == by_definition(
        whole, first, count, stride
    )
    tried("orders", n, first, count, stride)


@settings(max_examples=examples(150))
@given(
    n=st.integers(1, 60),
    replicas=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
)
def test_a_distributed_order_dealt_out_is_what_each_rank_of_torch_reads(
    n, replicas, shuffle, drop_last, seed, epoch
):
    def sampler(rank):
        return DistributedSampler(range(n), replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)

    order = Distributed(sampler(0)).look(epoch, 12345)
    for rank in range(replicas):
        theirs = sampler(rank)
        theirs.set_epoch(epoch)
        assert order.take(rank, theirs.num_samples, replicas).tolist() == list(theirs)
    tried("distributed order", n, replicas, shuffle, drop_last, seed, epoch)


DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw, n):
    shape = (n, *draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.arange(max(1, int(np.prod(shape)))).remainder(200)[: int(np.prod(shape))]
    tensor = values.to(torch.float32).to(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "transposed", "strided", "odd strides", "expanded"]))
    if form == "transposed" and tensor.dim() > 2:
        tensor = tensor.transpose(1, 2)
    elif form == "strided" and n > 1:
        tensor = torch.cat([tensor, tensor])[::2]
    elif form == "odd strides" and 1 in shape:
        # a dimension of size 1 may have any stride and still count as contiguous
        strides = [99 if size == 1 else stride for size, stride in zip(shape, tensor.stride(), strict=True)]
        tensor = tensor.as_strided(shape, strides)
    elif form == "expanded":
        tensor = tensor[:1].expand(shape)
    return tensor


@settings(max_examples=examples(300))
@given(data=st.data(), n=st.integers(1, 20), batch_size=st.integers(1, 7), drop_last=st.booleans())
def test_whole_tensors_equal_torchs_batches_in_values_strides_and_dtypes(data, n, batch_size, drop_last):
    dataset = TensorDataset(*data.draw(st.lists(tensors(n), min_size=1, max_size=3), label="tensors"))
    theirs = list(DataLoader(dataset, batch_size, drop_last=drop_last))
    ours = list(ResumableLoader(dataset, batch_size, drop_last=drop_last))
    assert len(ours) == len(theirs)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert type(mine) is type(torchs)
        assert len(mine) == len(torchs)
        for a, b in zip(mine, torchs, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert a.is_contiguous()
            assert a.storage_offset() == 0
            assert not a.requires_grad
            assert a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
            # a batch is the caller's own: writing to it must not reach the dataset
            assert all(
                a.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not a.numel()
                for whole in dataset.tensors
            )
    shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in dataset.tensors]
    tried("whole tensors", n, batch_size, drop_last, *shapes)
