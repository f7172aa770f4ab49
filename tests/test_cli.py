"""The command line: what it accepts, what it refuses, and what its exit status says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resumable_data import cli


@pytest.fixture
def run_demo(monkeypatch):
    """The demonstration replaced by a record of how it was called."""
    drive = pytest.importorskip("resumable_data.demo.drive")
    calls = []

    def record(out, **options):
        calls.append((out, options))
        return record.status

    record.status = 0
    record.calls = calls
    monkeypatch.setattr(drive, "run_demo", record)
    return record


def test_defaults(run_demo):
    assert cli.main(["demo"]) == 0
    assert run_demo.calls == [("demo-output", {"seed": 0, "kills": None, "quick": False})]


def test_options(run_demo):
    assert cli.main(["demo", "--out", "x", "--seed", "5", "--kills", "9", "--quick"]) == 0
    assert run_demo.calls == [("x", {"seed": 5, "kills": 9, "quick": True})]


def test_the_verdict_is_the_exit_status(run_demo):
    run_demo.status = 1
    assert cli.main(["demo"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice"),
        (["demo", "--kills", "0"], "must be at least 1, found 0"),
        (["demo", "--kills", "many"], "invalid"),
        (["demo", "--seed", "x"], "invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_extras_are_named(monkeypatch, capsys):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name in ("rich", "sklearn") else find(name)
    )
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "scikit-learn, rich" in error
    assert "matplotlib" not in error
    assert "pip install 'resumable-data[demo]'" in error


def test_a_directory_of_someone_else_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_child_is_reported(monkeypatch, capsys):
    drive = pytest.importorskip("resumable_data.demo.drive")
    process = pytest.importorskip("resumable_data.demo.process")

    def fail(out, **options):
        raise process.ChildError("killed-3 ended with status 1")

    monkeypatch.setattr(drive, "run_demo", fail)
    assert cli.main(["demo"]) == 2
    assert "killed-3 ended with status 1" in capsys.readouterr().err


def test_the_extras_are_imported_by_the_demonstration_only():
    names = ("rich", "matplotlib", "sklearn", "resumable_data.demo")
    code = f"import sys, resumable_data.cli; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
