"""The best checkpoint, and those that are marked as bad."""

import json
import shutil

import pytest
import torch

from checkpoint.helpers import debris, flip, names
from resumable_data.checkpoint import CheckpointManager
from resumable_data.errors import CheckpointCorruptError, CheckpointNotFoundError

LAYOUTS = pytest.mark.parametrize("shards", [None, 2])
MIN = ("loss", "min")


@pytest.fixture
def opened(tmp_path):
    managers = []

    def build(**options):
        managers.append(CheckpointManager(tmp_path, **options))
        return managers[-1]

    yield build
    for manager in managers:
        manager.close()


def save(manager, step, **metrics):
    objects = {"model": torch.nn.Linear(2, 2), "value": float(step)}
    return manager.save(step, objects, metrics=metrics)


def stems(directory):
    return sorted({name.partition(".")[0] for name in names(directory) if name.startswith("step_")})


# ── the best ─────────────────────────────────────────────────────────────────────────────────────────


@LAYOUTS
@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 2)])
def test_the_best_by_its_metric(tmp_path, opened, shards, mode, best):
    manager = opened(keep_last=None, keep_best=("loss", mode), shards=shards)
    assert manager.best_path() is None
    paths = {}
    for step, loss in ((1, 0.5), (2, 0.9), (3, 0.1), (4, float("nan")), (5, 0.7)):
        paths[step] = save(manager, step, loss=loss, other=-step)
    paths[6] = save(manager, 6, other=-100)
    assert manager.best_path() == paths[best]
    assert opened(keep_best=("other", mode)).best_path() == paths[6 if mode == "min" else 1]
    assert opened(keep_best=("unknown", mode)).best_path() is None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_several_as_good_the_newest(opened, mode):
    manager = opened(keep_last=None, keep_best=("loss", mode))
    save(manager, 9, loss=1)
    last = save(manager, 10, loss=1.0)
    assert manager.best_path() == last
    fresh = save(opened(keep_best=("loss", mode)), 2, loss=1)  # of a newer run
    assert manager.best_path() == fresh


def test_the_best_is_known_to_every_manager_and_outlives_restarts(tmp_path, opened):
    first = opened(keep_last=1, keep_best=MIN)
    best = save(first, 1, loss=0.1)
    save(first, 2, loss=0.5)
    for step in (3, 4, 5):
        manager = opened(keep_last=1, keep_best=MIN)
        assert manager.restore({}).step == step - 1
        save(manager, step, loss=0.5)
        assert manager.best_path() == best
    assert best.exists()
    save(opened(keep_last=1, keep_best=MIN), 6, loss=0.05)
    assert first.best_path().name == "step_000000000006.pt"


def test_best_path_needs_keep_best(opened):
    with pytest.raises(ValueError, match="best_path needs keep_best"):
        opened().best_path()


def test_a_tensor_that_is_the_metric_has_the_value_of_the_save(opened):
    manager = opened(keep_last=None, keep_best=MIN)
    loss = torch.tensor(0.5, requires_grad=True)
    first = save(manager, 1, loss=loss)
    with torch.no_grad():
        loss += 1
    save(manager, 2, loss=loss)
    assert manager.best_path() == first


def test_beside_a_best_that_is_not_verified_the_best_that_is_stays(tmp_path, opened):
    old = opened(keep_last=None, keep_best=MIN)
    unverified = save(old, 1, loss=0.1)
    save(old, 2, loss=0.9)
    manager = opened(keep_last=1, keep_best=MIN)
    manager.restore({})
    for step, loss in ((3, 0.3), (4, 0.4), (5, 0.5)):
        save(manager, step, loss=loss)
    assert stems(tmp_path) == [f"step_{step:012d}" for step in (1, 2, 3, 5)]  # 2 is the one resumed from
    flip(unverified)
    assert not manager.verify(1)[0].ok
    assert manager.copy_to(tmp_path / "best", 3).exists()


def test_a_best_with_a_damaged_index_is_no_best(opened):
    manager = opened(keep_last=None, keep_best=MIN)
    flip(save(manager, 1, loss=0.1).with_suffix(".json"), 20)
    second = save(manager, 2, loss=0.5)
    assert manager.best_path() == second


def test_a_metric_beyond_all_floats_is_no_best(opened, monkeypatch):
    manager = opened(keep_last=None, keep_best=MIN)
    monkeypatch.setattr("resumable_data.checkpoint.layout.clean_metrics", dict)  # as another writer may
    save(manager, 1, loss=-(10**400))
    second = save(manager, 2, loss=3)
    assert manager.best_path() == second


def test_the_best_can_be_read_without_this_package(opened):
    manager = opened(keep_best=MIN)
    save(manager, 7, loss=0.5)
    payload = torch.load(manager.best_path(), weights_only=True)
    assert payload["state"]["step"] == 7
    assert set(payload["model"]) == {"weight", "bias"}


# ── marked as bad ────────────────────────────────────────────────────────────────────────────────────


@LAYOUTS
def test_a_marked_checkpoint_is_passed_over_by_all_and_named(tmp_path, opened, shards):
    manager = opened(keep_last=None, keep_best=MIN, shards=shards)
    paths = [save(manager, step, loss=1 / step) for step in (1, 2, 3)]
    manager.mark_bad(3, "the loss was NaN")
    for one in (manager, opened(keep_best=MIN)):
        found = one.load_latest()
        assert found.step == 2
        assert found.skipped == ((paths[2], "marked as bad: the loss was NaN"),)
        assert one.latest_path() == one.best_path() == paths[1]
    assert json.loads((tmp_path / "latest.json").read_text())["file"] == paths[1].name
    manager.mark_bad(paths[1], "so was this one's")
    assert manager.load_latest().step == 1
    assert all(path.exists() for path in paths)


@LAYOUTS
def test_after_a_mark_the_run_goes_on_and_the_marked_step_is_saved_again(tmp_path, opened, shards):
    manager = opened(keep_last=2, shards=shards)
    for step in (1, 2, 3):
        bad = save(manager, step)
    manager.mark_bad(3, "diverged")
    assert manager.restore({"value": 0.0}).extra["value"] == 2.0
    again = save(manager, 3)
    assert ".g1" in again.name
    assert not bad.exists()  # superseded
    assert [name for name in names(tmp_path) if "bad" in name] == []
    assert manager.load_latest().path == again
    assert debris(tmp_path) == []


@LAYOUTS
def test_a_marked_checkpoint_takes_no_place_and_goes_with_its_mark_when_it_is_old(tmp_path, opened, shards):
    manager = opened(keep_last=2, shards=shards)
    for step in (1, 2):
        save(manager, step)
    manager.mark_bad(2, "diverged")
    save(manager, 3)
    assert stems(tmp_path) == [f"step_{step:012d}" for step in (1, 2, 3)]
    save(manager, 4)
    assert stems(tmp_path) == [f"step_{step:012d}" for step in (3, 4)]


def test_a_marked_last_step_is_saved_again_by_finish(opened):
    manager = opened()
    save(manager, 5)
    assert manager.finish(5, {}).name == "step_000000000005.pt"
    manager.mark_bad(5, "diverged")
    assert manager.finish(5, {}).name == "step_000000000005.g1.pt"


def test_the_newest_generation_of_a_step_is_marked(tmp_path, opened):
    manager = opened(keep_last=None)
    first = save(manager, 5)
    kept = tmp_path / "kept.pt"
    shutil.copy(first, kept)
    shutil.copy(first.with_suffix(".json"), kept.with_suffix(".json"))
    second = save(manager, 5)
    kept.rename(first)
    kept.with_suffix(".json").rename(first.with_suffix(".json"))
    manager.mark_bad(5, "diverged")
    assert [(report.path, report.ok) for report in manager.verify()] == [(second, False), (first, True)]


def test_where_all_are_marked_a_run_does_not_start_afresh(opened):
    manager = opened()
    save(manager, 1)
    manager.mark_bad(1, "diverged")
    with pytest.raises(CheckpointCorruptError, match="marked as bad: diverged"):
        manager.restore({})
    assert manager.latest_path() is None


def test_what_cannot_be_marked(tmp_path, opened):
    manager = opened()
    with pytest.raises(CheckpointNotFoundError, match="step 1"):
        manager.mark_bad(1, "diverged")
    assert names(tmp_path) == []
    save(manager, 1)
    with pytest.raises(CheckpointNotFoundError, match=r"step 2.*\[1\]"):
        manager.mark_bad(2, "diverged")
    with pytest.raises(ValueError, match="not in"):
        manager.mark_bad("/elsewhere/step_000000000001.pt", "diverged")
    assert manager.load_latest().step == 1


def test_a_damaged_checkpoint_can_be_marked_and_marked_anew(opened):
    manager = opened(keep_last=None)
    save(manager, 1)
    flip(save(manager, 2).with_suffix(".json"), 20)
    manager.mark_bad(2, "damaged")
    manager.mark_bad(2, "x" * 5000)
    (skipped,) = manager.load_latest().skipped
    assert skipped.reason == "marked as bad: " + "x" * 2000
