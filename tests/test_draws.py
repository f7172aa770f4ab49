"""torch's own draws from a user's generator, made once an epoch and resumable."""

from __future__ import annotations

import json

import pytest
import torch
from support_law import Plain
from torch.utils.data import RandomSampler

from resumable_data import ResumableLoader, StateError
from resumable_data.draws import GeneratorDraws
from resumable_data.seeding import draw_base_seed


def new(seed=0, n=10, *, base=True, sampler=True, **options):
    g = torch.Generator().manual_seed(seed)
    own = RandomSampler(Plain(n), generator=g, **options) if sampler else None
    return g, GeneratorDraws(g if base else None, own)


def state(generator):
    return generator.get_state().tolist()


def test_the_three_draws_are_torchs_in_torchs_order():
    g, draws = new()
    reference = torch.Generator().manual_seed(0)
    draws.open(0)
    draw_base_seed(reference)
    assert draws.order().tolist() == torch.randperm(10, generator=reference).tolist()
    assert state(g) == state(reference)
    draws.close()
    torch.randperm(10, generator=reference)
    assert state(g) == state(reference)


def test_opening_twice_draws_once_and_closing_what_is_not_open_draws_nothing():
    g, draws = new()
    before = state(g)
    draws.close()
    assert state(g) == before
    draws.open(0)
    opened = state(g)
    draws.open(0)
    assert state(g) == opened != before
    draws.close()
    closed = state(g)
    draws.close()
    assert state(g) == closed != opened


def test_looking_ahead_gives_the_order_that_opening_will_give_and_moves_nothing():
    g, draws = new()
    before = state(g)
    ahead = draws.order().tolist()
    assert draws.order().tolist() == ahead
    assert state(g) == before
    draws.open(0)
    assert draws.order().tolist() == ahead


@pytest.mark.parametrize(
    "options", [{}, {"replacement": True, "num_samples": 45}, {"num_samples": 23}], ids=str
)
def test_a_restored_epoch_has_its_order_and_keeps_the_users_draws(options):
    g, draws = new(**options)
    draws.open(0)
    order = draws.order().tolist()
    torch.rand(5, generator=g)  # the user's own
    text = draws.capture(0)
    other, copy = new(seed=77, **options)
    copy.restore(copy.check(text))
    assert state(other) == state(g)
    assert copy.order().tolist() == order
    assert copy.capture(0) == text
    copy.open(0)
    assert state(other) == state(g)
    for each in (draws, copy):
        each.close()
    assert state(other) == state(g)
    for each in (draws, copy):
        each.open(1)
    assert copy.order().tolist() == draws.order().tolist() != order


def test_a_check_and_the_order_of_a_saved_epoch_move_nothing():
    _g, draws = new()
    draws.open(0)
    text = draws.capture(0)
    other, copy = new(seed=77)
    before = state(other)
    saved = copy.check(text)
    assert copy.order_of(saved).tolist() == draws.order().tolist()
    assert state(other) == before


def test_two_generators_are_two_and_one_given_twice_is_one():
    g, draws = new()
    assert len(json.loads(draws.capture(0))["now"]) == 1
    second = torch.Generator().manual_seed(5)
    both = GeneratorDraws(second, RandomSampler(Plain(10), generator=g))
    assert len(json.loads(both.capture(0))["now"]) == 2
    with pytest.raises(StateError, match="pass the generators the run was saved with"):
        both.check(draws.capture(0))


def test_worker_seeds_are_drawn_from_a_copy():
    g, draws = new()
    assert draws.worker_generator() is None
    reference = draw_base_seed(torch.Generator().manual_seed(0))
    draws.open(0)
    opened = state(g)
    copy = draws.worker_generator()
    assert draw_base_seed(copy) == reference
    assert state(g) == opened
    _, without = new(base=False)
    without.open(0)
    assert without.worker_generator() is None


def test_a_generator_without_a_sampler_draws_base_seeds_only():
    g, draws = new(sampler=False)
    reference = torch.Generator().manual_seed(0)
    assert draws.length == 0
    for epoch in range(3):
        draws.open(epoch)
        draws.close()
        draw_base_seed(reference)
    assert state(g) == state(reference)
    assert draws.order().tolist() == []


def test_the_epoch_that_was_left_last_is_remembered_as_it_was():
    g, draws = new()
    draws.open(4)
    order, before = draws.order().tolist(), draws.capture(4)
    torch.rand(3, generator=g)  # the user's own, made after the capture
    later = draws.capture(4)
    assert later != before
    draws.close()
    ready = draws.capture(5)
    assert draws.capture(4) == later, "just before it was left"
    assert draws.order(4).tolist() == order
    draws.open(5)
    assert draws.capture(4) == later
    assert draws.order(4).tolist() == order != draws.order(5).tolist()
    assert draws.capture(5) != ready
    copy = new(seed=77)[1]
    assert copy.order_of(copy.check(later)).tolist() == order


def test_what_was_left_earlier_is_refused_and_a_restored_state_remembers_nothing():
    _, draws = new()
    for epoch in range(2):
        draws.open(epoch)
        draws.close()
    with pytest.raises(ValueError, match=r"goes back to epoch 0.*to epoch 1 only"):
        draws.capture(0)
    left, now = draws.capture(1), draws.capture(2)
    assert left != now
    draws.restore(draws.check(now))
    assert draws.capture(1) == draws.capture(2) == now


def test_an_epoch_that_was_loaded_is_left_like_any_other():
    g, draws = new()
    draws.open(0)
    text, order = draws.capture(0), draws.order().tolist()
    other, copy = new(seed=77)
    copy.restore(copy.check(text))
    copy.close()  # never opened here: the draws were made in another process
    draws.close()
    assert state(other) == state(g)
    assert copy.order(0).tolist() == order
    assert copy.capture(0) == text


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"now": ["00"]}', '{"before": 3, "now": []}'])
def test_what_is_not_a_capture_is_refused(text):
    g, draws = new()
    before = state(g)
    with pytest.raises(StateError, match=r"state.'generator'"):
        draws.check(text)
    assert state(g) == before


def test_an_override_reaches_positions_beyond_the_dataset_in_a_longer_order():
    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(range(10), replacement=True, num_samples=45, generator=generator)
        return ResumableLoader(range(10), 5, sampler=sampler, seed=3, collate_fn=list)

    before, whole = loader(1), list(loader(2))
    live = iter(before)
    [next(live) for _ in range(6)]
    state = before.state_dict()
    state["generator"] = loader(2).state_dict()["generator"]
    other = loader(2)
    other.load_state_dict(state, override={"order_digest"})
    assert (other.batch_in_epoch, other.samples_in_epoch) == (6, 30)
    assert list(other) == whole[6:]
    state["samples_in_epoch"] = 46
    with pytest.raises(StateError, match="at most 45"):
        loader(2).load_state_dict(state, override={"order_digest"})
