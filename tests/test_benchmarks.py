"""The benchmarks run, their records are well formed, and a bar that is missed is an exit status."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
#: Script -> (arguments that make it smaller still, a bar it has at toy size)
SCRIPTS = {
    "throughput": (("--datasets", "rows", "--workers", "0"), "rows.workers0.added_us"),
    "resume": (("--rounds", "1"), "shuffled.n1e+12.in_vain"),
    "memory": ((), "shuffled.above_mb"),
    "state": (("--rounds", "1"), "workers0.json_bytes"),
    "epoch_turn": (("--rounds", "1"), "n3200.workers0.added_ms"),
    "checkpoints": (("--rounds", "1"), "save.of_torch"),
    "small_saves": (("--rounds", "1"), "small.times"),
}
KEYS = {"benchmark", "command", "quick", "rounds", "seconds", "environment", "rows", "skipped", "bars"}
SUMMARY = {"median", "low", "high", "least", "rounds"}


def run(script, *arguments):
    """A script in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = (sys.executable, FOLDER / f"{script}.py", *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )


@pytest.fixture
def script(monkeypatch):
    """A script, or what they share, as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def common(script):
    return script("_common")


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Script -> its record at toy size, each measured once in a session, under a bar that cannot hold."""
    folder, known = tmp_path_factory.mktemp("records"), {}

    def record(name):
        if name not in known:
            path = folder / f"2026-01-01-{name}.json"
            arguments, bar = SCRIPTS[name]
            done = run(name, "--quick", "--json", path, *arguments, "--check", "--bar", f"{bar}=-1e9")
            assert path.exists(), done.stderr
            known[name] = (json.loads(path.read_text()), done, folder)
        return known[name]

    return record


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missed_bar_is_an_exit_status(name, records):
    record, done, _ = records(name)
    assert done.returncode == 1, done.stderr
    assert f"MISSED  {SCRIPTS[name][1]}" in done.stdout
    assert [bar["holds"] for bar in record["bars"] if bar["name"] == SCRIPTS[name][1]] == [False]


def test_bars_that_hold_or_are_not_asked_for_are_none(script, records):
    loose = [f"--bar={bar['name']}=1e9" for bar in records("state")[0]["bars"]]
    state = script("state")
    assert state.main(["--quick", "--rounds", "1", "--check", *loose]) == 0
    assert state.main(["--quick", "--rounds", "1", "--bar=workers0.json_bytes=-1"]) == 0
    with pytest.raises(SystemExit, match="there is no bar 'nothing'"):
        state.main(["--quick", "--rounds", "1", "--bar=nothing=1"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_record_says_what_was_measured_on_what(name, records):
    record, done, _ = records(name)
    assert set(record) == KEYS
    assert record["benchmark"] == name
    assert record["quick"] is True
    assert {"date", "machine", "cpus", "load", "python", "torch", "torchdata"} <= set(record["environment"])
    assert record["command"].startswith(f"python benchmarks/{name}.py --quick")
    assert str(ROOT) not in json.dumps(record)
    assert len(record["rows"]) >= 2
    for row in record["rows"]:
        assert row["loader"] in done.stdout
        for value in row.values():
            if isinstance(value, dict):
                assert set(value) == SUMMARY
                assert value["least"] <= value["low"] <= value["median"] <= value["high"]
    names = [bar["name"] for bar in record["bars"]]
    assert len(set(names)) == len(names)


def test_no_skipped_sample_is_fetched_by_us_and_all_are_by_iterating(records):
    rows = [row for row in records("resume")[0]["rows"] if row["workers"] == 0]
    ours = [row["fetched_in_vain"] for row in rows if row["loader"].startswith("ResumableLoader")]
    thrown = [row["fetched_in_vain"] for row in rows if "thrown away" in row["loader"]]
    assert ours
    assert set(ours) == {0}
    assert thrown
    assert min(thrown) > 1000


def test_a_slow_loader_misses_the_bar(script, monkeypatch, tmp_path):
    throughput = script("throughput")

    class Burning(throughput.ResumableLoader):
        def __iter__(self):
            for batch in super().__iter__():
                until = time.process_time() + 5e-3
                while time.process_time() < until:
                    pass
                yield batch

    threads = torch.get_num_threads()
    arguments = ["--quick", "--datasets", "rows", "--workers", "0", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(throughput, "ResumableLoader", Burning)
    assert throughput.main(arguments) == 0
    assert throughput.main([*arguments, "--check"]) == 1
    added = bar_of(tmp_path / "x.json", "rows.workers0.added_us")
    assert added["found"] > 4000
    assert not added["holds"]
    torch.set_num_threads(threads)


def bar_of(path, name):
    (found,) = [bar for bar in json.loads(path.read_text())["bars"] if bar["name"] == name]
    return found


def test_pairs_are_compared_round_by_round_and_nan_holds_no_bar(common):
    measured = common.interleave({"a": iter_of(10.0, 20.0, 60.0), "b": iter_of(5.0, 10.0, 30.0)}, 3)
    assert measured.of("a", "x").median == 20.0
    assert measured.added("a", "b", "x").median == 10.0
    assert measured.ratio("b", "a", "x") == common.Summary(2.0, 2.0, 2.0, 2.0, 3)
    assert common.tells_apart(measured.ratio("b", "a", "x")) == 1.0
    assert not common.Bar("x", float("nan"), 1.0, at_most=True).holds
    assert not common.Bar("x", float("nan"), 1.0, at_most=False).holds
    assert common.Bar("x", 0.97, 0.98, at_most=False, allowance=0.02).holds
    assert not common.Bar("x", 0.95, 0.98, at_most=False, allowance=0.02).holds


def iter_of(*values):
    left = iter(values)
    return lambda: {"x": next(left)}


def test_every_round_begins_with_another_case(common):
    seen = []
    common.interleave({name: lambda name=name: seen.append(name) or {"x": 1.0} for name in "abc"}, 4)
    assert "".join(seen) == "abcbcacababc"


def test_the_made_up_state_of_the_peer_is_the_iterated_one(script):
    resume = script("resume")
    resume.check_stateful_state()
    build = resume.stateful(resume.Virtual(640), 0, 50)
    assert len(list(build())) == 5


def test_a_process_has_cpu_time_and_so_do_its_workers(common):
    iterator = iter(DataLoader(Busy(), 4, num_workers=1))
    next(iterator)
    pids = common.worker_pids()
    before = common.cpu_seconds(pids)
    if before is None:
        pytest.skip("this system does not say what another process has used")
    for _ in range(5):
        next(iterator)
    assert 0.02 < common.cpu_seconds(pids) - before < 5
    assert common.cpu_seconds([]) == 0


class Busy(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        until = time.process_time() + 2e-3
        while time.process_time() < until:
            pass
        return index


def test_plots_and_tables_are_made_from_the_records(script, records, tmp_path):
    pytest.importorskip("matplotlib")
    for name in SCRIPTS:
        folder = records(name)[2]
    plots = script("plots")
    page = ROOT / "docs" / "explanation" / "performance.md"
    before = page.read_bytes()
    assert plots.main(["--results", str(folder), "--out", str(tmp_path)]) == 0
    assert page.read_bytes() == before
    text = (tmp_path / page.name).read_text()
    for name in SCRIPTS:
        drawn = (tmp_path / f"performance-{name}.svg").read_text()
        assert any(name in drawn for name in plots.OURS)
        assert f"![{name.replace('_', ' ')}](performance-{name}.svg)" in text
        assert f"`benchmarks/results/2026-01-01-{name}.json`" in text
        assert f"Missed: `{SCRIPTS[name][1]}`" in text
    again = tmp_path / "again"
    again.mkdir()
    plots.main(["--results", str(folder), "--out", str(again), "--page", str(tmp_path / page.name)])
    assert (again / page.name).read_text() == text
    assert all((again / path.name).read_bytes() == path.read_bytes() for path in tmp_path.glob("*.svg"))


def test_no_records_leave_the_page_as_it_is(script, tmp_path):
    pytest.importorskip("matplotlib")
    plots = script("plots")
    page = tmp_path / "page.md"
    page.write_text("as it is")
    assert plots.main(["--results", str(tmp_path), "--page", str(page)]) == 0
    assert page.read_text() == "as it is"
    with pytest.raises(ValueError, match="the page lacks <!-- figures: state -->"):
        plots.fill("as it is", "state", "a table")
