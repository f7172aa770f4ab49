"""Hostile checkpoints, each sealed with a valid index, loaded in a process with little memory and ten seconds."""

import io
import json
import os
import pickle
import socket
import struct
import tarfile
import warnings
import zipfile

import pytest
import torch

from checkpoint.evil import (
    NAME,
    PAYLOAD,
    SMALL,
    STEP,
    STORAGE,
    entry,
    name_of,
    packed,
    pickled_by,
    put,
    put_sharded,
    saved,
    sealed,
    shards,
    text,
    zipped,
)
from checkpoint.jail import Jail
from resumable_data import CheckpointManager
from resumable_data.checkpoint import gate, layout, unpack

HOSTS_KEY = "a key of sixteen bytes"


@pytest.fixture(scope="module")
def jail():
    with Jail() as jail:
        yield jail


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run"


def refused(outcome, kind, phrase):
    assert outcome[0] == f"Checkpoint{kind}Error", outcome
    assert phrase in outcome[1], outcome


# ── names and files ──────────────────────────────────────────────────────────────────────────────────

ODD_NAMES = {
    1: ["../model.shard-000.pt", "a/../../x", f"../{STEP}/model.shard-000.pt"],
    2: ["/etc/passwd"],
    3: [
        *(
            "",
            ".",
            "..",
            "model.shard-000.pt/",
            "model.shard-000.pt\0",
            "C:\\x",
            "..\\x",
            "model.shard-000.pt\n",
        ),
        *("m" * 201, "modèl.shard-000.pt", "model.shard-00.pt", "model.shard-٠٠٠.pt", "Model.shard-000.pt"),
    ],
}


@pytest.mark.parametrize(("row", "name"), [(row, name) for row, names in ODD_NAMES.items() for name in names])
def test_rows_1_to_3_a_name_that_no_data_file_has(jail, place, row, name):
    files = shards()
    lines = [entry(own, data) for own, data in files.items()]
    lines[1] = entry(name, files["model.shard-000.pt"])
    put_sharded(place, files, lines)
    refused(jail.load(place), "Security", "and nothing else")


def test_rows_1_to_3_in_the_index_of_one_file(jail, place):
    put(place, saved(PAYLOAD))
    for name in ("../other.pt", "/etc/passwd", "step_000000000002.pt"):
        index = layout.Index("0" * 32, 1, 1, 0, {}, (entry(name, b"x"),))
        (place / f"{STEP}.json").write_bytes(layout.index_bytes(index))
        refused(jail.load(place), "Security", f"expected {NAME}")


@pytest.mark.parametrize("which", ["data", "index", "shard", "index in it", "directory"])
def test_row_4_a_symbolic_link(jail, place, tmp_path, which):
    put(place, saved(PAYLOAD)) if which in ("data", "index") else put_sharded(place, shards())
    path = {
        "data": place / NAME,
        "index": place / f"{STEP}.json",
        "shard": place / STEP / "model.shard-001.pt",
        "index in it": place / STEP / "index.json",
        "directory": place / STEP,
    }[which]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(jail.load(place), "Security", "a symbolic link")


def test_row_4_the_pointer_is_never_followed(jail, place):
    put(place, saved(PAYLOAD))
    (place / "latest.json").symlink_to("/etc/passwd")
    assert jail.load(place) == ("", "3.0")


def test_row_5_a_hard_link_is_a_file(jail, place, tmp_path):
    put(place, saved(PAYLOAD))
    os.link(place / NAME, tmp_path / "other")
    assert jail.load(place) == ("", "3.0")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_device(path):
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": make_socket,
    "a special file": make_device,
}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("name", [NAME, f"{STEP}.json"])
def test_rows_6_and_7_what_is_no_file(jail, place, monkeypatch, what, name):
    put(place, saved(PAYLOAD))
    (place / name).unlink()
    monkeypatch.chdir(place)  # a socket's path must be short
    SPECIAL[what](name)
    refused(jail.load(place), "Security", what)


def test_row_8_a_sparse_file_is_never_hashed(jail, place):
    put(place, saved(PAYLOAD))
    os.truncate(place / NAME, 10**13)
    refused(jail.load(place), "Corrupt", "10000000000000 bytes, the index says")


def test_row_9_a_file_swapped_after_its_hash_is_not_read(place, monkeypatch):
    put(place, saved(PAYLOAD))
    other = saved(PAYLOAD | {"model": {"a": torch.zeros(3)}})
    real = unpack.load_archive

    def swapped(*args):
        (place / "new").write_bytes(other)
        (place / "new").replace(place / NAME)
        return real(*args)

    monkeypatch.setattr(gate.unpack, "load_archive", swapped)
    with CheckpointManager(place) as manager:
        assert manager.load_latest().payload["model"]["a"].tolist() == [1, 1, 1]
    assert (place / NAME).read_bytes() == other


@pytest.mark.parametrize("row", [10, 11])
def test_rows_10_and_11_nothing_of_the_file_is_mapped(jail, place, row):
    numbers = torch.ones(1_000_000)
    put(place, saved(PAYLOAD | {"model": {"a": numbers}}))
    if row == 11:  # a mapping would kill the process
        assert jail.load(place, cut=place / NAME) == ("", "1000000.0")
        return
    with CheckpointManager(place) as manager:
        found = manager.load_latest().payload["model"]["a"]
    (place / NAME).write_bytes(bytes((place / NAME).stat().st_size))
    assert torch.equal(found, numbers)


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────

STOP = b"."
TWO = b"\x80\x02"
TENSOR = pickled_by({"a": torch.ones(3)})


def calling(function, *args):
    return TWO + name_of(function) + b"(" + b"".join(args) + b"tR" + STOP


def of_int(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def laughs(levels):
    """A list of two lists of two lists ... each of them one object in two places."""
    parts = [TWO, b"(]q\x00"]
    for level in range(levels):
        last = bytes([level])
        parts.append(b"](h" + last + b"h" + last + b"eq" + bytes([level + 1]))
    return b"".join(parts) + b"t" + STOP


def copies(function, value, count):
    """One value, from which `count` others are made."""
    return (
        TWO + name_of(function) + b"q\x00" + value + b"q\x01(" + b"h\x00h\x01\x85R" * count + b"t\x87" + STOP
    )


class Evil:
    def __init__(self, function, *args):
        self.called = function, args

    def __reduce__(self):
        return self.called


def sparse():
    return torch.sparse_coo_tensor([[10**9]], [1.0], (4,), check_invariants=False)


def rebuilt(size, stride, offset=0, dtype=None):
    """The pickle of one tensor over three floats."""
    numbers = [b"(" + b"".join(map(of_int, values)) + b"t" for values in (size, stride)]
    kind = "FloatStorage" if dtype is None else "storage.UntypedStorage"
    count = of_int(3 if dtype is None else 12)
    storage = b"(" + text("storage") + name_of(f"torch.{kind}") + text("0") + text("cpu") + count + b"tQ"
    rest = b"\x89" + name_of("collections.OrderedDict") + b")R" + (b"" if dtype is None else name_of(dtype))
    version = "2" if dtype is None else "3"
    args = storage + of_int(offset) + numbers[0] + numbers[1] + rest
    return calling(f"torch._utils._rebuild_tensor_v{version}", args)


PICKLES = {
    "12 os.system": (calling("os.system", text("touch was-run")), "Security", "unsafe global os.system"),
    "12 posix.system": (
        pickle.dumps(Evil(os.system, "touch was-run"), protocol=2),
        "Security",
        "unsafe global posix.system",
    ),
    "12 eval": (
        pickle.dumps(Evil(eval, "open('was-run', 'w')"), protocol=2),
        "Security",
        "unsafe global __builtin__.eval",
    ),
    "12 protocol 4": (pickle.dumps(Evil(os.system, "touch was-run"), protocol=4), "Security", "protocol 2"),
    "12 a new opcode": (TWO + b"\x8c\x02os\x8c\x06system\x93.", "Security", "SHORT_BINUNICODE"),
    "12 an old opcode": (TWO + b"(S'touch was-run'\nios\nsystem\n.", "Security", "opcode STRING"),
    "12 no opcode": (TWO + b"\xff.", "Security", "opcode 0xff"),
    "12 a module of torch": (
        calling("torch.hub.load", text("x")),
        "Security",
        "unsafe global torch.hub.load",
    ),
    "13 bytearray": (calling("__builtin__.bytearray", of_int(2**30)), "Limit", "bytearray(1073741824)"),
    "13 a long int": (TWO + b"\x8b" + struct.pack("<i", 2**22) + bytes(2**22) + STOP, "Limit", "255 bytes"),
    "13 sets of one list": (
        copies("__builtin__.set", b"](" + b"K\x01" * 50_000 + b"e", 100_000),
        "Limit",
        "again and again",
    ),
    "13 bytearrays of one bytes object": (
        copies(
            "__builtin__.bytearray",
            name_of("_codecs.encode") + text("x" * 50_000) + text("latin1") + b"\x86R",
            100_000,
        ),
        "Limit",
        "again and again",
    ),
    "14 a tensor by its class": (
        calling("torch.Tensor", of_int(2**28)),
        "Security",
        "unsafe global torch.Tensor",
    ),
    "14 by NEWOBJ": (
        TWO + name_of("torch.FloatTensor") + of_int(2**28) + b"\x85\x81.",
        "Security",
        "unsafe global torch.FloatTensor",
    ),
    "14 NEWOBJ of what is known": (
        TWO + name_of("torch.FloatStorage") + of_int(2**28) + b"\x85\x81.",
        "Security",
        "opcode NEWOBJ",
    ),
    "14 a storage by its class": (calling("torch.FloatStorage", of_int(2**28)), "Security", "no function"),
    "14 BUILD of a tensor": (rebuilt((3,), (1,))[:-1] + b"}b.", "Security", "no OrderedDict"),
    "17 expanded": (rebuilt((2**40,), (0,)), "Limit", "if it were copied"),
    "17 expanded beyond any memory": (rebuilt((2**40, 2**40), (0, 0)), "Limit", "more than any memory"),
    "17 behind its storage": (rebuilt((3,), (1,), offset=1), "Corrupt", "beyond its 12 bytes"),
    "17 a stride behind it": (rebuilt((2,), (2**62,)), "Corrupt", "beyond its 12 bytes"),
    "17 before it": (rebuilt((3,), (1,), offset=-1), "Corrupt", "from -1"),
    "17 shape without strides": (rebuilt((3, 1), (1,)), "Corrupt", "has strides (1,)"),
    "18 sparse": (pickled_by(sparse()), "Security", "unsafe global torch._utils._rebuild_sparse_tensor"),
    "19 quantized": (calling("torch._utils._rebuild_qtensor"), "Security", "_rebuild_qtensor"),
    "19 a quantized dtype": (rebuilt((3,), (1,), dtype="torch.qint8"), "Security", "tensor of torch.qint8"),
    "19 a narrow dtype": (rebuilt((3,), (1,), dtype="torch.uint4"), "Security", "tensor of torch.uint4"),
    "19 a quantized storage": (
        TENSOR.replace(b"FloatStorage", b"QInt8Storage"),
        "Security",
        "unsafe global torch.QInt8Storage",
    ),
    "20 deep": (TWO + b"]" * 200_000 + b"a" * 199_999 + STOP, "Limit", "nest deeper than 64"),
    "20 deep tuples": (TWO + b")" + b"\x85" * 200_000 + STOP, "Limit", "nest deeper than 64"),
    "20 65 levels": (TWO + b"]" * 65 + b"a" * 64 + STOP, "Limit", "nest deeper than 64"),
    "20 itself": (TWO + b"]q\x00h\x00a.", "Limit", "contain themselves"),
    "20 itself by a tuple": (TWO + b"}q\x00K\x01h\x00\x85s.", "Limit", "contain themselves"),
    "20 itself by an attribute": (
        TWO + name_of("collections.OrderedDict") + b")Rq\x00}" + text("x") + b"h\x00sb.",
        "Limit",
        "contain themselves",
    ),
    "21 laughs": (laughs(40), "Limit", "count at each"),
    "21 as many as are allowed and one": (laughs(25), "Limit", "count at each"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_rows_12_to_21_a_pickle(jail, place, tmp_path, case):
    pickled, kind, phrase = PICKLES[case]
    put(place, packed(pickled))
    refused(jail.load(place), kind, phrase)
    assert not (tmp_path / "was-run").exists()


def test_the_parts_of_these_pickles_are_sound(jail, place):
    for pickled in (
        rebuilt((3,), (1,)),
        rebuilt((1_000_000,), (0,)),
        rebuilt((3,), (1,), dtype="torch.int32"),
    ):
        model = TWO + b"}" + text("model") + b"}" + text("a") + pickled[2:-1] + b"s"
        whole = b"s" + text("state") + b"}" + text("step") + b"K\x01ss."
        put(place, packed(model + whole))
        assert jail.load(place)[0] == "", jail.load(place)


def test_row_12_is_never_tried_again_by_unsafe_means(jail, place):
    put(place, packed(PICKLES["12 os.system"][0]))
    message = jail.load(place)[1]
    assert NAME in message
    assert "weights_only" not in message
    assert "add_safe_globals" not in message


@pytest.mark.parametrize("record", [b"", bytes(8), bytes(16), bytes(10_000)])
def test_row_16_a_record_of_another_size(jail, place, record):
    put(place, packed(TENSOR, {"data/0": record}))
    refused(jail.load(place), "Corrupt", f"its record has {len(record)} bytes")


def test_row_16_a_record_that_is_not_there(jail, place):
    put(place, packed(TENSOR, {"data/1": bytes(12)}))
    refused(jail.load(place), "Corrupt", "the storage '0', which the archive does not hold")


# ── archives ─────────────────────────────────────────────────────────────────────────────────────────


def parts(pickled=TENSOR):
    return [(f"archive/{name}", data) for name, data in {"data.pkl": pickled, **SMALL, **STORAGE}.items()]


def torchscript():
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, its files are about
        torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), buffer)
    return buffer.getvalue()


def tarred():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("storages")
        archive.addfile(member, io.BytesIO())
    return buffer.getvalue()


def legacy():
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def twice(name="data.pkl", data=None):
    data = PICKLES["12 os.system"][0] if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of what is meant here
        return zipped([*parts(), (f"archive/{name}", data)])


def behind_its_back():
    """Two archives in one file: readers that look for the end see the second."""
    return saved({"a": torch.ones(3)}) + packed(PICKLES["12 os.system"][0])


ARCHIVES = {
    "15 compressed": (
        lambda: zipped([*parts(), ("archive/data/1", bytes(2**28))], zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "22 TorchScript": (torchscript, "which torch.save never writes"),
    "22 legacy": (legacy, "no zip archive"),
    "22 pickle": (lambda: pickle.dumps({"a": 1}, protocol=2), "no zip archive"),
    "22 tar": (tarred, "no zip archive"),
    "22 zeros": (lambda: bytes(5000), "no zip archive"),
    "22 nothing": (lambda: b"", "no zip archive"),
    "23 twice": (twice, "two entries of the name"),
    "23 a record twice": (lambda: twice("data/0", struct.pack("<3f", 2, 2, 2)), "two entries of the name"),
    "23 a storage twice": (lambda: zipped([*parts(), ("archive/data/00", b"")]), "data/00"),
    "23 another case": (lambda: zipped([*parts(), ("archive/DATA.PKL", TENSOR)]), "DATA.PKL"),
    "23 another prefix": (lambda: zipped([*parts(), ("other/data.pkl", TENSOR)]), "other/data.pkl"),
    "23 more members": (lambda: zipped([*parts(), ("archive/constants.pkl", TENSOR)]), "constants.pkl"),
    "23 code": (lambda: zipped([*parts(), ("archive/code/x.py", b"")]), "code/x.py"),
    "23 a path upwards": (lambda: zipped([*parts(), ("archive/../x", b"")]), "../x"),
    "23 junk before": (lambda: b"x" * 64 + saved({}), "no zip archive"),
    "23 an archive before": (behind_its_back, "beside its entries"),
    "23 junk behind": (lambda: saved({}) + b"x", "cut, or something was added"),
    "23 a comment": (lambda: saved({})[:-2] + b"\x01\x00x", "cut, or something was added"),
    "23 no pickle": (lambda: zipped(parts()[1:]), "lacks data.pkl"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_rows_15_22_and_23_an_archive(jail, place, case):
    make, phrase = ARCHIVES[case]
    put(place, make())
    refused(jail.load(place), "Security", phrase)


def test_the_parts_of_these_archives_are_sound(jail, place):
    put(place, zipped(parts(pickled_by(PAYLOAD))))
    assert jail.load(place) == ("", "3.0")


# ── indexes ──────────────────────────────────────────────────────────────────────────────────────────


def content(place):
    return json.loads((place / f"{STEP}.json").read_bytes())


BYTES = {
    "24 large": (b" " * 1_000_001, "larger than"),
    "24 deep": (b"[" * 100_000, "not an index"),
    "24 deep in an object": (b'{"a":' * 100_000, "not an index"),
    "24 a long number": (b'{"step":' + b"1" * 10_000 + b"}\n", "not an index"),
    "25 a key twice": (b'{"step":1,"step":1}\n', "canonical"),
    "25 NaN": (b'{"step":NaN}\n', "not an index"),
    "25 Infinity": (b'{"step":-Infinity}\n', "not an index"),
    "25 an infinite number": (b'{"step":1e999}\n', "not an index"),
    "25 BOM": (b"\xef\xbb\xbf{}\n", "not an index"),
    "25 UTF-16": ('{"step":1}\n'.encode("utf-16"), "not an index"),
    "25 a lone surrogate": (b'{"a":"\\ud800"}\n', "index_sha256"),
    "25 raw UTF-8": ('{"a":"ä"}\n'.encode(), "not an index"),
    "27 empty": (b"", "not an index"),
    "27 a list": (b"[]\n", "canonical"),
}


@pytest.mark.parametrize("case", BYTES)
def test_rows_24_and_25_bytes_that_are_no_index(jail, place, case):
    data, phrase = BYTES[case]
    put(place, saved(PAYLOAD))
    (place / f"{STEP}.json").write_bytes(data)
    refused(jail.load(place), "Corrupt", phrase)


HASH = "0" * 64
VALUES = {
    "step": [True, 1.0, "1", None, -1, [1], 10**12, 2],
    "generation": [True, 0.0, "0", -1, 10**6, 1],
    "run": [[], {}, {"id": "0" * 32}, {"id": "0" * 31, "ordinal": 1}, {"id": "0" * 32, "ordinal": True}],
    "metrics": [[], {"a": "x"}, {"a": True}, {"a": [1]}],
    "layout": ["Single", None, 1],
    "durability": ["none", None],
    "files": [[], {}, [1], [{"name": NAME}], [{"name": NAME, "size": 1, "sha256": HASH}] * 2],
    "files[0].size": [-1, 1.0, True, "1", 2**63],
    "files[0].sha256": ["A" * 64, "0" * 63, "0" * 65, None, 0, "٠" * 64],
    "files[0].name": [None, 1, [NAME]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values]
)
def test_rows_26_and_27_a_value_of_another_type(jail, place, key, value):
    put(place, saved(PAYLOAD))
    changed = content(place)
    if key.startswith("files[0]"):
        changed["files"][0][key.partition(".")[2]] = value
    else:
        changed[key] = value
    (place / f"{STEP}.json").write_bytes(sealed(changed))
    refused(jail.load(place), "Corrupt", key.partition(".")[0].partition("[")[0])


def test_row_27_a_shard_twice_or_out_of_order(jail, place):
    files = shards()
    a, b, c = (entry(name, data) for name, data in files.items())
    put_sharded(place, files)
    for lines in ((a, b, b), (a, c, b), (b, c), (a, b, b, c), (a, c)):
        index = layout.Index("0" * 32, 1, 1, 0, {}, lines, "sharded")
        (place / STEP / "index.json").write_bytes(layout.index_bytes(index))
        refused(jail.load(place), "Corrupt", "each once and in this order")


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        ({"model.shard-001.pt": {"a": torch.ones(1)}}, "a key that an earlier shard holds too"),
        ({"model.shard-001.pt": {"A": torch.ones(1)}}, "do not hold the keys"),
        ({"model.shard-001.pt": {"b": 1}}, "not a dict of tensors"),
        ({"model.shard-001.pt": [torch.ones(1)]}, "not a dict of tensors"),
        ({"meta.pt": [1]}, "no table of shards"),
        ({"meta.pt": PAYLOAD}, "no table of shards"),
        ({"meta.pt": PAYLOAD | {"model": {"a": 1, "b": None}, "shards": {"a": 0, "b": 1}}}, "holds a value"),
        ({"meta.pt": PAYLOAD | {"model": {"a": None}, "shards": {"a": 0, "b": 1}}}, "deals keys"),
    ],
)
def test_row_27_shards_that_do_not_fit(jail, place, changed, phrase):
    put_sharded(place, shards() | {name: saved(value) for name, value in changed.items()})
    refused(jail.load(place), "Corrupt", phrase)


def test_a_sound_sharded_checkpoint_passes(jail, place):
    put_sharded(place, shards())
    assert jail.load(place) == ("", "7.0")


def test_rows_4_and_12_to_23_in_a_shard(jail, tmp_path):
    for number, (pickled, kind, phrase) in enumerate(list(PICKLES.values())[::4]):
        place = tmp_path / str(number)
        put_sharded(place, shards() | {"model.shard-001.pt": packed(pickled)})
        refused(jail.load(place), kind, phrase)


def test_row_28_everything_rehashed_by_someone_without_the_key(jail, place):
    put(place, saved(PAYLOAD), key=HOSTS_KEY.encode())
    assert jail.load(place, key=HOSTS_KEY) == ("", "3.0")
    signature = content(place)["hmac_sha256"]
    put(place, saved(PAYLOAD | {"model": {"a": torch.zeros(3)}}))
    assert jail.load(place) == ("", "0.0")  # a hash finds damage, not tampering
    refused(jail.load(place, key=HOSTS_KEY), "Security", "has no signature")
    for forged in (signature, "0" * 64, "", 1, None, "é"):
        (place / f"{STEP}.json").write_bytes(sealed(content(place) | {"hmac_sha256": forged}))
        refused(jail.load(place, key=HOSTS_KEY), "Security", "signature")
    refused(jail.load(place), "Corrupt", "hmac_sha256")  # without the key its form is checked


def test_row_29_a_newer_schema_and_missing_fields(jail, place):
    put(place, saved(PAYLOAD))
    sound = content(place)
    path = place / f"{STEP}.json"
    path.write_bytes(sealed(sound | {"schema": "resumable_data.index.v2"}))
    refused(jail.load(place), "Mismatch", "by a newer version")
    for schema in ("resumable_data.index.v0", "other", 1, None):
        path.write_bytes(sealed(sound | {"schema": schema}))
        refused(jail.load(place), "Corrupt", "schema")
    for key in sound.keys() - {"index_sha256", "schema"}:
        path.write_bytes(sealed({name: value for name, value in sound.items() if name != key}))
        refused(jail.load(place), "Corrupt", "keys")
    path.write_bytes(sealed(sound | {"more": 1}))
    refused(jail.load(place), "Corrupt", "keys")


def test_row_30_an_old_signed_checkpoint_under_a_newer_name(jail, place):
    put(place, saved(PAYLOAD), key=HOSTS_KEY.encode())
    for kind in ("pt", "json"):
        (place / f"{STEP}.{kind}").rename(place / layout.file_name(9, 0, kind))
    refused(jail.load(place, key=HOSTS_KEY), "Corrupt", "as its place says")


def test_row_30_an_index_that_was_rewritten_too(jail, place):
    put(place, saved(PAYLOAD), step=9)
    refused(jail.load(place), "Corrupt", "holds step 1, its index says 9")


# ── what a run makes of them ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", ["12 os.system", "17 expanded", "20 itself", "17 before it"])
def test_an_older_sound_checkpoint_is_loaded_and_the_reason_told(place, case):
    pickled, _, phrase = PICKLES[case]
    put(place, saved(PAYLOAD))
    put(place, packed(pickled), step=2)
    with CheckpointManager(place) as manager:
        found = manager.load_latest()
    assert found.step == 1
    (skipped,) = found.skipped
    assert skipped.path.name == layout.file_name(2, 0)
    assert phrase in skipped.reason


def test_the_jail_sees_what_it_is_for(jail, tmp_path):
    (tmp_path / "empty").mkdir()
    assert jail.load(tmp_path / "empty")[0] == "ValueError"  # no entry at all
