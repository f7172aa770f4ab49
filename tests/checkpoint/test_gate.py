import hashlib
import io
import json
import os
import pickle
import zipfile

import pytest
import torch

from checkpoint.helpers import flip
from resumable_data.checkpoint import gate, layout
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
)

NAME = "step_000000000001.pt"


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def put(directory, data):
    """A data file whose index agrees with it: only what is behind the hash can object."""
    (directory / NAME).write_bytes(data)
    entry = layout.FileEntry(NAME, len(data), hashlib.sha256(data).hexdigest())
    index = layout.Index("0" * 32, 1, 1, 0, {}, (entry,))
    (directory / "step_000000000001.json").write_bytes(layout.index_bytes(index))
    return index


def load(directory):
    fd = os.open(directory, os.O_RDONLY)
    try:
        return gate.load_verified(fd, gate.read_index(fd, 1, 0))[0]
    finally:
        os.close(fd)


def repacked(compression=zipfile.ZIP_STORED, twice=False, pickled=None):
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(3)}))) as old,
        zipfile.ZipFile(out, "w", compression) as new,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry.filename, pickled if pickled and entry.filename.endswith("data.pkl") else data)
        if twice:
            with pytest.warns(UserWarning, match="Duplicate"):
                new.writestr(entry.filename, data)
    return out.getvalue()


class Evil:
    def __reduce__(self):
        return os.system, ("touch was-run",)


def test_an_honest_file_passes(tmp_path):
    put(tmp_path, saved({"a": torch.ones(3)}))
    assert torch.equal(load(tmp_path)["a"], torch.ones(3))


HOSTILE = {
    "os.system": lambda: repacked(pickled=pickle.dumps(Evil(), protocol=2)),
    "legacy pickle": lambda: pickle.dumps({"a": 1}, protocol=2),
    "zeros": lambda: bytes(500),
    "empty": lambda: b"",
    "deflated": lambda: repacked(zipfile.ZIP_DEFLATED),
    "two of one name": lambda: repacked(twice=True),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_resealed_hostile_file_is_refused(tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, HOSTILE[case]())
    with pytest.raises(CheckpointSecurityError, match=NAME) as caught:
        load(tmp_path)
    if case == "os.system":
        assert "system" in str(caught.value)
    assert "weights_only=False" not in str(caught.value)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("case", ["cut", "no zip end", "bad pickle"])
def test_a_resealed_broken_archive_is_corrupt_or_refused(tmp_path, case):
    data = {
        "cut": saved({"a": torch.ones(3)})[:-100],
        "no zip end": b"PK\x03\x04" + bytes(100),
        "bad pickle": repacked(pickled=b"\x80\x02("),
    }[case]
    put(tmp_path, data)
    with pytest.raises((CheckpointCorruptError, CheckpointSecurityError), match=NAME):
        load(tmp_path)


def test_one_changed_bit_anywhere_is_corrupt(tmp_path):
    data = saved({"a": torch.ones(3)})
    put(tmp_path, data)
    for place in range(0, len(data), 7):
        flip(tmp_path / NAME, place)
        with pytest.raises(CheckpointCorruptError, match="sha256"):
            load(tmp_path)
        flip(tmp_path / NAME, place)
    load(tmp_path)


def test_size_is_compared_before_hashing(tmp_path):
    put(tmp_path, saved({}))
    os.truncate(tmp_path / NAME, 10**13)  # sparse: hashing it would take hours
    with pytest.raises(CheckpointCorruptError, match="10000000000000 bytes"):
        load(tmp_path)


def test_links_and_large_or_missing_indexes(tmp_path):
    index = tmp_path / "step_000000000001.json"
    put(tmp_path, saved({}))
    index.rename(tmp_path / "other")
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path)
    index.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointSecurityError, match="a symbolic link"):
        load(tmp_path)
    index.unlink()
    index.write_bytes(b" " * 1_000_001)
    with pytest.raises(CheckpointCorruptError, match="larger"):
        load(tmp_path)
    (tmp_path / NAME).unlink()
    put(tmp_path, saved({}))
    os.link(tmp_path / NAME, tmp_path / "hard")  # a hard link is a file
    assert load(tmp_path) == {}


def test_a_newer_index_is_a_mismatch(tmp_path):
    put(tmp_path, saved({}))
    path = tmp_path / "step_000000000001.json"
    content = json.loads(path.read_bytes()) | {"schema": "resumable_data.index.v7"}
    del content["index_sha256"]
    digest = hashlib.sha256(layout.canonical(content)).hexdigest()
    path.write_bytes(layout.canonical(content | {"index_sha256": digest}))
    with pytest.raises(CheckpointMismatchError, match="v7"):
        load(tmp_path)
