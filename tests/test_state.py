"""The state: its keys, its types, what is refused and what may be overridden by name."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_law import (
    Noted,
    Plain,
    as_is,
    error_from,
    indices_of,
    make,
    noted,
    position,
    through_json,
    whole_epochs,
)
from torch.utils.data import DistributedSampler, RandomSampler

from resumable_data import ResumableLoader, StateError, StateMismatchError, StateVersionError
from resumable_data.state import COMPARED, KEYS, LoaderState

GOLDEN = json.loads((Path(__file__).parent / "golden" / "state.json").read_text())
CONTRACT = [
    "schema",
    "epoch",
    "batch_in_epoch",
    "samples_in_epoch",
    "consumed_samples",
    "segment",
    "skipped",
    "order",
    "order_digest",
    "torch_version",
    "seed",
    "dataset_size",
    "dataset_id",
    "batch_size",
    "num_replicas",
    "drop_last",
    "tail",
    "batches_per_epoch",
    "seeding",
    "delivered_ahead",
    "generator",
    "sampler",
    "stream",
]


def saved_of(loader):
    """The state after two batches."""
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    return loader.state_dict()


def saved(**changes):
    return {**saved_of(make()), **changes}


def generator_loader(seed=0, n=10, **options):
    g = torch.Generator().manual_seed(seed)
    return g, ResumableLoader(Plain(n), 2, shuffle=True, generator=g, collate_fn=as_is, **options)


def everything_of(loader):
    """All that a refused load must leave alone."""
    generator = loader.generator
    return (
        loader.state_dict(),
        position(loader),
        loader.resumed,
        None if generator is None else generator.get_state().tolist(),
    )


# -- the form -----------------------------------------------------------------------------------


def test_the_keys_are_the_contracts():
    assert list(KEYS) == CONTRACT
    assert list(saved()) == CONTRACT


def test_a_golden_state_loads_and_continues():
    loader = make()
    loader.load_state_dict(GOLDEN["state"])
    assert loader.state_dict() == {**GOLDEN["state"], "torch_version": str(torch.__version__)}
    batches = [[list(item) for item in batch[0]] for batch in loader]
    assert batches == GOLDEN["rest"]
    assert position(loader) == (2, 0)


def test_control_the_golden_rest_is_not_any_rest():
    loader = make()
    loader.seek(2, 2)
    assert [[list(item) for item in batch[0]] for batch in loader] != GOLDEN["rest"]


def test_values_are_leaves_and_small():
    for state in (saved(), ResumableLoader(Plain(10**9), 64, seed=2**64 - 1).state_dict()):
        for value in state.values():
            assert value is None or type(value) in (int, str, bool, list)
            assert not isinstance(value, list) or all(type(item) is int for item in value)
        assert len(json.dumps(state)) < 1024


def test_it_passes_json_and_torch_load():
    state = saved()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state == through_json(state)


def test_a_caller_who_edits_a_state_edits_a_copy():
    loader = make()
    loader.seek(0, 2)
    state = loader.state_dict()
    state["skipped"].append(9)
    state["epoch"] = 5
    assert loader.state_dict()["skipped"] == [0, 0, 2]
    assert loader.epoch == 0


WORD = st.integers(0, 2**64 - 1)


@settings(max_examples=200)
@given(
    epoch=WORD,
    seed=WORD,
    batch=st.integers(0, 10**12),
    skipped=st.lists(st.tuples(WORD, st.integers(0, 99), st.integers(0, 99)), max_size=3),
    dataset_id=st.one_of(st.none(), st.text()),
    torch_version=st.text(),
)
def test_to_dict_and_from_dict_are_inverse(epoch, seed, batch, skipped, dataset_id, torch_version):
    state = saved(
        epoch=epoch,
        seed=seed,
        batch_in_epoch=batch,
        samples_in_epoch=min(10, 2 * batch),
        skipped=[number for triple in skipped for number in triple],
        dataset_id=dataset_id,
        torch_version=torch_version,
    )
    assert LoaderState.from_dict(through_json(state)).to_dict() == state


# -- what cannot be read ------------------------------------------------------------------------

UNREADABLE = {
    "no dict": (lambda s: list(s.items()), StateError, "dict"),
    "None": (lambda s: None, StateError, "NoneType"),
    "a missing key": (lambda s: {k: v for k, v in s.items() if k != "seed"}, StateError, "'seed'"),
    "an unknown key": (lambda s: {**s, "extra": 1}, StateError, "extra"),
    "a key that is no string": (lambda s: {**s, 3: 1}, StateError, "3"),
    "no schema": (lambda s: {k: v for k, v in s.items() if k != "schema"}, StateError, "schema is None"),
    "a foreign schema": (lambda s: {**s, "schema": "torchdata"}, StateError, "torchdata"),
    "a newer schema": (
        lambda s: {"schema": "resumable_data.loader.v2"},
        StateVersionError,
        "upgrade",
    ),
}


@pytest.mark.parametrize(("damage", "kind", "part"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_state_is_refused(damage, kind, part):
    loader = make()
    loader.seek(1, 1)
    before = everything_of(loader)
    for call in (loader.load_state_dict, loader.check_state_dict):
        message, _ = error_from(kind, lambda call=call: call(damage(saved())))
        assert part in message
    assert everything_of(loader) == before


WRONG = {
    "schema": [7, None],
    "epoch": [-1, 2**64, 1.0, True, "1", None],
    "batch_in_epoch": [-1, 2.0, True, None, [2]],
    "samples_in_epoch": [-1, 4.0, False, "4"],
    "consumed_samples": [-1, 4.0, True],
    "segment": [[0], [0, 0, 0], [0, -1], [0.0, 0], None, "00", [True, 0], [0, 1, 2]],
    "skipped": [[1], [1, 2], [0, 0, -1], [0.5, 0, 1], None, {}],
    "order": ["random", None, 3, [], {}],
    "order_digest": [None, 3],
    "torch_version": [None, 2.1],
    "seed": [-1, 2**64, 1.5, True, None, "7"],
    "dataset_size": [-1, 10.0, True, "10"],
    "dataset_id": [3, b"x", True],
    "batch_size": [0, -2, 2.0, True],
    "num_replicas": [0, 1.0, True, None],
    "drop_last": [0, 1, None, "False"],
    "tail": ["none", None, 1, []],
    "batches_per_epoch": [0, -1, 2.0, True],
    "seeding": ["batch", None, 1, []],
    "delivered_ahead": [[-1], None, 3, [1.0]],
    "generator": [3, b"x", {}],
    "sampler": [3, []],
    "stream": [3, []],
}


@pytest.mark.parametrize("name", CONTRACT)
def test_wrong_types_and_ranges_are_refused_by_name(name):
    loader = make()
    before = everything_of(loader)
    for value in WRONG[name]:
        with pytest.raises(StateError, match=name):
            loader.load_state_dict(saved(**{name: value}))
        assert everything_of(loader) == before


IMPOSSIBLE = {
    "more samples than there are": {"samples_in_epoch": 11, "batch_in_epoch": 9},
    "samples without batches": {"batch_in_epoch": 0},
    "more samples than batches hold": {"samples_in_epoch": 6},
    "fewer samples than batches hold": {"samples_in_epoch": 2},
    "an unknowable count for a built-in order": {"samples_in_epoch": None},
    "a batch past the epoch's end": {"batch_in_epoch": 6, "samples_in_epoch": 10},
    "a segment beyond the position": {"segment": [0, 3]},
    "a segment of samples beyond the position": {"segment": [5, 1]},
    "a size of a built-in order that is unknown": {"dataset_size": None},
}


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_values_that_no_run_can_reach_are_refused(changes):
    loader = make()
    before = everything_of(loader)
    with pytest.raises(StateError):
        loader.load_state_dict(saved(**changes))
    assert everything_of(loader) == before


# -- what belongs to another run ----------------------------------------------------------------

OTHERS = {
    "dataset_size": ({"n": 12}, 10, 12),
    "dataset_id": ({"dataset_id": "b"}, "a", "b"),
    "order": ({"shuffle": False}, "shuffled.v1", "sequential"),
    "seed": ({"seed": 8}, 7, 8),
    "drop_last": ({"drop_last": True}, False, True),
    "seeding": ({"seeding": "sample"}, "batch.v1", "sample.v1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_differing_field_is_named_with_both_values_and_accepted_by_name(name):
    options, was, now = OTHERS[name]
    loader = make(**{"dataset_id": "a", **options})
    state = saved(dataset_id="a")
    before = everything_of(loader)
    message, fields = error_from(StateMismatchError, lambda: loader.load_state_dict(state))
    assert fields == {name: (was, now)}
    assert f"{name}: saved {was!r}, current {now!r}" in message
    assert f"override={{{name!r}}}" in message
    assert everything_of(loader) == before
    loader.check_state_dict(state, override=[name])
    assert everything_of(loader) == before
    loader.load_state_dict(state, override={name})
    assert position(loader) == (0, 2), "the position stays"
    assert loader.state_dict()[name] == now, "the present value holds"
    assert len(list(loader)) == len(loader) - 2


@pytest.mark.parametrize("name", ["tail", "batches_per_epoch"])
def test_fields_whose_other_values_come_later_are_compared_already(name):
    state = saved(**{name: {"tail": "drop", "batches_per_epoch": 3}[name]})
    _, fields = error_from(StateMismatchError, lambda: make().load_state_dict(state))
    assert list(fields) == [name]


def test_all_differing_fields_are_listed_at_once():
    loader = make(n=12, shuffle=False, seed=8, drop_last=True, seeding="sample", dataset_id="b")
    _, fields = error_from(StateMismatchError, lambda: loader.load_state_dict(saved()))
    assert set(fields) == {"dataset_size", "dataset_id", "order", "seed", "drop_last", "seeding"}
    # one name accepts one field
    _, fields = error_from(
        StateMismatchError, lambda: loader.load_state_dict(saved(), override={"seed", "order"})
    )
    assert set(fields) == {"dataset_size", "dataset_id", "drop_last", "seeding"}


@pytest.mark.parametrize("name", ["epoch", "schema", "batch_in_epoch", "num_workers", "", "Seed"])
def test_an_unknown_override_is_refused(name):
    for override in ({name}, ["seed", name]):
        with pytest.raises(ValueError, match="override names"):
            make().load_state_dict(saved(), override=override)


@pytest.mark.parametrize("override", ["seed", 3, None])
def test_an_override_is_a_set_of_names(override):
    with pytest.raises(TypeError, match="override must be a set"):
        make().load_state_dict(saved(), override=override)


def test_what_may_be_overridden_is_what_is_compared_and_the_digest():
    make().load_state_dict(saved(), override={*COMPARED, "order_digest"})


TOPOLOGIES = {
    "batch_size": {"batch_size": 3},
    "num_replicas": {"num_replicas": 2, "rank": 0},
    "both": {"num_replicas": 2, "rank": 1, "batch_size": 1},
}


@pytest.mark.parametrize("options", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_another_topology_goes_on_from_the_same_position(options, shuffle):
    state = saved_of(make(shuffle=shuffle))
    loader = make(shuffle=shuffle, **options)
    loader.load_state_dict(state)
    after = loader.state_dict()
    present = {key: value for key, value in options.items() if key != "rank"}
    assert after == {**state, **present, "segment": [4, 2]}
    whole = [index for batch in whole_epochs(1, shuffle=shuffle)[0] for index in indices_of(batch)]
    width = options.get("num_replicas", 1)
    # of the six samples that are left each rank takes every second
    mine = whole[4 + options.get("rank", 0) :: width]
    assert [index for batch in loader for index in indices_of(batch)] == mine
    assert position(loader) == (1, 0)
    assert loader.state_dict()["segment"] == [0, 0]


def test_another_topology_at_an_epochs_start_begins_no_segment():
    loader = make(batch_size=3)
    loader.load_state_dict(make().state_dict())
    assert loader.state_dict()["segment"] == [0, 0]
    assert len(list(loader)) == 4


@pytest.mark.parametrize(
    ("options", "name"),
    [({"batch_size": 3}, "batch_size"), ({"num_replicas": 2, "rank": 0}, "num_replicas")],
)
def test_another_topology_is_refused_by_name_where_the_order_is_not_global(options, name):
    loader = with_sampler(**options)
    before = everything_of(loader)
    now = options[name]
    was = {"batch_size": 2, "num_replicas": 1}[name]
    message, fields = error_from(StateMismatchError, lambda: loader.load_state_dict(saved_of(with_sampler())))
    assert fields == {name: (was, now)}
    assert "override" not in message, "no name accepts it"
    with pytest.raises(ValueError, match="override names"):
        loader.load_state_dict(saved_of(with_sampler()), override={name})
    assert everything_of(loader) == before


def with_sampler(batch_size=2, **options):
    return ResumableLoader(Plain(10), batch_size, sampler=list(range(9)), collate_fn=as_is, seed=7, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"batch_size": 3}, "batch_size"), ({"num_replicas": 2, "rank": 0}, "num_replicas")],
)
def test_another_topology_is_refused_by_name_while_batches_are_missing(options, name):
    # batch 2 came before batches 0 and 1 did
    state = saved(batch_in_epoch=1, samples_in_epoch=0, consumed_samples=2, delivered_ahead=[2])
    loader = make(**options)
    before = everything_of(loader)
    _, fields = error_from(StateMismatchError, lambda: loader.load_state_dict(state))
    assert list(fields) == [name]
    assert everything_of(loader) == before
    same = make()
    same.load_state_dict(state)
    assert same.state_dict() == state
    whole = whole_epochs(1)[0]
    assert list(same) == whole[:2] + whole[3:]


def test_a_batch_before_the_change_of_topology_cannot_be_had_again():
    loader = make(batch_size=3)
    loader.load_state_dict(saved())
    with pytest.raises(ValueError, match="batch 1 of epoch 0 was delivered under another"):
        loader.batch_at(0, 1)
    with pytest.raises(ValueError, match="batch 1 of epoch 0 was delivered under another"):
        loader.seek(0, 1)
    assert position(loader) == (0, 2)
    later = loader.batch_at(0, 3)
    assert list(loader)[1] == later
    loader.seek(0, 0)  # gives the position up
    assert list(loader) == whole_epochs(1, batch_size=3)[0]


@pytest.mark.parametrize("new", [make, with_sampler], ids=["shuffled", "sampler"])
def test_the_state_of_a_stream_is_refused_by_name(new):
    state = {**saved_of(new()), "stream": "{}"}
    loader = new()
    before = everything_of(loader)
    _, fields = error_from(StateMismatchError, lambda: loader.load_state_dict(state))
    assert list(fields) == ["stream"]
    assert everything_of(loader) == before


@pytest.mark.parametrize("text", ["{}", "nonsense", "[1]"])
def test_a_samplers_state_where_there_is_no_sampler_is_refused_by_name(text):
    loader = make()
    before = everything_of(loader)
    with pytest.raises(StateError, match="sampler"):
        loader.load_state_dict(saved(sampler=text))
    assert everything_of(loader) == before


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=str,
)
def test_workers_are_free_to_change(options):
    reference = make()
    whole = list(reference)
    loader = make(**options)
    loader.load_state_dict(saved())
    assert list(loader) == whole[2:]


# -- orders from outside ------------------------------------------------------------------------


def distributed(**options):
    sampler = DistributedSampler(Plain(20), 2, 1, **options)
    return ResumableLoader(Noted(20), 3, sampler=sampler, collate_fn=noted)


def test_another_order_of_the_same_kind_is_found_by_its_digest():
    loader = distributed()
    next(iter(loader))
    state = loader.state_dict()
    assert len(state["order_digest"]) == 32
    distributed().load_state_dict(state)
    other = distributed(shuffle=False)
    before = other.state_dict()
    _, fields = error_from(StateMismatchError, lambda: other.load_state_dict(state))
    assert fields == {"order_digest": (state["order_digest"], fields["order_digest"][1])}
    assert other.state_dict() == before
    other.load_state_dict(state, override={"order_digest"})
    assert position(other) == (0, 1)


def test_a_distributed_samplers_drop_last_is_the_tail():
    assert distributed(drop_last=True).state_dict()["tail"] == "drop"
    _, fields = error_from(
        StateMismatchError, lambda: distributed().load_state_dict(distributed(drop_last=True).state_dict())
    )
    assert fields == {"tail": ("drop", "pad")}


def test_a_generators_state_is_carried_and_restored():
    g, loader = generator_loader()
    list(loader)
    iterator = iter(loader)
    next(iterator)
    torch.rand(3, generator=g)  # the user's own draws are kept too
    state = through_json(loader.state_dict())
    rest = list(iterator), list(loader), g.get_state().tolist()
    other, copy = generator_loader(seed=99)
    torch.rand(5, generator=other)
    copy.load_state_dict(state)
    assert copy.state_dict() == state
    assert (list(copy), list(copy), other.get_state().tolist()) == rest


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", "nonsense", '{"before": null, "now": ["00"]}', '{"now": []}']
)
def test_a_damaged_generator_state_leaves_the_generator_alone(text):
    _, loader = generator_loader()
    next(iter(loader))
    state = {**loader.state_dict(), "generator": text}
    other, copy = generator_loader(seed=3)
    before = everything_of(copy)
    with pytest.raises(StateError, match="generator"):
        copy.load_state_dict(state)
    assert everything_of(copy) == before
    assert other.get_state().tolist() == before[3]


def test_another_generators_order_is_refused_and_the_generator_left_alone():
    _, loader = generator_loader()
    next(iter(loader))
    state = loader.state_dict()
    other = torch.Generator().manual_seed(3)
    copy = ResumableLoader(
        Plain(10), 2, sampler=RandomSampler(Plain(10), True, generator=other), collate_fn=as_is
    )
    before = everything_of(copy)
    with pytest.raises(StateError):
        copy.load_state_dict(state)
    assert everything_of(copy) == before


def test_generators_on_one_side_only_are_refused():
    _, loader = generator_loader()
    plain = make()
    for target, state in [(plain, loader.state_dict()), (loader, plain.state_dict())]:
        before = everything_of(target)
        with pytest.raises(StateMismatchError):
            target.load_state_dict(state)
        assert everything_of(target) == before


def test_unseeded_resumes_say_once_what_is_not_promised():
    state = make(seeding=None).state_dict()
    loader = make(seeding=None)
    with pytest.warns(UserWarning, match="seeding=None"):
        loader.load_state_dict(state)
    loader.load_state_dict(state)
