import collections
import datetime
import enum
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from resumable_data.checkpoint.saveable import prepare


def size_and_back(tree):
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return buffer.getbuffer().nbytes, torch.load(buffer, weights_only=True)


GOOD = {
    "numbers": [1, 2**200, 0.5, float("nan"), 1j, True, None],
    "bytes": [b"x", bytearray(b"y"), "z"],
    "containers": {"t": (1, (2,)), "s": {1, 2}, 3: {None: 1.0, (1, 2): "k"}},
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "torch": [torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided],
    "tensors": [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)],
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_accepted_is_what_a_safe_load_reads_back(name):
    assert prepare(GOOD[name]) is GOOD[name]
    assert repr(size_and_back(GOOD[name])[1]) == repr(GOOD[name])


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")
BAD = {
    "numpy.float64": np.float64(1),
    "numpy.int64": np.int64(1),
    "numpy.ndarray": np.ones(2),
    "numpy.bool": np.bool_(True),
    "builtins.frozenset": frozenset({1}),
    "defaultdict": collections.defaultdict(int),
    "deque": collections.deque([1]),
    "datetime": datetime.date(2020, 1, 1),
    "PosixPath": Path("x"),
    "Colour": Colour.RED,
    "Point": Point(1, 2),
    "range": range(3),
    "random.Random": random.Random(1),
    "Generator": torch.Generator(),
    "function": test_what_is_accepted_is_what_a_safe_load_reads_back,
    "Linear": torch.nn.Linear(1, 1),
    "type": int,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_is_refused_by_its_key_path(name):
    with pytest.raises(TypeError, match=rf"state\['a'\]\[2\]\['b'\] is a .*{name}"):
        prepare({"a": [1, 2, {"b": BAD[name]}]})
    with pytest.raises(TypeError, match="a key"):
        prepare({BAD[name]: 1}) if name in ("numpy.float64", "Colour", "Point", "PosixPath") else prepare(
            {Point: 1}
        )


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.nn.UninitializedParameter()]
)
def test_tensors_that_cannot_be_saved(tensor):
    with pytest.raises(TypeError, match=r"state\['t'\]"):
        prepare({"t": tensor})


def test_depth_and_cycles_are_refused():
    deep = []
    for _ in range(70):
        deep = [deep]
    loop = [1, {}]
    loop[1]["again"] = loop
    for tree in (deep, loop):
        with pytest.raises(TypeError, match="contains itself, or nests deeper"):
            prepare(tree)


def test_a_million_losses_cost_next_to_nothing():
    losses = [0.5] * 1_000_000
    assert prepare({"losses": losses})["losses"] is losses


def test_views_are_saved_at_their_own_size_with_their_strides():
    big = torch.arange(1_000_000.0)
    for view in (big[5:15], big[:100:10], big.view(1000, 1000)[3, :7], big[20:32].view(3, 4).t(), big[7:7]):
        size, back = size_and_back(prepare({"v": view}))
        assert size < 3000
        assert torch.equal(back["v"], view)
        assert back["v"].stride() == view.stride()
    assert size_and_back({"v": big[5:15]})[0] > 4_000_000  # torch by itself


def test_whole_tensors_are_not_copied_and_stride_zero_is_not_made_dense():
    whole = torch.ones(100)
    tree = {"a": whole, "b": whole.view(10, 10)}
    assert prepare(tree) is tree
    wide = torch.ones(1).expand(1_000_000)
    size, back = size_and_back(prepare([wide]))
    assert size < 3000
    assert back[0].stride() == (0,)


@pytest.mark.parametrize("copy", [False, True])
def test_ties_stay_tied_and_separate_tensors_separate(copy):
    big = torch.arange(1000.0)
    tied, part, apart = big[10:20], big[15:30], big[500:510]
    tree = {"a": tied, "b": tied, "c": part, "d": apart, "e": big[10:20]}
    size, back = size_and_back(prepare(tree, copy=copy))
    assert size < 4000
    assert all(torch.equal(back[key], tree[key]) for key in tree)
    back["a"][7] = -1
    assert back["b"][7] == back["e"][7] == back["c"][2] == -1
    assert back["a"].untyped_storage().data_ptr() != back["d"].untyped_storage().data_ptr()
    assert tied[7] == 17  # the original is not the copy


def test_a_copy_is_of_its_own():
    parameter = torch.nn.Parameter(torch.ones(3))
    shared = [1, 2]
    tree = {"p": parameter, "l": shared, "m": shared, "o": collections.OrderedDict(x=torch.zeros(2))}
    tree["o"]._metadata = {"": {"version": 2}}
    copied = prepare(tree, copy=True)
    with torch.no_grad():
        parameter.fill_(7)
    shared.append(3)
    assert torch.equal(copied["p"].detach(), torch.ones(3))
    assert type(copied["p"]) is torch.nn.Parameter
    assert copied["l"] == [1, 2]
    assert copied["l"] is copied["m"]
    assert copied["o"]._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("copy", [False, True])
def test_dtypes_over_one_storage_are_parted_or_refused(copy):
    raw = torch.arange(64, dtype=torch.uint8)
    parts = [raw[:32].view(torch.float64), raw[32:].view(torch.int32)]
    with pytest.raises(RuntimeError, match="different types"):
        size_and_back(parts)  # torch by itself
    _, back = size_and_back(prepare(parts, copy=copy))
    assert [part.dtype for part in back] == [torch.float64, torch.int32]
    assert torch.equal(torch.cat([part.view(torch.uint8) for part in back]), raw)
    with pytest.raises(TypeError, match=r"\['b'\] is a torch.float64 view.*torch.uint8"):
        prepare({"a": raw[:20], "b": raw[16:32].view(torch.float64)}, copy=copy)


LONGEST = [2**2039 - 1, 1 - 2**2039]


def test_the_longest_ints_come_back():
    prepare(LONGEST)
    assert size_and_back(LONGEST)[1] == LONGEST


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": 2**2039}, r"state\['a'\] is an int of 2040 bits"),
        ({"a": [0, -(2**3000)]}, r"state\['a'\]\[1\] is an int of 3001 bits"),
        ({"a": b""}, r"state\['a'\] is an empty bytes object"),
        ({"a": (1, [b"x", b""])}, r"state\['a'\]\[1\]\[1\] is an empty bytes"),
        ({b"": 1}, "key that cannot be saved: an empty bytes"),
        ({"a": {(1, 2**2039): 1}}, r"state\['a'\] has a key that cannot be saved"),
    ],
)
def test_values_that_torch_writes_and_cannot_read_are_refused(value, path):
    with pytest.raises(Exception, match="Weights only load failed"):
        size_and_back(value)
    with pytest.raises(TypeError, match=path):
        prepare(value)


def with_attribute(tensor):
    tensor.note = np.float64(1)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(3, dtype=torch.uint4), "torch.uint4 tensor, which torch.load cannot read"),
        (torch.zeros(3, dtype=torch.int8).view(torch.int2), "torch.int2"),
        (with_attribute(torch.zeros(3)), r"attributes \['note'\]"),
        (with_attribute(torch.nn.Parameter(torch.zeros(3))), r"attributes \['note'\]"),
    ],
)
def test_tensors_that_torch_writes_and_cannot_read_are_refused(tensor, match):
    with pytest.raises(Exception, match=r"Weights only load failed|not recognized"):
        size_and_back({"x": tensor})
    with pytest.raises(TypeError, match=match):
        prepare({"x": tensor})


def test_two_storages_that_begin_at_one_address():
    memory = np.arange(10.0)
    tree = {"part": torch.from_numpy(memory[:5]), "all": torch.from_numpy(memory)}
    _, back = size_and_back(prepare(tree))
    assert all(torch.equal(back[key], tree[key]) for key in tree)
    assert tree["part"].untyped_storage().nbytes() == 40


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_a_copy_of_a_lazy_view_does_not_follow_it(lazy):
    numbers = torch.ones(3, dtype=torch.complex64)
    view = numbers.conj() if lazy == "conj" else numbers.conj().imag
    before = view.clone()
    copied = prepare({"x": view}, copy=True)["x"]
    numbers.add_(2 + 3j)
    assert torch.equal(copied, before)
