import hashlib
import hmac
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resumable_data.checkpoint import layout
from resumable_data.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointSecurityError

INDEX = layout.Index(
    run_id="0123456789abcdef" * 2,
    run_ordinal=2,
    step=42,
    generation=1,
    metrics={"val_loss": 0.1, "n": 3, "bad": None},
    files=(layout.FileEntry("step_000000000042.g1.pt", 1234, "ab" * 32),),
)
NAME = "step_000000000042.g1.json"
# Frozen: a change of these bytes needs a new schema, and breaks the checkpoints people have.
GOLDEN = (
    b'{"durability":"full","files":[{"name":"step_000000000042.g1.pt","sha256":"'
    + b"ab" * 32
    + b'","size":1234}],'
    b'"generation":1,"index_sha256":"' + b"DIGEST" + b'","layout":"single",'
    b'"metrics":{"bad":null,"n":3,"val_loss":0.1},"run":{"id":"0123456789abcdef0123456789abcdef","ordinal":2},'
    b'"schema":"resumable_data.index.v1","step":42}\n'
)


def read(data, *, sharded=False, hmac_key=None):
    return layout.parse_index(data, NAME, step=42, generation=1, sharded=sharded, hmac_key=hmac_key)


def test_the_index_has_these_bytes():
    without = GOLDEN.replace(b'"index_sha256":"DIGEST",', b"")
    assert layout.index_bytes(INDEX) == GOLDEN.replace(
        b"DIGEST", hashlib.sha256(without).hexdigest().encode()
    )
    assert read(layout.index_bytes(INDEX)) == INDEX


def test_every_flipped_bit_and_every_cut_is_seen():
    data = layout.index_bytes(INDEX)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError):
                read(bytes(bad))
        with pytest.raises(CheckpointCorruptError):
            read(data[:place])


def sealed(**changes):
    content = {
        key: value for key, value in json.loads(layout.index_bytes(INDEX)).items() if key != "index_sha256"
    }
    content |= changes
    content = {key: value for key, value in content.items() if value is not ...}
    return layout.canonical(content | {"index_sha256": hashlib.sha256(layout.canonical(content)).hexdigest()})


ENTRY = {"name": "step_000000000042.g1.pt", "size": 1, "sha256": "ab" * 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 43},
        {"step": True},
        {"step": -1},
        {"generation": 0},
        {"run": {"id": "x" * 32, "ordinal": 1}},
        {"run": {"id": "0" * 32, "ordinal": 0}},
        {"run": {"id": "0" * 32}},
        {"metrics": {"a": "low"}},
        {"metrics": {"a": True}},
        {"files": []},
        {"files": [ENTRY, ENTRY]},
        {"files": [ENTRY | {"sha256": "AB" * 32}]},
        {"files": [ENTRY | {"size": 1.0}]},
        {"files": [ENTRY | {"size": -1}]},
        {"files": [ENTRY | {"more": 1}]},
        {"files": [ENTRY | {"name": 3}]},
        {"files": "step_000000000042.g1.pt"},
        {"files": [ENTRY] * 2000},
        {"hmac_sha256": "x"},
        {"layout": "folded"},
        {"layout": ["single"]},
        {"durability": "none"},
        {"schema": "other"},
        {"schema": 1},
        {"extra": 1},
        {"metrics": ...},
    ],
)
def test_a_resealed_index_of_wrong_content_is_corrupt(changes):
    with pytest.raises(CheckpointCorruptError):
        read(sealed(**changes))
    assert read(sealed()) == INDEX


@pytest.mark.parametrize(
    "name",
    ["../x.pt", "/etc/passwd", "", ".", "step_000000000042.pt", "step_000000000042.g1.pt\n", "STEP.pt"],
)
def test_a_resealed_index_naming_another_file_is_refused_as_unsafe(name):
    with pytest.raises(CheckpointSecurityError, match="names the file"):
        read(sealed(files=[ENTRY | {"name": name}]))


def test_a_newer_schema_is_a_mismatch():
    with pytest.raises(CheckpointMismatchError, match=r"index\.v2.*newer"):
        read(sealed(schema="resumable_data.index.v2"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null\n",
        b"[]\n",
        b"\x00" * 50,
        b"[" * 100_000,
        b'{"a":NaN}\n',
        b'{"a":1,"a":1}\n',
        b"\xef\xbb\xbf{}\n",
        b'{"a":' + b"1" * 10_000 + b"}\n",
        b'{"a": 1}\n',
        b'"\\ud800"\n',
    ],
)
def test_what_is_no_index_is_corrupt(data):
    with pytest.raises(CheckpointCorruptError):
        read(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(data):
    with pytest.raises(CheckpointCorruptError):
        read(data)


@given(st.integers(0, layout.MAX_STEP), st.integers(0, 999_999))
def test_names_come_back(step, generation):
    for kind in ("pt", "json", "bad.json", "dir"):
        name = layout.file_name(step, generation, kind)
        assert layout.parse_name(name) == (step, generation, kind)
        assert layout.is_ours(name)
        grave = layout.tombstone_name(name, "0" * 12)
        assert layout.entombed(grave) == (name if kind in ("pt", "dir") else None)


@pytest.mark.parametrize(
    "name",
    [
        "step_1.pt",
        "step_000000000001.g0.pt",
        "step_000000000001.g01.pt",
        "xstep_000000000001.pt",
        "step_000000000001.pt.tmp",
        "step_00000000000١.pt",
        "step_000000000001.bad",
        "step_000000000001.g1.",
        "step_000000000001/",
        "step_000000000001.pt\n",
    ],
)
def test_other_names_are_not_ours(name):
    assert layout.parse_name(name) is None
    assert not layout.is_ours(name)


def test_metrics_on_a_graph_and_too_long_ints():
    loss = torch.ones(1, requires_grad=True).sum()
    assert layout.clean_metrics({"loss": loss, "n": 2**1000}) == {"loss": 1.0, "n": 2**1000}
    for value in (10**400, -(10**400)):
        with pytest.raises(TypeError, match=r"metrics\['n'\]"):
            layout.clean_metrics({"n": value})


# ── sharded ──────────────────────────────────────────────────────────────────────────────────────────

PARTS = ("meta.pt", "model.shard-000.pt", "model.shard-001.pt")
SHARDED = replace(
    INDEX, files=tuple(layout.FileEntry(name, 5, "cd" * 32) for name in PARTS), layout="sharded"
)


def resharded(*names):
    return layout.index_bytes(
        replace(SHARDED, files=tuple(layout.FileEntry(name, 5, "cd" * 32) for name in names))
    )


def test_a_sharded_index_comes_back_and_is_of_its_own_place():
    assert read(layout.index_bytes(SHARDED), sharded=True) == SHARDED
    assert (SHARDED.name, INDEX.name) == ("step_000000000042.g1", "step_000000000042.g1.pt")
    with pytest.raises(CheckpointCorruptError, match="layout"):
        read(layout.index_bytes(SHARDED))
    with pytest.raises(CheckpointCorruptError, match="layout"):
        read(layout.index_bytes(INDEX), sharded=True)
    assert all(map(layout.is_member, (*PARTS, "index.json")))


@pytest.mark.parametrize(
    "name",
    [
        "../model.shard-000.pt",
        "model.shard-0000.pt",
        "model.shard-00.pt",
        "meta.pt/",
        "model.shard-\u0660\u0660\u0660.pt",
        "MODEL.shard-000.pt",
        "index.json",
        "x" * 300,
        "C:\\x",
        "a\0b",
        "model.shard-000.pt\n",
    ],
)
def test_a_sharded_index_names_only_shards_and_meta(name):
    assert not layout.is_member(name) or name == "index.json"
    with pytest.raises(CheckpointSecurityError, match="names the file"):
        read(resharded("meta.pt", name), sharded=True)


@pytest.mark.parametrize(
    "names",
    [
        ("model.shard-000.pt",),
        ("meta.pt", "model.shard-001.pt"),
        ("meta.pt", "model.shard-000.pt", "model.shard-000.pt"),
        ("meta.pt", "meta.pt"),
        ("meta.pt", "model.shard-001.pt", "model.shard-000.pt"),
    ],
)
def test_shards_are_listed_each_once_and_in_order(names):
    with pytest.raises(CheckpointCorruptError, match="files"):
        read(resharded(*names), sharded=True)


# ── signed ───────────────────────────────────────────────────────────────────────────────────────────

KEY = b"sixteen bytes ok"


def test_a_signature_is_asked_for_with_a_key_only():
    signed = layout.index_bytes(INDEX, KEY)
    assert read(signed, hmac_key=KEY) == read(signed) == INDEX
    for key, data, text in (
        (b"another key.....", signed, "not of this key"),
        (KEY, layout.index_bytes(INDEX), "no signature"),
    ):
        with pytest.raises(CheckpointSecurityError, match=text):
            read(data, hmac_key=key)


def test_a_signed_index_that_was_changed_and_resealed_is_refused():
    content = json.loads(layout.index_bytes(INDEX, KEY))
    del content["index_sha256"]
    for changes in ({"step": 43}, {"metrics": {}}, {"run": {"id": "0" * 32, "ordinal": 9}}):
        forged = content | changes
        data = layout.canonical(
            forged | {"index_sha256": hashlib.sha256(layout.canonical(forged)).hexdigest()}
        )
        with pytest.raises(CheckpointSecurityError, match="not of this key"):
            read(data, hmac_key=KEY)


def test_the_signature_is_this_one():
    """Frozen: HMAC-SHA256 over the canonical form without the signature and index_sha256."""
    content = json.loads(layout.index_bytes(INDEX, KEY))
    signature = content.pop("hmac_sha256")
    del content["index_sha256"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert signature == hmac.new(KEY, text, hashlib.sha256).hexdigest()


def test_marks_say_why_and_an_unreadable_one_marks_all_the_same():
    data = layout.bad_bytes(3, 1, "loss spiked")
    assert data == b'{"generation":1,"reason":"loss spiked","schema":"resumable_data.bad.v1","step":3}\n'
    assert layout.parse_bad(data) == "loss spiked"
    for broken in (b"", b"[]", b"\xff", b"[" * 100_000, b'{"reason":3}'):
        assert layout.parse_bad(broken) == "by a mark that cannot be read"
