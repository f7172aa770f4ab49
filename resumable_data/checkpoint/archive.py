"""The zip archive of a data file, read strictly: its bytes must be what torch.save writes, and nothing else.

Two readers of one zip file can see two contents (entries that overlap, names twice, a second directory behind
the first). Here each byte belongs to one entry or to the directory, so that there is one way to read it.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from resumable_data.checkpoint.limits import Limits
from resumable_data.errors import CheckpointCorruptError, CheckpointLimitError, CheckpointSecurityError

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_BEHIND = {16: struct.Struct("<4s3L"), 24: struct.Struct("<4sL2Q")}  # what follows the data of an entry
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF  # the real number is in an extra field, or in the zip64 record
_DESCRIBED, _UTF8 = 0x8, 0x800  # flags: sizes follow the data; the name is UTF-8
_LONGEST_NAME = 200
_PREFIX = re.compile(rb"[A-Za-z0-9._+-]{1,100}/")
_STORAGE = re.compile(rb"data/(0|[1-9][0-9]{0,9})")
_PICKLE, _BYTEORDER, _VERSION = b"data.pkl", b"byteorder", b"version"
_SMALL = frozenset(
    {_BYTEORDER, _VERSION, b".format_version", b".storage_alignment", b".data/serialization_id"}
)
_LARGEST_SMALL = 64


class _Entry(NamedTuple):
    name: bytes
    flags: int
    crc: int
    size: int
    offset: int


@dataclass(frozen=True)
class Archive:
    """What is in a data file: its pickle, and the size in bytes of each storage, by its key."""

    pickled: bytes
    storages: dict[str, int]


def read_archive(fd: int, limits: Limits) -> Archive:
    """Check a file's archive from end to end, and read its pickle.

    Args:
        fd: Of the file, open for reading; its position stays.
        limits: How many entries it may have, and how large a pickle.

    Raises:
        CheckpointSecurityError: Not an archive as torch.save writes it.
        CheckpointLimitError: More than `limits` has.
        CheckpointCorruptError: Written on a machine of the other byte order, or the file ends too early.
    """
    size = os.fstat(fd).st_size
    if _read(fd, 0, min(size, 4)) != b"PK\x03\x04":
        _refuse("it is no zip archive as torch.save writes it")
    start, end, count = _directory(fd, size)
    if count > limits.entries or end - start > count * (_CENTRAL.size + _LONGEST_NAME + 32):
        raise CheckpointLimitError(f"its archive has {count} entries; expected at most {limits.entries}")
    entries = _entries(_read(fd, start, end - start), count)
    prefix = _PREFIX.match(entries[0].name) if entries else None
    if prefix is None:
        _refuse("its archive does not begin with an entry of torch.save's")
    storages: dict[str, int] = {}
    small: dict[bytes, bytes] = {}
    pickled: bytes | None = None
    place = 0
    for entry, behind in zip(entries, [*(e.offset for e in entries[1:]), start], strict=True):
        data = _check_place(fd, entry, place, behind)
        place = behind
        name = entry.name.removeprefix(prefix[0]) if entry.name.startswith(prefix[0]) else b""
        if name in small or (name == _PICKLE and pickled is not None):
            _twice(entry.name)
        if name == _PICKLE:
            if entry.size > limits.pickle_bytes:
                raise CheckpointLimitError(
                    f"its pickle has {entry.size} bytes; expected at most {limits.pickle_bytes}"
                )
            pickled = _read(fd, data, entry.size)
        elif name in _SMALL and entry.size <= _LARGEST_SMALL:
            small[name] = _read(fd, data, entry.size)
        elif found := _STORAGE.fullmatch(name):
            key = found[1].decode()
            if key in storages:
                _twice(entry.name)
            storages[key] = entry.size
        else:
            _refuse(f"its archive holds {entry.name[:80]!r}, which torch.save never writes")
    if pickled is None or not small.keys() >= {_BYTEORDER, _VERSION}:
        _refuse("its archive lacks data.pkl, byteorder or version")
    if small[_BYTEORDER] != sys.byteorder.encode():
        order = small[_BYTEORDER].decode("ascii", "replace")
        raise CheckpointCorruptError(f"its byte order is {order!r}, this machine's is {sys.byteorder!r}")
    return Archive(pickled, storages)


def _directory(fd: int, size: int) -> tuple[int, int, int]:
    """Where the central directory begins and ends, and how many entries it has."""
    tail = _read(fd, max(0, size - _END.size), min(size, _END.size))
    if len(tail) != _END.size:
        _refuse("its archive is cut")
    mark, disk, disk_of, here, count, length, start, comment = _END.unpack(tail)
    if mark != b"PK\x05\x06" or comment or disk or disk_of or here != count:
        _refuse("its archive does not end with the end of its directory: it is cut, or something was added")
    end = size - _END.size
    where64 = end - _LOCATOR.size - _END64.size
    locator = _LOCATOR.unpack(_read(fd, end - _LOCATOR.size, _LOCATOR.size)) if where64 > 0 else None
    if locator is not None and locator[0] == b"PK\x06\x07":
        record = _END64.unpack(_read(fd, where64, _END64.size))
        if locator[1:] != (0, where64, 1) or record[:2] != (b"PK\x06\x06", _END64.size - 12):
            _refuse("its archive has two ends")
        short = (count, length, start)
        disk, disk_of, here, count, length, start = record[4:]
        full = (_FULL16, _FULL, _FULL)
        agree = all(a in (b, c) for a, b, c in zip(short, (count, length, start), full, strict=True))
        if disk or disk_of or here != count or not agree:
            _refuse("its archive has two ends that differ")
        end = where64
    if start + length != end:
        _refuse("its archive holds bytes beside its entries and its directory")
    return start, end, count


def _entries(data: bytes, count: int) -> list[_Entry]:
    entries = []
    place = 0
    for _ in range(count):
        if place + _CENTRAL.size > len(data):
            _refuse("its archive's directory is cut")
        head = _CENTRAL.unpack_from(data, place)
        mark, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, disk, _, _, offset = head
        name_at = place + _CENTRAL.size
        name = data[name_at : name_at + named]
        place = name_at + named + extra
        if mark != b"PK\x01\x02" or comment or disk or flags & ~(_DESCRIBED | _UTF8) or place > len(data):
            _refuse("its archive's directory is not as torch.save writes it")
        if method != 0 or packed != size:
            _refuse("its archive holds compressed entries, which torch.save never writes")
        if named > _LONGEST_NAME:
            _refuse("its archive holds a name that torch.save never writes")
        size, offset = _wide(data[name_at + named : place], size, offset)
        entries.append(_Entry(name, flags, crc, size, offset))
    if place != len(data):
        _refuse("its archive's directory holds more than its entries")
    return entries


def _wide(extra: bytes, size: int, offset: int) -> tuple[int, int]:
    """Size and offset of an entry, which stand in an extra field where they need more than 32 bits."""
    wide = 2 * (size == _FULL) + (offset == _FULL)
    if len(extra) != (4 + 8 * wide if wide else 0):
        _refuse("its archive's directory has extra fields, which torch.save never writes")
    if not wide:
        return size, offset
    kind, length, *numbers = struct.unpack(f"<2H{wide}Q", extra)
    if kind != 1 or length != 8 * wide or (size == _FULL and numbers[0] != numbers[1]):
        _refuse("its archive's directory has extra fields, which torch.save never writes")
    return numbers[0] if size == _FULL else size, numbers[-1] if offset == _FULL else offset


def _check_place(fd: int, entry: _Entry, place: int, behind: int) -> int:
    """Where an entry's data begins: between `place` and `behind`, with no byte left over."""
    head = _read(fd, entry.offset, _LOCAL.size + len(entry.name)) if entry.offset == place else b""
    if len(head) != _LOCAL.size + len(entry.name):
        _refuse("its archive's entries overlap, are out of order, or have something between them")
    mark, _, flags, method, _, _, crc, packed, size, named, extra = _LOCAL.unpack_from(head)
    shown = (mark, flags, method, named, head[_LOCAL.size :])
    if shown != (b"PK\x03\x04", entry.flags, 0, len(entry.name), entry.name):
        _refuse(f"its archive has two descriptions of {entry.name[:80]!r}")
    start: int = entry.offset + _LOCAL.size + named + extra
    gap = behind - start - entry.size
    if entry.flags & _DESCRIBED:
        form = _BEHIND.get(gap)
        told = form.unpack(_read(fd, behind - gap, gap)) if form else ()
        agree = told == (b"PK\x07\x08", entry.crc, entry.size, entry.size) and not (crc or packed or size)
    else:
        agree = gap == 0 and (crc, packed, size) == (entry.crc, entry.size, entry.size)
    if not agree:
        _refuse(f"its archive has two sizes for {entry.name[:80]!r}")
    return start


def _read(fd: int, offset: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count and (part := os.pread(fd, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    if count:
        raise CheckpointCorruptError("its archive refers to bytes behind the end of the file")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _twice(name: bytes) -> NoReturn:
    _refuse(f"its archive holds two entries of the name {name[:80]!r}")


def _refuse(what: str) -> NoReturn:
    raise CheckpointSecurityError(what)
