"""Names on the disk and the index that binds them: canonical JSON, one form for one meaning."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from resumable_data.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointSecurityError

SCHEMA = "resumable_data.index.v1"
LATEST = "latest.json"
MAX_INDEX_BYTES = 1_000_000
MAX_STEP = 10**12 - 1  # what twelve digits hold
_METRIC_BITS = 1023  # of an int that a float can hold too

_DATA = re.compile(r"step_(?P<step>[0-9]{12})(?:\.g(?P<generation>[1-9][0-9]{0,5}))?\.(?P<kind>pt|json)")
_DEAD = re.compile(r"\.(?P<name>step_[0-9]{12}(?:\.g[1-9][0-9]{0,5})?\.pt)\.[0-9a-f]{12}\.dead")
_KEYS = {"schema", "run", "step", "generation", "metrics", "layout", "durability", "files", "index_sha256"}


def file_name(step: int, generation: int, kind: str = "pt") -> str:
    """``step_<12 digits>.pt`` (or .json), with ``.g<n>`` for the n-th later generation of a step."""
    return f"step_{step:012d}{f'.g{generation}' if generation else ''}.{kind}"


def parse_name(name: str) -> tuple[int, int, str] | None:
    """(step, generation, "pt" or "json") of a name that `file_name` gives; None for every other."""
    found = _DATA.fullmatch(name)
    return (int(found["step"]), int(found["generation"] or 0), found["kind"]) if found else None


def tombstone_name(name: str, token: str) -> str:
    """What a data file is called while it is being deleted; `token` is twelve hex digits."""
    return f".{name}.{token}.dead"


def is_tombstone(name: str) -> bool:
    """Whether `tombstone_name` could have given this name."""
    return _DEAD.fullmatch(name) is not None


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
class Index:
    """What a checkpoint's index says.

    Attributes:
        run_id: 32 hex digits, drawn when a run begins.
        run_ordinal: Number of the run in its directory, from 1.
        step: Of the checkpoint, 0 to `MAX_STEP`.
        generation: 0 for a step's first save, 1 for its second.
        metrics: Name -> number; None where it was not finite.
        files: The data files; exactly one in the layout "single".
        layout: "single".
        durability: "full": files and directory were synced.
    """

    run_id: str
    run_ordinal: int
    step: int
    generation: int
    metrics: Mapping[str, int | float | None]
    files: tuple[FileEntry, ...]
    layout: str = "single"
    durability: str = "full"

    @property
    def order(self) -> tuple[int, int, int]:
        """By which the newest checkpoint is chosen."""
        return self.run_ordinal, self.step, self.generation


def canonical(value: Any) -> bytes:
    """The one form of a JSON value: ASCII, sorted keys, no spaces, one newline."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def index_bytes(index: Index) -> bytes:
    """The index file's bytes; ``index_sha256`` is of the canonical form without that key.

    Raises:
        ValueError: More metrics than fit.
    """
    content = {
        "schema": SCHEMA,
        "run": {"id": index.run_id, "ordinal": index.run_ordinal},
        "step": index.step,
        "generation": index.generation,
        "metrics": dict(index.metrics),
        "layout": index.layout,
        "durability": index.durability,
        "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in index.files],
    }
    data = canonical(content | {"index_sha256": hashlib.sha256(canonical(content)).hexdigest()})
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(
            f"metrics make an index of {len(data)} bytes; at most {MAX_INDEX_BYTES} are read back"
        )
    return data


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


def parse_index(data: bytes, name: str) -> Index:
    """Read an index file's bytes.

    Args:
        data: The whole file, at most `MAX_INDEX_BYTES`.
        name: The index file's own name, for messages and to be compared with what it says.

    Raises:
        CheckpointCorruptError: Bytes that `index_bytes` could not have written.
        CheckpointSecurityError: A file name in it that is no data file's.
        CheckpointMismatchError: An intact index of a newer schema.
    """
    content = _parse_canonical(data, name)
    found = content.pop("index_sha256", None)
    wanted = hashlib.sha256(canonical(content)).hexdigest()
    if found != wanted:
        _corrupt(name, "index_sha256", found, wanted)
    schema = content.get("schema")
    if schema != SCHEMA:
        if isinstance(schema, str) and re.fullmatch(r"resumable_data\.index\.v[1-9][0-9]{0,3}", schema):
            raise CheckpointMismatchError(
                f"{name}: written under the schema {schema!r} by a newer version; this one reads {SCHEMA!r}. "
                "Install that version to load it.",
                expected=SCHEMA,
                found=schema,
            )
        _corrupt(name, "schema", schema, SCHEMA)
    if content.keys() | {"index_sha256"} != _KEYS:
        _corrupt(name, "keys", sorted(content), sorted(_KEYS))
    return _to_index(content, name)


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
    if type(run["id"]) is not str or not re.fullmatch(r"[0-9a-f]{32}", run["id"]):
        _corrupt(name, "run.id", run["id"], "32 hex digits")
    ordinal = _whole(run["ordinal"], 1, 2**53, name, "run.ordinal")
    step = _whole(content["step"], 0, MAX_STEP, name, "step")
    generation = _whole(content["generation"], 0, 999_999, name, "generation")
    if file_name(step, generation, "json") != name:
        _corrupt(name, "step and generation", (step, generation), "those of the file's name")
    for key, value in (("layout", "single"), ("durability", "full")):
        if content[key] != value:
            _corrupt(name, key, content[key], value)
    metrics = content["metrics"]
    if type(metrics) is not dict or any(type(v) not in (int, float, type(None)) for v in metrics.values()):
        _corrupt(name, "metrics", metrics, "numbers by name")
    return Index(
        run["id"], ordinal, step, generation, metrics, _files(content["files"], step, generation, name)
    )


def _files(entries: Any, step: int, generation: int, name: str) -> tuple[FileEntry, ...]:
    if type(entries) is not list or len(entries) != 1 or type(entries[0]) is not dict:
        _corrupt(name, "files", entries, "a list of one file")
    entry = entries[0]
    if entry.keys() != {"name", "size", "sha256"}:
        _corrupt(name, "files[0]", sorted(entry), "name, size and sha256")
    if entry["name"] != file_name(step, generation):
        raise CheckpointSecurityError(
            f"{name}: names the file {str(entry['name'])[:80]!r}; expected {file_name(step, generation)!r} "
            "and nothing else. Do not use this directory before you know who wrote it.",
            expected=file_name(step, generation),
            found=entry["name"],
        )
    if type(entry["sha256"]) is not str or not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        _corrupt(name, "files[0].sha256", entry["sha256"], "64 hex digits")
    return (
        FileEntry(entry["name"], _whole(entry["size"], 0, 2**62, name, "files[0].size"), entry["sha256"]),
    )


def _whole(value: Any, low: int, high: int, name: str, key: str) -> int:
    if type(value) is not int or not low <= value <= high:
        _corrupt(name, key, value, f"an int from {low} to {high}")
    return value


def _corrupt(name: str, key: str, found: Any, expected: Any) -> NoReturn:
    raise CheckpointCorruptError(
        f"{name}: {key} is {str(found)[:80]!r}, expected {expected}; the index is damaged",
        expected=expected,
        found=found,
    )
