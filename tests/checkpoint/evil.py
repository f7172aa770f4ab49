"""Data files made by hand, and indexes that agree with them: only what is behind the hash can object."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile

import torch

from resumable_data.checkpoint import layout

STEP = "step_000000000001"
NAME = f"{STEP}.pt"
RUN = "0" * 32
PAYLOAD = {"schema": "ckpt.v1", "state": {"step": 1}, "model": {"a": torch.ones(3)}}
SMALL = {"version": b"3\n", "byteorder": b"little"}
STORAGE = {"data/0": struct.pack("<3f", 1, 1, 1)}


def saved(value):
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped(entries, compression=zipfile.ZIP_STORED):
    """An archive of the entries given, as pairs of name and bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


def packed(pickled, records=None):
    """A data file around a pickle."""
    parts = {"data.pkl": pickled, **SMALL, **(STORAGE if records is None else records)}
    return zipped([(f"archive/{name}", data) for name, data in parts.items()])


def pickled_by(value):
    """The pickle in what torch.save writes."""
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        return archive.read("archive/data.pkl")


def text(value):
    """The opcode that puts a string on the stack."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name_of(function):
    """The opcode that puts a global on the stack, by its full name."""
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def entry(name, data, **changed):
    """The index's line of a file."""
    parts = {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} | changed
    return layout.FileEntry(**parts)


def sealed(content):
    """An index of any content, with the hash that belongs to it."""
    content.pop("index_sha256", None)
    digest = hashlib.sha256(layout.canonical(content)).hexdigest()
    return layout.canonical(content | {"index_sha256": digest})


def put(directory, data, key=None, step=1):
    """A checkpoint in one file."""
    name = layout.file_name(step, 0)
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    index = layout.Index(RUN, 1, step, 0, {}, (entry(name, data),))
    (directory / layout.file_name(step, 0, "json")).write_bytes(layout.index_bytes(index, key))


def put_sharded(directory, files, entries=None):
    """A checkpoint in several files; `entries` are the index's, where they are not those of the files."""
    place = directory / STEP
    place.mkdir(parents=True)
    for name, data in files.items():
        (place / name).write_bytes(data)
    lines = [entry(name, data) for name, data in files.items()] if entries is None else entries
    index = layout.Index(RUN, 1, 1, 0, {}, tuple(lines), "sharded")
    (place / "index.json").write_bytes(layout.index_bytes(index))
    return place


def shards():
    """The files of a sharded checkpoint, its model in two shards."""
    meta = PAYLOAD | {"model": {"a": None, "b": None}, "shards": {"a": 0, "b": 1}}
    parts = {
        "meta.pt": meta,
        "model.shard-000.pt": {"a": torch.ones(3)},
        "model.shard-001.pt": {"b": torch.ones(4)},
    }
    return {name: saved(value) for name, value in parts.items()}
