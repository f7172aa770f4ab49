"""The fast paths give what the plain definitions give: tickets in chunks, orders as slices, whole tensors."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumable_data import ResumableLoader
from resumable_data.orders import Distributed, Sequential, Shuffled, Stored
from resumable_data.passes import make_ticket, make_tickets
from resumable_data.permutation import Permutation
from resumable_data.plan import Plan

from .strategies import examples, tried

WORDS = st.integers(0, 2**64 - 1)


@st.composite
def plans(draw, max_n=200):
    replicas = draw(st.integers(1, 5))
    length = draw(st.integers(0, max_n))
    return Plan(
        length=length,
        real=length,
        batch_size=draw(st.integers(1, 12)),
        num_replicas=replicas,
        rank=draw(st.integers(0, replicas - 1)),
        drop_last=draw(st.booleans()),
    )


@settings(max_examples=examples(300))
@given(plan=plans(), seed=WORDS, epoch=WORDS, data=st.data())
def test_tickets_made_in_chunks_equal_tickets_made_one_by_one(plan, seed, epoch, data):
    begin = data.draw(st.integers(0, plan.batches + 1), label="begin")
    order = Shuffled(plan.length, plan.length).look(epoch, seed)
    coordinates = {"epoch": epoch, "seed": seed, "base_seed": 17}
    single = [make_ticket(plan, order, number, **coordinates) for number in range(begin, plan.batches)]
    assert list(make_tickets(plan, order, begin, **coordinates)) == single
    tried("tickets", plan, begin)


def test_tickets_of_an_epoch_longer_than_a_chunk():
    plan = Plan(length=100_003, real=100_003, batch_size=7, num_replicas=2, rank=1, drop_last=False)
    order = Sequential(plan.length, plan.length).look(0, 0)
    tickets = list(make_tickets(plan, order, 3, epoch=0, seed=0, base_seed=0))
    assert [ticket.number for ticket in tickets] == list(range(3, plan.batches))
    keys = [key for ticket in tickets for key in np.frombuffer(ticket.indices, "<i8").tolist()]
    assert keys == [p % plan.length for p in range(3 * 14 + 1, 2 * plan.samples, 2)]


@settings(max_examples=examples(300))
@given(plan=plans())
def test_the_plan_deals_contiguous_blocks_and_covers_every_position_once(plan):
    ranks = [
        Plan(plan.length, plan.real, plan.batch_size, plan.num_replicas, rank, plan.drop_last)
        for rank in range(plan.num_replicas)
    ]
    covered = []
    for batch in range(plan.batches):
        block = sorted(
            this.first(batch) + place * plan.num_replicas
            for this in ranks
            for place in range(this.count(batch))
        )
        assert block == list(range(len(covered), len(covered) + len(block)))
        covered += block
        assert plan.samples_at(batch + 1) == min(plan.length, len(covered))
    assert len(covered) == plan.samples * plan.num_replicas
    if plan.drop_last:
        assert plan.length - plan.block < len(covered) <= plan.length
    else:
        assert plan.length <= len(covered) < plan.length + plan.num_replicas
    tried("plan", plan)


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
        Sequential(n, n): list(range(n)),
        Shuffled(n, n): [int(permutation.take(np.array([i]))[0]) for i in range(n)],
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
