"""Plain values as JSON text and back: the same value, type and bits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property.strategies import examples

from resumable_data.encoding import decode, encode

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(["~", "", "float"]),
)
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.just("~"), st.binary(max_size=2)
)
arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["?", "<i1", "<i8", ">i4", "<u8", "<f4", "<f8", "<c16", "<M8[s]", "S3", "<U2"]),
    st.integers(0, 99),
)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [
            torch.bool,
            torch.uint8,
            torch.uint16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
        ]
    ),
    st.integers(0, 99),
)
values = st.recursive(
    scalars | arrays | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) for a, b in zip(one.values(), other.values(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        bits = one.dtype == other.dtype and one.shape == other.shape
        return (
            bits and one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
            if (one.dtype != torch.bfloat16)
            else bits and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return repr(one) == repr(other)
    return one == other


@settings(max_examples=examples(120))
@given(values)
def test_a_value_comes_back_as_it_was(value):
    text = encode(value, "it")
    assert same(decode(text), value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert encode(decode(text), "it") == text


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, -0.0, 2**80, "\ud800", np.float64(0.1), np.int8(3)]
)
def test_edges(value):
    assert same(decode(encode([value], "it")), [value])


def test_a_view_is_carried_as_what_it_shows():
    base = torch.arange(1000)
    view = base[3:9:2]
    text = encode({"t": view, "a": np.arange(10)[::-3]}, "it")
    assert len(text) < 300
    back = decode(text)
    assert torch.equal(back["t"], view)
    assert back["a"].tolist() == [9, 6, 3, 0]
    back["t"][0] = 7  # it owns its memory
    back["a"][0] = 7
    assert base[3] == 3


BAD = {
    "an object": object(),
    "a set": {1},
    "a function": len,
    "a complex number": 1j,
    "objects": np.array([None]),
    "a record": np.zeros(2, dtype=[("x", "<i4")]),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a parameter": torch.nn.Parameter(torch.zeros(1)),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_what_cannot_be_carried_is_refused_by_its_path(what):
    with pytest.raises(TypeError, match=r"it\['a'\]\[1\]"):
        encode({"a": [0, BAD[what]]}, "it")


def test_what_has_no_end_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(TypeError, match="deeper"):
        encode(endless, "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"~":[]}',
        '{"~":["what",1]}',
        '{"~":["tensor","int64",[2],"00"]}',
        '{"~":["bytes","0g"]}',
        '{"~":["tensor","Tensor",[1],"00"]}',
        '{"~":["array","<i8",[3],"00"]}',
        '{"~":7}',
        '{"~":["array","O",[0],""]}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_an_unreadable_text_is_a_value_error(text):
    with pytest.raises(ValueError):
        decode(text)
