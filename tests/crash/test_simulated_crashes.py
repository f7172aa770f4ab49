"""Power cuts and kills after every call of everything that writes, on a file system that forgets.

Whatever a crash leaves loads as the old checkpoint or the new one, whole; from the moment that the caller
was told, as the new one. Then the run goes on, and its next save leaves nothing of the crash behind.
"""

import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checkpoints import LAYOUTS, Hasty, cleared, debris, managed, objects_of, seen
from support.simfs import SimFS, materialise, tree_of

from resumable_data.checkpoint import CheckpointManager, atomic, atomic_json_dump, atomic_torch_save

DONE = "done"


@pytest.fixture(autouse=True)
def quiet(caplog):
    """A checkpoint that is skipped is logged, here by the thousand."""
    caplog.set_level(logging.ERROR, logger="resumable_data")


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: thousands of states are written, and no real disk is asked."""
    memory = Path("/dev/shm")  # noqa: S108 - a fresh directory of its own in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@dataclass
class Scene:
    """What is done before and while the file system is watched, and what loads: (step, number)."""

    before: object
    act: object
    old: object
    new: object
    keep_last: int = 3
    deletes: bool = False
    place: str = "run"


def saves(*pairs):
    def act(manager, **options):
        for step, number in pairs:
            manager.save(step, objects_of(number))

    return act


def saves_in_the_background(manager):
    manager.save(2, objects_of(2), blocking=False)
    manager.close()


def an_earlier_run(*pairs):
    """Its checkpoints are not this run's to count; the newest is resumed from."""

    def before(manager, **options):
        with managed(manager.directory, Hasty(), **options) as earlier:
            saves(*pairs)(earlier)
        manager.restore({})

    return before


def marks(manager):
    manager.mark_bad(2, "its loss is not a number")


def copies(manager):
    manager.copy_to(manager.directory.parent / "copy")


SCENES = {
    "the very first save": Scene(saves(), saves((1, 1)), None, (1, 1)),
    "a second save": Scene(saves((1, 1)), saves((2, 2)), (1, 1), (2, 2)),
    "a second save, in the background": Scene(saves((1, 1)), saves_in_the_background, (1, 1), (2, 2)),
    "a second save of a step": Scene(saves((1, 1)), saves((1, 7)), (1, 1), (1, 7), deletes=True),
    "the only one kept is replaced": Scene(
        saves((1, 1)), saves((2, 2)), (1, 1), (2, 2), keep_last=1, deletes=True
    ),
    "an earlier run is pruned": Scene(
        an_earlier_run((1, 1), (2, 2), (3, 3)), saves((4, 4)), (3, 3), (4, 4), keep_last=1, deletes=True
    ),
    "the newest is marked as bad": Scene(saves((1, 1), (2, 2)), marks, (2, 2), (1, 1)),
    "a copy elsewhere": Scene(saves((1, 1)), copies, None, (1, 1), place="copy"),
}


def record(tmp_path, scene, options, **how):
    """The scene, played once on a watched directory."""
    root = cleared(tmp_path / "root")
    root.mkdir()
    with managed(root / "run", Hasty(), keep_last=scene.keep_last, **options) as manager:
        scene.before(manager, **options)
        sim = manager._ops = SimFS(root, **how)
        scene.act(manager)
        sim.mark(DONE)
    return sim


def same(sim):
    """Whether the record and the disk agree; the lock's text is written without the record."""
    locks = {f"{place}/.writer.lock": b"" for place in ("run", "copy")}
    return sim.performed() | locks == tree_of(sim.root) | locks


def examined(tmp_path, crashes, scene, options):
    """What loads after each crash, and what is wrong with that or with going on from there."""
    for crash in crashes:
        place = cleared(tmp_path / "after")
        materialise(crash.state, place)
        try:
            outcome = seen(place / scene.place)
        except Exception as error:  # noqa: BLE001 - whatever a load raises is the finding
            outcome = repr(error), ()
        problem = broken(place / scene.place, outcome, crash, scene, options)
        yield outcome[0], problem and f"after call {crash.at} {set(crash.reached) or ''}: {problem}"


def check(tmp_path, crashes, scene, options, label):
    found = list(examined(tmp_path, crashes, scene, options))
    print(f"{len(found)} states: {label}")
    assert [problem for _, problem in found if problem] == []
    assert {outcome for outcome, _ in found} == {scene.old, scene.new}


def broken(directory, outcome, crash, scene, options):
    found, skipped = outcome
    allowed = [scene.new] if DONE in crash.reached else [scene.old, scene.new]
    if found not in allowed:
        return f"found {found}, expected {allowed}"
    # a file system that reorders deletions may leave half of what was to go; it is never chosen
    strict = crash.in_order or not scene.deletes
    if strict and [skip for skip in skipped if "marked as bad" not in skip.reason]:
        return f"skipped {skipped}"
    if strict and (directory / "latest.json").exists():
        named = json.loads((directory / "latest.json").read_bytes())["file"]
        if not (directory / named).exists():
            return f"the pointer names {named}, which is not there"
    with managed(directory, Hasty(), keep_last=scene.keep_last, **options) as manager:
        manager.restore({})
        manager.save(9, objects_of(9))
    found, skipped = seen(directory)
    if found != (9, 9) or (strict and (skipped or debris(directory))):
        return f"the next save left {found}, {skipped}, {debris(directory)}"
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_power_cut_after_any_call(tmp_path, name, layout):
    scene, options = SCENES[name], LAYOUTS[layout]
    sim = record(tmp_path, scene, options)
    assert same(sim)
    check(tmp_path, sim.crashes(), scene, options, f"{name}, {layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_after_any_call_without_syncs(tmp_path, name, layout):
    scene, options = SCENES[name], LAYOUTS[layout] | {"durability": "process"}
    sim = record(tmp_path, scene, options)
    assert same(sim)
    assert not {op.kind for op in sim.ops} & {"fsync"}  # the directory's own creation is synced
    check(tmp_path, sim.killed(), scene, options, f"{name}, {layout}, durability process")


#: The syncs of a commit; those after them are the pointer's.
SYNCS = {"single": {"fsync": 2, "dirsync": 2}, "sharded": {"fsync": 4, "dirsync": 2}}
EACH = [(layout, name, n) for layout, counts in SYNCS.items() for name in counts for n in range(counts[name])]


@pytest.mark.parametrize(("layout", "name", "number"), EACH)
def test_a_save_without_any_one_of_its_syncs_is_found_out(tmp_path, layout, name, number):
    scene, options = SCENES["a second save"], LAYOUTS[layout]
    sim = record(tmp_path, scene, options, blind={(name, number)})
    assert sim.counts[name] == SYNCS[layout][name] + 1
    found = examined(tmp_path, reversed(list(sim.crashes())), scene, options)
    assert any(problem for _, problem in found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blind", ["fsync", "dirsync"])
def test_a_save_without_syncs_breaks_its_promise(tmp_path, blind, layout):
    scene, options = SCENES["a second save"], LAYOUTS[layout]
    sim = record(tmp_path, scene, options, blind={blind})
    found = examined(tmp_path, reversed(list(sim.crashes())), scene, options)
    assert any(problem and DONE in problem for _, problem in found)


# ── single files ─────────────────────────────────────────────────────────────────────────────────────

WRITERS = {
    "atomic_torch_save": (
        lambda number, path: atomic_torch_save({"w": torch.full((500,), float(number))}, path),
        lambda path: set(torch.load(path, weights_only=True)["w"].tolist()),
    ),
    "atomic_json_dump": (
        lambda number, path: atomic_json_dump([number] * 500, path),
        lambda path: set(json.loads(path.read_text())),
    ),
}


def wrong_files(tmp_path, sim, load, old):
    wrong, crashes = [], list(sim.crashes())
    for crash in crashes:
        place = cleared(tmp_path / "after")
        materialise(crash.state, place)
        try:
            found = load(place / "file") if (place / "file").exists() else None
        except Exception as error:  # noqa: BLE001 - whatever a load raises is the finding
            found = repr(error)
        if found not in ([{2}] if DONE in crash.reached else [old, {2}]):
            wrong.append((crash.at, found))
    return wrong, len(crashes)


@pytest.mark.parametrize("old", [None, {1}], ids=["new", "replaced"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_power_cut_after_any_call_of_a_single_file(tmp_path, monkeypatch, name, old):
    write, load = WRITERS[name]
    root = tmp_path / "root"
    root.mkdir()
    if old:
        write(1, root / "file")
    sim = SimFS(root)
    monkeypatch.setattr(atomic, "FS", sim)
    write(2, root / "file")
    sim.mark(DONE)
    assert sim.performed() == tree_of(root)
    wrong, count = wrong_files(tmp_path, sim, load, old)
    print(f"{count} states: {name}")
    assert wrong == []
    assert count >= len(sim.ops)


# ── the simulation itself ────────────────────────────────────────────────────────────────────────────


def replace(sim, *, order):
    """A file replaced by hand, its steps in a given order."""
    temp, target = str(sim.root / ".temp"), str(sim.root / "file")
    fd = sim.open(temp, os.O_WRONLY | os.O_CREAT)
    sim.write(fd, memoryview(json.dumps([2] * 500).encode()))
    steps = {
        "fsync": lambda: sim.fsync(fd),
        "rename": lambda: sim.rename(temp, target),
        "dirsync": lambda: sim.dirsync(str(sim.root)),
    }
    for step in order.split():
        steps[step]()
    sim.close(fd)
    sim.mark(DONE)


ORDERS = {
    "fsync rename dirsync": True,
    "rename fsync dirsync": False,
    "fsync dirsync rename": False,
    "fsync rename": False,
    "rename dirsync": False,
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_simulation_knows_good_orders_from_bad_ones(tmp_path, order):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text(json.dumps([1] * 500))
    sim = SimFS(root)
    replace(sim, order=order)
    wrong, _ = wrong_files(tmp_path, sim, WRITERS["atomic_json_dump"][1], {1})
    assert (wrong == []) == ORDERS[order]


def test_a_crash_tears_unsynced_bytes_at_sectors(tmp_path):
    sim = SimFS(tmp_path)
    fd = sim.open(str(tmp_path / "x"), os.O_WRONLY | os.O_CREAT)
    sim.write(fd, memoryview(b"a" * 512 + b"b" * 512))
    sim.close(fd)
    found = {crash.state.get("x") for crash in sim.crashes()}
    assert {None, b"", bytes(1024), b"a" * 512 + b"b" * 512, b"a" * 512} <= found
    assert found <= {None, b"", b"a" * 512} | {
        a + b for a in (bytes(512), b"a" * 512) for b in (bytes(512), b"b" * 512)
    }


def test_names_survive_a_crash_in_any_combination_until_they_are_synced(tmp_path):
    sim = SimFS(tmp_path)
    for name in "ab":
        sim.mkdir(str(tmp_path / name))
    sim.dirsync(str(tmp_path))
    sim.mark(DONE)
    sim.rename(str(tmp_path / "a"), str(tmp_path / "c"))
    sim.rmdir(str(tmp_path / "b"))
    found = {(DONE in crash.reached, frozenset(crash.state)) for crash in sim.crashes()}
    both = {frozenset(names) for names in ("ab", "cb", "a", "c")}
    assert {names for done, names in found if done} == both
    assert {names for done, names in found if not done} == {
        frozenset(names) for names in ("", "a", "b", "ab")
    }


def test_a_manager_reads_what_a_crash_left_without_changing_it(tmp_path):
    sim = record(tmp_path, SCENES["an earlier run is pruned"], {})
    for crash in list(sim.crashes())[::20]:
        place = cleared(tmp_path / "after")
        materialise(crash.state, place)
        before = tree_of(place)
        CheckpointManager(place / "run").load_latest()
        assert tree_of(place) == before
