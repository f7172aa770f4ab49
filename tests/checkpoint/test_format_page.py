"""The page on the format: what it says is enough to read what is written here, and to write what is read here."""

import hashlib
import io
import json
import re
import zipfile
from pathlib import Path

import pytest
import torch

from checkpoint import page_format
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS
from resumable_data.checkpoint.layout import Stamp
from resumable_data.checkpoint.limits import Limits
from resumable_data.checkpoint.payload import build_payload
from resumable_data.checkpoint.store import Store
from resumable_data.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointSecurityError

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "checkpoint-format.md").read_text(encoding="utf-8")
RULES = re.findall(r"^\| ([A-Z]\d+) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
KEY = b"a key of more than 16 bytes"
FORMS = {
    "single": Form(),
    "not synced": Form(durability="process"),
    "signed": Form(hmac_key=KEY),
    "sharded": Form(shards=3),
    "sharded by key": Form(shards=lambda key: int(key.startswith("0")), hmac_key=KEY),
}


class Tied(torch.nn.Module):
    """Two names for one weight, a view of a larger buffer, a key that no tensor stands behind."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("view", torch.arange(100.0)[10:30:2])

    def get_extra_state(self):
        return {"of": "its own"}

    def set_extra_state(self, state):
        pass


def payload_of(step):
    torch.manual_seed(step)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.first(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return build_payload(
        {"model": model, "optimizer": optimizer, "ema": [1.5, {"x": torch.ones(2, dtype=torch.bfloat16)}]},
        step=step,
        state={"losses": [0.1, 0.2]},
    )


def stamp(step, generation=0, ordinal=1, metrics=None):
    return Stamp("0123456789abcdef" * 2, ordinal, step, generation, metrics or {"loss": 0.1, "inf": None})


def same(left, right):
    """Equal to the last bit, in types and in the order of keys too."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (left, right)]
        return facts[0] == facts[1] and torch.equal(bits(left), bits(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)  # so that -0.0 is not 0.0


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def newest(directory, key=None):
    loaded = Store(directory, FS, Form(hmac_key=key)).newest_good()
    return loaded.payload, {skip.path.name: skip.reason for skip in loaded.skipped}


def reseal(index, **changes):
    """Change an index, and have its hash agree."""
    content = json.loads(index.read_bytes()) | changes
    content.pop("index_sha256")
    index.write_bytes(page_format.canonical(content | {"index_sha256": page_format.digest(content)}))


# ── the page's reader, the page's writer ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_reader_of_the_page_gives_the_same_values(tmp_path, form):
    store = Store(tmp_path, FS, form)
    store.commit(payload_of(6), stamp(6))
    store.commit(payload_of(7), stamp(7))
    store.commit(payload_of(7) | {"config": "later"}, stamp(7, generation=1))
    payload, index, skipped = page_format.read_newest(tmp_path, form.hmac_key)
    wanted = payload_of(7) | {"config": "later"} | {key: payload[key] for key in ("wall_saved_at", "rng")}
    assert same(payload, wanted)
    assert same(payload, newest(tmp_path, form.hmac_key)[0])
    assert (index["step"], index["generation"], index["durability"]) == (7, 1, form.durability)
    assert index["metrics"] == {"loss": 0.1, "inf": None}
    assert skipped == {}
    model = payload["model"]
    assert model["first.weight"].data_ptr() == model["second.weight"].data_ptr()
    assert model["view"].untyped_storage().nbytes() < 100


def test_the_reader_of_the_page_sees_what_the_gate_sees(tmp_path):
    for name, form in FORMS.items():
        store = Store(tmp_path / name, FS, form)
        store.directory.mkdir()
        store.commit(payload_of(1), stamp(1))
        entry = store.commit(payload_of(2), stamp(2))
        place = store.directory / entry.name
        place = place / "meta.pt" if entry.sharded else place
        data = bytearray(place.read_bytes())
        data[len(data) // 2] ^= 1
        place.write_bytes(data)
        payload, _, skipped = page_format.read_newest(store.directory, form.hmac_key)
        assert payload["state"]["step"] == 1
        assert skipped == {entry.name: "sha256"}
        assert list(newest(store.directory, form.hmac_key)[1]) == [entry.name]


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_what_is_written_by_the_page_is_read_here(tmp_path, key):
    single, sharded = payload_of(3), payload_of(4)
    page_format.write(tmp_path, single, 3, key=key)
    assert same(newest(tmp_path, key)[0], single)
    model = sharded["model"]
    shards = [{"view": model["view"]}, {name: model[name] for name in ("first.weight", "second.weight")}]
    page_format.write(tmp_path, sharded, 4, shards=shards, key=key)
    assert same(newest(tmp_path, key)[0], sharded)
    assert same(page_format.read_newest(tmp_path, key)[0], sharded)


# ── its rules ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", [FORMS["signed"], FORMS["sharded by key"]], ids=["single", "sharded"])
def test_a_signature_is_of_these_bytes(tmp_path, form):
    entry = Store(tmp_path, FS, form).commit(payload_of(1), stamp(1))
    place = tmp_path / (f"{entry.name}/index.json" if entry.sharded else "step_000000000001.json")
    content = json.loads(place.read_bytes())
    content.pop("index_sha256")
    assert content.pop("hmac_sha256") == page_format.signature(content, KEY)
    assert page_format.signature(content, b"another key, as long") != page_format.signature(content, KEY)


@pytest.mark.parametrize("key", [None, b"somebody else's key"], ids=["unsigned", "of another key"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_reader_with_a_key_refuses_what_is_not_signed_with_it(tmp_path, key, sharded):
    payload = payload_of(1)
    shards = [{"view": payload["model"]["view"]}] if sharded else None
    page_format.write(tmp_path, payload, 1, shards=shards, key=key)
    with pytest.raises(CheckpointSecurityError, match="signature"):
        newest(tmp_path, KEY)
    with pytest.raises(page_format.DamagedError, match="signature"):
        page_format.read_newest(tmp_path, KEY)
    assert same(newest(tmp_path)[0], payload)  # without a key it is read


def test_without_a_key_a_signature_of_another_form_is_refused(tmp_path):
    index = page_format.write(tmp_path, payload_of(1), 1, key=KEY)
    reseal(index, hmac_sha256=json.loads(index.read_bytes())["hmac_sha256"].upper())
    with pytest.raises(CheckpointCorruptError, match="hmac_sha256"):
        newest(tmp_path)


@pytest.mark.parametrize("key", ["ordinal", "step", "size"])
def test_a_bool_is_no_int(tmp_path, key):
    index = page_format.write(tmp_path, payload_of(1), 1)
    content = json.loads(index.read_bytes())
    where = {"ordinal": content["run"], "step": content, "size": content["files"][0]}[key]
    where[key] = True
    reseal(index, **content)
    with pytest.raises(CheckpointCorruptError, match=f"{key} is 'True'"):
        newest(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_have_is_refused(tmp_path, number):
    index = page_format.write(tmp_path, payload_of(1), 1, metrics={"loss": 0.25})
    text = index.read_text().replace("0.25", number)
    body = re.sub(r'"index_sha256":"\w+",', "", text)
    wanted = hashlib.sha256(body.encode()).hexdigest()
    index.write_text(re.sub(r'(?<="index_sha256":")\w+', wanted, text))
    with pytest.raises(CheckpointCorruptError, match="no JSON number"):
        newest(tmp_path)


@pytest.mark.parametrize("moved", ["step_000000000002", "step_000000000001.g1"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_an_index_of_another_place_is_refused(tmp_path, moved, sharded):
    payload = payload_of(1)
    page_format.write(tmp_path, payload, 1, shards=[{"view": payload["model"]["view"]}] if sharded else None)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("step_000000000001", moved))
    with pytest.raises((CheckpointCorruptError, CheckpointSecurityError)):
        newest(tmp_path)
    with pytest.raises(page_format.DamagedError, match="of another place"):
        page_format.read_newest(tmp_path)


def test_an_index_of_the_other_layout_is_refused(tmp_path):
    payload = payload_of(1)
    index = page_format.write(tmp_path, payload, 1)
    (tmp_path / "step_000000000001").mkdir()
    (tmp_path / "step_000000000001.pt").rename(tmp_path / "step_000000000001" / "meta.pt")
    index.rename(tmp_path / "step_000000000001" / "index.json")
    with pytest.raises((CheckpointCorruptError, CheckpointSecurityError)):
        newest(tmp_path)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_payload_of_another_step_is_refused(tmp_path, sharded):
    payload = payload_of(2)
    page_format.write(tmp_path, payload_of(1), 1)
    page_format.write(tmp_path, payload, 3, shards=[{"view": payload["model"]["view"]}] if sharded else None)
    payload, skipped = newest(tmp_path)
    assert payload["state"]["step"] == 1
    assert "holds step 2" in next(iter(skipped.values()))
    assert page_format.read_newest(tmp_path)[0]["state"]["step"] == 1


def test_a_reader_needs_no_crc(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = page_format.saved(payload_of(1))
    finally:
        torch.serialization.set_crc32_options(before)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is not None  # its first entry of a wrong checksum
    page_format.write(tmp_path, {}, 1, files={"step_000000000001.pt": data})
    assert newest(tmp_path)[0]["state"]["step"] == 1
    assert page_format.read_newest(tmp_path)[0]["state"]["step"] == 1


def test_limits_are_those_of_the_page():
    limits = Limits()
    found = (limits.pickle_bytes, limits.values, limits.expanded_bytes, limits.depth)
    assert found == (2**30, 2**26, 16 * 2**30, 64)
    assert "at most 64 levels" in PAGE
    assert "2^30 bytes of pickle, 2^26 values" in PAGE
    assert "up to 16 GiB" in PAGE


def test_shards_that_do_not_agree_are_refused(tmp_path):
    payload = payload_of(1)
    model = payload["model"]
    shards = [{"view": model["view"]}, {"first.bias": model["first.bias"]}]
    cases = {
        "a key too many": [{"view": model["view"], "second.bias": model["second.bias"]}, shards[1]],
        "a key in two": [shards[0], shards[1] | shards[0]],
        "a key too few": [{}, shards[1]],
        "another key": [{"first.weight": model["first.weight"]}, shards[1]],
        "changed about": shards[::-1],
    }
    for step, (name, wrong) in enumerate(cases.items(), 1):
        files = {f"model.shard-{i:03d}.pt": page_format.saved(shard) for i, shard in enumerate(wrong)}
        own = payload | {"state": payload["state"] | {"step": step}}
        directory = tmp_path / str(step)
        page_format.write(directory, own, step, shards=shards)
        assert same(newest(directory)[0], own)
        page_format.write(directory, own, step, shards=shards, files=files)
        with pytest.raises(CheckpointCorruptError, match="not written together"):
            newest(directory)
        with pytest.raises(page_format.DamagedError, match="shards"):
            print(name, page_format.read_newest(directory))


@pytest.mark.parametrize("mark", [b"{}", b"", b"\xff not JSON"])
@pytest.mark.parametrize("form", [FORMS["single"], FORMS["sharded"]], ids=["single", "sharded"])
def test_a_marked_checkpoint_is_not_chosen(tmp_path, form, mark):
    store = Store(tmp_path, FS, form)
    for step in (1, 2):
        store.commit(payload_of(step), stamp(step))
    (tmp_path / "step_000000000002.bad.json").write_bytes(mark)
    assert newest(tmp_path)[0]["state"]["step"] == 1
    assert page_format.read_newest(tmp_path)[0]["state"]["step"] == 1


def test_a_mark_has_these_bytes(tmp_path):
    store = Store(tmp_path, FS)
    entry = store.commit(payload_of(1), stamp(1))
    store.mark_bad(entry, "loss exploded")
    wanted = {"generation": 0, "reason": "loss exploded", "schema": "resumable_data.bad.v1", "step": 1}
    assert (tmp_path / "step_000000000001.bad.json").read_bytes() == page_format.canonical(wanted)


@pytest.mark.parametrize("form", [FORMS["single"], FORMS["sharded"]], ids=["single", "sharded"])
def test_files_of_others_are_ignored_and_stay(tmp_path, form):
    store = Store(tmp_path, FS, form)
    entry = store.commit(payload_of(1), stamp(1))
    own = ["notes.txt", "step_1.pt", "step_000000000009.pt.bak", "step_000000000009.g0.pt", ".hidden.tmp"]
    for name in own:
        (tmp_path / name).write_bytes(b"mine")
    if entry.sharded:
        (tmp_path / entry.name / "notes.txt").write_bytes(b"mine")
    store.sweep()
    assert newest(tmp_path)[1] == {}
    assert page_format.read_newest(tmp_path)[2] == {}
    store.delete(entry)
    store.sweep()
    assert {name for name in own if (tmp_path / name).read_bytes() == b"mine"} == set(own)
    if entry.sharded:
        assert [path.name for path in (tmp_path / entry.name).iterdir()] == ["notes.txt"]
    assert store.newest_good() is None


def test_a_newer_schema_is_an_error_of_its_own(tmp_path):
    index = page_format.write(tmp_path, payload_of(2), 2)
    page_format.write(tmp_path, payload_of(1), 1)
    reseal(index, schema="resumable_data.index.v2")
    with pytest.raises(CheckpointMismatchError, match="newer version"):
        newest(tmp_path)
    with pytest.raises(page_format.NewerError):
        page_format.read_newest(tmp_path)


# ── the page itself ──────────────────────────────────────────────────────────────────────────────────


def test_every_rule_is_held_by_a_test_that_exists():
    assert len(RULES) > 30
    names = [name for name, _, _ in RULES]
    assert len(set(names)) == len(names)
    for name, rule, held in RULES:
        assert "MUST" in rule or "MAY" in rule, name
        tests = re.findall(r"`([^`]+)`", held)
        assert tests, name
        for test in tests:
            path, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / "tests" / path).read_text(), (name, test)


def test_what_must_be_is_a_numbered_rule():
    numbered = tuple(f"| {name} |" for name, _, _ in RULES)
    loose = [line for line in PAGE.splitlines() if "MUST" in line and not line.startswith(numbered)]
    assert [line[:27] for line in loose] == ["MUST and MAY stand for what"]


def test_the_reader_uses_nothing_of_the_package():
    text = (ROOT / "tests" / "checkpoint" / "page_format.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {
        "__future__",
        "contextlib",
        "hashlib",
        "hmac",
        "io",
        "json",
        "os",
        "re",
        "stat",
        "torch",
    }
