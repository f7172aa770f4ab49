import io
import os
import struct
import sys
import zipfile

import pytest
import torch
from torch.utils.serialization import config

from checkpoint.evil import SMALL, STORAGE, packed, pickled_by, saved, zipped
from resumable_data.checkpoint.archive import read_archive
from resumable_data.checkpoint.atomic import atomic_torch_save
from resumable_data.checkpoint.limits import DEFAULT, Limits
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointSecurityError,
)

VALUE = {"a": torch.ones(3), "b": torch.empty(0), "c": torch.ones(100, dtype=torch.int16)}
SIZES = {"0": 12, "1": 0, "2": 200}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def read(path, limits=DEFAULT):
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_archive(fd, limits)
    finally:
        os.close(fd)


def read_bytes(path, data, limits=DEFAULT):
    path.write_bytes(data)
    return read(path, limits)


def entries(pickled=b"\x80\x02N."):
    return [(f"archive/{name}", data) for name, data in {"data.pkl": pickled, **SMALL, **STORAGE}.items()]


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────


WAYS = {"without CRC": {"save.compute_crc32": False}, "aligned to 4096": {"save.storage_alignment": 4096}}


@pytest.mark.parametrize("way", ["path", "buffer", "ours", *WAYS])
def test_whatever_way_torch_writes_it(path, way):
    if way == "ours":
        atomic_torch_save(VALUE, path)
    else:
        with config.patch(WAYS.get(way, {})):
            path.write_bytes(saved(VALUE)) if way == "buffer" else torch.save(VALUE, path)
    found = read(path)
    assert found.storages == SIZES
    assert found.pickled == pickled_by(VALUE)


def test_many_entries(path):
    torch.save([torch.tensor(i) for i in range(500)], path)
    assert read(path).storages == {str(i): 8 for i in range(500)}


def local(name, described=True, extra=b""):
    return (
        struct.pack(
            "<4s5H3L2H", b"PK\3\4", 0, 0x808 if described else 0x800, 0, 0, 0, 0, 0, 0, len(name), len(extra)
        )
        + name
        + extra
    )


def large_file(path, changed=None):
    """An archive with a storage of more than 4 GiB, as torch writes it; the file is sparse.

    `changed` may replace parts of it: "size" and "offset" of extra fields, "behind" the large storage.
    """
    changed = changed or {}
    large = (1 << 32) + 4096
    names = {
        "data.pkl": b"\x80\x02N.",
        "byteorder": sys.byteorder.encode(),
        "data/0": large,
        "version": b"3\n",
    }
    table = b""
    with path.open("wb") as file:
        for short, data in names.items():
            name = f"archive/{short}".encode()
            start = file.tell()
            size = data if isinstance(data, int) else len(data)
            wide = [size, size] * (size > 0xFFFFFFFF) + [start] * (start > 0xFFFFFFFF)
            extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            file.write(local(name, extra=extra))
            file.seek(size, os.SEEK_CUR) if isinstance(data, int) else file.write(data)
            behind = struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\7\x08", 0, size, size)
            file.write(changed.get("behind", behind) if isinstance(data, int) else behind)
            if wide:
                extra = changed.get("size" if size > 0xFFFFFFFF else "offset", extra)
            shown = min(size, 0xFFFFFFFF), min(start, 0xFFFFFFFF)
            head = (
                b"PK\1\2",
                0,
                0,
                0x808,
                0,
                0,
                0,
                0,
                shown[0],
                shown[0],
                len(name),
                len(extra),
                0,
                0,
                0,
                0,
                shown[1],
            )
            table += struct.pack("<4s6H3L5H2L", *head) + name + extra
        start = file.tell()
        file.write(table)
        end = file.tell()
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, 4, 4, len(table), start))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 4, 4, len(table), 0xFFFFFFFF, 0))
    return large


def test_more_than_four_gigabytes(path):
    assert read_bytes_of_large(path, {}) == {"0": (1 << 32) + 4096}


def read_bytes_of_large(path, changed):
    large_file(path, changed)
    return read(path).storages


BIG = (1 << 32) + 4096


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        ({"size": b""}, "extra fields"),
        ({"size": struct.pack("<2H2Q", 2, 16, BIG, BIG)}, "extra fields"),
        ({"size": struct.pack("<2H2Q", 1, 16, BIG, 0)}, "extra fields"),
        ({"size": struct.pack("<2H3Q", 1, 24, BIG, BIG, 0)}, "extra fields"),
        ({"size": struct.pack("<2H2Q", 1, 16, BIG + 1, BIG + 1)}, "two sizes"),
        ({"size": struct.pack("<2H2Q", 1, 16, 2**63, 2**63)}, "two sizes"),
        ({"offset": struct.pack("<2HQ", 1, 8, 0)}, "two sizes"),
        ({"offset": struct.pack("<2HQ", 1, 8, 2**63)}, "two sizes"),
        ({"behind": b""}, "two sizes"),
        ({"behind": struct.pack("<4sL2Q", b"PK\7\x08", 0, BIG, 0)}, "two sizes"),
        ({"behind": struct.pack("<4sL2Q", b"PK\7\x08", 1, BIG, BIG)}, "two sizes"),
    ],
)
def test_more_than_four_gigabytes_and_not_as_torch_writes_it(path, changed, phrase):
    with pytest.raises(CheckpointSecurityError, match=phrase):
        read_bytes_of_large(path, changed)


# ── what is not ──────────────────────────────────────────────────────────────────────────────────────


def test_no_byte_can_change_what_is_read_and_go_unseen(path):
    """But for the pickle's own bytes, and fields that no reader looks at (times, versions, padding)."""
    data = saved({"a": torch.ones(1)})
    sound = read_bytes(path, data)
    at = data.index(sound.pickled)
    changed = 0
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << place % 8)]), place)
            try:
                found = read_archive(file.fileno(), DEFAULT)
            except CheckpointError:
                found = None
            os.pwrite(file.fileno(), bytes([byte]), place)
            if found is not None:
                assert found.storages == sound.storages
                if found.pickled != sound.pickled:
                    assert at <= place < at + len(sound.pickled)
                    changed += 1
    assert changed == len(sound.pickled)
    assert read(path) == sound


def test_a_file_cut_anywhere_is_refused(path):
    data = saved(VALUE)
    read_bytes(path, data)
    with path.open("r+b", buffering=0) as file:
        for length in reversed(range(len(data))):
            file.truncate(length)
            with pytest.raises(CheckpointSecurityError):
                read_archive(file.fileno(), DEFAULT)


@pytest.mark.parametrize(
    "place", ["front", "behind an entry", "before the directory", "before the end", "end"]
)
def test_bytes_that_belong_to_nothing(path, place):
    data = saved(VALUE)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start, second = archive.start_dir, archive.infolist()[1].header_offset
    at = {
        "front": 0,
        "behind an entry": second,
        "before the directory": start,
        "before the end": len(data) - 98,
        "end": len(data),
    }[place]
    for more in (b"x", b"PK\x03\x04", bytes(16)):
        with pytest.raises(CheckpointSecurityError, match="archive"):
            read_bytes(path, data[:at] + more + data[at:])


def test_a_gap_of_which_the_directory_knows(path):
    """zipfile moves its entries to wherever the file stands: the offsets are true, the bytes between are hidden."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number, (name, data) in enumerate(entries()):
            archive.writestr(name, data)
            if number == 1:
                out.write(b"hidden")
                archive.start_dir = out.tell()
    with pytest.raises(CheckpointSecurityError, match=r"two sizes|overlap"):
        read_bytes(path, out.getvalue())


def headers(data):
    """Where the entries of the central directory begin."""
    return [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]


def test_two_entries_over_the_same_bytes(path):
    data = bytearray(zipped([*entries(), ("archive/data/1", bytes(12))]))
    *_, before, last = headers(data)
    data[last + 42 : last + 46] = data[before + 42 : before + 46]
    with pytest.raises(CheckpointSecurityError, match="two sizes"):
        read_bytes(path, data)


def test_entries_in_another_order_than_the_directory(path):
    data = zipped([*entries(), ("archive/data/1", bytes(12)), ("archive/data/2", bytes(12))])
    *_, second, third = headers(data)
    end = data.index(b"PK\x05\x06")
    with pytest.raises(CheckpointSecurityError, match="two sizes"):
        read_bytes(path, data[:second] + data[third:end] + data[second:third] + data[end:])


@pytest.mark.parametrize("which", [0, -1])
def test_an_entry_that_the_directory_does_not_name(path, which):
    data = zipped(
        [("archive/hidden", b"x"), *entries()] if which == 0 else [*entries(), ("archive/hidden", b"x")]
    )
    begins = [*headers(data), data.index(b"PK\x05\x06")]
    start, stop = (begins[0], begins[1]) if which == 0 else (begins[-2], begins[-1])
    count, length = len(begins) - 2, begins[-1] - begins[0] - (stop - start)
    data = field(data, b"PK\x05\x06", 8, struct.pack("<2HL", count, count, length))
    with pytest.raises(CheckpointSecurityError, match="overlap" if which == 0 else "two sizes"):
        read_bytes(path, data[:start] + data[stop:])


def field(data, mark, offset, value):
    """The last header of a kind with a field replaced."""
    at = data.rindex(mark) + offset
    return data[:at] + value + data[at + len(value) :]


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
FIELDS = {
    "encrypted here": (LOCAL, 6, b"\x01\x00", "two descriptions"),
    "encrypted there": (CENTRAL, 8, b"\x01\x00", "directory is not as"),
    "compressed here": (LOCAL, 8, b"\x08\x00", "two descriptions"),
    "compressed there": (CENTRAL, 10, b"\x08\x00", "compressed"),
    "packed to less": (CENTRAL, 20, b"\x01\x00\x00\x00", "compressed"),
    "another size here": (LOCAL, 22, b"\x01\x00\x00\x00", "two sizes"),
    "another packed size here": (LOCAL, 18, b"\x01\x00\x00\x00", "two sizes"),
    "another CRC here": (LOCAL, 14, b"\x01\x00\x00\x00", "two sizes"),
    "another name here": (LOCAL, 30, b"b", "two descriptions"),
    "a longer name here": (LOCAL, 26, b"\xff\x00", "two descriptions"),
    "an extra field here": (LOCAL, 28, b"\x04\x00", "two sizes"),
    "an extra field there": (CENTRAL, 30, b"\x04\x00", "directory"),
    "a comment there": (CENTRAL, 32, b"\x04\x00", "directory is not as"),
    "another disk there": (CENTRAL, 34, b"\x01\x00", "directory is not as"),
    "an entry less": (END, 10, b"\x03\x00", "end of its directory"),
    "an entry less twice": (END, 8, b"\x03\x00\x03\x00", "more than its entries"),
    "an entry more twice": (END, 8, b"\x05\x00\x05\x00", "directory is cut"),
    "another disk": (END, 4, b"\x01\x00", "end of its directory"),
    "a shorter directory": (END, 12, b"\x20\x00\x00\x00", "beside its entries"),
    "a directory elsewhere": (END, 16, b"\x00\x00\x00\x00", "beside its entries"),
    "a comment": (END, 20, b"\x01\x00", "end of its directory"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_header_that_says_something_else(path, case):
    mark, offset, value, phrase = FIELDS[case]
    data = zipped(entries())
    read_bytes(path, data)
    with pytest.raises(CheckpointSecurityError, match=phrase):
        read_bytes(path, field(data, mark, offset, value))


@pytest.mark.parametrize(
    ("offset", "value", "phrase"),
    [
        (4, b"\x01", "two ends"),
        (8, b"\x01", "two ends"),
        (16, b"\x02", "two ends"),
        (20, b"x", "end of its dir"),
    ],
)
def test_a_locator_that_says_something_else(path, offset, value, phrase):
    with pytest.raises(CheckpointSecurityError, match=phrase):
        read_bytes(path, field(saved(VALUE), b"PK\x06\x07", offset, value))


@pytest.mark.parametrize("offset", [0, 4, 16, 20, 24, 32, 40, 48])
def test_a_large_end_that_says_something_else(path, offset):
    data = saved(VALUE)
    at = data.rindex(b"PK\x06\x06") + offset
    with pytest.raises(CheckpointSecurityError, match=r"two ends|beside its entries"):
        read_bytes(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_no_entries_at_all(path):
    with pytest.raises(CheckpointSecurityError, match="no zip archive"):
        read_bytes(path, zipped([]))
    with pytest.raises(CheckpointSecurityError, match="begin with an entry"):
        read_bytes(path, b"PK\x03\x04" + struct.pack("<4s4H2LH", END, 0, 0, 0, 0, 0, 4, 0))


@pytest.mark.parametrize("prefix", ["", "/", "a/b/", "ä/", "../", "x" * 101 + "/"])
def test_prefixes(path, prefix):
    renamed = [(name.replace("archive/", prefix), data) for name, data in entries()]
    if prefix == "../":  # torch would read it; a name that is never used on the disk does no harm
        assert read_bytes(path, zipped(renamed)).storages == {"0": 12}
        return
    with pytest.raises(CheckpointSecurityError, match="archive"):
        read_bytes(path, zipped(renamed))


@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder"])
def test_an_entry_that_is_needed(path, name):
    with pytest.raises(CheckpointSecurityError, match="lacks"):
        read_bytes(path, zipped([(own, data) for own, data in entries() if own != f"archive/{name}"]))


def test_byte_order_is_this_machines(path):
    other = "big" if sys.byteorder == "little" else "little"
    data = zipped(
        [(name, other.encode() if name.endswith("byteorder") else data) for name, data in entries()]
    )
    with pytest.raises(CheckpointCorruptError, match=f"byte order is '{other}'"):
        read_bytes(path, data)


def test_a_small_entry_that_is_large(path):
    data = zipped([(name, bytes(65) if name.endswith("version") else data) for name, data in entries()])
    with pytest.raises(CheckpointSecurityError, match="archive/version"):
        read_bytes(path, data)


def test_a_long_name(path):
    with pytest.raises(CheckpointSecurityError, match="a name that torch"):
        read_bytes(path, zipped([*entries(), ("archive/" + "x" * 200, b"")]))


def test_limits(path):
    data = packed(pickled_by({"a": 1}))
    size = len(pickled_by({"a": 1}))
    read_bytes(path, data, Limits(entries=4, pickle_bytes=size))
    with pytest.raises(CheckpointLimitError, match="4 entries"):
        read(path, Limits(entries=3))
    with pytest.raises(CheckpointLimitError, match=f"{size} bytes; expected at most {size - 1}"):
        read(path, Limits(pickle_bytes=size - 1))


def test_a_directory_larger_than_its_entries(path):
    data = zipped(entries())
    start, end = data.index(CENTRAL), data.index(END)
    padded = data[:start] + data[start:end] + bytes(2000) + data[end:]
    padded = field(padded, END, 12, struct.pack("<L", end - start + 2000))
    with pytest.raises(CheckpointLimitError, match="4 entries"):
        read_bytes(path, padded)
