"""save(..., blocking=False): what is saved, when, who is told of an error, and how a process ends meanwhile."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.checkpoints import LAYOUTS, managed

from checkpoint.helpers import FailingOps, Run, debris, names
from checkpoint.test_staging import the_same
from resumable_data import ResumableLoader
from resumable_data.checkpoint import CheckpointManager, staging
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.errors import CheckpointWriteError

ROOT = Path(__file__).parents[2]


class Held(FsOps):
    """Waits at the first file of each save until it is let go."""

    def __init__(self):
        self.began, self.go = threading.Event(), threading.Event()

    def open(self, path, flags, mode=0o666):
        if ".tmp" in path:
            self.began.set()
            if not self.go.wait(30):
                raise TimeoutError("nobody let it go")
        return super().open(path, flags, mode)


@pytest.fixture
def ops():
    held = Held()
    yield held
    held.go.set()


def save(manager, step, **options):
    options.setdefault("blocking", False)
    return manager.save(step, {"value": torch.full((3,), float(step))}, **options)


def newest(directory):
    found = CheckpointManager(directory).load_latest()
    return None if found is None else (found.step, found.extra["value"].tolist())


# ── what is saved ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_checkpoint_that_a_blocking_save_makes_at_that_moment(tmp_path, ops, layout):
    run, shared = Run(), [[1], bytearray(b"a")]
    run.model[3].weight = torch.nn.Parameter(run.model[0].weight[:1, :].repeat(1, 2)[:, :6].clone())
    buffer = torch.arange(20.0)
    objects = run.objects | {"shared": shared, "whole": buffer, "view": buffer[4:8], "tied": buffer}
    run.train(5)
    with CheckpointManager(tmp_path / "blocking", **LAYOUTS[layout]) as manager:
        manager.save(5, objects, state={"losses": run.losses})
    with managed(tmp_path / "background", ops, **LAYOUTS[layout]) as manager:
        path = manager.save(5, objects, state={"losses": run.losses}, blocking=False)
        assert ops.began.wait(30)
        assert not path.exists()
        run.train(12)
        shared[0].append(2)
        shared[1][0] = 9
        buffer.add_(100)
        ops.go.set()
    assert path.exists()
    one, other = (
        CheckpointManager(tmp_path / kind).load_latest().payload for kind in ("blocking", "background")
    )
    assert one.pop("wall_saved_at") <= other.pop("wall_saved_at")
    assert the_same(other, one)
    places = [other["extra"][key].untyped_storage().data_ptr() for key in ("whole", "view", "tied")]
    assert len(set(places)) == 1
    assert path.name == (tmp_path / "blocking" / path.name).name
    assert names(tmp_path / "background") == names(tmp_path / "blocking")


def test_a_run_saved_in_the_background_goes_on_as_one_that_never_stopped(tmp_path):
    whole = Run()
    whole.train(30)
    run = Run()
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 14):
            run.train(step)
            manager.save(step, run.objects, state={"losses": run.losses}, blocking=False)
    again = Run(seed=9)
    assert again.resume(CheckpointManager(tmp_path)).step == 13
    assert again.train(30) == whole.losses
    assert the_same(again.model.state_dict(), whole.model.state_dict())


def test_the_path_is_that_of_the_next_generation(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        first = save(manager, 5)
        second = save(manager, 5)
        assert [first.name, second.name] == ["step_000000000005.pt", "step_000000000005.g1.pt"]
        assert manager.latest_path() in (first, second)
    assert second.exists()
    assert not first.exists()


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match="'bad'"):
            manager.save(1, {"bad": object}, blocking=False)
        assert names(tmp_path) == []
        save(manager, 2)
    assert newest(tmp_path) == (2, [2.0] * 3)


def test_disabled_it_does_nothing(tmp_path):
    with CheckpointManager(tmp_path / "none", enabled=False) as manager:
        assert save(manager, 1) is None
        assert manager.finish(1, {}, blocking=False) is None
    assert not (tmp_path / "none").exists()


# ── one in flight ────────────────────────────────────────────────────────────────────────────────────


def test_a_second_save_waits_for_the_first(tmp_path, ops):
    with managed(tmp_path, ops) as manager:
        first = save(manager, 1)
        assert ops.began.wait(30)
        threading.Timer(0.1, ops.go.set).start()
        save(manager, 2)
        assert first.exists()
    assert newest(tmp_path) == (2, [2.0] * 3)


def test_a_second_save_is_skipped_where_that_was_asked_for(tmp_path, ops, caplog):
    with managed(tmp_path, ops, when_busy="skip") as manager:
        save(manager, 1)
        assert ops.began.wait(30)
        with caplog.at_level(logging.WARNING, "resumable_data"):
            assert save(manager, 2) is None
        assert "the checkpoint of step 2 was skipped" in caplog.text
        ops.go.set()
    assert newest(tmp_path) == (1, [1.0] * 3)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("how", ["save", "finish"])
def test_the_last_step_and_a_blocking_save_are_never_skipped(tmp_path, ops, how, blocking):
    with managed(tmp_path, ops, when_busy="skip") as manager:
        save(manager, 1)
        assert ops.began.wait(30)
        threading.Timer(0.1, ops.go.set).start()
        if how == "finish":
            assert manager.finish(2, {"value": torch.full((3,), 2.0)}, blocking=blocking) is not None
        elif blocking:
            assert save(manager, 2, blocking=True).exists()
        else:
            assert save(manager, 2) is None  # the one call that may be
    assert newest(tmp_path)[0] == (1 if (how, blocking) == ("save", False) else 2)


def test_finish_after_a_background_save_of_the_same_step_saves_nothing(tmp_path, ops):
    with managed(tmp_path, ops) as manager:
        path = save(manager, 3)
        assert ops.began.wait(30)
        threading.Timer(0.1, ops.go.set).start()
        assert manager.finish(3, {}) == path
    assert newest(tmp_path) == (3, [3.0] * 3)


def test_nothing_is_pruned_before_the_new_one_is_committed(tmp_path, ops):
    with managed(tmp_path, FsOps(), keep_last=1) as manager:
        first = save(manager, 1, blocking=True)
        manager._ops = ops
        second = save(manager, 2)
        assert ops.began.wait(30)
        assert first.exists()
        assert newest(tmp_path) == (1, [1.0] * 3)
        ops.go.set()
    assert second.exists()
    assert not first.exists()


def test_two_managers_of_one_directory_take_turns(tmp_path, ops):
    with managed(tmp_path, ops, keep_last=None) as one, CheckpointManager(tmp_path, keep_last=None) as other:
        save(one, 1)
        assert ops.began.wait(30)
        threading.Timer(0.1, ops.go.set).start()
        save(other, 2, blocking=True)
        save(other, 3)
    steps = [report.step for report in CheckpointManager(tmp_path).verify() if report.ok]
    assert steps == [3, 2, 1]
    assert debris(tmp_path) == []


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────

CALLS = {
    "save": lambda manager, _: save(manager, 9, blocking=True),
    "save in the background": lambda manager, _: save(manager, 9),
    "finish": lambda manager, _: manager.finish(9, {}),
    "restore": lambda manager, _: manager.restore({}),
    "load_latest": lambda manager, _: manager.load_latest(),
    "prune": lambda manager, _: manager.prune(),
    "mark_bad": lambda manager, _: manager.mark_bad(1, "nan"),
    "copy_to": lambda manager, path: manager.copy_to(path / "copy"),
    "verify": lambda manager, _: manager.verify(),
    "best_path": lambda manager, _: manager.best_path(),
    "close": lambda manager, _: manager.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_raised_once_by_the_next_call(tmp_path, call):
    place = tmp_path / "run"
    manager = CheckpointManager(place, keep_last=1, keep_best=("loss", "min"))
    save(manager, 1, metrics={"loss": 1.0})
    manager._background.settle()
    before = names(place)
    manager._ops = FailingOps(at=0, code=errno.ENOSPC, only={"fsync"})
    save(manager, 2)
    with pytest.raises(CheckpointWriteError) as caught:
        CALLS[call](manager, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert names(place) == before
    assert newest(place) == (1, [1.0] * 3)
    manager.close()  # not once more
    manager._ops = FsOps()
    save(manager, 3)
    manager.close()
    assert newest(place) == (3, [3.0] * 3)


def test_a_manager_in_a_with_statement_tells_at_its_end(tmp_path):
    with (
        pytest.raises(CheckpointWriteError),
        managed(tmp_path, FailingOps(at=0, code=errno.EIO, only={"fsync"})) as manager,
    ):
        save(manager, 2)
    assert newest(tmp_path) is None
    assert debris(tmp_path) == []


def test_another_writer_is_named_at_the_call(tmp_path):
    code = (
        "import sys; from resumable_data.checkpoint import CheckpointManager as M\n"
        "M(sys.argv[1]).save(1, {'value': 1.0}); print('holds', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert other.stdout.readline() == "holds\n"
        manager = CheckpointManager(tmp_path)
        with pytest.raises(CheckpointWriteError, match=f"process {other.pid}"):
            save(manager, 2)
        manager.close()
    finally:
        other.communicate()


@pytest.mark.parametrize("at", range(3))
def test_without_memory_to_copy_aside_nothing_is_begun(tmp_path, monkeypatch, at):
    run = Run()
    run.train(4)
    manager = CheckpointManager(tmp_path)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    original, left = staging._empty, [at]

    def scarce(nbytes, *, pinned):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't allocate memory")
        return original(nbytes, pinned=pinned)

    monkeypatch.setattr(staging, "_empty", scarce)
    with pytest.raises(CheckpointWriteError) as caught:
        manager.save(4, run.objects, blocking=False)
    assert caught.value.errno == errno.ENOMEM
    assert not manager._background.busy
    assert names(tmp_path) == []
    assert the_same(dict(run.model.state_dict()), before)
    monkeypatch.undo()
    run.train(6)
    manager.save(6, run.objects, blocking=False)
    manager.close()
    assert CheckpointManager(tmp_path).load_latest().step == 6


# ── signals, forks, the end ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["save", "close", "restore"])
def test_a_signal_handler_during_training_may_save_and_close(tmp_path, ops, what):
    manager = managed(tmp_path, ops)
    save(manager, 1)
    assert ops.began.wait(30)
    seen = []

    def handler(*_):
        threading.Timer(0.05, ops.go.set).start()
        if what == "save":
            save(manager, 2, blocking=True)
        elif what == "close":
            manager.close()
        else:
            seen.append(manager.restore({}).step)
        seen.append(newest(tmp_path)[0])

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not seen:
            threading.Event().wait(0.01)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen[-1] == (2 if what == "save" else 1)
    manager.close()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index * index


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_loader_workers_forked_while_a_save_runs(tmp_path, ops):
    with managed(tmp_path, ops) as manager:
        save(manager, 1)
        assert ops.began.wait(30)
        loader = ResumableLoader(Squares(), 4, num_workers=2, multiprocessing_context="fork")
        total = sum(int(batch.sum()) for batch in loader)
        assert not (tmp_path / "step_000000000001.pt").exists()
        ops.go.set()
    assert total == sum(i * i for i in range(40))
    assert newest(tmp_path) == (1, [1.0] * 3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_save_in_flight_and_no_right_to_write(tmp_path, ops):
    manager = managed(tmp_path / "run", ops)
    save(manager, 1, blocking=False)
    assert ops.began.wait(30)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            manager.close()
            assert manager.load_latest() is None
            manager._ops = FsOps()
            try:
                save(manager, 2)
            except CheckpointWriteError as error:
                code = 0 if error.errno == errno.EAGAIN else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ops.go.set()
    manager.close()
    assert newest(tmp_path / "run") == (1, [1.0] * 3)


# Large enough for every thread that a save may use.
LAST = """
import sys, time, torch
from resumable_data.checkpoint import CheckpointManager
from resumable_data.checkpoint.fsops import FsOps

class Slow(FsOps):
    def open(self, path, flags, mode=0o666):
        time.sleep(0.5)
        return super().open(path, flags, mode)
    def fsync(self, fd):
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        super().fsync(fd)

manager = CheckpointManager(sys.argv[1])
manager._ops = Slow()
torch.manual_seed(0)
manager.save(7, {"value": torch.randn(10_000_000)}, blocking=False)
print("leaves", flush=True)
if sys.argv[2] == "raises":
    raise ValueError("mine")
"""


@pytest.mark.parametrize("end", ["returns", "raises", "fails"])
def test_a_large_save_in_flight_when_the_process_ends(tmp_path, end):
    done = subprocess.run(
        [sys.executable, "-c", LAST, str(tmp_path), end],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.stdout == "leaves\n"
    assert done.returncode == (1 if end == "raises" else 0)
    found = CheckpointManager(tmp_path).load_latest()
    assert debris(tmp_path) == []
    if end == "fails":
        assert found is None
        assert "the checkpoint of step 7 was lost" in done.stderr
        assert "ENOSPC" in done.stderr
    else:
        torch.manual_seed(0)
        assert torch.equal(found.extra["value"], torch.randn(10_000_000))
        assert "lost" not in done.stderr, done.stderr
