import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.helpers import FailingOps, Run, debris, flip, names
from resumable_data.checkpoint import CheckpointManager
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointSecurityError,
    CheckpointWriteError,
    RNGRestoreError,
    StateMismatchError,
)

# From Python 3.12 on a fork beside other threads, torch's among them, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def opened():
    managers = []

    def build(*args, **options):
        managers.append(CheckpointManager(*args, **options))
        return managers[-1]

    yield build
    for manager in managers:
        manager.close()


def steps(directory):
    return [name for name in names(directory) if name.endswith(".pt")]


def save(manager, step, value=None):
    return manager.save(step, {"value": torch.tensor(float(step if value is None else value))})


@pytest.mark.parametrize("stop", [3, 6, 7, 9])
def test_a_resumed_run_is_the_same_run(tmp_path, opened, stop):
    reference = Run().train(14)
    first = Run()
    assert first.resume(opened(tmp_path, every_steps=3)) is None
    first.train(stop, opened(tmp_path, every_steps=3))
    second = Run(seed=77)
    manager = opened(tmp_path, every_steps=3)
    found = second.resume(manager)
    assert found.step == stop // 3 * 3
    assert found.skipped == ()
    assert second.train(14, manager) == reference
    assert debris(tmp_path) == []


def test_a_run_without_its_random_streams_is_another_run(tmp_path, opened):
    reference = Run().train(8)
    first = Run()
    first.train(6, opened(tmp_path, every_steps=6))
    second = Run(seed=77)
    second.resume(opened(tmp_path))
    torch.manual_seed(1)
    assert second.train(8) != reference


def test_what_is_found(tmp_path, opened):
    run = Run()
    run.train(4)
    manager = opened(tmp_path, config={"lr": 0.1})
    objects = run.objects | {"best": 0.5, "names": ["a", "b"]}
    path = manager.save(4, objects, state={"losses": run.losses, "note": "x"}, metrics={"loss": 1.5})
    found = opened(tmp_path).restore(Run().objects | {"best": 0.0})
    assert found.path == path == manager.latest_path() == manager.path_for(4)
    assert found.state == {
        "step": 4,
        "epoch": 0,
        "batch_in_epoch": 4,
        "losses": run.losses,
        "note": "x",
    }
    assert found.extra == {"best": 0.5, "names": ["a", "b"]}
    assert found.payload["config"] == {"lr": 0.1}
    looked = opened(tmp_path).load_latest()
    assert (looked.step, looked.state, looked.path) == (4, found.state, path)
    assert json.loads(json.dumps(found.state)) == found.state


def test_an_empty_or_missing_directory_is_a_fresh_start_and_is_not_created(tmp_path, opened):
    for directory in (tmp_path, tmp_path / "a" / "b"):
        manager = opened(directory)
        assert manager.restore({}) is None
        assert manager.load_latest() is None
        assert manager.latest_path() is None
        assert manager.path_for(5).name == "step_000000000005.pt"
    assert names(tmp_path) == []
    save(opened(tmp_path / "a" / "b"), 1)
    assert steps(tmp_path / "a" / "b") == ["step_000000000001.pt"]


@pytest.mark.parametrize(("before", "after"), [(9, 10), (99_999, 100_000)])
def test_steps_are_numbers_not_texts(tmp_path, opened, before, after):
    manager = opened(tmp_path, keep_last=1)
    for step in (before, after):
        save(manager, step)
    assert opened(tmp_path).load_latest().step == after
    assert steps(tmp_path) == [f"step_{after:012d}.pt"]


def test_the_same_step_twice_is_two_generations_and_the_newer_one_stays(tmp_path, opened):
    manager = opened(tmp_path)
    first = save(manager, 5, 1)
    before = first.stat().st_ino
    second = save(manager, 5, 2)
    assert second.name == "step_000000000005.g1.pt"
    assert manager.path_for(5) == second
    assert second.stat().st_ino != before
    assert opened(tmp_path).load_latest().extra["value"] == 2
    assert steps(tmp_path) == [second.name]  # the older generation goes after the commit
    assert save(manager, 5, 3).name == "step_000000000005.g2.pt"


def test_a_damaged_step_is_passed_over_and_saved_again(tmp_path, opened):
    manager = opened(tmp_path)
    for step in (10, 20):
        bad = save(manager, step)
    flip(bad)
    damaged = bad.read_bytes()
    resumed = opened(tmp_path)
    found = resumed.restore({})
    assert found.step == 10
    assert [skip.path for skip in found.skipped] == [bad]
    assert "sha256" in found.skipped[0].reason
    again = save(resumed, 20, 21)
    assert again.name == "step_000000000020.g1.pt"
    assert not bad.exists()  # superseded by its next generation, and not before that was committed
    assert damaged != again.read_bytes()
    newest = opened(tmp_path).load_latest()
    assert (newest.step, newest.extra["value"], newest.skipped) == (20, 21, ())


def test_a_new_run_at_lower_steps_in_an_old_directory_is_the_newest(tmp_path, opened):
    old = opened(tmp_path, keep_last=2)
    for step in (100, 200):
        save(old, step)
    new = opened(tmp_path, keep_last=2)
    save(new, 5, -5)
    assert opened(tmp_path).load_latest().extra["value"] == -5
    assert len(steps(tmp_path)) == 3  # its own one and, until it has two, the others
    restarted = opened(tmp_path, keep_last=2)
    assert restarted.restore({}).step == 5
    save(restarted, 10, -10)
    assert opened(tmp_path).load_latest().extra["value"] == -10
    indexes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("step_*.json"))]
    assert {index["run"]["ordinal"] for index in indexes} == {2}
    assert len({index["run"]["id"] for index in indexes}) == 1


def test_keep_last_counts_good_ones_and_keeps_the_one_resumed_from(tmp_path, opened):
    first = opened(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        save(first, step)
    assert steps(tmp_path) == ["step_000000000002.pt", "step_000000000003.pt"]
    flip(tmp_path / "step_000000000003.pt")
    second = opened(tmp_path, keep_last=2)
    assert second.restore({}).step == 2
    for step in (4, 5, 6):
        save(second, step)
    assert steps(tmp_path) == [f"step_{step:012d}.pt" for step in (2, 5, 6)]


def test_a_checkpoint_that_rotted_after_its_save_does_not_count(tmp_path, opened):
    manager = opened(tmp_path, keep_last=2)
    for step in (1, 2):
        save(manager, step)
    flip(tmp_path / "step_000000000002.pt")
    save(manager, 3)
    assert steps(tmp_path) == [f"step_{step:012d}.pt" for step in (1, 2, 3)]


def test_keep_last_none_keeps_all(tmp_path, opened):
    manager = opened(tmp_path, keep_last=None)
    for step in range(1, 7):
        save(manager, step)
    assert len(steps(tmp_path)) == 6
    other = opened(tmp_path, keep_last=2)
    other.restore({})
    other.prune()
    assert len(steps(tmp_path)) == 6  # one is verified by it: two would be wanted
    save(other, 7)
    assert len(steps(tmp_path)) == 2


def test_should_save_and_finish(tmp_path, opened):
    manager = opened(tmp_path, every_steps=3)
    assert [step for step in range(10) if manager.should_save(step)] == [3, 6, 9]
    path = save(manager, 3)
    assert manager.finish(3, {"value": 1}) == path
    assert steps(tmp_path) == ["step_000000000003.pt"]
    assert manager.finish(4, {"value": 1}).name == "step_000000000004.pt"
    flip(tmp_path / "step_000000000004.pt")
    assert manager.finish(4, {"value": 1}).name == "step_000000000004.g1.pt"
    resumed = opened(tmp_path)
    resumed.restore({})
    assert resumed.finish(4, {"value": 1}).name == "step_000000000004.g1.pt"


def test_disabled_managers_write_nothing_and_still_restore(tmp_path, opened):
    save(opened(tmp_path), 3)
    before = names(tmp_path)
    manager = opened(tmp_path, every_steps=1, enabled=False)
    assert not manager.should_save(5)
    assert save(manager, 5) is None
    assert manager.finish(6, {}) is None
    manager.prune()
    assert manager.restore({}).step == 3
    assert names(tmp_path) == before


def test_metrics_are_numbers(tmp_path, opened):
    manager = opened(tmp_path)
    with pytest.raises(TypeError, match=r"metrics\['loss'\]"):
        manager.save(1, {}, metrics={"loss": "low"})
    assert names(tmp_path) == []
    metrics = {"a": float("nan"), "b": np.float32(0.5), "c": 3, "d": torch.tensor(2.0), "e": float("inf")}
    manager.save(1, {}, metrics=metrics)
    index = json.loads((tmp_path / "step_000000000001.json").read_text())
    assert index["metrics"] == {"a": None, "b": 0.5, "c": 3, "d": 2.0, "e": None}


def test_what_cannot_be_read_back_is_refused_by_its_key_path_before_any_file(tmp_path, opened):
    with pytest.raises(TypeError, match=r"\['state'\]\['losses'\]\[1\] is a numpy.float64"):
        opened(tmp_path).save(1, {}, state={"losses": [0.5, np.float64(0.5)]})
    assert names(tmp_path) == []


# ── mismatches are never an older checkpoint ─────────────────────────────────────────────────────────


def test_an_edited_model_is_a_mismatch_and_changes_nothing(tmp_path, opened):
    run = Run()
    run.train(4, opened(tmp_path, every_steps=2))
    other = Run(width=7, seed=5)
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    streams = torch.get_rng_state()
    with pytest.raises(CheckpointMismatchError, match=r"model: .*0\.weight is \[6, 4\].*\[7, 4\]"):
        opened(tmp_path).restore(other.objects)
    assert all(torch.equal(value, before[key]) for key, value in other.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), streams)
    assert other.data.batch_in_epoch == 0


def test_loader_and_rng_errors_pass_through_and_override_reaches_the_loader(tmp_path, opened, monkeypatch):
    run = Run()
    run.train(2, opened(tmp_path, every_steps=1, config={"a": 1}))
    other = Run(seed=3)
    other.data.dataset_size = 99
    manager = opened(tmp_path, config={"a": 2})
    with pytest.raises(CheckpointMismatchError, match="a was 1, is 2"):
        manager.restore(other.objects)
    with pytest.raises(StateMismatchError, match="dataset_size"):
        manager.restore(other.objects, override={"config"})
    with pytest.raises(ValueError, match="unknown override"):
        manager.restore(other.objects, override={"config", "dataset_sise"})
    with pytest.raises(ValueError, match="dataset_size"):
        manager.restore({"model": other.model}, override={"config", "dataset_size"})
    assert manager.restore(other.objects, override={"config", "dataset_size"}).step == 2
    assert other.data.overrides == [{"dataset_size"}]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RNGRestoreError, match="rank"):
        opened(tmp_path).restore(Run().objects)


def test_generators_are_captured_and_restored(tmp_path, opened):
    generator = np.random.default_rng(3)
    generator.random(5)
    opened(tmp_path, generators={"aug": generator}).save(1, {})
    expected = generator.random(3).tolist()
    fresh = np.random.default_rng(8)
    with pytest.raises(RNGRestoreError, match="aug"):
        opened(tmp_path).restore({})
    opened(tmp_path, generators={"aug": fresh}).restore({})
    assert fresh.random(3).tolist() == expected


# ── choosing ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [None, "", "{", '{"step":1,"file":"step_000000000001.pt"}', "\0" * 50])
def test_latest_json_is_a_hint_only(tmp_path, opened, content):
    manager = opened(tmp_path)
    for step in (1, 2):
        save(manager, step)
    hint = tmp_path / "latest.json"
    assert json.loads(hint.read_text())["file"] == "step_000000000002.pt"
    hint.unlink()
    if content is not None:
        hint.write_text(content)
    assert opened(tmp_path).load_latest().step == 2


def damage_index(path):
    flip(path.with_suffix(".json"), 20)


DAMAGE = {
    "bit": flip,
    "first byte": lambda path: flip(path, 0),
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte more": lambda path: os.truncate(path, path.stat().st_size + 1),
    "index bit": damage_index,
    "index gone": lambda path: path.with_suffix(".json").unlink(),
    "index empty": lambda path: os.truncate(path.with_suffix(".json"), 0),
    "link": lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "other step's file": lambda path: path.write_bytes(path.with_name("step_000000000001.pt").read_bytes()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_that_verifies_is_used_and_the_others_are_named(tmp_path, opened, kind, caplog):
    manager = opened(tmp_path)
    for step in (1, 2, 3):
        path = save(manager, step)
    DAMAGE[kind](path)
    found = opened(tmp_path).restore({})
    assert found.step == 2
    assert [skip.path for skip in found.skipped] == [path]
    assert path.name in caplog.text


@pytest.mark.parametrize("kind", DAMAGE)
def test_where_nothing_verifies_each_file_is_named_and_nothing_overwritten(tmp_path, opened, kind):
    manager = opened(tmp_path)
    paths = [save(manager, step) for step in (1, 2)]
    for path in reversed(paths):
        DAMAGE[kind](path)
    if kind == "other step's file":
        flip(paths[0])
    kept = {path: path.lstat().st_ino for path in paths}
    with pytest.raises((CheckpointCorruptError, CheckpointSecurityError)) as caught:
        opened(tmp_path).restore({})
    for path in paths:
        assert path.name in str(caught.value)
        assert path.lstat().st_ino == kept[path]
    assert (type(caught.value) is CheckpointSecurityError) == (kind in ("link", "fifo", "directory"))


def test_a_lone_index_was_never_committed(tmp_path, opened):
    manager = opened(tmp_path)
    path = save(manager, 1)
    path.unlink()
    assert opened(tmp_path).restore({}) is None
    save(opened(tmp_path), 2)
    assert not path.with_suffix(".json").exists()  # swept by the next save


# ── one writer ───────────────────────────────────────────────────────────────────────────────────────

SECOND = """
import sys
from resumable_data.checkpoint import CheckpointManager
from resumable_data.errors import CheckpointWriteError
manager = CheckpointManager(sys.argv[1])
print(manager.load_latest().step)
try:
    manager.save(9, {})
    print("saved")
except CheckpointWriteError as error:
    print(error.errno, error)
"""


def second_process(directory):
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout


def test_a_second_writer_is_refused_naming_the_first_and_readers_are_not(tmp_path, opened):
    first, also_first = opened(tmp_path), opened(tmp_path)
    save(first, 1)
    save(also_first, 2)  # two managers of one process
    out = second_process(tmp_path)
    assert out.startswith("2\n")
    assert f"process {os.getpid()} on host" in out
    first.close()
    assert "saved" not in second_process(tmp_path)  # the other manager holds it still
    also_first.close()
    assert second_process(tmp_path).endswith("saved\n")
    assert save(first, 10).exists()  # and takes it back after the other has ended
    assert opened(tmp_path).load_latest().step == 9  # of the run that began last


def test_the_lock_is_not_held_by_a_forked_worker(tmp_path, opened):
    manager = opened(tmp_path)
    save(manager, 1)
    pid = os.fork()
    if pid == 0:
        try:
            save(manager, 2)
            os._exit(1)
        except CheckpointWriteError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    save(manager, 3)
    assert "process" in second_process(tmp_path)


def test_a_directory_made_anew_is_locked_anew(tmp_path, opened):
    directory = tmp_path / "run"
    manager = opened(directory)
    save(manager, 1)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    save(manager, 2)
    assert f"process {os.getpid()}" in second_process(directory)


def test_a_manager_is_a_context_manager_and_closes_twice(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1)
    manager.close()
    assert second_process(tmp_path).endswith("saved\n")


# ── layouts, signatures, durability ──────────────────────────────────────────────────────────────────

KEY = bytes(range(32))


@pytest.mark.parametrize("shards", [1, 2, 999, lambda key: 7 if "weight" in key else 3])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_resumed_run_is_the_same_run_from_shards_too(tmp_path, opened, shards, key):
    reference = Run().train(9)
    options = {"every_steps": 3, "shards": shards, "hmac_key": key, "durability": "process"}
    first = Run()
    first.train(7, opened(tmp_path, **options))
    second = Run(seed=77)
    manager = opened(tmp_path, **options)
    found = second.resume(manager)
    assert found.path == tmp_path / "step_000000000006" == manager.latest_path() == manager.path_for(6)
    assert second.train(9, manager) == reference
    index = json.loads((tmp_path / "step_000000000009" / "index.json").read_text())
    assert (index["layout"], index["durability"], "hmac_sha256" in index) == ("sharded", "process", bool(key))
    assert debris(tmp_path) == []


def test_what_is_on_the_disk_decides_how_it_is_read(tmp_path, opened):
    run = Run()
    run.train(2)
    for step, shards in ((1, None), (2, 2), (3, None)):
        opened(tmp_path, keep_last=None, shards=shards).save(step, run.objects)
    manager = opened(tmp_path, shards=5)
    assert [report.ok for report in manager.verify()] == [True] * 3
    assert manager.path_for(1).name == "step_000000000001.pt"
    assert manager.path_for(2).name == "step_000000000002"
    assert manager.path_for(4).name == "step_000000000004"
    assert manager.restore(Run().objects).path.name == "step_000000000003.pt"
    again = manager.save(3, run.objects)
    assert again.name == "step_000000000003.g1"  # a step's generations are counted over both layouts


def test_a_key_refuses_what_is_not_signed_with_it_and_a_signature_is_read_without(tmp_path, opened):
    save(opened(tmp_path / "plain"), 1)
    with pytest.raises(CheckpointSecurityError, match="sign"):
        opened(tmp_path / "plain", hmac_key=KEY).restore({})
    save(opened(tmp_path / "signed", hmac_key=KEY), 1)
    with pytest.raises(CheckpointSecurityError, match="sign"):
        opened(tmp_path / "signed", hmac_key=KEY[::-1]).restore({})
    assert opened(tmp_path / "signed").restore({}).step == 1
    assert opened(tmp_path / "signed", hmac_key=KEY).restore({}).step == 1
    later = opened(tmp_path / "plain", hmac_key=KEY)
    save(later, 2)
    found = later.restore({})
    assert found.step == 2
    assert [skip.path.name for skip in found.skipped] == ["step_000000000001.pt"]  # of an unknown age
    assert [(report.step, report.ok) for report in later.verify()] == [(1, False), (2, True)]


@pytest.mark.parametrize(("durability", "syncs"), [("full", True), ("process", False)])
@pytest.mark.parametrize("shards", [None, 2])
def test_only_full_durability_syncs(tmp_path, opened, durability, syncs, shards):
    manager = opened(tmp_path, durability=durability, shards=shards, keep_last=1)
    manager._ops = FailingOps()
    for step in (1, 2):
        manager.save(step, Run().objects)
    manager.mark_bad(2, "diverged")
    manager.prune()
    assert {"fsync", "dirsync"} & set(manager._ops.calls) == ({"fsync", "dirsync"} if syncs else set())


# ── the first save, killed ───────────────────────────────────────────────────────────────────────────


class Killing(FailingOps):
    def _count(self, name):
        self.calls.append(name)
        if self.at == len(self.calls) - 1:
            os._exit(9)


@pytest.mark.parametrize("shards", [None, 2])
def test_a_kill_before_any_call_of_the_very_first_save(tmp_path, opened, shards):
    counting = opened(tmp_path / "whole", shards=shards)
    counting._ops = FailingOps()
    model = torch.nn.Linear(2, 2)
    counting.save(1, {"model": model})
    outcomes = []
    for at in range(len(counting._ops.calls)):
        directory = tmp_path / f"at{at}"
        pid = os.fork()
        if pid == 0:
            manager = CheckpointManager(directory, shards=shards)
            manager._ops = Killing(at=at)
            manager.save(1, {"model": model})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        manager = opened(directory, shards=shards)
        found = manager.restore({"model": torch.nn.Linear(2, 2)})
        outcomes.append(found is not None)
        again = manager.save(1, {"model": model})
        assert opened(directory).load_latest().path == again
        assert all(report.ok for report in manager.verify())
        assert debris(directory) == []
    assert outcomes == sorted(outcomes)  # nothing, and from the commit on the new one
    assert set(outcomes) == {False, True}
