"""A reader and a writer of checkpoints from docs/reference/checkpoint-format.md alone: nothing of the package."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
import re
import stat

import torch

NAME = re.compile(r"step_([0-9]{12})(?:\.g([1-9][0-9]{0,5}))?(\.pt)?")
KEYS = {"schema", "run", "step", "generation", "metrics", "layout", "durability", "files"}


class DamagedError(Exception):
    """A checkpoint that is not what was written."""


class NewerError(Exception):
    """A checkpoint of a newer schema."""


def canonical(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return (text + "\n").encode("ascii")


def digest(value):
    return hashlib.sha256(canonical(value)).hexdigest()


def signature(content, key):
    return hmac.new(key, canonical(content), "sha256").hexdigest()


def need(condition, reason):
    if not condition:
        raise DamagedError(reason)


def opened(home, name):
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=home)
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror}") from error
    file = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise DamagedError(f"{name}: no file")
    return file


def opened_directory(name, home, stack):
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=home)
    stack.callback(os.close, fd)
    return fd


def read_index(home, name, place, key):
    with opened(home, name) as file:
        data = file.read(1_000_001)
    need(len(data) <= 1_000_000, "too long")
    try:
        content = json.loads(data)
        need(canonical(content) == data, "not canonical")
    except (ValueError, RecursionError) as error:
        raise DamagedError(str(error)) from error
    need(content.pop("index_sha256", None) == digest(content), "index_sha256")
    signed = content.pop("hmac_sha256", None)
    if key is not None:
        need(signed is not None and hmac.compare_digest(signed, signature(content, key)), "signature")
    if content["schema"] != "resumable_data.index.v1":
        raise NewerError(content["schema"])
    need(content.keys() == KEYS, "keys")
    need((content["step"], content["generation"], content["layout"]) == place, "of another place")
    shards = [f"model.shard-{i:03d}.pt" for i in range(len(content["files"]) - 1)]
    stem = name.removesuffix(".json")
    wanted = [f"{stem}.pt"] if place[2] == "single" else ["meta.pt", *shards]
    need([file["name"] for file in content["files"]] == wanted, "names of files")
    return content


def read_file(home, entry):
    with opened(home, entry["name"]) as file:
        need(os.fstat(file.fileno()).st_size == entry["size"], "size")
        need(hashlib.sha256(file.read()).hexdigest() == entry["sha256"], "sha256")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def joined(values):
    payload, *shards = values
    numbers, model = payload.pop("shards"), payload["model"]
    need(sum(map(len, shards)) == len(numbers), "shards")
    for key, number in numbers.items():
        need(number < len(shards) and key in shards[number] and model.get(key, 0) is None, "shards")
        model[key] = shards[number][key]
    return payload


def read_newest(directory, key=None):
    """(payload, index, {name: why it was passed over}) of the newest checkpoint that is whole."""
    names = [path.name for path in directory.iterdir()]
    found, skipped = [], {}
    with contextlib.ExitStack() as stack:
        top = opened_directory(directory, None, stack)
        for name in filter(NAME.fullmatch, names):
            stem, match = name.removesuffix(".pt"), NAME.fullmatch(name)
            step, generation, single = int(match[1]), int(match[2] or 0), bool(match[3])
            try:
                need(f"{stem}.bad.json" not in names, "marked")
                home = top if single else opened_directory(name, top, stack)
                place = (step, generation, "single" if single else "sharded")
                index = read_index(home, f"{stem}.json" if single else "index.json", place, key)
                found.append(((index["run"]["ordinal"], step, generation), name, home, index))
            except DamagedError as error:
                skipped[name] = str(error)
        for _, name, home, index in sorted(found, key=lambda one: one[0], reverse=True):
            try:
                return read_data(home, index), index, skipped
            except DamagedError as error:
                skipped[name] = str(error)
    raise DamagedError(skipped)


def read_data(home, index):
    values = [read_file(home, entry) for entry in index["files"]]
    payload = joined(values) if index["layout"] == "sharded" else values[0]
    need(payload["state"]["step"] == index["step"], "step")
    return payload


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write(
    directory, payload, step, *, generation=0, ordinal=1, shards=None, key=None, metrics=None, files=None
):
    """Write a checkpoint, without a thought for crashes: `payload` whole, or with `shards` [{key: tensor}].

    `files` replaces data files by name with other bytes, under an index that agrees with them.
    """
    stem = f"step_{step:012d}" + (f".g{generation}" if generation else "")
    contents = {f"{stem}.pt": payload}
    home, index_name = directory, f"{stem}.json"
    if shards is not None:
        numbers = {key: i for i, shard in enumerate(shards) for key in shard}
        meta = payload | {"shards": numbers}
        meta["model"] = {key: None if key in numbers else value for key, value in payload["model"].items()}
        contents = {"meta.pt": meta} | {f"model.shard-{i:03d}.pt": shard for i, shard in enumerate(shards)}
        home, index_name = directory / stem, "index.json"
    home.mkdir(parents=True, exist_ok=True)
    data = {name: saved(value) for name, value in contents.items()} | (files or {})
    for name, content in data.items():
        (home / name).write_bytes(content)
    index = {
        "schema": "resumable_data.index.v1",
        "run": {"id": "0123456789abcdef" * 2, "ordinal": ordinal},
        "step": step,
        "generation": generation,
        "metrics": metrics or {},
        "layout": "single" if shards is None else "sharded",
        "durability": "process",
        "files": [
            {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in data.items()
        ],
    }
    if key is not None:
        index["hmac_sha256"] = signature(index, key)
    (home / index_name).write_bytes(canonical(index | {"index_sha256": digest(index)}))
    return home / index_name
