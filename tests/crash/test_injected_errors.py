"""Every system call of everything that writes fails in turn; then real limits of the operating system.

A failure is a CheckpointWriteError with its errno and path, leaves no temp, and the old checkpoint loads;
after the commit it is a warning. The next save works.
"""

import errno
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.checkpoints import LAYOUTS, Hasty, cleared, debris, managed, names, objects_of, seen

from resumable_data.checkpoint import CheckpointManager, atomic, atomic_json_dump, atomic_torch_save
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import CheckpointError, CheckpointWriteError

CODES = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EDQUOT]
CALLS = sorted(name for name in vars(FsOps) if not name.startswith("_"))
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """A checkpoint that is skipped is logged, here by the hundred."""
    caplog.set_level(logging.ERROR, logger="resumable_data")


class Failing(Hasty):
    """Raises OSError(code) at call number `at` from 0, with `for_good` at every later one too.

    Args:
        at: None for never.
        code: The errno.
        only: The names of the calls that count; None for all.
        for_good: As for a file system that has been remounted read-only.
    """

    def __init__(self, at=None, code=errno.EIO, *, only=None, for_good=False):
        self.at, self.code, self.only, self.for_good = at, code, only or CALLS, for_good
        self.calls = []

    def due(self, name):
        if name not in self.only:
            return False
        self.calls.append(name)
        number = len(self.calls) - 1
        return self.at is not None and (number == self.at or (self.for_good and number > self.at))


def intercepted(name):
    def call(self, *arguments):
        due = self.due(name)
        if due and name == "close":
            os.close(arguments[0])  # a close that fails has closed all the same
        if due:
            where = [arguments[0]] if isinstance(arguments[0], str) else []
            raise OSError(self.code, os.strerror(self.code), *where)
        return getattr(Hasty, name)(self, *arguments)

    return call


for each in CALLS:
    setattr(Failing, each, intercepted(each))


# ── every call of every action ───────────────────────────────────────────────────────────────────────


def saves(manager):
    manager.save(3, objects_of(3))


def prunes(manager):
    manager.keep_last = 1
    manager.prune()


def marks(manager):
    manager.mark_bad(2, "its loss is not a number")


def copies(manager):
    manager.copy_to(manager.directory.parent / "copy")


OLD = (2, 2)
#: The action, and what may load after it failed.
ACTIONS = {
    "save": (saves, [OLD]),
    "prune": (prunes, [OLD]),
    "mark_bad": (marks, [OLD, (1, 1)]),
    "copy_to": (copies, [OLD]),
}


def begun(root, ops, layout, **options):
    """A manager that has saved steps 1 and 2, its calls now going through `ops`."""
    manager = managed(cleared(root) / "run", Hasty(), **options, **LAYOUTS[layout])
    for step in (1, 2):
        manager.save(step, objects_of(step))
    manager._ops = ops
    return manager


def failure(act, manager):
    """The error that an action ends with, or the text of its warning, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act(manager)
        except OSError as error:
            return error
    return str(caught[0].message) if caught else None


def go_on(root, manager, allowed):
    """The old checkpoint loads, in another manager; the next save works and nothing is left behind."""
    found, skipped = seen(root / "run")
    assert found in allowed
    assert [skip for skip in skipped if "marked as bad" not in skip.reason] == []
    manager._ops = Hasty()
    manager.save(4, objects_of(4))
    manager.copy_to(root / "copy")
    for directory in (root / "run", root / "copy"):
        assert seen(directory)[0] == (4, 4)
        assert debris(directory) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIONS)
def test_each_call_fails_once(tmp_path, name, layout):
    act, allowed = ACTIONS[name]
    root = tmp_path / "root"
    clean = Failing()
    with begun(root, clean, layout) as manager:
        assert failure(act, manager) is None
    warned = 0
    for code in CODES:
        for at in range(len(clean.calls)):
            with begun(root, Failing(at, code), layout) as manager:
                problem = failure(act, manager)
                assert manager._ops.calls[at] == clean.calls[at]
                assert [left for left in names(root) if left.endswith(".tmp")] == []
                if isinstance(problem, OSError):
                    assert problem.errno == code
                    # what is read before anything is written fails as itself
                    assert isinstance(problem, CheckpointWriteError) or clean.calls[at] == "listdir"
                    assert str(problem.filename).startswith(str(root))
                    go_on(root, manager, allowed)
                else:  # in the tidying after a commit
                    assert name == "save"
                    assert "step 3 is committed" in problem
                    warned += 1
                    go_on(root, manager, [(3, 3)])
    print(f"{len(clean.calls) * len(CODES)} failures, {warned} after the commit: {name}, {layout}")
    assert (warned > 0) == (name == "save")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIONS)
def test_from_some_call_on_all_fail(tmp_path, name, layout):
    act, allowed = ACTIONS[name]
    root = tmp_path / "root"
    clean = Failing()
    with begun(root, clean, layout) as manager:
        act(manager)
    for at in range(len(clean.calls)):
        with begun(root, Failing(at, errno.EROFS, for_good=True), layout) as manager:
            problem = failure(act, manager)
            if isinstance(problem, OSError):
                assert problem.errno == errno.EROFS
            found, _ = seen(root / "run")
            # what could not be taken back is whole: a commit whose sync failed
            assert found in [*allowed, (3, 3)]
        with managed(root / "run", Hasty(), **LAYOUTS[layout]) as manager:
            manager.restore({})
            go_on(root, manager, [found])


SINGLE = {
    "atomic_torch_save": (
        lambda number, path: atomic_torch_save({"w": torch.full((500,), float(number))}, path),
        lambda path: set(torch.load(path, weights_only=True)["w"].tolist()),
    ),
    "atomic_json_dump": (
        lambda number, path: atomic_json_dump([number] * 500, path),
        lambda path: set(json.loads(path.read_text())),
    ),
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", SINGLE)
def test_each_call_of_a_single_file_fails_once(tmp_path, monkeypatch, name, code):
    write, load = SINGLE[name]
    path = tmp_path / "file"
    clean = Failing()
    monkeypatch.setattr(atomic, "FS", clean)
    write(1, path)
    for at in range(len(clean.calls)):
        monkeypatch.setattr(atomic, "FS", Hasty())
        write(1, path)
        monkeypatch.setattr(atomic, "FS", Failing(at, code))
        with pytest.raises(CheckpointWriteError) as caught:
            write(2, path)
        assert caught.value.errno == code
        assert names(tmp_path) == ["file"]
        renamed = "rename" in clean.calls[:at]
        assert load(path) == ({2} if renamed else {1})
    monkeypatch.setattr(atomic, "FS", Hasty())
    write(3, path)
    assert load(path) == {3}


# ── the ways of a single call ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_fsync_is_never_tried_again_and_the_next_save_writes_a_new_file(tmp_path, layout):
    ops = Failing(0, only=["fsync"])
    opened = []
    ops.open = lambda path, *rest: opened.append(path) or Hasty.open(ops, path, *rest)
    with begun(tmp_path / "root", ops, layout) as manager:
        with pytest.raises(CheckpointWriteError) as caught:
            manager.save(3, objects_of(3))
        assert caught.value.errno == errno.EIO
        assert ops.calls == ["fsync"]
        first = set(opened)
        manager.save(3, objects_of(3))
        assert first.isdisjoint(opened[len(first) :])
    assert seen(tmp_path / "root" / "run") == ((3, 3), ())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_warned_about_once(tmp_path, layout, code):
    ops = Failing(0, code, only=["dirsync"], for_good=True)
    with begun(tmp_path / "root", ops, layout) as manager:
        with pytest.warns(UserWarning, match="cannot sync directories") as caught:
            manager.save(3, objects_of(3))
        places = {str(warning.message).partition(":")[0] for warning in caught}
        assert len(caught) == len(places)
        manager.save(4, objects_of(4))
    assert seen(tmp_path / "root" / "run") == ((4, 4), ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_sync_of_the_directory_fails_the_save(tmp_path, layout):
    with begun(tmp_path / "root", Failing(0, only=["dirsync"]), layout) as manager:
        with pytest.raises(CheckpointWriteError) as caught:
            manager.save(3, objects_of(3))
        assert caught.value.errno == errno.EIO
    assert seen(tmp_path / "root" / "run") == (OLD, ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_close_fails_the_save(tmp_path, layout):
    with begun(tmp_path / "root", Failing(0, errno.EDQUOT, only=["close"]), layout) as manager:
        with pytest.raises(CheckpointWriteError) as caught:
            manager.save(3, objects_of(3))
        assert caught.value.errno == errno.EDQUOT
        assert debris(tmp_path / "root" / "run") == []
    assert seen(tmp_path / "root" / "run") == (OLD, ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_writes_are_completed(tmp_path, layout):
    class Short(Hasty):
        def write(self, fd, data):
            return super().write(fd, data[: max(1, len(data) // 2)])

    with begun(tmp_path / "root", Short(), layout) as manager:
        manager.save(3, objects_of(3, size=100_000))
    assert seen(tmp_path / "root" / "run") == ((3, 3), ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_storm_of_signals_disturbs_no_save(tmp_path, layout):
    rings = []
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    with begun(tmp_path / "root", FsOps(), layout) as manager:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for step in range(3, 13):
                manager.save(step, objects_of(step, size=20_000))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert len(rings) > 5
    assert seen(tmp_path / "root" / "run") == ((12, 12), ())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["open", "write", "fsync", "close", "rename", "dirsync"])
def test_an_interrupt_in_any_call_comes_out_as_itself(tmp_path, name, layout):
    class Interrupted(Hasty):
        pass

    calls = []

    def interrupt(self, *arguments):
        calls.append(name)
        result = getattr(Hasty, name)(self, *arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    setattr(Interrupted, name, interrupt)
    root = tmp_path / "root"
    with begun(root, Interrupted(), layout) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(3, objects_of(3))
        assert debris(root / "run") == []
        go_on(root, manager, [OLD])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_that_runs_out_in_a_save_leaves_everything_as_it_was(tmp_path, monkeypatch, layout):
    root = tmp_path / "root"
    with begun(root, Hasty(), layout) as manager:
        objects = objects_of(3)
        before = {name: tensor.clone() for name, tensor in objects["model"].tensors.items()}
        files = names(root)
        real, left = torch.save, [0 if layout == "single" else 1]

        def save(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError
            real(*arguments, **options)

        monkeypatch.setattr(torch, "save", save)
        with pytest.raises(MemoryError):
            manager.save(3, objects)
        monkeypatch.undo()
        assert names(root) == files
        assert all(map(torch.equal, objects["model"].tensors.values(), before.values()))
        go_on(root, manager, [OLD])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_only_checkpoint_stays_while_saves_fail(tmp_path, layout):
    root = tmp_path / "root"
    with managed(root / "run", Hasty(), keep_last=1, **LAYOUTS[layout]) as manager:
        manager.save(1, objects_of(1))
        manager._ops = Failing(0, errno.ENOSPC, only=["write"], for_good=True)
        for step in (2, 3):
            with pytest.raises(CheckpointWriteError, match=r"needs \d+ bytes, \d+ are free") as caught:
                manager.save(step, objects_of(step))
            assert caught.value.needed > 1000
            assert caught.value.free > 0
            assert seen(root / "run") == ((1, 1), ())
        manager._ops = Hasty()
        manager.save(4, objects_of(4))
    assert seen(root / "run") == ((4, 4), ())
    assert not [name for name in names(root / "run") if "000001" in name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_full_at_the_index_commits_nothing(tmp_path, layout):
    class FullAtIndex(Hasty):
        at_index = False

        def open(self, path, *rest):
            self.at_index = ".json" in Path(path).name
            return super().open(path, *rest)

        def write(self, fd, data):
            if self.at_index:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data)

    root = tmp_path / "root"
    with begun(root, FullAtIndex(), layout) as manager:
        files = names(root)
        with pytest.raises(CheckpointWriteError) as caught:
            manager.save(3, objects_of(3))
        assert caught.value.errno == errno.ENOSPC
        assert names(root) == files
        go_on(root, manager, [OLD])


# ── the operating system's own limits ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_limit_on_the_size_of_files_is_reported_as_itself(tmp_path, layout):
    root = tmp_path / "root"
    with begun(root, FsOps(), layout) as manager:
        files = names(root)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            with pytest.raises(CheckpointWriteError) as caught:
                manager.save(3, objects_of(3, size=400_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert names(root) == files
        go_on(root, manager, [OLD])


FULL_DISK = """
import errno, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from support.checkpoints import LAYOUTS, debris, managed, names, objects_of, seen
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import CheckpointWriteError

place, options = Path(sys.argv[1]), LAYOUTS[sys.argv[2]]
with managed(place / "run", FsOps(), **options) as manager:
    manager.save(1, objects_of(1, size=100_000))
    before = names(place)
    try:
        manager.save(2, objects_of(2, size=2_000_000))
    except CheckpointWriteError as error:
        assert error.errno == errno.ENOSPC, error
        assert error.needed > error.free > 0, error
        assert f"needs {error.needed} bytes, {error.free} are free" in str(error), error
    else:
        raise AssertionError("24 MB went into 8 MB")
    assert names(place) == before, names(place)
    assert seen(place / "run") == ((1, 1), ())
    manager.save(3, objects_of(3, size=100_000))
    assert seen(place / "run") == ((3, 3), ())
    assert debris(place / "run") == []
print("passed")
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_really_full(tmp_path, layout):
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=8m none {tmp_path}"
    if unshare is None or subprocess.run([unshare, "-Urm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("no tmpfs can be mounted: unprivileged user namespaces are switched off here")
    command = f'{mount} && exec "$@"'
    script = [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path), layout, str(TESTS)]
    done = subprocess.run(
        [unshare, "-Urm", "sh", "-c", command, "sh", *script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=TESTS.parent,
    )
    assert (done.stdout, done.returncode) == ("passed\n", 0), done.stderr


READ_ONLY = """
import errno, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.checkpoints import managed, objects_of, seen
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import CheckpointWriteError

class Counting(FsOps):
    written = 0
    def write(self, fd, data):
        Counting.written += 1
        return super().write(fd, data)

place = Path(sys.argv[1]) / "run"
with managed(place, Counting()) as manager:
    assert manager.restore({}).step == 1
    for action in (lambda: manager.save(2, objects_of(2)), lambda: manager.mark_bad(1, "x"), manager.prune):
        try:
            action()
        except CheckpointWriteError as error:
            assert error.errno == errno.EROFS, error
            assert str(place) in error.filename, error
        else:
            raise AssertionError("it was written to")
    assert Counting.written == 0
    assert seen(place) == ((1, 1), ())
print("passed")
"""


def test_a_read_only_file_system_is_found_before_anything_is_written(tmp_path):
    with managed(tmp_path / "run", Hasty()) as manager:
        manager.save(1, objects_of(1))
    unshare = shutil.which("unshare")
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}"
    if unshare is None or subprocess.run([unshare, "-Urm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("nothing can be mounted: unprivileged user namespaces are switched off here")
    script = [sys.executable, "-W", "error", "-c", READ_ONLY, str(tmp_path), str(TESTS)]
    done = subprocess.run(
        [unshare, "-Urm", "sh", "-c", f'{mount} && exec "$@"', "sh", *script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=TESTS.parent,
    )
    assert (done.stdout, done.returncode) == ("passed\n", 0), done.stderr


def test_a_directory_without_permission_is_named(tmp_path):
    class Forbidden(Hasty):
        """For root, whom permissions do not stop."""

        def open(self, path, flags, mode=0o666):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    manager = managed(tmp_path / "run", Forbidden())
    with pytest.raises(CheckpointWriteError) as caught:
        manager.save(1, objects_of(1))
    assert caught.value.errno == errno.EACCES
    assert caught.value.filename.startswith(str(tmp_path / "run"))
    assert isinstance(caught.value, CheckpointError)
    assert CheckpointManager(tmp_path / "run").load_latest() is None
