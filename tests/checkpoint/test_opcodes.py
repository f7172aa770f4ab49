import pickle
import struct

import pytest
import torch

from checkpoint.evil import name_of, pickled_by, text
from resumable_data.checkpoint.limits import DEFAULT, Limits
from resumable_data.checkpoint.opcodes import scan
from resumable_data.checkpoint.standins import Box, Leaf, Tensor
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointSecurityError,
)

TWO = b"\x80\x02"
RECORDS = {"0": 12}
ORDERED = name_of("collections.OrderedDict") + b")R"
STORAGE = b"(" + text("storage") + name_of("torch.FloatStorage") + text("0") + text("cpu") + b"K\x03tQ"
TENSOR = (
    name_of("torch._utils._rebuild_tensor_v2")
    + b"("
    + STORAGE
    + b"K\x00K\x03\x85K\x01\x85\x89"
    + ORDERED
    + b"tR"
)


def run(body, limits=DEFAULT, records=RECORDS):
    return scan(TWO + body + b".", records, limits)


def plain(value):
    """A stand-in as something that can be compared."""
    if type(value) is Box:
        return value.kind, [plain(item) for item in value.items], [plain(item) for item in value.hung]
    if type(value) is tuple:
        return tuple(map(plain, value))
    if type(value) is Leaf:
        return value.kind, value.size
    return "tensor" if type(value) is Tensor else value


def test_what_torch_writes_is_read():
    ordered = torch.nn.Linear(1, 1).state_dict()
    tree = [
        1,
        -70000,
        300,
        2**70,
        -(2**40),
        0.5,
        None,
        True,
        "ä",
        ("a", ()),
        {"k": (1, 2, 3)},
        torch.float16,
        ordered,
    ]
    found = plain(scan(pickled_by(tree), {"0": 4, "1": 4}, DEFAULT))
    assert found[0] == "list"
    assert found[1][:12] == [
        *(1, -70000, 300, 2**70, -(2**40), 0.0, None, True, "ä", ("a", ())),
        ("dict", ["k", (1, 2, 3)], []),
        torch.float16,
    ]
    assert found[1][12][:2] == ("OrderedDict", ["weight", "tensor", "bias", "tensor"])
    assert found[1][12][2][0] == "_metadata"


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (b"abc\xff", ("bytes", 4)),
        (bytearray(b"abc"), ("bytearray", 3)),
        (bytearray(), ("bytearray", 0)),
        (1j, ("complex", 0)),
        (torch.Size([1, 2]), ("Size", 2)),
        (torch.device("cuda", 1), ("device", 0)),
        (torch.strided, ("layout", 0)),
    ],
)
def test_plain_values_that_are_made_by_calls(value, leaf):
    assert plain(scan(pickled_by(value), {}, DEFAULT)) == leaf


def test_a_run_of_floats_is_one_step():
    losses = [float(i) for i in range(10_000)]
    found = scan(pickled_by(losses), {}, Limits(opcodes=100))
    assert len(found.items) == 10_000
    assert run(b"(G" + b"G" * 8 + b"K\x01t") == (0.0, 1)  # bytes that look like the opcode


def test_a_pickle_cut_anywhere_is_refused():
    tree = {
        "a": torch.ones(3),
        "b": [1, 2**70, 0.5, b"x", bytearray(b"y"), 1j, {1, 2}],
        "c": torch.nn.Linear(1, 1).state_dict(),
    }
    whole = pickled_by(tree)
    records = {"0": 12, "1": 4, "2": 4}
    scan(whole, records, DEFAULT)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            scan(whole[:length], records, DEFAULT)


CORRUPT = {
    "nothing": b"",
    "two values": b"NN",
    "an open mark": b"(N",
    "a mark that is not open": b"t",
    "an item too few": b"N\x87",
    "an append to nothing": b"Na",
    "a key without a value": b"}(Nu",
    "no such memo": b"h\x05",
    "no such long memo": b"j\x05\x00\x00\x00",
    "nothing to keep": b"q\x00",
    "a string of four billion": b"X\xff\xff\xff\xff",
    "no UTF-8": b"X\x01\x00\x00\x00\xff",
    "an int cut": b"\x8a\xff\x01",
    "an end in the middle": b"N.N",
}


@pytest.mark.parametrize("case", CORRUPT)
def test_parts_that_do_not_fit_are_corrupt(case):
    with pytest.raises(CheckpointCorruptError, match="its pickle"):
        run(CORRUPT[case])


SECURITY = {
    "no list": {
        "append to a tuple": b")Na",
        "append to a dict": b"}Na",
        "extend a dict": b"}(Ne",
    },
    "no Counter or OrderedDict or dict": {
        "set in a list": b"](NNu",
        "set in a tuple": b")NNs",
    },
    "a dict key that is no plain value": {
        "a dict as a key": b"}}Ns",
        "a list in a key": b"}]\x85Ns",
        "a tensor as a key": b"}" + TENSOR + b"Ns",
    },
    "calls something that is no function": {
        "a call of a list": b"])R",
        "a call of a dtype": name_of("torch.float32") + b")R",
        "arguments in a list": name_of("collections.OrderedDict") + b"]R",
    },
    "no OrderedDict": {
        "an attribute for a dict": b"}}b",
        "an attribute for a list": b"]}b",
    },
    "no dict of names": {
        "attributes in a tuple": ORDERED + b")b",
        "an attribute by a number": ORDERED + b"}K\x01Nsb",
    },
    "whose name does not end": {
        "a name that does not end": b"cos" + b"x" * 500,
    },
    "unsafe global torch": {
        "a global by a path": name_of("torch.float32.__class__"),
        "no dtype of torch": name_of("torch.nn"),
        "an unknown storage": name_of("torch.QUInt8Storage"),
    },
    "a part of a tensor that has been made": {
        "a hook added afterwards": (
            TENSOR.replace(ORDERED, ORDERED + b"q\x07") + b"h\x07" + text("x") + b"Ns\x86"
        ),
        "a hook as an attribute": TENSOR.replace(ORDERED, ORDERED + b"q\x07") + b"h\x07}b\x86",
    },
    "no tensor's storage": {
        "no persistent id": b"NQ",
        "a persistent id that is too short": b"(" + text("storage") + b"tQ",
        "a persistent module": STORAGE.replace(text("storage"), text("module_")),
        "a storage without a type": STORAGE.replace(name_of("torch.FloatStorage"), text("FloatStorage")),
        "a place that is no device": STORAGE.replace(text("cpu"), text("/tmp/x")),  # noqa: S108 - never opened
        "a number of elements that is none": STORAGE.replace(b"K\x03tQ", b"\x88tQ"),
    },
}


@pytest.mark.parametrize(
    ("phrase", "body"),
    [
        pytest.param(phrase, body, id=case)
        for phrase, cases in SECURITY.items()
        for case, body in cases.items()
    ],
)
def test_what_torch_never_writes(phrase, body):
    with pytest.raises(CheckpointSecurityError, match=phrase):
        run(body)


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_protocols(protocol):
    with pytest.raises(CheckpointSecurityError, match="expected protocol 2"):
        scan(pickle.dumps([1], protocol=protocol), {}, DEFAULT)


def test_the_parts_of_these_are_sound():
    assert plain(run(TENSOR)) == "tensor"
    assert plain(run(TENSOR.replace(ORDERED, ORDERED + b"q\x07") + b"h\x07\x86")) == (
        "tensor",
        ("OrderedDict", [], []),
    )
    assert plain(run(ORDERED + b"}" + text("x") + b"Nsb")) == ("OrderedDict", [], ["x", None])
    assert plain(run(b"}(N)" + text("x") + b"\x85Nu")) == ("dict", [None, (), ("x",), None], [])


V2, V3, PARAMETER = (f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter"))
SHAPE = b"K\x00K\x03\x85K\x01\x85\x89"
CALLED = {
    "a tensor of nothing": (V2, b""),
    "a tensor without hooks": (V2, STORAGE + SHAPE),
    "a tensor with too much": (V2, STORAGE + SHAPE + ORDERED + b"}}"),
    "no storage": (V2, b"N" + SHAPE + ORDERED),
    "a number as the offset": (V2, STORAGE + b"G" + bytes(8) + SHAPE[2:] + ORDERED),
    "a bool as the offset": (V2, STORAGE + b"\x88" + SHAPE[2:] + ORDERED),
    "a shape of floats": (V2, STORAGE + b"K\x00G" + bytes(8) + b"\x85K\x01\x85\x89" + ORDERED),
    "a shape in a list": (V2, STORAGE + b"K\x00]K\x01\x85\x89" + ORDERED),
    "strides of None": (V2, STORAGE + b"K\x00K\x03\x85N\x85\x89" + ORDERED),
    "a number for requires_grad": (V2, STORAGE + SHAPE[:-1] + b"K\x01" + ORDERED),
    "None for hooks": (V2, STORAGE + SHAPE + b"N"),
    "a dict for hooks": (V2, STORAGE + SHAPE + b"}"),
    "a hook": (V2, STORAGE + SHAPE + ORDERED + b"K\x01Ns"),
    "hooks with an attribute": (V2, STORAGE + SHAPE + ORDERED + b"}" + text("x") + b"Nsb"),
    "metadata that is a list": (V2, STORAGE + SHAPE + ORDERED + b"]"),
    "unknown metadata": (V2, STORAGE + SHAPE + ORDERED + b"}" + text("fake") + b"\x88s"),
    "metadata by a number": (V2, STORAGE + SHAPE + ORDERED + b"}K\x01\x88s"),
    "metadata of another type": (V2, STORAGE + SHAPE + ORDERED + b"}" + text("neg") + b"K\x01s"),
    "a tensor of no dtype": (V3, STORAGE + SHAPE + ORDERED),
    "a dtype by its name": (V3, STORAGE + SHAPE + ORDERED + text("torch.int32")),
    "a parameter of nothing": (PARAMETER, b""),
    "a parameter of a storage": (PARAMETER, STORAGE + b"\x88" + ORDERED),
    "a parameter with a hook": (PARAMETER, TENSOR + b"\x88" + ORDERED + b"K\x01Ns"),
    "a parameter by a number": (PARAMETER, TENSOR + b"K\x01" + ORDERED),
    "an OrderedDict of pairs": ("collections.OrderedDict", b"]"),
    "a Counter of a list": ("collections.Counter", b"]"),
    "a Counter of nothing": ("collections.Counter", b""),
    "a set of a string": ("__builtin__.set", text("abc")),
    "a set of nothing": ("__builtin__.set", b""),
    "bytes in another code": ("_codecs.encode", text("abc") + text("rot13")),
    "bytes in no code": ("_codecs.encode", text("abc")),
    "a bytearray of a list": ("__builtin__.bytearray", b"]"),
    "a bytearray of a complex number": (
        "__builtin__.bytearray",
        name_of("__builtin__.complex") + b"G" + bytes(8) + b"G" + bytes(8) + b"\x86R",
    ),
    "a complex number of a string": ("__builtin__.complex", text("1j")),
    "a size of a list": ("torch.Size", b"]"),
    "a size of floats": ("torch.Size", b"G" + bytes(8) + b"\x85"),
    "a device by a number": ("torch.device", b"K\x01"),
    "a device by a path": ("torch.device", text("../x")),
    "a layout of nothing": ("torch.serialization._get_layout", b""),
    "a layout by another name": ("torch.serialization._get_layout", text("os.system")),
}


@pytest.mark.parametrize("case", CALLED)
def test_calls_with_arguments_that_torch_never_writes(case):
    function, arguments = CALLED[case]
    with pytest.raises(CheckpointSecurityError, match=r"in a way in which torch\.save never does"):
        run(name_of(function) + b"(" + arguments + b"tR")


def test_one_storage_is_of_one_size_and_dtype():
    other = STORAGE.replace(b"FloatStorage", b"IntStorage")
    run(STORAGE + STORAGE + b"\x86")
    with pytest.raises(CheckpointCorruptError, match=r"of torch.float32 and of torch.int32"):
        run(STORAGE + other + b"\x86")
    with pytest.raises(CheckpointCorruptError, match="its record has 13 bytes"):
        run(STORAGE, records={"0": 13})
    with pytest.raises(CheckpointCorruptError, match="does not hold"):
        run(STORAGE, records={"1": 12})
    with pytest.raises(CheckpointCorruptError, match="-1 elements"):
        run(STORAGE.replace(b"K\x03tQ", b"J" + struct.pack("<i", -1) + b"tQ"))


@pytest.mark.parametrize(
    ("body", "limits", "phrase"),
    [
        (b"N" * 50, Limits(opcodes=50), "more than 50 steps"),
        (b"(" + b"]" * 11 + b"t", Limits(containers=10), "more than 10 containers"),
        (b"(" + b")" * 11 + b"t", Limits(containers=10), "more than 10 containers"),
        (b"N" + b"\x85" * 11, Limits(containers=10), "more than 10 containers"),
        (TENSOR, Limits(containers=3), "more than 3 containers"),
    ],
)
def test_limits(body, limits, phrase):
    with pytest.raises(CheckpointLimitError, match=phrase):
        run(body, limits)


def test_an_honest_bytearray_is_copied_twice_and_no_more_often():
    value = bytearray(range(256)) * 400
    assert plain(scan(pickled_by([value, value]), {}, DEFAULT))[1] == [("bytearray", len(value))] * 2
    kept = name_of("_codecs.encode") + text("x" * 1000) + text("latin1") + b"\x86R\x85q\x00"
    again = name_of("__builtin__.bytearray") + b"h\x00R"
    run(b"(" + kept + again + b"t")
    with pytest.raises(CheckpointLimitError, match="again and again"):
        run(b"(" + kept + again * 3 + b"t")
