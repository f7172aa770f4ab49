"""Saves, readers and closes that meet: threads, signal handlers, other processes."""

import errno
import os
import threading

import pytest
import torch

from checkpoint.helpers import debris, names
from resumable_data.checkpoint import CheckpointManager, gate
from resumable_data.checkpoint import writer as writer_module
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.lock import LOCK_NAME
from resumable_data.errors import CheckpointWriteError


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
    real = gate._load

    def load(*args):
        payload = real(*args)
        monkeypatch.setattr(gate, "_load", real)
        if change == "prune":
            save(writer, 3)
        else:
            path.chmod(0o600)
        return payload

    monkeypatch.setattr(gate, "_load", load)
    found = CheckpointManager(tmp_path).load_latest()
    assert (found.step, found.skipped) == (2, ())
    writer.close()


def test_a_file_whose_bytes_change_while_it_is_read_is_not_used(tmp_path, monkeypatch):
    writer = CheckpointManager(tmp_path)
    save(writer, 1)
    path = save(writer, 2)
    real = gate._load

    def load(*args):
        payload = real(*args)
        monkeypatch.setattr(gate, "_load", real)
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
        return payload

    monkeypatch.setattr(gate, "_load", load)
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
