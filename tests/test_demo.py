"""The demonstration: the script it trains with, its plan of kills, its comparison, its picture."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from resumable_data.demo import digits, drive, lanes, train, usual, verdict
from resumable_data.demo.child import Watch, watched
from resumable_data.demo.draw import draw
from resumable_data.demo.kills import Kill, in_window, plan_kills
from resumable_data.demo.process import Child, ChildError, Children
from resumable_data.demo.screen import Screen, kill_table

PLAN = {"epochs": 9, "batches": 45, "save_every": 6, "accumulate": 4}


# ── the data and the script ──────────────────────────────────────────────────────────────────────────


def test_the_digits_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = digits.load_digits()
    theirs = sklearn.load_digits()
    assert np.array_equal(images.squeeze(1).numpy() * 16, theirs.images.astype(np.float32))
    assert np.array_equal(labels.numpy(), theirs.target)
    assert [len(part) for part in digits.split()] == [1437, 360]


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"resumable-data\[demo\]"):
        digits.load_digits()


def test_each_random_library_has_its_part_in_a_sample():
    plain = digits.split()[0]
    sample = train.Distorted(plain)

    def image(python, numpy, torch_seed):
        random.seed(python)
        np.random.seed(numpy)
        torch.manual_seed(torch_seed)
        return torch.stack([sample[i][0] for i in range(40)])

    same = image(0, 0, 0)
    assert torch.equal(same, image(0, 0, 0))
    for other in (image(1, 0, 0), image(0, 1, 0), image(0, 0, 1)):
        assert not torch.equal(same, other)


class Stopped(Exception):  # noqa: N818 - no error: a kill, as far as one process can play it
    pass


@pytest.fixture
def quiet_torch():
    """The script sets torch up for the whole process; so it is put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def training(monkeypatch, module, directory, *, stop_at=None, **options):
    """Losses by step of one call of a training script, which is stopped at a step."""
    losses = {}

    def say(**values):
        if "loss" in values:
            losses[values["step"]] = values["loss"]
            if values["step"] == stop_at:
                raise Stopped

    monkeypatch.setattr(module, "say", say)
    for scramble in (random.seed, np.random.seed, torch.manual_seed):
        scramble(time.time_ns() % 2**32)
    if stop_at is None:
        module.train(str(directory), epochs=3, **options)
    else:
        with pytest.raises(Stopped):
            module.train(str(directory), epochs=3, **options)
    return losses


@pytest.mark.usefixtures("quiet_torch")
def test_the_script_goes_on_exactly_and_the_usual_recipe_does_not(monkeypatch, tmp_path):
    whole = training(monkeypatch, train, tmp_path / "whole")
    # 43: the checkpoint of step 42 holds two batches of a window; 46: an epoch began and its first was lost
    parts = training(monkeypatch, train, tmp_path / "parts", stop_at=43)
    resumed = training(monkeypatch, train, tmp_path / "parts", workers=2, stop_at=46)
    rest = training(monkeypatch, train, tmp_path / "parts")
    assert [min(resumed), min(rest)] == [43, 43]
    for losses in (parts, resumed, rest):
        assert losses == {step: whole[step] for step in losses}
    outcomes = [verdict.read_outcome(tmp_path / name) for name in ("whole", "parts")]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].losses) == 135
    assert len(outcomes[0].accuracies) == 3
    # the negative control: the same comparison catches the usual recipe, at the first step after its resume
    theirs = training(monkeypatch, usual, tmp_path / "usual")
    training(monkeypatch, usual, tmp_path / "usual-parts", stop_at=55)
    broken = training(monkeypatch, usual, tmp_path / "usual-parts")
    assert min(broken) == 55
    assert broken[55] != theirs[55]


# ── the plan of kills ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 30])
@pytest.mark.parametrize("seed", range(5))
def test_a_plan_holds_what_it_must(count, seed):
    kills = plan_kills(count, seed=seed, **PLAN)
    assert len(kills) == count
    assert kills == sorted(kills, key=lambda kill: kill.step)
    assert all(1 <= kill.step < 405 for kill in kills)
    kinds = {kill.kind for kill in kills}
    assert {"save", "window", "boundary"}.issubset(kinds) or count < 3
    assert "random" in kinds or count < 4
    for kill in kills:
        if kill.kind == "window":  # gradients wait in the process and in the checkpoint it will go on from
            assert kill.step % 4 != 0
            assert (kill.step - 1) // 6 * 6 % 4 != 0
        elif kill.kind == "boundary":
            assert kill.step % 45 == 0
            assert kill.step % 6 == 0
        elif kill.kind == "save":
            assert kill.call in ("fsync", "rename", "unlink")
            assert kill.nth >= 1


def test_a_plan_is_a_function_of_its_seed():
    assert plan_kills(8, seed=1, **PLAN) == plan_kills(8, seed=1, **PLAN)
    assert plan_kills(8, seed=1, **PLAN) != plan_kills(8, seed=2, **PLAN)


def test_a_run_without_a_saved_boundary_is_killed_elsewhere():
    kills = plan_kills(3, seed=0, epochs=3, batches=45, save_every=7, accumulate=4)
    assert sorted(kill.kind for kill in kills) == ["random", "save", "window"]


def test_a_kill_travels_by_command_line():
    kill = Kill("save", 12, "rename", 2, 0.25)
    assert Kill.from_json(kill.to_json()) == kill


def test_windows():
    inside = in_window(6, 4)
    # step 13: window 13..16 is open, but the checkpoint of step 12 lies between windows
    assert [step for step in range(1, 26) if inside(step)] == [7, 9, 10, 11, 19, 21, 22, 23]


# ── holding a process ────────────────────────────────────────────────────────────────────────────────


def held_at(monkeypatch, directory, kill):
    """Where the training script is held for a kill, and the last step it had reported."""
    steps = []

    def hold(self, where):
        raise Stopped(where)

    def say(**values):
        if "loss" in values:
            steps.append(values["step"])

    monkeypatch.setattr(Watch, "hold", hold)
    monkeypatch.setattr(train, "say", say)
    with pytest.raises(Stopped) as caught, watched(Watch(kill)):
        train.train(str(directory), epochs=2)
    return str(caught.value), steps[-1]


@pytest.mark.usefixtures("quiet_torch")
@pytest.mark.parametrize(
    ("kill", "where", "step"),
    [
        (Kill("save", 13, "rename", 2), "save: before rename of the data", 18),
        (Kill("save", 1, "fsync", 1), "save: before fsync of the data", 6),
        (Kill("save", 6, "rename", 3), "save: before rename of latest.json", 6),
        (Kill("save", 12, "rename", 99), "save: at its very end", 12),
        (Kill("window", 8), "1 of 4 batches accumulated", 9),
        (Kill("boundary", 30), "epoch over, not yet evaluated", 45),
    ],
)
def test_a_process_is_held_where_the_plan_says(monkeypatch, tmp_path, kill, where, step):
    assert held_at(monkeypatch, tmp_path / "run", kill) == (where, step)


@pytest.mark.usefixtures("quiet_torch")
def test_watching_changes_nothing_and_ends(monkeypatch, tmp_path):
    before = train.CheckpointManager, train.ResumableLoader, train.evaluate
    events = []
    monkeypatch.setattr(train, "say", lambda **values: events.append(values))
    with watched(Watch(None)):
        train.train(str(tmp_path), epochs=1)
    assert (train.CheckpointManager, train.ResumableLoader, train.evaluate) == before
    assert events[0] == {"restored": 0}
    assert [set(event) for event in events[1:3]] == [{"first_batch"}, {"step", "epoch", "batch", "loss"}]
    assert sum("first_batch" in event for event in events) == 1


# ── children ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes modules for children to run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def make(name, code):
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return make


def test_a_child_reports_and_ends(module, tmp_path):
    name = module(
        "speaker", "import json, sys\nfor a in sys.argv[1:]:\n    print(json.dumps({'arg': a}), flush=True)"
    )
    with Children() as children:
        events = list(children.start(name, ["a", "b"], tmp_path / "errors").events())
    assert events == [{"arg": "a"}, {"arg": "b"}]


def test_a_child_that_fails_by_itself_is_an_error_with_its_last_words(module, tmp_path):
    child = Child(module("failing", "raise SystemExit('no luck today')"), [], tmp_path / "failing.stderr")
    with pytest.raises(ChildError, match=r"status 1(.|\n)*no luck today"):
        list(child.events())


def test_a_kill_takes_the_children_of_the_child_and_is_no_error(module, tmp_path):
    code = (
        "import json, subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'pid': other.pid}), flush=True)\n"
        "print('{\"torn', end='', flush=True)\n"
        "other.wait()"
    )
    child = Child(module("parent", code), [], tmp_path / "errors")
    events = []
    for event in child.events():  # ends only when nobody holds the pipe any more
        events.append(event)
        child.kill()
    assert len(events) == 1
    deadline = time.monotonic() + 30
    while running(events[0]["pid"]):
        assert time.monotonic() < deadline, "the child's child has outlived it"
        time.sleep(0.01)


def running(pid):
    """Whether a process is there and no zombie waiting for whoever adopts orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_that_never_ends_is_given_up(module, tmp_path, monkeypatch):
    monkeypatch.setattr("resumable_data.demo.process.PATIENCE", 0.2)
    child = Child(module("sleeper", "import time; time.sleep(600)"), [], tmp_path / "errors")
    with pytest.raises(ChildError, match="still running"):
        list(child.events())


def test_no_child_is_started_after_the_end(tmp_path):
    with Children() as children:
        pass
    with pytest.raises(ChildError, match="given up"):
        children.start("json.tool", [], tmp_path / "errors")


# a stand-in for the training script: ten steps, a checkpoint a step, the order of its life in a file
SCRIPT = """
import json, pathlib, sys, time
def say(**values): print(json.dumps(values), flush=True)
path = pathlib.Path(sys.argv[1]); path.mkdir(exist_ok=True)
begin = int((path / "step").read_text()) if (path / "step").exists() else 0
say(restored=begin); say(first_batch=0.25)
for step in range(begin + 1, 11):
    say(step=step, epoch=0, batch=step - 1, loss=step / 2)
    (path / "new").write_text(str(step)); (path / "new").replace(path / "step")
    time.sleep(0.05)
"""


def test_a_run_is_killed_and_goes_on(module, tmp_path):
    name = module("script", SCRIPT)
    seen = []
    with Children() as children:
        story = lanes.run(
            children,
            name,
            tmp_path / "run",
            epochs=1,
            kills=[Kill("random", 3), Kill("random", 6, delay=0.06)],
            report=seen.append,
        )
    assert [row.where for row in story.kills] == ["at a random moment"] * 2
    assert story.kills[0].step >= 3
    assert story.kills[1].step >= 6
    for row in story.kills:
        assert row.step - 1 <= row.resumed_from <= row.step
        assert row.batch == row.step - 1
        assert row.seconds > 0
        assert row.restoring == 0.25
    assert {step for step, _ in story.losses} == set(range(1, 11))
    assert sum("killed" in event for event in seen) == 2


def test_a_kill_that_came_too_late_is_an_error(module, tmp_path):
    with Children() as children, pytest.raises(ChildError, match="planned for step 50"):
        lanes.run(
            children,
            module("script", SCRIPT),
            tmp_path / "run",
            epochs=1,
            kills=[Kill("random", 50)],
            report=lambda event: None,
        )


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────


def outcome(losses, accuracies=(0.5,), weights="ab"):
    return verdict.Outcome(list(losses), list(accuracies), weights)


CALM = outcome([2.0, 1.5, 1.0])


def test_equal_runs_are_the_same():
    reported = [(1, 2.0), (2, 1.5), (2, 1.5), (3, 1.0)]
    result = verdict.compare(CALM, outcome([2.0, 1.5, 1.0]), reported)
    assert result.same
    assert (result.losses, result.differing, result.undone) == (3, [], 1)


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (outcome([2.0, np.nextafter(1.5, 2), 1.0]), [2]),
        (outcome([2.0, 1.5]), [3]),
        (outcome([2.0, 1.5, 1.0, 0.9]), [4]),
        (outcome([1.5, 2.0, 1.0]), [1, 2]),
        (outcome([2.0, 1.5, float("nan")]), [3]),
        (outcome([2.0, 1.5, 1.0], accuracies=[0.6]), []),
        (outcome([2.0, 1.5, 1.0], weights="ac"), []),
    ],
)
def test_the_least_difference_is_one(other, differing):
    result = verdict.compare(CALM, other, [])
    assert not result.same
    assert result.differing == differing


def test_losses_that_are_no_numbers_are_never_equal():
    nan = outcome([float("nan")])
    assert not verdict.compare(nan, nan, []).same


def test_a_loss_that_a_kill_made_undone_counts_too():
    result = verdict.compare(CALM, outcome([2.0, 1.5, 1.0]), [(1, 2.0), (2, 1.4), (2, 1.5), (3, 1.0)])
    assert not result.same
    assert result.undone_differing == 1


def test_the_digest_sees_every_bit_name_type_and_shape():
    base = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.int64)}
    digest = verdict.weights_digest(base)
    assert digest == verdict.weights_digest(dict(reversed(base.items())))
    last_bit = torch.tensor([0, 0, 0, struct.unpack("f", struct.pack("I", 1))[0]])
    changes = [
        {"a": last_bit},
        {"a": -torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"c": torch.zeros(1)},
    ]
    assert len({digest, *(verdict.weights_digest({**base, **change}) for change in changes)}) == 6


# ── the driver's end ─────────────────────────────────────────────────────────────────────────────────

ROW = lanes.Row(2, 0, 1, "save: before rename of the data", 2, 1, 3.25, 0.05)


@pytest.fixture
def finished(monkeypatch):
    """A driver whose runs are over: their outcomes are given, the processes are not started."""

    def finish(ours, other):
        stories = {name: lanes.Story() for name in drive.RUNS}
        stories["killed"].kills = [ROW]
        stories["usual-killed"].kills = [ROW]
        results = {"uninterrupted": ours, "killed": other}
        usual_results = {
            "usual-uninterrupted": outcome([2.0, 1.5, 1.0]),
            "usual-killed": outcome([2.0, 1.6, 1.0], weights="cd"),
        }
        monkeypatch.setattr(drive, "_run_all", lambda settings, screen: stories)
        monkeypatch.setattr(verdict, "read_outcome", lambda directory: results[directory.name])
        monkeypatch.setattr(verdict, "read_usual_outcome", lambda directory: usual_results[directory.name])

    return finish


def test_the_same_run_is_status_0(finished, tmp_path, capsys):
    finished(CALM, outcome([2.0, 1.5, 1.0]))
    assert drive.run_demo(str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "THE SAME RUN. Killed once; 3 of 3 losses ==" in said
    assert "leaves its own uninterrupted run at step 2" in said
    assert (tmp_path / "out" / drive.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_another_run_is_status_1(finished, tmp_path, capsys):
    finished(CALM, outcome([2.0, 1.5, np.nextafter(1.0, 2)]))
    assert drive.run_demo(str(tmp_path / "out")) == 1
    assert "ANOTHER RUN. Killed once; 1 of 3 losses differ, the first at step 3" in capsys.readouterr().out


def test_only_its_own_output_is_removed(tmp_path):
    out = tmp_path / "out"
    drive.clear(out)
    (out / "killed").mkdir()
    (out / "killed" / "step_000000000001.pt").write_text("old")
    (out / "killed-0.stderr").write_text("old")
    (out / "notes.txt").write_text("mine")
    drive.clear(out)
    assert sorted(path.name for path in out.iterdir()) == [drive.MARKER, "notes.txt"]


def test_the_run_has_the_length_the_plan_counts_on():
    assert drive.BATCHES == -(-len(digits.split()[0]) // train.BATCH) == 45


# ── what it shows ────────────────────────────────────────────────────────────────────────────────────


def test_without_a_terminal_there_are_lines():
    text = io.StringIO()
    with Screen(Console(file=text, width=110)) as screen:
        report = screen.follow("killed", 10)
        report({"restored": 0})
        report({"step": 2, "epoch": 0, "batch": 1, "loss": 1.5})
        report({"killed": ROW})
        report({"step": 10, "epoch": 0, "batch": 9, "loss": 1.0})
    assert text.getvalue().splitlines() == [
        "killed: kill 1 at step 2, save: before rename of the data",
        "killed: step 10 of 10",
    ]


def test_on_a_terminal_there_are_bars():
    text = io.StringIO()
    with Screen(Console(file=text, width=110, force_terminal=True)) as screen:
        screen.follow("killed", 10)({"step": 2, "epoch": 0, "batch": 1, "loss": 1.5})
    assert "2/10" in text.getvalue()
    assert "loss 1.500" in text.getvalue()


def test_the_table_has_a_row_for_each_kill():
    text = io.StringIO()
    Console(file=text, width=110).print(
        kill_table([ROW, dataclasses.replace(ROW, resumed_from=0, where="at a random moment")])
    )
    said = text.getvalue()
    assert "save: before rename of the data" in said
    assert "step 1" in said
    assert "3.2 s" in said
    assert "50 ms" in said
    assert "nothing yet" in said


@pytest.mark.parametrize("usual_losses", [[2.0, 1.6, 0.9], [2.0, 1.5, 1.0]])
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path, usual_losses):
    story = lanes.Story(kills=[ROW])
    draw(
        tmp_path / "demo.png",
        ours=(CALM, outcome([2.0, 1.5])),
        usual=(CALM, outcome(usual_losses)),
        stories={"killed": story, "usual-killed": story},
        batches=45,
    )
    assert (tmp_path / "demo.png").stat().st_size > 10_000


# ── the whole of it ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.nightly
def test_the_quick_demonstration(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "resumable_data.cli", "demo", "--quick", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "THE SAME RUN" in done.stdout
