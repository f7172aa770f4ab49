"""Saves, readers and closes that meet: threads, signal handlers, other processes."""

import errno
import os
import signal
import threading

import pytest
import torch

from checkpoint.helpers import debris, names
from resumable_data.checkpoint import CheckpointManager, unpack
from resumable_data.checkpoint import writer as writer_module
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.lock import LOCK_NAME
from resumable_data.errors import CheckpointWriteError

# From Python 3.12 on a fork beside other threads, torch's among them, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def save(manager, step, value=0.0):
    return manager.save(step, {"value": torch.tensor(value)})


class At(FsOps):
    """Calls a function once, before (or after a listing) the `at`-th call of one operation, from 0."""

    def __init__(self, name, at, act):
        self.name, self.at, self.act, self.count = name, at, act, 0

    def _meet(self, name):
        if name == self.name:
            self.count += 1
            if self.count == self.at + 1:
                self.act()

    def rename(self, source, target):
        self._meet("rename")
        super().rename(source, target)

    def listdir(self, path):
        found = super().listdir(path)
        self._meet("listdir")
        return found


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("same", [True, False])
def test_a_save_from_a_signal_handler_in_the_midst_of_a_save_is_refused(tmp_path, at, same):
    outer = CheckpointManager(tmp_path)
    inner = outer if same else CheckpointManager(tmp_path)
    met = []

    def handler():
        with pytest.raises(CheckpointWriteError, match="signal handler") as caught:
            save(inner, 5, 1.0)
        met.append(caught.value.errno)

    outer._ops = At("rename", at, handler)
    save(outer, 5, 2.0)
    assert met == [errno.EBUSY]
    assert float(CheckpointManager(tmp_path).load_latest().extra["value"]) == 2.0
    outer._ops = FsOps()
    assert save(inner, 5, 3.0).name == "step_000000000005.g1.pt"
    inner.close()
    outer.close()


def second_process_may_write(directory):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            save(CheckpointManager(directory), 99)
            code = 0
        except CheckpointWriteError:
            code = 3
        finally:
            os._exit(code)
    return {0: True, 3: False}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def test_close_from_a_signal_handler_waits_for_the_end_of_the_save(tmp_path):
    manager = CheckpointManager(tmp_path)
    seen = []

    def handler():
        manager.close()
        seen.append(second_process_may_write(tmp_path))

    manager._ops = At("rename", 0, handler)
    save(manager, 1)
    assert seen == [False]
    assert second_process_may_write(tmp_path)


def test_close_from_another_thread_waits_for_the_end_of_the_save(tmp_path):
    manager = CheckpointManager(tmp_path)
    closed, order = threading.Event(), []
    closer = threading.Thread(target=lambda: (manager.close(), order.append("closed"), closed.set()))

    def meet():
        closer.start()
        assert not closed.wait(0.2)
        order.append("renamed")

    manager._ops = At("rename", 0, meet)
    save(manager, 1)
    closer.join(10)
    assert order == ["renamed", "closed"]


def test_first_saves_in_two_threads_take_one_hold_and_close_gives_it_back(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    real = writer_module.acquire
    both = threading.Barrier(2)

    def acquire(*args):
        try:
            both.wait(0.3)  # passed only if two threads are here at once
        except threading.BrokenBarrierError:
            both.reset()
        return real(*args)

    monkeypatch.setattr(writer_module, "acquire", acquire)
    threads = [threading.Thread(target=save, args=(manager, step)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.close()
    assert second_process_may_write(tmp_path)


def test_a_lock_lost_to_a_copy_of_the_directory_is_taken_again_or_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    (tmp_path / LOCK_NAME).read_bytes()  # POSIX: closing any descriptor of the file drops the lock
    save(manager, 2)
    assert not second_process_may_write(tmp_path)

    (tmp_path / LOCK_NAME).read_bytes()
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        save(CheckpointManager(tmp_path), 50)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointWriteError, match=f"process {pid} "):
        save(manager, 3)
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    save(manager, 4)
    manager.close()
    for fd in (*ready, *go):
        os.close(fd)


def test_a_reader_whose_only_checkpoint_is_replaced_meanwhile_finds_the_new_one(tmp_path):
    writer = CheckpointManager(tmp_path, keep_last=1)
    save(writer, 1)
    reader = CheckpointManager(tmp_path)
    reader._ops = At("listdir", 0, lambda: save(writer, 2))
    assert reader.load_latest().step == 2
    reader._ops = At("listdir", 0, lambda: save(writer, 3))
    assert reader.latest_path().name == "step_000000000003.pt"
    writer.close()


@pytest.mark.parametrize("change", ["prune", "chmod"])
def test_a_file_whose_name_or_mode_changes_while_it_is_read_is_as_good_as_before(
    tmp_path, monkeypatch, change
):
    writer = CheckpointManager(tmp_path, keep_last=1 if change == "prune" else None)
    save(writer, 1)
    path = save(writer, 2)
    real = unpack.load_archive

    def load(*args, **options):
        payload = real(*args, **options)
        monkeypatch.setattr(unpack, "load_archive", real)
        if change == "prune":
            save(writer, 3)
        else:
            path.chmod(0o600)
        return payload

    monkeypatch.setattr(unpack, "load_archive", load)
    found = CheckpointManager(tmp_path).load_latest()
    assert (found.step, found.skipped) == (2, ())
    writer.close()


def test_a_file_whose_bytes_change_while_it_is_read_is_not_used(tmp_path, monkeypatch):
    writer = CheckpointManager(tmp_path)
    save(writer, 1)
    path = save(writer, 2)
    real = unpack.load_archive

    def load(*args, **options):
        payload = real(*args, **options)
        monkeypatch.setattr(unpack, "load_archive", real)
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
        return payload

    monkeypatch.setattr(unpack, "load_archive", load)
    found = CheckpointManager(tmp_path).load_latest()
    assert found.step == 1
    assert "sha256" in found.skipped[0].reason
    writer.close()


def test_the_directory_stays_where_it_was_when_the_program_changes_its_own(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with CheckpointManager("runs") as manager:
        save(manager, 1)
        monkeypatch.chdir(tmp_path / "second")
        path = save(manager, 2)
    assert names(tmp_path / "second") == []
    assert path == tmp_path / "first" / "runs" / "step_000000000002.pt"
    assert path.exists()


def test_a_step_below_the_last_one_is_a_new_run_and_the_newest(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        save(manager, 100)
        path = save(manager, 50)
        assert path.exists()
        assert manager.latest_path() == path
        save(manager, 60)
    assert CheckpointManager(tmp_path).load_latest().step == 60
    assert debris(tmp_path) == []


# ── saves in the background ──────────────────────────────────────────────────────────────────────────


class Held(FsOps):
    """Stops before its first rename until it is let go, and then perhaps fails."""

    def __init__(self, code=None):
        self.began, self.go, self.code = threading.Event(), threading.Event(), code

    def rename(self, source, target):
        self.began.set()
        if not self.go.wait(30):
            raise TimeoutError("nobody let it go")
        if self.code is not None:
            raise OSError(self.code, os.strerror(self.code))
        super().rename(source, target)


def begin(manager, step, value=0.0, code=None):
    """A save in flight, in the midst of its commit; the file system that holds it."""
    manager._ops = Held(code)
    path = manager.save(step, {"value": torch.tensor(value)}, blocking=False)
    assert manager._ops.began.wait(30)
    held, manager._ops = manager._ops, FsOps()
    return held, path


def soon(held):
    threading.Timer(0.1, held.go.set).start()


@pytest.mark.parametrize("shards", [None, 2])
def test_a_save_in_the_background_holds_the_values_of_its_call(tmp_path, shards):
    model = torch.nn.Linear(3, 2)
    losses, data = [0.5], torch.arange(6.0)
    objects = {"model": model, "whole": data, "view": data[2:4], "losses": losses}
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with CheckpointManager(tmp_path, shards=shards) as manager:
        manager._ops = Held()
        path = manager.save(1, objects, blocking=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
            data.zero_()
        losses.append(0.4)
        manager._ops.go.set()
    found = CheckpointManager(tmp_path).load_latest()
    assert found.path == path
    assert all(torch.equal(value, expected[key]) for key, value in found.payload["model"].items())
    assert found.extra["whole"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.extra["view"].tolist() == [2, 3]
    assert found.extra["losses"] == [0.5]


CALLS = {
    "save": lambda manager: save(manager, 9),
    "save in the background": lambda manager: manager.save(9, {}, blocking=False),
    "finish": lambda manager: manager.finish(9, {}),
    "restore": lambda manager: manager.restore({}),
    "load_latest": lambda manager: manager.load_latest(),
    "best_path": lambda manager: manager.best_path(),
    "verify": lambda manager: manager.verify(),
    "prune": lambda manager: manager.prune(),
    "mark_bad": lambda manager: manager.mark_bad(1, "diverged"),
    "copy_to": lambda manager: manager.copy_to(manager.directory.with_name("copy")),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_each_call_waits_for_the_save_in_flight_and_raises_its_error_once(tmp_path, call):
    manager = CheckpointManager(tmp_path / "run", keep_best=("loss", "min"))
    save(manager, 1)
    held, path = begin(manager, 2)
    soon(held)
    call(manager)
    assert path.exists()
    held, path = begin(manager, 3, code=errno.ENOSPC)
    soon(held)
    with pytest.raises(CheckpointWriteError) as caught:
        call(manager)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()
    call(manager)
    manager.close()
    assert debris(tmp_path / "run") == []


def test_paths_and_the_cadence_do_not_wait(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        first = save(manager, 1)
        held, second = begin(manager, 2)
        assert manager.latest_path() == first
        assert manager.path_for(2) == second
        assert not manager.should_save(2)
        assert not second.exists()
        held.go.set()
    assert manager.latest_path() == second


def test_nothing_is_pruned_on_the_strength_of_an_unfinished_save(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    first = save(manager, 1)
    held, second = begin(manager, 2, code=errno.EIO)
    assert first.exists()
    held.go.set()
    with pytest.raises(CheckpointWriteError):
        manager.prune()
    assert first.exists()
    held, second = begin(manager, 2)
    held.go.set()
    manager.prune()
    assert not first.exists()
    assert second.exists()
    manager.close()


def test_a_busy_manager_skips_if_asked_but_never_a_blocking_save_nor_the_last(tmp_path, caplog):
    with CheckpointManager(tmp_path, when_busy="skip", keep_last=None) as manager:
        held, _ = begin(manager, 1)
        assert manager.save(2, {}, blocking=False) is None
        assert "step 2 was skipped" in caplog.text
        soon(held)
        assert save(manager, 3).exists()
        held, _ = begin(manager, 4)
        soon(held)
        last = manager.finish(5, {}, blocking=False)
    assert last.exists()
    assert [report.step for report in manager.verify()] == [5, 4, 3, 1]


def test_a_step_that_is_saved_in_the_background_is_finished(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        held, path = begin(manager, 4)
        soon(held)
        assert manager.finish(4, {}) == path
        second = manager.save(4, {}, blocking=False)
    assert second.name == "step_000000000004.g1.pt"
    assert not path.exists()


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match=r"\['extra'\]\['odd'\]"):
            manager.save(1, {"odd": object()}, blocking=False)
        with pytest.raises(TypeError, match="blocking"):
            manager.save(1, {}, blocking=0)
        assert names(tmp_path) == []
        assert manager.save(1, {}, blocking=False).name == "step_000000000001.pt"


def test_another_process_that_writes_is_found_at_the_call(tmp_path):
    manager = CheckpointManager(tmp_path)
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        save(CheckpointManager(tmp_path), 50)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointWriteError, match=f"process {pid} "):
        manager.save(3, {}, blocking=False)
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    manager.close()
    for fd in (*ready, *go):
        os.close(fd)


def test_a_fork_during_a_save_in_the_background_is_refused_and_does_not_hang(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        held, _ = begin(manager, 2)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                save(manager, 9)
            except CheckpointWriteError as error:
                manager.close()
                code = 0 if error.errno == errno.EAGAIN and manager.load_latest().step == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        held.go.set()
    assert manager.load_latest().step == 2


def test_an_interrupted_close_leaves_the_save_running_and_the_right_with_it(tmp_path):
    manager = CheckpointManager(tmp_path)
    held, path = begin(manager, 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not path.exists()
    assert not second_process_may_write(tmp_path)
    held.go.set()
    manager.close()
    assert path.exists()
    assert second_process_may_write(tmp_path)


def test_two_managers_of_a_process_save_in_the_background_one_after_the_other(tmp_path):
    with (
        CheckpointManager(tmp_path, keep_last=None) as one,
        CheckpointManager(tmp_path, keep_last=None) as two,
    ):
        for step in range(1, 6):
            one.save(step, {"who": "one"}, blocking=False)
            two.save(step, {"who": "two"}, blocking=False)
    reports = CheckpointManager(tmp_path).verify()
    assert len(reports) == 10
    assert all(report.ok for report in reports)
    assert debris(tmp_path) == []
