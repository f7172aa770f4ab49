"""Verifying checkpoints in place, and copying one elsewhere."""

import errno
import os
import shutil

import pytest
import torch

from checkpoint.helpers import FailingOps, Run, debris, flip, names
from resumable_data.checkpoint import CheckpointManager, transfer
from resumable_data.checkpoint.atomic import FsOps
from resumable_data.checkpoint.lock import LOCK_NAME
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
    CheckpointWriteError,
)

KEY = b"k" * 32
LAYOUTS = pytest.mark.parametrize("shards", [None, 2])

# From Python 3.12 on a fork beside other threads, torch's among them, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def save(manager, step, value=None):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, float(step if value is None else value))
    return manager.save(step, {"model": model})


def weight(manager):
    return float(manager.load_latest().payload["model"]["weight"][0, 0])


def files(path):
    """The bytes of all files of a checkpoint, by name."""
    if path.is_dir():
        return {f"{path.name}/{own.name}": own.read_bytes() for own in path.iterdir()}
    return {own.name: own.read_bytes() for own in (path, path.with_suffix(".json"))}


def damage(path):
    flip(path / "model.shard-000.pt" if path.is_dir() else path)


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────


@LAYOUTS
def test_each_checkpoint_is_reported_the_newest_first(tmp_path, shards):
    with CheckpointManager(tmp_path, shards=shards) as manager:
        paths = [save(manager, step) for step in (1, 2, 3)]
        damage(paths[1])
        manager.mark_bad(1, "the loss was NaN")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)}
    reports = CheckpointManager(tmp_path).verify()
    assert [report.path for report in reports] == paths[::-1]
    assert [(report.step, report.generation) for report in reports] == [(3, 0), (2, 0), (1, 0)]
    assert [report.ok for report in reports] == [True, False, False]
    assert reports[0].reason == ""
    assert "sha256" in reports[1].reason
    assert reports[2].reason == "marked as bad: the loss was NaN"
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)} == before


def test_one_is_verified_by_step_or_path_and_its_newest_generation_is_meant(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        first = save(manager, 1)
        second = save(manager, 2)
        damage(second)
        third = save(manager, 2, 9)  # the damaged one is superseded and goes
        assert not second.exists()
        assert [report.path for report in manager.verify(2)] == [third]
        assert [report.path for report in manager.verify(first)] == [first]
        assert [report.path for report in manager.verify(str(first))] == [first]
        with pytest.raises(CheckpointNotFoundError, match=r"step 7.*\[1, 2\]"):
            manager.verify(7)
        with pytest.raises(CheckpointNotFoundError, match=second.name):
            manager.verify(second)
        with pytest.raises(ValueError, match="directory of this manager"):
            manager.verify(tmp_path / "elsewhere" / first.name)
        with pytest.raises(TypeError, match="step must be an int"):
            manager.verify(1.5)


def test_nothing_to_verify(tmp_path):
    manager = CheckpointManager(tmp_path / "none")
    assert manager.verify() == ()
    with pytest.raises(CheckpointNotFoundError, match="step 1"):
        manager.verify(1)
    assert names(tmp_path) == []


def test_a_checkpoint_without_index_or_signature_is_reported(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        save(manager, 1).with_suffix(".json").unlink()
        save(manager, 2)
    signed, lone = CheckpointManager(tmp_path, hmac_key=KEY).verify()
    assert {signed.ok, lone.ok} == {False}
    reasons = {signed.step: signed.reason, lone.step: lone.reason}
    assert "missing" in reasons[1]
    assert "sign" in reasons[2]


def test_one_that_is_pruned_while_others_are_read_is_not_reported(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        first = save(manager, 1)
        second = save(manager, 2)
        real = transfer.Store.load

        def load(store, entry):
            if first.exists():
                first.unlink()
            return real(store, entry)

        monkeypatch.setattr(transfer.Store, "load", load)
        assert [report.path for report in manager.verify()] == [second]


def test_verifying_applies_nothing(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path, every_steps=2) as manager:
        run.train(4, manager)
        run.train(5)
        before = {key: value.clone() for key, value in run.model.state_dict().items()}
        streams = torch.get_rng_state()
        assert all(report.ok for report in manager.verify())
        assert torch.equal(torch.get_rng_state(), streams)
        assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())


# ── copy_to ──────────────────────────────────────────────────────────────────────────────────────────


@LAYOUTS
@pytest.mark.parametrize("key", [None, KEY])
def test_a_copy_has_the_same_names_and_bytes_and_loads(tmp_path, shards, key):
    source, target = tmp_path / "runs", tmp_path / "a" / "copies"
    with CheckpointManager(source, shards=shards, hmac_key=key) as manager:
        save(manager, 1)
        path = save(manager, 2)
        copy = manager.copy_to(target)
        assert copy == target / path.name
        assert files(copy) == files(path)
        assert sorted(names(target)) == sorted({LOCK_NAME} | {name.partition("/")[0] for name in files(path)})
        older = manager.copy_to(target, 1)
        assert files(older) == files(manager.path_for(1))
    copied = CheckpointManager(target, hmac_key=key)
    assert weight(copied) == 2
    assert [report.ok for report in copied.verify()] == [True, True]


def test_a_copy_of_another_layout_than_the_managers_own(tmp_path):
    with CheckpointManager(tmp_path / "a", shards=3) as manager:
        save(manager, 1)
    with CheckpointManager(tmp_path / "a") as manager:
        path = manager.copy_to(tmp_path / "b")
    assert path.is_dir()
    assert weight(CheckpointManager(tmp_path / "b")) == 1


@LAYOUTS
def test_a_copy_that_is_there_is_left_alone(tmp_path, shards):
    with CheckpointManager(tmp_path / "a", shards=shards) as manager:
        path = save(manager, 1)
        copy = manager.copy_to(tmp_path / "b", path)
        before = copy.stat()
        assert manager.copy_to(tmp_path / "b") == copy
        assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert manager.copy_to(tmp_path / "a") == path  # onto itself
        assert save(manager, 2).exists()


def mark(path):
    with CheckpointManager(path.parent) as manager:
        manager.mark_bad(path, "diverged")


def another(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with CheckpointManager(path.parent, shards=2 if path.suffix == "" else None) as manager:
        save(manager, 1, 5)


def other_layout(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with CheckpointManager(path.parent, shards=None if path.suffix == "" else 2) as manager:
        save(manager, 1)


@LAYOUTS
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (another, "another checkpoint"),
        (damage, "a damaged copy"),
        (mark, r"marked as bad \(diverged"),
        (other_layout, "another"),
    ],
    ids=["another", "damaged", "marked", "other layout"],
)
def test_what_is_there_under_the_same_name_is_never_overwritten(tmp_path, shards, change, text):
    with CheckpointManager(tmp_path / "a", shards=shards) as manager:
        save(manager, 1)
        change(manager.copy_to(tmp_path / "b"))
        there = {name: (tmp_path / "b" / name).lstat().st_ino for name in names(tmp_path / "b")}
        with pytest.raises(CheckpointWriteError, match=text) as caught:
            manager.copy_to(tmp_path / "b")
        assert caught.value.errno == errno.EEXIST
        assert {name: (tmp_path / "b" / name).lstat().st_ino for name in names(tmp_path / "b")} == there


def test_nothing_to_copy(tmp_path):
    manager = CheckpointManager(tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint to copy"):
        manager.copy_to(tmp_path / "b")
    with pytest.raises(CheckpointNotFoundError, match="step 3"):
        manager.copy_to(tmp_path / "b", 3)
    assert names(tmp_path) == []


@LAYOUTS
def test_the_newest_that_is_whole_is_copied_and_a_named_one_must_be_whole(tmp_path, shards):
    with CheckpointManager(tmp_path / "a", shards=shards, keep_last=None) as manager:
        paths = [save(manager, step) for step in (1, 2, 3, 4)]
        damage(paths[2])
        manager.mark_bad(4, "diverged")
        assert manager.copy_to(tmp_path / "b").name == paths[1].name
        with pytest.raises(CheckpointCorruptError, match="sha256"):
            manager.copy_to(tmp_path / "b", 3)
        with pytest.raises(CheckpointCorruptError, match="marked as bad"):
            manager.copy_to(tmp_path / "b", 4)
        damage(paths[1])
        damage(paths[0])
        with pytest.raises(CheckpointCorruptError, match="None of the 4"):
            manager.copy_to(tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_an_unsigned_checkpoint_is_not_copied_under_a_key(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        save(manager, 1)
    with pytest.raises(CheckpointSecurityError, match="sign"):
        CheckpointManager(tmp_path / "a", hmac_key=KEY).copy_to(tmp_path / "b", 1)


@LAYOUTS
def test_bytes_that_change_between_verifying_and_copying_are_found(tmp_path, shards, monkeypatch):
    with CheckpointManager(tmp_path / "a", shards=shards) as manager:
        path = save(manager, 1)
        real = transfer._commit
        monkeypatch.setattr(transfer, "_commit", lambda *args: (damage(path), real(*args)))
        with pytest.raises(CheckpointCorruptError, match="changed since it was verified"):
            manager.copy_to(tmp_path / "b")
        assert names(tmp_path / "b") == [LOCK_NAME]


@LAYOUTS
def test_an_index_that_changes_between_verifying_and_copying_is_found(tmp_path, shards, monkeypatch):
    with CheckpointManager(tmp_path / "a", shards=shards) as manager:
        path = save(manager, 1)
        with CheckpointManager(tmp_path / "c", shards=shards) as other:
            foreign = save(other, 1)
        real = transfer._copy_data

        def copy_data(*args):
            written = real(*args)
            own = (path / "index.json", foreign / "index.json")
            if shards is None:
                own = (path.with_suffix(".json"), foreign.with_suffix(".json"))
            own[0].write_bytes(own[1].read_bytes())
            return written

        monkeypatch.setattr(transfer, "_copy_data", copy_data)
        with pytest.raises(CheckpointCorruptError, match="changed since it was verified"):
            manager.copy_to(tmp_path / "b")
        assert names(tmp_path / "b") == [LOCK_NAME]


@LAYOUTS
def test_one_that_is_pruned_meanwhile_is_followed_by_a_newer_one(tmp_path, shards, monkeypatch):
    with CheckpointManager(tmp_path / "a", shards=shards, keep_last=1) as manager:
        save(manager, 1)
        real = transfer._commit

        def commit(*args):
            monkeypatch.setattr(transfer, "_commit", real)
            save(manager, 2)
            return real(*args)

        monkeypatch.setattr(transfer, "_commit", commit)
        assert "2" in manager.copy_to(tmp_path / "b").name
        assert debris(tmp_path / "b") == []
        assert [report.step for report in CheckpointManager(tmp_path / "b").verify()] == [2]


@LAYOUTS
def test_a_copy_that_fails_at_any_call_leaves_nothing_and_the_next_one_works(tmp_path, shards):
    with CheckpointManager(tmp_path / "a", shards=shards) as manager:
        save(manager, 1)
        manager._ops = FailingOps()
        manager.copy_to(tmp_path / "counted")
        calls = manager._ops.calls
        assert calls.count("fsync") == (2 if shards is None else 4)
        assert "dirsync" in calls
        for at in range(len(calls)):
            target = tmp_path / f"b{at}"
            manager._ops = FailingOps(at=at, code=errno.ENOSPC)
            with pytest.raises(CheckpointWriteError) as caught:
                manager.copy_to(target)
            assert caught.value.errno == errno.ENOSPC
            manager._ops = FsOps()
            left = CheckpointManager(target).load_latest()
            assert left is None or left.step == 1
            assert weight(CheckpointManager(manager.copy_to(target).parent)) == 1
            assert debris(target) == []


def test_a_target_that_another_process_writes_is_refused(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        save(manager, 1)
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        save(CheckpointManager(tmp_path / "b"), 5)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointWriteError, match=f"process {pid} "):
        CheckpointManager(tmp_path / "a").copy_to(tmp_path / "b")
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    assert CheckpointManager(tmp_path / "a").copy_to(tmp_path / "b").exists()
    for fd in (*ready, *go):
        os.close(fd)


def test_copying_from_a_directory_takes_no_right_to_write_it(tmp_path):
    with CheckpointManager(tmp_path / "a") as writer:
        save(writer, 1)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if CheckpointManager(tmp_path / "a").copy_to(tmp_path / "b").exists() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_disabled_managers_copy_and_mark_nothing_and_still_verify(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        save(manager, 1)
    quiet = CheckpointManager(tmp_path / "a", enabled=False)
    assert quiet.copy_to(tmp_path / "b") is None
    quiet.mark_bad(1, "diverged")
    assert [report.ok for report in quiet.verify()] == [True]
    assert not (tmp_path / "b").exists()


def test_a_newer_schema_is_a_mismatch_for_verify_and_copy(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        index = save(manager, 1).with_suffix(".json")
        index.write_bytes(_newer(index.read_bytes()))
        for call in (manager.verify, lambda: manager.copy_to(tmp_path / "b")):
            with pytest.raises(CheckpointMismatchError, match="newer"):
                call()


def _newer(data):
    import hashlib
    import json

    content = json.loads(data)
    content["schema"] = "resumable_data.index.v2"
    content.pop("index_sha256")

    def canonical(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    seal = hashlib.sha256(canonical(content)).hexdigest()
    return canonical(content | {"index_sha256": seal})
