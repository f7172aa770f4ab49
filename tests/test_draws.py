"""torch's own draws from a user's generator, made once an epoch and resumable."""

from __future__ import annotations

import json

import pytest
import torch
from support_law import Plain
from torch.utils.data import RandomSampler

from resumable_data import StateError
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
    draws.open()
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
    draws.open()
    opened = state(g)
    draws.open()
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
    draws.open()
    assert draws.order().tolist() == ahead


@pytest.mark.parametrize(
    "options", [{}, {"replacement": True, "num_samples": 45}, {"num_samples": 23}], ids=str
)
def test_a_restored_epoch_has_its_order_and_keeps_the_users_draws(options):
    g, draws = new(**options)
    draws.open()
    order = draws.order().tolist()
    torch.rand(5, generator=g)  # the user's own
    text = draws.capture()
    other, copy = new(seed=77, **options)
    copy.restore(copy.check(text))
    assert state(other) == state(g)
    assert copy.order().tolist() == order
    assert copy.capture() == text
    copy.open()
    assert state(other) == state(g)
    for each in (draws, copy):
        each.close()
    assert state(other) == state(g)
    for each in (draws, copy):
        each.open()
    assert copy.order().tolist() == draws.order().tolist() != order


def test_a_check_and_the_order_of_a_saved_epoch_move_nothing():
    _g, draws = new()
    draws.open()
    text = draws.capture()
    other, copy = new(seed=77)
    before = state(other)
    saved = copy.check(text)
    assert copy.order_of(saved).tolist() == draws.order().tolist()
    assert state(other) == before


def test_two_generators_are_two_and_one_given_twice_is_one():
    g, draws = new()
    assert len(json.loads(draws.capture())["now"]) == 1
    second = torch.Generator().manual_seed(5)
    both = GeneratorDraws(second, RandomSampler(Plain(10), generator=g))
    assert len(json.loads(both.capture())["now"]) == 2
    with pytest.raises(StateError, match="pass the generators the run was saved with"):
        both.check(draws.capture())


def test_worker_seeds_are_drawn_from_a_copy():
    g, draws = new()
    assert draws.worker_generator() is None
    reference = draw_base_seed(torch.Generator().manual_seed(0))
    draws.open()
    opened = state(g)
    copy = draws.worker_generator()
    assert draw_base_seed(copy) == reference
    assert state(g) == opened
    _, without = new(base=False)
    without.open()
    assert without.worker_generator() is None


def test_a_generator_without_a_sampler_draws_base_seeds_only():
    g, draws = new(sampler=False)
    reference = torch.Generator().manual_seed(0)
    assert draws.length == 0
    for _ in range(3):
        draws.open()
        draws.close()
        draw_base_seed(reference)
    assert state(g) == state(reference)
    assert draws.order().tolist() == []


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"now": ["00"]}', '{"before": 3, "now": []}'])
def test_what_is_not_a_capture_is_refused(text):
    g, draws = new()
    before = state(g)
    with pytest.raises(StateError, match=r"state.'generator'"):
        draws.check(text)
    assert state(g) == before
