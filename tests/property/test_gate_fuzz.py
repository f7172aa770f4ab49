"""Everything that is saved comes back bit by bit; whatever else is in a file, the error is one of ours."""

import collections
import io
import os
import struct

import pytest
import torch
from checkpoint.evil import packed, pickled_by, saved
from hypothesis import given, settings
from hypothesis import strategies as st

from property.strategies import examples, tried
from resumable_data.checkpoint import layout
from resumable_data.checkpoint.atomic import atomic_torch_save
from resumable_data.checkpoint.limits import DEFAULT
from resumable_data.checkpoint.opcodes import scan
from resumable_data.checkpoint.survey import survey
from resumable_data.checkpoint.unpack import load_archive
from resumable_data.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]
FORMS = [
    "whole",
    "transposed",
    "part",
    "expanded",
    "empty",
    "scalar",
    "parameter",
    "grad",
    "conj",
    "neg",
    "again",
]


# ── what is saved ────────────────────────────────────────────────────────────────────────────────────


@st.composite
def tensors(draw, met):
    """A tensor of any dtype, shape and strides; some share memory with an earlier one."""
    form = draw(st.sampled_from(FORMS))
    if form == "again" and met:
        earlier = draw(st.sampled_from(met))
        return earlier if draw(st.booleans()) else earlier.detach()
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    raw = draw(st.binary(min_size=16, max_size=16)) * 64
    if dtype is torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    whole = torch.frombuffer(bytearray(raw), dtype=dtype)
    value = whole[: torch.Size(shape).numel()].clone().view(shape)
    if form in ("grad", "parameter") and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
        value = torch.nn.Parameter(value) if form == "parameter" else value.requires_grad_()
    elif form == "conj" and dtype is torch.complex64:
        value = value.conj()
    elif form == "neg" and dtype is torch.complex64:
        value = value.conj().imag
    else:
        value = {
            "transposed": value.t() if value.dim() == 2 else value,
            "part": value[..., :1],
            "expanded": value[:1].expand(7, *shape[1:]),
            "empty": value[..., :0],
            "scalar": value.flatten()[0],
        }.get(form, value)
    met.append(value)
    return value


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-(2**2039) + 1, 2**2039 - 1),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=20),
    st.binary(min_size=1, max_size=20),
    st.sampled_from(
        [torch.float32, torch.qint8, torch.device("cpu"), torch.device("cuda", 3), torch.strided]
    ),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
)
KEYS = st.one_of(
    st.text(max_size=5), st.integers(-300, 300), st.booleans(), st.none(), st.tuples(st.integers(), st.text())
)


@st.composite
def trees(draw):
    """A tree of everything that may be saved, some of it in several places."""
    met = []
    made = []

    def kept(value):
        made.append(value)
        return value

    def grown(inner):
        lists = st.lists(inner, max_size=4)
        dicts = st.dictionaries(KEYS, inner, max_size=4)
        return st.one_of(
            lists.map(kept),
            lists.map(tuple),
            dicts.map(kept),
            dicts.map(collections.OrderedDict).map(kept),
            st.deferred(lambda: st.sampled_from(made) if made else st.just([])),
        )

    leaves = st.one_of(
        PLAIN,
        tensors(met),
        st.binary(max_size=20).map(bytearray),
        st.sets(st.integers(-5, 300) | st.text(max_size=3), max_size=5),
        st.text("abc", max_size=9).map(collections.Counter),
        st.lists(st.floats(), max_size=40),
    )
    tree = draw(st.recursive(leaves, grown, max_leaves=20))
    if type(tree) is collections.OrderedDict:
        tree._metadata = {"": {"version": draw(st.integers())}}
    return tree


CHANGE = (torch.Tensor, list, dict, set, bytearray)


def same(one, other, pairs):
    """Whether two trees are equal bit by bit and of the same types; `pairs` gets what stands for what."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CHANGE) and pairs.setdefault(id(one), id(other)) != id(other):
        return False  # what was one object in two places must be so again
    if isinstance(one, torch.Tensor):
        return alike(one.detach(), other.detach()) and one.requires_grad == other.requires_grad
    if isinstance(one, dict):
        keys = [*one] == [*other] and [*map(type, one)] == [*map(type, other)]
        inside = zip(
            [*one.values(), *vars_of(one).values()], [*other.values(), *vars_of(other).values()], strict=True
        )
        return keys and [*vars_of(one)] == [*vars_of(other)] and all(same(a, b, pairs) for a, b in inside)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(same(a, b, pairs) for a, b in zip(one, other, strict=True))
    if type(one) in (float, complex):
        return struct.pack("<dd", one.real, one.imag) == struct.pack("<dd", other.real, other.imag)
    return one == other


def vars_of(value):
    """What hangs on an OrderedDict."""
    return getattr(value, "__dict__", {})


def alike(one, other):
    parts = (one.shape, one.dtype, one.is_conj(), one.is_neg()) == (
        *(other.shape, other.dtype),
        *(other.is_conj(), other.is_neg()),
    )
    strides = [(n, a, b) for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if n > 1]
    # with no elements there are no bytes to compare
    return parts and (
        not one.numel() or (all(a == b for _, a, b in strides) and bytes_of(one) == bytes_of(other))
    )


def bytes_of(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes(plain.flatten().view(torch.uint8).tolist())


def read(path):
    with path.open("rb", buffering=0) as file:
        return load_archive(file, path.name)


@settings(max_examples=examples(300))
@given(tree=trees())
def test_everything_that_is_saved_comes_back(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree.pt"
    atomic_torch_save(tree, path)
    assert same(tree, read(path), {})
    tried("trees saved and loaded", os.urandom(8))


def test_the_comparison_sees_a_difference():
    base = {"a": torch.tensor([1.0, float("nan")]), "b": [0.0, (1, True)]}
    assert same(base, {"a": torch.tensor([1.0, float("nan")]), "b": [0.0, (1, True)]}, {})
    for other in (
        {"a": torch.tensor([1.0, 2.0]), "b": [0.0, (1, True)]},
        {"a": base["a"].double(), "b": [0.0, (1, True)]},
        {"a": base["a"], "b": [-0.0, (1, True)]},
        {"a": base["a"], "b": [0.0, (True, True)]},
        {"a": base["a"], "b": [0.0, [1, True]]},
    ):
        assert not same(base, other, {})
    tied = [base["a"], base["a"]]
    assert not same(tied, [base["a"].clone(), base["a"].clone()], {})


# ── what was never saved ─────────────────────────────────────────────────────────────────────────────

ORDERED = collections.OrderedDict(a=torch.nn.Parameter(torch.ones(2)), b=torch.zeros(3, dtype=torch.uint16))
ORDERED._metadata = {"": {"version": 1}}
SEED_VALUES = [
    {"a": torch.ones(3), "b": [1, 2**70, 0.5, None, True]},
    [b"x", bytearray(b"y"), 1j, {1, 2}, torch.Size([1]), torch.float16, torch.device("cpu"), torch.strided],
    ORDERED,
    {"c": collections.Counter("aab"), "t": torch.ones(2, 2).t(), "losses": [0.5] * 20},
]
FILES = [saved(value) for value in SEED_VALUES]
PICKLES = [pickled_by(value) for value in SEED_VALUES]
RECORDS = {str(number): 12 for number in range(4)}


@st.composite
def mutated(draw, sources):
    """One of the sources, with bytes changed, cut out, doubled, or mixed with another."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        stop = min(len(data), start + draw(st.integers(0, 24)))
        kind = draw(st.sampled_from(["set", "cut", "double", "insert", "mix"]))
        if kind == "set" and data:
            data[start] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[start:stop]
        elif kind == "double":
            data[start:start] = data[start:stop]
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=12))
        else:
            other = draw(st.sampled_from(sources))
            data[start:] = other[min(start, len(other)) :]
    return bytes(data)


OPCODES = st.sampled_from(
    [bytes([code]) for code in b"N\x88\x89](})tuesabRQ.\x85\x86\x87"]
) | st.sampled_from(
    [
        *(
            b"K\x01",
            b"M\x01\x01",
            b"J\xff\xff\xff\xff",
            b"\x8a\x01\x05",
            b"G" + bytes(8),
            b"X\x01\x00\x00\x00a",
        ),
        *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"ccollections\nOrderedDict\n", b"ccollections\nCounter\n"),
        *(b"c__builtin__\nset\n", b"c__builtin__\nbytearray\n", b"ctorch\nSize\n", b"ctorch\nFloatStorage\n"),
        *(
            b"ctorch\nfloat32\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"c_codecs\nencode\n",
            b"ccollections\nOrderedDict\n)R",
        ),
    ]
)
WORDS = st.lists(OPCODES, max_size=30).map(lambda parts: b"\x80\x02" + b"".join(parts) + b".")


def ours_or_read(data):
    """Load a file from memory: True where it loads, False where it is refused as it should be."""
    fd = os.memfd_create("fuzz")
    with os.fdopen(fd, "r+b", buffering=0) as file:
        file.write(data)
        file.seek(0)
        try:
            load_archive(file, "x.pt")
        except CheckpointError:
            return False
    return True


def test_the_sources_are_sound():
    assert all(map(ours_or_read, FILES))
    for value, pickled in zip(SEED_VALUES, PICKLES, strict=True):
        assert type(torch.load(io.BytesIO(saved(value)))) is type(value)
        assert pickled in saved(value)


@settings(max_examples=examples(200))
@given(data=st.binary(max_size=400) | st.binary(max_size=200).map(lambda more: b"PK\x03\x04" + more))
def test_random_bytes_are_no_file(data):
    assert not ours_or_read(data)


@settings(max_examples=examples(400))
@given(data=mutated(FILES))
def test_a_changed_file_is_read_or_refused(data):
    ours_or_read(data)


@settings(max_examples=examples(400))
@given(pickled=mutated(PICKLES) | WORDS)
def test_a_changed_pickle_is_read_or_refused(pickled):
    """In an archive that is whole; what passes the scan is given to torch."""
    ours_or_read(packed(pickled, {f"data/{key}": bytes(size) for key, size in RECORDS.items()}))


@settings(max_examples=examples(400))
@given(pickled=WORDS)
def test_what_passes_the_scan_is_what_torch_makes(pickled):
    try:
        values = survey(scan(pickled, {}, DEFAULT), DEFAULT)
    except CheckpointError:
        return
    try:
        made = torch.load(io.BytesIO(packed(pickled, {})), weights_only=True)
    except (TypeError, RuntimeError):  # a list in a set, text that is no bytes
        return
    assert count(made) <= values


def count(value):
    """Values of a tree, counted at each of their places; a set or a dict may have lost what is twice in it."""
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values()) + sum(map(count, vars_of(value).values()))
    return 1 + sum(map(count, value)) if type(value) in (list, tuple, set) else 1


def an_index():
    entry = layout.FileEntry("step_000000000001.pt", 10, "0" * 64)
    return layout.index_bytes(layout.Index("0" * 32, 1, 1, 0, {"loss": 0.5}, (entry,)))


@settings(max_examples=examples(300))
@given(data=mutated([an_index(), b'{"a":[{"b":1e5,"c":null}]}\n']) | st.binary(max_size=200))
def test_a_changed_index_is_never_read(data):
    sound = an_index()
    if data == sound:
        return
    with pytest.raises(CheckpointError):
        layout.parse_index(data, "x.json", step=1, generation=0, sharded=False)
