import hashlib
import json

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


def test_the_index_has_these_bytes():
    without = GOLDEN.replace(b'"index_sha256":"DIGEST",', b"")
    assert layout.index_bytes(INDEX) == GOLDEN.replace(
        b"DIGEST", hashlib.sha256(without).hexdigest().encode()
    )
    assert layout.parse_index(layout.index_bytes(INDEX), NAME) == INDEX


def test_every_flipped_bit_and_every_cut_is_seen():
    data = layout.index_bytes(INDEX)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError):
                layout.parse_index(bytes(bad), NAME)
        with pytest.raises(CheckpointCorruptError):
            layout.parse_index(data[:place], NAME)


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
        {"layout": "sharded"},
        {"durability": "none"},
        {"schema": "other"},
        {"schema": 1},
        {"extra": 1},
        {"metrics": ...},
    ],
)
def test_a_resealed_index_of_wrong_content_is_corrupt(changes):
    with pytest.raises(CheckpointCorruptError):
        layout.parse_index(sealed(**changes), NAME)
    assert layout.parse_index(sealed(), NAME) == INDEX


@pytest.mark.parametrize(
    "name",
    ["../x.pt", "/etc/passwd", "", ".", "step_000000000042.pt", "step_000000000042.g1.pt\n", "STEP.pt", 3],
)
def test_a_resealed_index_naming_another_file_is_refused_as_unsafe(name):
    with pytest.raises(CheckpointSecurityError, match="names the file"):
        layout.parse_index(sealed(files=[ENTRY | {"name": name}]), NAME)


def test_a_newer_schema_is_a_mismatch():
    with pytest.raises(CheckpointMismatchError, match=r"index\.v2.*newer"):
        layout.parse_index(sealed(schema="resumable_data.index.v2"), NAME)


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
        layout.parse_index(data, NAME)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else(data):
    with pytest.raises(CheckpointCorruptError):
        layout.parse_index(data, NAME)


@given(st.integers(0, layout.MAX_STEP), st.integers(0, 999_999))
def test_names_come_back(step, generation):
    for kind in ("pt", "json"):
        name = layout.file_name(step, generation, kind)
        assert layout.parse_name(name) == (step, generation, kind)
        assert layout.is_ours(name)
    assert layout.is_tombstone(layout.tombstone_name(layout.file_name(step, generation), "0" * 12))


@pytest.mark.parametrize(
    "name",
    [
        "step_1.pt",
        "step_000000000001.g0.pt",
        "step_000000000001.g01.pt",
        "xstep_000000000001.pt",
        "step_000000000001.pt.tmp",
        "step_00000000000١.pt",
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
