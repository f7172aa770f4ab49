"""Each fast path gives what the plain path gives, bit for bit."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from resumable_data import ResumableLoader, seeding
from resumable_data.deals import Coordinates, PositionDeal
from resumable_data.fetch import Fetcher, Ticket
from resumable_data.orders import Sequential, Shuffled
from resumable_data.plan import Plan
from resumable_data.seeding import TAG_BATCH, TAG_COLLATE, TAG_SAMPLE, SampleWords, StreamsAside, Words
from resumable_data.splitmix import derive

from .strategies import examples

words = st.integers(0, 2**64 - 1)
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


class Drawing(Dataset):
    """Item i is i and a draw from each of the global streams."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        drawn = [np.random.standard_normal(), random.random(), torch.rand(1, dtype=torch.float64).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def collate_by_hand(samples):
    """torch's default under another name, so that nothing is taken for granted about it."""
    return default_collate(samples)


def same(left, right):
    """Types, dtypes, shapes and every bit; NaN is the NaN it was."""
    if isinstance(left, torch.Tensor):
        return (
            type(left) is type(right)
            and (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            and left.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8))
        )
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def streams():
    """The three global streams, as values that compare."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), (name, key.tolist(), *rest), torch.default_generator.get_state().tolist()


@pytest.fixture(autouse=True)
def _streams_kept():
    before = seeding.StreamStates.now()
    yield
    before.put_back()


@st.composite
def tensor_datasets(draw):
    """One to three tensors of a common length, of any dtype, with and without more dimensions."""
    n = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)):
        shape = (n, *draw(st.lists(st.integers(0, 4), max_size=2)))
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 5
        values = torch.where(values > 9, torch.tensor(float("nan"), dtype=torch.float64), values)
        tensors.append((values.nan_to_num() if not dtype.is_floating_point else values).to(dtype))
    return TensorDataset(*tensors)


@settings(max_examples=examples(60))
@given(tensor_datasets(), st.integers(1, 50), st.booleans(), words)
def test_whole_tensors_are_the_stacked_items(dataset, batch_size, shuffle, seed):
    fast = ResumableLoader(dataset, batch_size, shuffle, seed=seed)
    plain = ResumableLoader(dataset, batch_size, shuffle, collate_fn=collate_by_hand, seed=seed)
    assert same(list(fast), list(plain))


def test_whole_tensors_are_used_where_they_may_be_and_only_there():
    class Own(TensorDataset):
        def __getitem__(self, index):
            return tuple(-item for item in super().__getitem__(index))

    values = torch.arange(12.0).reshape(6, 2)

    def used(dataset, collate_fn=default_collate, **options):
        fetcher = Fetcher(dataset, collate_fn, "batch.v1", 0, aside=True, **options)
        return fetcher._whole_tensors

    assert used(TensorDataset(values))
    assert not used(Own(values))
    assert not used(TensorDataset(values), collate_by_hand)
    assert not used(TensorDataset(values.T.contiguous().T))
    assert not used(TensorDataset(values.clone().requires_grad_()))
    assert not used(TensorDataset(values), single=True)
    assert same(next(iter(ResumableLoader(Own(values), 6))), [-values])


@settings(max_examples=examples(5))
@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from(["batch", "sample"]), words)
def test_the_direct_call_is_what_a_worker_sends(n, batch_size, seeding_mode, seed):
    make = partial(ResumableLoader, Drawing(n), batch_size, True, seed=seed, seeding=seeding_mode)
    assert same(list(make()), list(make(num_workers=1)))


def test_the_direct_call_is_what_the_dataloader_yields():
    direct = ResumableLoader(Drawing(23), 4, seed=5)
    fetcher = Fetcher(Drawing(23), default_collate, "batch.v1", 0, aside=True)
    deal = direct._run.dealer.deal(0)
    tickets = list(deal.tickets(0, (), Coordinates(0, 5, 0)))
    through_torch = DataLoader(fetcher, batch_size=None, sampler=tickets, collate_fn=lambda pair: pair[1])
    assert same(list(direct), list(through_torch))


def of_position(plan, order, where, number):
    """The ticket of a batch, from the definition: one position after the other."""
    first, width, n = plan.first(number), plan.num_replicas, plan.length
    positions = [(first + at * width) % n for at in range(plan.count(number))]
    keys = [int(order.take(position, 1, 1)[0]) for position in positions]
    return Ticket(number, *where, first, width, np.array(keys, "<i8").tobytes())


@settings(max_examples=examples(60))
@given(st.data())
def test_tickets_by_the_chunk_are_tickets_one_by_one(data):
    draw = data.draw
    n, batch_size, width = draw(st.integers(1, 400)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    plan = Plan(
        n,
        batch_size,
        width,
        draw(st.integers(0, width - 1)),
        drop_last=draw(st.booleans()),
        tail=draw(st.sampled_from(["pad", "drop", "uneven"])),
        limit=draw(st.none() | st.integers(1, 60)),
    )
    kind, seed, epoch = draw(st.sampled_from([Shuffled, Sequential])), draw(words), draw(st.integers(0, 5))
    order = kind(n).look(epoch, seed)
    deal = PositionDeal(plan, lambda: order)
    begin = draw(st.integers(0, plan.batches))
    ahead = draw(st.sets(st.integers(begin, max(begin, plan.batches - 1)), max_size=4))
    where = Coordinates(epoch, seed, draw(words))
    wanted = [of_position(plan, order, where, b) for b in range(begin, plan.batches) if b not in ahead]
    assert list(deal.tickets(begin, ahead, where)) == wanted
    assert [deal.ticket(ticket.number, where) for ticket in wanted] == wanted


def test_chunks_longer_than_one_block_of_the_permutation():
    plan = Plan(100_003, 64, 1, 0, drop_last=False)
    order = Shuffled(plan.length).look(2, 9)
    where = Coordinates(2, 9, 0)
    deal = PositionDeal(plan, lambda: order)
    assert list(deal.tickets(700, (), where)) == [deal.ticket(b, where) for b in range(700, plan.batches)]


@settings(max_examples=examples(25))
@given(st.integers(1, 20), st.integers(1, 6), st.sampled_from(["batch", "sample"]), words)
def test_unseeded_default_collate_is_the_seeded_one(n, batch_size, seeding_mode, seed):
    make = partial(ResumableLoader, Drawing(n), batch_size, True, seed=seed, seeding=seeding_mode)
    assert same(list(make()), list(make(collate_fn=collate_by_hand)))


def test_a_collate_that_draws_is_seeded():
    def drawing(samples):
        return len(samples), torch.rand(1).item(), random.random(), np.random.rand()

    def drawn(seed):
        return list(ResumableLoader(Drawing(9), 4, seed=seed, collate_fn=drawing))

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def draw_from_all(counts):
    """Move the streams; an odd number of legacy normals leaves half a pair behind."""
    normals, uniforms = counts
    return (
        [np.random.standard_normal() for _ in range(normals)],
        [np.random.rand() for _ in range(uniforms)],
        [random.gauss(0, 1) for _ in range(normals)],
        torch.randn(3).tolist(),
    )


counts = st.tuples(st.integers(0, 3), st.integers(0, 700))


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32 - 1), counts, counts, words)
def test_swapping_numpys_generator_is_saving_and_setting_its_state(seed, before, inside, word):
    def seeded(_):
        seeding.seed_streams(Words(word, word, word, word))
        return draw_from_all(inside)

    def start():
        np.random.seed(seed)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        draw_from_all(before)

    start()
    kept = seeding.StreamStates.now()
    plain = seeded(None)
    kept.put_back()
    plain_after = (streams(), draw_from_all((3, 3)))
    start()
    fast = StreamsAside().around(seeded, None)
    assert fast == plain
    assert (streams(), draw_from_all((3, 3))) == plain_after


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32 - 1), counts)
def test_the_cached_gaussian_is_what_get_state_says(seed, before):
    np.random.seed(seed)
    draw_from_all(before)
    held = streams()
    assert seeding.has_cached_gaussian() is bool(np.random.get_state()[3])
    assert seeding.has_cached_gaussian() is bool(before[0] % 2)
    assert streams() == held


@settings(max_examples=examples(100))
@given(st.sampled_from([TAG_BATCH, TAG_COLLATE]), words, words, words, st.integers(0, 4096))
def test_words_with_their_common_part_remembered_are_derived_words(tag, seed, epoch, first, rank):
    plain = Words(*derive(tag, seed, epoch, first, rank, count=4))
    assert seeding.batch_words(tag, seed, epoch, first, rank) == plain
    assert seeding.batch_words(tag, seed, epoch, first, rank) == plain  # now from what was remembered
    each = Words(*derive(TAG_SAMPLE, seed, epoch, first, count=4))
    assert SampleWords(seed, epoch).at(first) == each


def test_what_is_remembered_belongs_to_its_tag_seed_and_epoch():
    places = [
        (tag, seed, epoch) for tag in (TAG_BATCH, TAG_COLLATE) for seed in range(9) for epoch in range(9)
    ]
    for _ in range(2):  # more places than are remembered at once
        found = [seeding.batch_words(*place, 7, 1) for place in places]
        assert found == [Words(*derive(*place, 7, 1, count=4)) for place in places]
    assert len(set(found)) == len(places)


def test_the_same_comparison_sees_one_flipped_bit():
    values = torch.arange(4.0)
    other = values.clone()
    other.view(torch.int32)[2] ^= 1
    assert same([values], [values.clone()])
    assert not same([values], [other])
    assert not same([values], (values,))
    assert not same(values, values.double())
