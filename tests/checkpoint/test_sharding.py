import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.sharding import join, split
from resumable_data.errors import CheckpointCorruptError

META = "meta.pt"


def payload(**model):
    return prepare({"schema": "ckpt.v1", "model": model, "optimizer": None, "extra": {}, "grads": {}})


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(
    sizes=st.lists(st.integers(0, 4), max_size=12),
    shards=st.integers(1, 6),
    ties=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=4),
)
def test_what_is_split_is_joined_to_the_same_in_the_same_order(sizes, shards, ties):
    model = {f"k{i}": torch.rand(size) for i, size in enumerate(sizes)}
    for a, b in ties:
        if a < len(sizes) and b < len(sizes):
            model[f"k{b}"] = model[f"k{a}"].view(-1)
    model["_extra_state"] = {"n": 3}
    whole = payload(**model)
    parts = split(whole, shards)
    numbers = parts[META]["shards"]
    assert numbers.keys() == {key for key in model if key != "_extra_state"}
    assert len(parts) - 1 <= shards
    for a in model:
        for b in model:
            if a in numbers and b in numbers and model[a].numel() and model[b].numel():
                shared = model[a].data_ptr() == model[b].data_ptr()
                assert not shared or numbers[a] == numbers[b]
    assert same(join(parts, "x"), whole)
    assert "shards" not in whole
    assert all(value is not None for value in whole["model"].values())


def test_groups_are_dealt_in_turn():
    parts = split(payload(a=torch.ones(1), b=torch.ones(1), c=torch.ones(1), d=torch.ones(1)), 3)
    assert parts[META]["shards"] == {"a": 0, "b": 1, "c": 2, "d": 0}
    assert list(parts) == [META, "model.shard-000.pt", "model.shard-001.pt", "model.shard-002.pt"]


def test_what_is_shared_with_something_outside_the_model_stays_with_it():
    shared = torch.ones(3)
    whole = prepare(
        {"schema": "ckpt.v1", "model": {"a": shared, "b": torch.ones(2)}, "extra": {"ema": [shared]}}
    )
    parts = split(whole, 2)
    assert parts[META]["shards"] == {"b": 0}
    joined = join(parts, "x")
    assert joined["model"]["a"] is joined["extra"]["ema"][0]


def test_a_given_grouping_is_numbered_without_gaps():
    parts = split(payload(a=torch.ones(1), b=torch.ones(1), c=torch.ones(1)), {"a": 7, "b": 2, "c": 7}.get)
    assert parts[META]["shards"] == {"a": 1, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("grouping", "kind", "text"),
    [
        (lambda key: ord(key[0]) % 2, ValueError, "share storage"),
        (lambda key: 1000, ValueError, "0 to 999"),
        (lambda key: -1, ValueError, "0 to 999"),
        (lambda key: True, TypeError, "expected an int"),
        (lambda key: "0", TypeError, "expected an int"),
    ],
)
def test_a_grouping_that_cannot_be_is_refused(grouping, kind, text):
    tied = torch.ones(2)
    with pytest.raises(kind, match=text):
        split(payload(a=tied, b=tied), grouping)


def test_without_a_model_there_is_no_shard():
    whole = prepare({"schema": "ckpt.v1", "model": None, "extra": {"x": torch.ones(2)}})
    parts = split(whole, 4)
    assert list(parts) == [META]
    assert same(join(parts, "x"), whole)


def broken(change):
    parts = split(payload(a=torch.ones(1), b=torch.ones(2)), 2)
    change(parts)
    return parts


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update({META: []}),
        lambda parts: parts[META].pop("shards"),
        lambda parts: parts[META].update(shards=[]),
        lambda parts: parts[META].update(shards={}),
        lambda parts: parts[META]["shards"].update(c=0),
        lambda parts: parts[META]["shards"].pop("a"),
        lambda parts: parts[META]["shards"].update(a=1),
        lambda parts: parts[META]["shards"].update(a=False),
        lambda parts: parts[META]["shards"].update(a=0.0),
        lambda parts: parts[META]["model"].update(a=torch.zeros(1)),
        lambda parts: parts[META].update(model=None),
        lambda parts: parts["model.shard-000.pt"].pop("a"),
        lambda parts: parts["model.shard-000.pt"].update(b=torch.ones(2)),
        lambda parts: parts["model.shard-000.pt"].update(a=3),
        lambda parts: parts.update({"model.shard-000.pt": [torch.ones(1)]}),
    ],
)
def test_parts_that_do_not_belong_together_are_corrupt(change):
    with pytest.raises(CheckpointCorruptError, match="not written together"):
        join(broken(change), "step_000000000001")
    assert join(broken(lambda parts: None), "x")
