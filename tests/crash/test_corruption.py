"""Damage on the disk: each is found, named by its class, and the checkpoint before it loads instead."""

import json
import logging
import os
import random
import re
import shutil
from collections import Counter

import pytest
from support.checkpoints import LAYOUTS, Hasty, managed, names, objects_of, seen

from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.store import Store
from resumable_data.errors import CheckpointCorruptError, CheckpointError, CheckpointSecurityError

FLIPS = 500  # random bits of each data file
CLEAN = 500  # loads of what nobody has touched
PAGE = 4096
SIZE = 1500  # elements of each tensor: pages enough to swap
NEWEST = "step_000000000002"
#: The files of the newest checkpoint: its index, then its data.
FILES = {
    "single": (f"{NEWEST}.json", [f"{NEWEST}.pt"]),
    "sharded": (
        f"{NEWEST}/index.json",
        [f"{NEWEST}/{name}" for name in ("meta.pt", "model.shard-000.pt", "model.shard-001.pt")],
    ),
}
DATA = [(layout, name) for layout, (_, data) in FILES.items() for name in data]
ALL = [(layout, name) for layout, (index, data) in FILES.items() for name in (index, *data)]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """A checkpoint that is skipped is logged, here by the thousand."""
    caplog.set_level(logging.ERROR, logger="resumable_data")


def begun(directory, layout, *steps, **options):
    with managed(directory, Hasty(), **options, **LAYOUTS[layout]) as manager:
        for step in steps or (1, 2):
            manager.save(step, objects_of(step, SIZE))
    return directory


def path_of(directory, layout, step=2):
    return directory / f"step_{step:012d}{'' if layout == 'sharded' else '.pt'}"


def refusal(directory):
    """The class of error that the newest checkpoint is refused with."""
    store = Store(directory, Hasty())
    (entry,) = [entry for entry in store.entries() if entry.step == 2]
    with pytest.raises(CheckpointError) as caught:
        store.load(entry)
    return caught.type


def found_out(directory, layout, kinds=(CheckpointCorruptError,)):
    """The newest is refused and named, the one before it loads."""
    outcome, skipped = seen(directory)
    assert outcome == (1, 1)
    assert [skip.path for skip in skipped] == [path_of(directory, layout)]
    kind = refusal(directory)
    assert kind in kinds
    return kind


def flip(path, bit):
    """Change one bit in place; twice is as it was."""
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_in_any_byte_of_the_index(tmp_path, layout):
    path = begun(tmp_path, layout) / FILES[layout][0]
    draw, kinds = random.Random(1), Counter()
    for byte in range(path.stat().st_size):
        bit = 8 * byte + draw.randrange(8)
        flip(path, bit)
        kinds[found_out(tmp_path, layout).__name__] += 1
        flip(path, bit)
    print(f"{kinds.total()} flips found of {path.stat().st_size} bytes: index, {layout}: {dict(kinds)}")
    assert seen(tmp_path) == ((2, 2), ())


@pytest.mark.parametrize(("layout", "name"), DATA)
def test_random_flipped_bits_in_each_data_file(tmp_path, layout, name):
    path = begun(tmp_path, layout) / name
    bits = random.Random(2).sample(range(8 * path.stat().st_size), FLIPS)
    for bit in bits:
        flip(path, bit)
        found_out(tmp_path, layout)
        flip(path, bit)
    print(f"{len(bits)} flips found: {name}, {layout}")
    assert seen(tmp_path) == ((2, 2), ())


@pytest.mark.parametrize(("layout", "name"), DATA[:2])
def test_a_flipped_bit_in_any_byte_of_what_is_no_tensor(tmp_path, layout, name):
    path = begun(tmp_path, layout) / name
    store = Store(tmp_path, Hasty())
    newest = store.entries()[0]
    draw = random.Random(3)
    size = path.stat().st_size
    for byte in range(size):
        bit = 8 * byte + draw.randrange(8)
        flip(path, bit)
        with pytest.raises(CheckpointCorruptError, match="sha256"):
            store.load(newest)
        flip(path, bit)
    print(f"{size} flips found of {size} bytes: {name}, {layout}")
    assert store.load(newest).payload["state"]["step"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_false_alarm(tmp_path, layout):
    begun(tmp_path, layout)
    for _ in range(CLEAN):
        assert seen(tmp_path) == ((2, 2), ())


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────

CUTS = {
    "0": lambda size: 0,
    "1": lambda size: 1,
    "half": lambda size: size // 2,
    "n-1": lambda size: size - 1,
    "n+1": lambda size: size + 1,
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("layout", "name"), ALL)
def test_cut_and_extended_files(tmp_path, layout, name, cut):
    path = begun(tmp_path, layout) / name
    os.truncate(path, CUTS[cut](path.stat().st_size))
    found_out(tmp_path, layout)
    if name.endswith(".pt"):
        assert "the file was cut or extended" in seen(tmp_path)[1][0].reason


@pytest.mark.parametrize("content", [b"", b"{", bytes(600), b"null\n", b"{}\n", b"[" * 100_000, b"\xff\xfe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_that_is_something_else(tmp_path, layout, content):
    (begun(tmp_path, layout) / FILES[layout][0]).write_bytes(content)
    found_out(tmp_path, layout)


def pages(data):
    return [data[start : start + PAGE] for start in range(0, len(data), PAGE)]


@pytest.mark.parametrize(("layout", "name"), DATA)
def test_a_page_of_zeros(tmp_path, layout, name):
    path = begun(tmp_path, layout) / name
    whole = pages(path.read_bytes())
    damaged = 0
    for number, page in enumerate(whole):
        if any(page):
            path.write_bytes(b"".join([*whole[:number], bytes(len(page)), *whole[number + 1 :]]))
            found_out(tmp_path, layout)
            damaged += 1
    assert damaged > 1


@pytest.mark.parametrize(("layout", "name"), DATA)
def test_swapped_pages(tmp_path, layout, name):
    path = begun(tmp_path, layout) / name
    whole = pages(path.read_bytes())
    swapped = 0
    for number in range(len(whole) - 1):
        mixed = whole.copy()
        mixed[number], mixed[number + 1] = whole[number + 1], whole[number]
        if mixed != whole:
            path.write_bytes(b"".join(mixed))
            found_out(tmp_path, layout)
            swapped += 1
    assert swapped > 0


# ── files of elsewhere ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("layout", "name"), ALL)
def test_a_file_of_another_step_under_this_ones_name(tmp_path, layout, name):
    begun(tmp_path, layout)
    shutil.copyfile(tmp_path / name.replace("2", "1", 1), tmp_path / name)
    found_out(tmp_path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_files_of_another_step_under_this_ones_name(tmp_path, layout):
    begun(tmp_path, layout)
    index, data = FILES[layout]
    for name in (index, *data):
        shutil.copyfile(tmp_path / name.replace("2", "1", 1), tmp_path / name)
    found_out(tmp_path, layout)


@pytest.mark.parametrize(("layout", "name"), DATA)
def test_a_file_of_an_earlier_save_of_the_same_step(tmp_path, layout, name):
    stale = begun(tmp_path / "stale", layout) / name
    run = tmp_path / "run"
    with managed(run, Hasty(), **LAYOUTS[layout]) as manager:
        manager.save(1, objects_of(1, SIZE))
        manager.save(2, objects_of(7, SIZE))
    assert stale.stat().st_size == (run / name).stat().st_size  # else the size alone would tell
    shutil.copyfile(stale, run / name)
    found_out(run, layout)


@pytest.mark.parametrize(("layout", "name"), [row for row in ALL if row[1] != FILES["single"][1][0]])
def test_a_missing_file(tmp_path, layout, name):
    (begun(tmp_path, layout) / name).unlink()
    outcome, skipped = seen(tmp_path)
    assert outcome == (1, 1)
    assert [skip.path for skip in skipped] == [path_of(tmp_path, layout)]
    assert name.rpartition("/")[2] in skipped[0].reason


def test_a_missing_data_file_leaves_a_lone_index_which_is_no_checkpoint(tmp_path):
    (begun(tmp_path, "single") / f"{NEWEST}.pt").unlink()
    assert seen(tmp_path) == ((1, 1), ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_foreign_files_are_ignored_and_never_deleted(tmp_path, layout):
    begun(tmp_path, layout)
    mine = [
        "notes.txt",
        "step_2.pt",
        f"{NEWEST}.pt.bak",
        ".hidden.tmp",
        "step_000000000002.gx.pt",
        "model.pt",
    ]
    if layout == "sharded":
        mine += [f"{NEWEST}/notes.txt", f"{NEWEST}/model.shard-0.pt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    assert seen(tmp_path) == ((2, 2), ())
    with managed(tmp_path, Hasty(), keep_last=1, **LAYOUTS[layout]) as manager:
        manager.restore({})
        for step in (3, 4):
            manager.save(step, objects_of(step, SIZE))
    assert seen(tmp_path) == ((4, 4), ())
    assert set(mine) <= set(names(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_foreign_files_in_a_checkpoint_outlive_it(tmp_path, layout):
    if layout == "single":
        begun(tmp_path, layout)
        (tmp_path / "notes.txt").write_text("mine")
        kept = tmp_path / "notes.txt"
    else:
        kept = begun(tmp_path, layout) / NEWEST / "notes.txt"
        kept.write_text("mine")
    with managed(tmp_path, Hasty(), keep_last=1, **LAYOUTS[layout]) as manager:
        for step in (3, 4):
            manager.save(step, objects_of(step, SIZE))
    assert kept.read_text() == "mine"
    assert seen(tmp_path) == ((4, 4), ())
    assert not [name for name in names(tmp_path) if NEWEST in name and name.endswith((".pt", ".json"))]


# ── the pointer and times ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pointer_is_never_needed(tmp_path, layout):
    path = begun(tmp_path, layout) / "latest.json"
    whole = path.read_bytes()
    stale = json.loads(whole) | {"step": 1, "file": path_of(tmp_path, layout, 1).name}
    missing = json.loads(whole) | {"step": 99, "file": "step_000000000099.pt"}
    flips = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for content in (b"", b"{", bytes(100), json.dumps(stale).encode(), json.dumps(missing).encode(), *flips):
        path.write_bytes(content)
        assert seen(tmp_path) == ((2, 2), ())
    path.unlink()
    assert seen(tmp_path) == ((2, 2), ())
    with managed(tmp_path, Hasty(), **LAYOUTS[layout]) as manager:
        manager.restore({})
        manager.save(3, objects_of(3, SIZE))
    assert json.loads(path.read_bytes())["step"] == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_is_of_runs_and_steps_and_not_of_times(tmp_path, layout):
    begun(tmp_path, layout)
    for i, name in enumerate(sorted(names(tmp_path), reverse=True)):
        os.utime(tmp_path / name, (1000 * i, 1000 * i))
    assert seen(tmp_path) == ((2, 2), ())


# ── several ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_the_oldest_loads_when_all_newer_ones_are_damaged(tmp_path, layout, bad):
    begun(tmp_path, layout, 1, 2, 3, 4, keep_last=4)
    victims = list(range(4, 4 - bad, -1))
    for step in victims:
        name = FILES[layout][1][0].replace("2", str(step), 1)
        flip(tmp_path / name, 8000)
    outcome, skipped = seen(tmp_path)
    assert outcome == (4 - bad, 4 - bad)
    assert [skip.path for skip in skipped] == [path_of(tmp_path, layout, step) for step in victims]
    assert all("sha256" in skip.reason for skip in skipped)


def remove(path):
    path.unlink()


def bend(path):
    flip(path, 8 * (path.stat().st_size // 2))


def empty(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [remove, bend, empty])
@pytest.mark.parametrize(("layout", "name"), [row for row in ALL if row[1] != FILES["single"][1][0]])
def test_when_all_are_damaged_no_run_starts_afresh(tmp_path, layout, name, damage):
    begun(tmp_path, layout)
    for step in (1, 2):
        damage(tmp_path / name.replace("2", str(step), 1))
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in names(tmp_path)}
    manager = CheckpointManager(tmp_path, **LAYOUTS[layout])
    for load in (manager.load_latest, lambda: manager.restore({})):
        with pytest.raises(CheckpointCorruptError, match="None of the 2 checkpoint") as caught:
            load()
        for step in (1, 2):
            assert re.search(re.escape(str(path_of(tmp_path, layout, step))) + ": .+", str(caught.value))
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in names(tmp_path)} == before


def test_unsafe_and_damaged_together_are_reported_as_damage(tmp_path):
    begun(tmp_path, "single")
    newest = tmp_path / f"{NEWEST}.pt"
    newest.unlink()
    newest.symlink_to(tmp_path / "elsewhere")
    assert refusal(tmp_path) is CheckpointSecurityError
    bend(tmp_path / "step_000000000001.pt")
    with pytest.raises(CheckpointCorruptError, match="symbolic link"):
        CheckpointManager(tmp_path).load_latest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_takes_no_place_among_those_kept(tmp_path, layout):
    with managed(tmp_path, Hasty(), keep_last=2, **LAYOUTS[layout]) as manager:
        for step in (1, 2):
            manager.save(step, objects_of(step, SIZE))
        flip(tmp_path / FILES[layout][1][0], 8000)
        manager.save(3, objects_of(3, SIZE))
        # 3 and 1 are whole, and 2 is left for whoever wants to look into it
        assert [report.ok for report in manager.verify()] == [True, False, True]
        flip(tmp_path / FILES[layout][1][0].replace("2", "3", 1), 8000)
        assert seen(tmp_path)[0] == (1, 1)
        for step in (4, 5):
            manager.save(step, objects_of(step, SIZE))
    outcome, skipped = seen(tmp_path)
    assert (outcome, skipped) == ((5, 5), ())
    assert not path_of(tmp_path, layout, 1).exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_fell_back_saves_the_damaged_step_again(tmp_path, layout):
    begun(tmp_path, layout)
    bend(tmp_path / FILES[layout][1][0])
    with managed(tmp_path, Hasty(), **LAYOUTS[layout]) as manager:
        assert manager.restore({}).step == 1
        path = manager.save(2, objects_of(2, SIZE))
        assert ".g1" in path.name
    assert seen(tmp_path) == ((2, 2), ())
