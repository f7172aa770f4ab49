"""Temps, temp directories and what is left of them: `Commit` and `sweep` by themselves."""

import errno
import hashlib
import os
import stat

import pytest
import torch

from checkpoint.helpers import FailingOps, names
from resumable_data.checkpoint import atomic_torch_save
from resumable_data.checkpoint.atomic import Commit, make_directory, sweep
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.temps import is_dead, temp_name
from resumable_data.errors import CheckpointWriteError


def put(content):
    return lambda sink: sink.write(content)


def write_directory(commit):
    temp = commit.temp_directory("step")
    commit.write("a.pt", put(b"a" * 1000), inside=temp)
    commit.write("index.json", put(b"{}"), inside=temp)
    commit.sync_inside(temp)
    return temp


def test_a_directory_gets_its_place_with_all_that_is_in_it(tmp_path):
    ops = FailingOps()
    with Commit(tmp_path, ops) as commit:
        temp = commit.temp_directory("step")
        written = commit.write("a.pt", put(b"abc"), inside=temp)
        assert names(tmp_path) == [temp.name]
        assert temp.name.startswith(".step.")
        assert (written.temp, written.size) == (temp / "a.pt", 3)
        assert written.sha256 == hashlib.sha256(b"abc").hexdigest()
        commit.sync_inside(temp)
        assert commit.rename_directory(temp, "step") == tmp_path / "step"
        commit.sync()
    assert names(tmp_path) == ["step"]
    assert (tmp_path / "step" / "a.pt").read_bytes() == b"abc"
    assert ops.calls == ["open", "write", "fsync", "close", "dirsync", "rename", "dirsync"]


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_failed_commit_removes_its_directory_and_leaves_what_others_put_into_it(tmp_path, kind):
    for foreign in (False, True):
        place = tmp_path / str(foreign)
        place.mkdir()

        def fail(place=place, foreign=foreign):
            with Commit(place, FsOps()) as commit:
                temp = write_directory(commit)
                if foreign:
                    (temp / "notes.txt").write_text("mine")
                raise kind(errno.EIO, "the disk")

        with pytest.raises(CheckpointWriteError if kind is OSError else kind):
            fail()
        assert [names(place / name) for name in names(place)] == [["notes.txt"]] * foreign


def place_directory(directory, ops):
    with Commit(directory, ops) as commit:
        commit.rename_directory(write_directory(commit), "step")


def test_each_call_of_a_directory_may_fail_and_nothing_is_left(tmp_path):
    clean = FailingOps()
    (tmp_path / "clean").mkdir()
    place_directory(tmp_path / "clean", clean)
    assert clean.calls == ["open", "write", "fsync", "close"] * 2 + ["dirsync", "rename"]
    directory = tmp_path / "failing"
    directory.mkdir()
    for at in range(len(clean.calls)):
        with pytest.raises(CheckpointWriteError) as caught:
            place_directory(directory, FailingOps(at=at, code=errno.ENOSPC))
        assert caught.value.errno == errno.ENOSPC
        assert names(directory) == []


def write_beside(directory, plant):
    with Commit(directory, FsOps()) as commit:
        temp = commit.temp_directory("step")
        plant(temp / "a.pt")
        commit.write("a.pt", put(b"new"), inside=temp)


def test_a_file_inside_replaces_nothing_and_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in (lambda path: path.symlink_to(victim), lambda path: path.write_text("first")):
        with pytest.raises(CheckpointWriteError) as caught:
            write_beside(tmp_path, plant)
        assert caught.value.errno == errno.EEXIST
    assert victim.read_text() == "mine"


def test_without_durability_nothing_is_synced_and_all_is_there(tmp_path):
    ops = FailingOps()
    with Commit(tmp_path, ops, durable=False) as commit:
        commit.rename_directory(write_directory(commit), "step")
        written = commit.write("x.json", put(b"{}"))
        commit.rename(written)
        commit.sync()
    assert names(tmp_path) == ["step", "x.json"]
    assert {"open", "write", "close", "rename"} == set(ops.calls)
    assert written.sha256 == hashlib.sha256(b"{}").hexdigest()


def test_directories_of_the_dead_are_swept_up_to_what_is_not_ours(tmp_path):
    def left(target, *inside, pid="999999999"):
        parts = temp_name(target).split("-")
        parts[2] = pid
        place = tmp_path / "-".join(parts)
        place.mkdir()
        for name in inside:
            (place / name).write_text("")
        return place

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.pt").write_text("mine")
    whole, empty = left("step", "a.pt", "index.json"), left("step")
    mixed, other = left("step", "a.pt", "notes.txt"), left("other", "a.pt")
    alive = left("step", "a.pt", pid=str(os.getpid()))
    link = whole.with_name(whole.name.replace("-999999999-", "-999999998-"))
    link.symlink_to(outside)
    assert all(is_dead(p.name, ours=lambda t: t == "step", alone=False) for p in (whole, mixed, link))

    members = ("a.pt", "index.json").__contains__
    for _ in range(2):  # what stays is no error the next time either
        sweep(tmp_path, FsOps(), ours=lambda t: t == "step", alone=False, is_member=members)
        assert not any(os.path.lexists(place) for place in (whole, empty, link))
        assert names(mixed) == ["notes.txt"]
        assert (names(other), names(alive)) == (["a.pt"], ["a.pt"])
        assert (outside / "a.pt").read_text() == "mine"


def test_directories_are_made_through_the_operations_under_the_umask_and_each_is_synced(tmp_path):
    class Noting(FailingOps):
        def mkdir(self, path):
            self._count(f"mkdir {os.path.relpath(path, tmp_path)}")
            super().mkdir(path)

        def dirsync(self, path):
            self._count(f"dirsync {os.path.relpath(path, tmp_path)}")
            FsOps.dirsync(self, path)

    before, ops = os.umask(0o027), Noting()
    try:
        make_directory(tmp_path / "a" / "b", ops)
    finally:
        os.umask(before)
    assert ops.calls == ["mkdir a", "dirsync .", "mkdir a/b", "dirsync a"]
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o750
    make_directory(tmp_path / "a" / "b", ops)
    assert len(ops.calls) == 4
    with pytest.raises(CheckpointWriteError) as caught:
        make_directory(tmp_path / "c", Noting(at=0, code=errno.EROFS))
    assert caught.value.errno == errno.EROFS


def test_a_file_system_that_takes_no_hints_is_written_all_the_same(tmp_path, monkeypatch):
    hints = []

    def refuse(*hint):
        hints.append(hint)
        raise OSError(errno.EOPNOTSUPP, "no hints")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    state = torch.rand(5 << 20)
    atomic_torch_save(state, tmp_path / "x.pt")
    assert hints
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True), state)


def test_an_error_of_the_disk_after_a_hint_still_fails_the_save(tmp_path, monkeypatch):
    class Late(FailingOps):
        def writeback(self, fd, offset, count):
            self.hinted = True

    ops = Late(at=0, code=errno.EIO, only={"fsync"})
    with pytest.raises(CheckpointWriteError) as caught, Commit(tmp_path, ops) as commit:
        commit.write("x", put(bytes(9 << 20)))
    assert (caught.value.errno, ops.hinted, names(tmp_path)) == (errno.EIO, True, [])
