"""Names on the disk and the index that binds them: canonical JSON, one form for one meaning."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from resumable_data.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointSecurityError

SCHEMA = "resumable_data.index.v1"
BAD_SCHEMA = "resumable_data.bad.v1"
LATEST = "latest.json"
META = "meta.pt"
INDEX = "index.json"
MAX_SHARDS = 1000
MAX_INDEX_BYTES = 1_000_000
MAX_STEP = 10**12 - 1  # what twelve digits hold
MAX_GENERATION = 999_999
MAX_ORDINAL = 2**53
_REMEMBERED = 4096  # bytes of an index up to which what it says is remembered, by all of its bytes
_LONGEST_REASON = 2000  # characters of a mark's reason
_METRIC_BITS = 1023  # of an int that a float can hold too

_STEM = r"step_(?P<step>[0-9]{12})(?:\.g(?P<generation>[1-9][0-9]{0,5}))?"
_NAME = re.compile(_STEM + r"(?:\.(?P<kind>pt|json|bad\.json))?")
_DEAD = re.compile(r"\.(?P<name>step_[0-9]{12}(?:\.g[1-9][0-9]{0,5})?(?:\.pt)?)\.[0-9a-f]{12}\.dead")
_SHARD = re.compile(r"model\.shard-(?P<number>[0-9]{3})\.pt")
_REQUIRED = frozenset(
    {"schema", "run", "step", "generation", "metrics", "layout", "durability", "files", "index_sha256"}
)
_SIGNATURE = "hmac_sha256"


@functools.lru_cache(maxsize=1024)  # every save asks for the names of the same few checkpoints
def file_name(step: int, generation: int, kind: str = "pt") -> str:
    """``step_<12 digits>`` with ``.g<n>`` for the n-th later generation of a step, and what stands behind it.

    Args:
        step: 0 to `MAX_STEP`.
        generation: From 0.
        kind: "pt" (data), "json" (its index) and "bad.json" (a mark) of files, "dir" of a sharded
            checkpoint's directory, whose name ends with the stem.
    """
    stem = f"step_{step:012d}{f'.g{generation}' if generation else ''}"
    return stem if kind == "dir" else f"{stem}.{kind}"


def checkpoint_name(step: int, generation: int, *, sharded: bool) -> str:
    """The name that stands for a checkpoint: of its data file, or of its directory."""
    return file_name(step, generation, "dir" if sharded else "pt")


@functools.lru_cache(maxsize=1024)  # likewise
def parse_name(name: str) -> tuple[int, int, str] | None:
    """(step, generation, kind) of a name that `file_name` gives; None for every other."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found["step"]), int(found["generation"] or 0), found["kind"] or "dir"


def shard_name(number: int) -> str:
    """``model.shard-NNN.pt``, numbered from 0 to `MAX_SHARDS` - 1."""
    return f"model.shard-{number:03d}.pt"


def is_member(name: str) -> bool:
    """Whether a writer puts files of this name into a sharded checkpoint's directory."""
    return name in (META, INDEX) or _SHARD.fullmatch(name) is not None


def tombstone_name(name: str, token: str) -> str:
    """What a data file or directory is called while it is being deleted; `token` is twelve hex digits."""
    return f".{name}.{token}.dead"


def entombed(name: str) -> str | None:
    """The name of the checkpoint that a tombstone was; None for a name `tombstone_name` does not give."""
    found = _DEAD.fullmatch(name)
    return None if found is None else found["name"]


def is_ours(name: str) -> bool:
    """Whether a manager writes files of this name."""
    return name == LATEST or parse_name(name) is not None


@dataclass(frozen=True)
class FileEntry:
    """One data file: its plain name, its size in bytes, the sha256 of its bytes in lower-case hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Stamp:
    """What is known of a checkpoint before its files are written.

    Attributes:
        run_id: 32 hex digits, drawn when a run begins.
        run_ordinal: Number of the run in its directory, from 1.
        step: Of the checkpoint, 0 to `MAX_STEP`.
        generation: 0 for a step's first save, 1 for its second.
        metrics: Name -> number; None where it was not finite.
    """

    run_id: str
    run_ordinal: int
    step: int
    generation: int
    metrics: Mapping[str, int | float | None]


@dataclass(frozen=True)
class Index(Stamp):
    """What a checkpoint's index says.

    Attributes:
        files: The data files: one in the layout "single"; meta.pt and the shards, by name, in "sharded".
        layout: "single" or "sharded".
        durability: "full": files and directory were synced; "process": they were not.
    """

    files: tuple[FileEntry, ...]
    layout: str = "single"
    durability: str = "full"

    @property
    def order(self) -> tuple[int, int, int]:
        """By which the newest checkpoint is chosen."""
        return self.run_ordinal, self.step, self.generation

    @property
    def name(self) -> str:
        """The name of the checkpoint's data file or directory."""
        return checkpoint_name(self.step, self.generation, sharded=self.layout == "sharded")


def canonical(value: Any) -> bytes:
    """The one form of a JSON value: ASCII, sorted keys, no spaces, one newline."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def index_bytes(index: Index, hmac_key: bytes | None = None) -> bytes:
    """The index file's bytes, signed where a key is given.

    ``hmac_sha256`` is of the canonical form without it and ``index_sha256``; ``index_sha256`` is of the
    canonical form without itself.

    Raises:
        ValueError: More metrics than fit.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "run": {"id": index.run_id, "ordinal": index.run_ordinal},
        "step": index.step,
        "generation": index.generation,
        "metrics": dict(index.metrics),
        "layout": index.layout,
        "durability": index.durability,
        "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in index.files],
    }
    if hmac_key is not None:
        content[_SIGNATURE] = _signature(content, hmac_key)
    data = canonical(content | {"index_sha256": hashlib.sha256(canonical(content)).hexdigest()})
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(
            f"metrics make an index of {len(data)} bytes; at most {MAX_INDEX_BYTES} are read back"
        )
    return data


def _signature(content: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, canonical(content), hashlib.sha256).hexdigest()


def bad_bytes(step: int, generation: int, reason: str) -> bytes:
    """The bytes of the file that marks a checkpoint as bad; a long reason is cut."""
    cut = reason[:_LONGEST_REASON]
    return canonical({"schema": BAD_SCHEMA, "step": step, "generation": generation, "reason": cut})


def parse_bad(data: bytes) -> str:
    """The reason in a mark. One that cannot be read marks all the same: the answer says so."""
    try:
        content = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        content = None
    reason = content.get("reason") if isinstance(content, dict) else None
    return reason[:_LONGEST_REASON] if isinstance(reason, str) else "by a mark that cannot be read"


def clean_metrics(metrics: Mapping[str, Any] | None) -> dict[str, int | float | None]:
    """Metrics as the index holds them: plain numbers, None for those that are not finite.

    Raises:
        TypeError: A name that is no string, or a value that is no number.
    """
    clean: dict[str, int | float | None] = {}
    for name, value in (metrics or {}).items():
        if type(name) is not str:
            raise TypeError(f"metrics has the name {name!r}; expected a str")
        if type(value) is not int:
            if isinstance(value, (str, bytes, bool)):
                raise TypeError(f"metrics[{name!r}] must be a number, found {value!r}")
            try:
                # tensors of one element and numpy's numbers too; torch warns of float() on a graph's end
                value = float(value.detach() if hasattr(value, "detach") else value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise TypeError(f"metrics[{name!r}] must be a number, found {value!r}") from error
        elif value.bit_length() > _METRIC_BITS:
            raise TypeError(f"metrics[{name!r}] must be a number of at most {_METRIC_BITS} bits")
        clean[name] = value if math.isfinite(value) else None
    return clean


def parse_index(
    data: bytes, name: str, *, step: int, generation: int, sharded: bool, hmac_key: bytes | None = None
) -> Index:
    """Read an index file's bytes.

    Args:
        data: The whole file, at most `MAX_INDEX_BYTES`.
        name: The index file's own name, for messages.
        step: That the index's place on the disk says; it must say the same.
        generation: Likewise.
        sharded: Likewise.
        hmac_key: With one, only an index that was signed with it is read.

    Raises:
        CheckpointCorruptError: Bytes that `index_bytes` could not have written, or an index of another place.
        CheckpointSecurityError: A file name in it that is no data file's, or no valid signature under the key.
        CheckpointMismatchError: An intact index of a newer schema.
    """
    place = (name, step, generation, sharded, hmac_key)
    return _parse_known(data, *place) if len(data) <= _REMEMBERED else _parse(data, *place)


def _parse(
    data: bytes, name: str, step: int, generation: int, sharded: bool, hmac_key: bytes | None
) -> Index:
    content = _parse_canonical(data, name)
    found = content.pop("index_sha256", None)
    wanted = hashlib.sha256(canonical(content)).hexdigest()
    if found != wanted:
        _corrupt(name, "index_sha256", found, wanted)
    signature = content.pop(_SIGNATURE, None)
    if hmac_key is not None:
        _check_signature(content, signature, hmac_key, name)
    elif signature is not None:
        _hex(signature, 64, name, _SIGNATURE)
    _check_schema(content.get("schema"), name)
    if content.keys() | {"index_sha256"} != _REQUIRED:
        _corrupt(name, "keys", sorted(content), sorted(_REQUIRED))
    index = _to_index(content, name)
    place = index.step, index.generation, index.layout
    expected = (step, generation, "sharded" if sharded else "single")
    if place != expected:
        _corrupt(name, "step, generation and layout", place, f"{expected}, as its place says")
    _check_files(index, name)
    return index


_parse_known = functools.lru_cache(maxsize=64)(_parse)  # every save looks through the same few again


def _check_signature(content: Mapping[str, Any], found: Any, key: bytes, name: str) -> None:
    if type(found) is str and hmac.compare_digest(found.encode(), _signature(content, key).encode()):
        return
    what = "its signature is not of this key" if found is not None else "it has no signature"
    raise CheckpointSecurityError(
        f"{name}: {what}; expected an index signed with hmac_key. It was written by someone without the key, "
        "or changed since. Find out who wrote it before using it.",
        expected="a valid hmac_sha256",
        found=found,
    )


def _check_schema(schema: Any, name: str) -> None:
    if schema == SCHEMA:
        return
    if isinstance(schema, str) and re.fullmatch(r"resumable_data\.index\.v[1-9][0-9]{0,3}", schema):
        raise CheckpointMismatchError(
            f"{name}: written under the schema {schema!r} by a newer version; this one reads {SCHEMA!r}. "
            "Install that version to load it.",
            expected=SCHEMA,
            found=schema,
        )
    _corrupt(name, "schema", schema, SCHEMA)


def _parse_canonical(data: bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(data.decode("ascii"), parse_constant=_no_constant)
        same = canonical(content) == data
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{name}: not an index ({error}); the file is damaged") from error
    if not same or type(content) is not dict:
        raise CheckpointCorruptError(f"{name}: not in canonical form; a byte of the file has changed")
    return content


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _to_index(content: dict[str, Any], name: str) -> Index:
    run = content["run"]
    if type(run) is not dict or run.keys() != {"id", "ordinal"}:
        _corrupt(name, "run", run, "id and ordinal")
    _hex(run["id"], 32, name, "run.id")
    ordinal = _whole(run["ordinal"], 1, MAX_ORDINAL, name, "run.ordinal")
    step = _whole(content["step"], 0, MAX_STEP, name, "step")
    generation = _whole(content["generation"], 0, MAX_GENERATION, name, "generation")
    layout = _one_of(content["layout"], ("single", "sharded"), name, "layout")
    durability = _one_of(content["durability"], ("full", "process"), name, "durability")
    metrics = content["metrics"]
    if type(metrics) is not dict or any(type(v) not in (int, float, type(None)) for v in metrics.values()):
        _corrupt(name, "metrics", metrics, "numbers by name")
    entries = content["files"]
    if type(entries) is not list or not 1 <= len(entries) <= MAX_SHARDS + 1:
        _corrupt(name, "files", entries, f"a list of 1 to {MAX_SHARDS + 1} files")
    files = tuple(_file(entry, f"files[{i}]", name) for i, entry in enumerate(entries))
    return Index(run["id"], ordinal, step, generation, metrics, files, layout, durability)


def _file(entry: Any, key: str, name: str) -> FileEntry:
    if type(entry) is not dict or entry.keys() != {"name", "size", "sha256"}:
        _corrupt(name, key, entry, "name, size and sha256")
    if type(entry["name"]) is not str:
        _corrupt(name, f"{key}.name", entry["name"], "a string")
    _hex(entry["sha256"], 64, name, f"{key}.sha256")
    return FileEntry(entry["name"], _whole(entry["size"], 0, 2**62, name, f"{key}.size"), entry["sha256"])


def _check_files(index: Index, name: str) -> None:
    """The names must be those of the layout, and nothing else: the first check is of what may be opened."""
    found = [file.name for file in index.files]
    single = index.layout == "single"
    for own in found:
        if own == index.name if single else own == META or _SHARD.fullmatch(own):
            continue
        expected = index.name if single else f"{META} and {shard_name(0)[:-6]}NNN.pt"
        raise CheckpointSecurityError(
            f"{name}: names the file {own[:80]!r}; expected {expected} and nothing else. Do not use this "
            "directory before you know who wrote it.",
            expected=expected,
            found=own,
        )
    shards = [shard_name(i) for i in range(len(found) - 1)]
    wanted = [index.name] if single else [META, *shards]
    if found != wanted:
        _corrupt(name, "files", found, f"{wanted}, each once and in this order")


def _whole(value: Any, low: int, high: int, name: str, key: str) -> int:
    if type(value) is not int or not low <= value <= high:
        _corrupt(name, key, value, f"an int from {low} to {high}")
    return value


def _hex(value: Any, digits: int, name: str, key: str) -> None:
    if type(value) is not str or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        _corrupt(name, key, value, f"{digits} hex digits in lower case")


def _one_of(value: Any, allowed: tuple[str, ...], name: str, key: str) -> str:
    if type(value) is not str or value not in allowed:
        _corrupt(name, key, value, " or ".join(allowed))
    return value


def _corrupt(name: str, key: str, found: Any, expected: Any) -> NoReturn:
    raise CheckpointCorruptError(
        f"{name}: {key} is {str(found)[:80]!r}, expected {expected}; the index is damaged",
        expected=expected,
        found=found,
    )
