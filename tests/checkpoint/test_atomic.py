import errno
import json
import os
import signal
import stat
import threading

import pytest
import torch

from checkpoint.helpers import FailingOps, debris, names
from resumable_data.checkpoint import CheckpointManager, atomic, atomic_json_dump, atomic_torch_save
from resumable_data.checkpoint.temps import is_dead, temp_name
from resumable_data.errors import CheckpointError, CheckpointWriteError


@pytest.fixture
def ops(monkeypatch):
    def install(**options):
        failing = FailingOps(**options)
        monkeypatch.setattr(atomic, "FS", failing)
        return failing

    return install


def test_values_come_back_and_parents_are_created(tmp_path):
    path = tmp_path / "a" / "b" / "state.pt"
    state = {"w": torch.arange(5.0), "n": 3, "losses": [0.5, 0.25]}
    assert atomic_torch_save(state, path) is None
    back = torch.load(path, weights_only=True)
    assert torch.equal(back["w"], state["w"])
    assert (back["n"], back["losses"]) == (3, [0.5, 0.25])
    atomic_json_dump({"b": [1, 2.5, None, "ü"]}, str(tmp_path / "c" / "x.json"))
    assert json.loads((tmp_path / "c" / "x.json").read_bytes()) == {"b": [1, 2.5, None, "ü"]}
    assert names(path.parent) == ["state.pt"]


def test_large_and_small_writes_arrive_in_order(tmp_path):
    state = [torch.randn(n) for n in (1, 200_000, 3, 70_000, 0, 1_000_000, 2)]
    atomic_torch_save(state, tmp_path / "x.pt")
    assert all(map(torch.equal, torch.load(tmp_path / "x.pt", weights_only=True), state))


def test_the_file_mode_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_json_dump(1, tmp_path / "x.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o640


def test_bad_values_are_refused_before_any_file(tmp_path):
    with pytest.raises(TypeError, match="key 1"):
        atomic_json_dump({"a": [{1: 2}]}, tmp_path / "x.json")
    with pytest.raises(ValueError, match="JSON"):
        atomic_json_dump([float("nan")], tmp_path / "x.json")
    with pytest.raises(TypeError, match="set"):
        atomic_json_dump({1, 2}, tmp_path / "x.json")
    with pytest.raises(TypeError, match=r"\['f'\] is a builtins.function"):
        atomic_torch_save({"f": lambda: 0}, tmp_path / "x.pt")
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_each_system_call_of_a_save_may_fail(tmp_path, ops, code):
    path = tmp_path / "state.pt"
    atomic_torch_save({"old": torch.zeros(1000)}, path)
    clean = ops()
    monitored = {"new": torch.ones(100_000)}
    atomic_torch_save(monitored, path)
    assert clean.calls == [
        "listdir",
        "open",
        "write",
        "write",
        "write",
        "fsync",
        "close",
        "rename",
        "dirsync",
    ]
    for at in range(len(clean.calls)):
        atomic_torch_save({"old": torch.zeros(10)}, path)
        failing = ops(at=at, code=code)
        with pytest.raises(CheckpointWriteError) as caught:
            atomic_torch_save(monitored, path)
        assert caught.value.errno == code
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, CheckpointError)
        assert names(tmp_path) == ["state.pt"]
        kept = torch.load(path, weights_only=True)
        assert list(kept) == (["new"] if failing.calls[-2:-1] == ["rename"] and at == 8 else ["old"])
        if failing.calls[at] == "write":
            assert caught.value.needed > 400_000
            assert caught.value.free > 0
        ops()
    atomic_torch_save(monitored, path)
    assert torch.equal(torch.load(path, weights_only=True)["new"], monitored["new"])


def test_a_failed_fsync_is_not_tried_again(tmp_path, ops):
    failing = ops(at=0, code=errno.EIO, only={"fsync"})
    with pytest.raises(CheckpointWriteError):
        atomic_torch_save({}, tmp_path / "x.pt")
    assert failing.calls == ["fsync"]
    assert names(tmp_path) == []


def test_short_writes_are_completed(tmp_path, monkeypatch):
    class Short(FailingOps):
        def write(self, fd, data):
            return super().write(fd, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(atomic, "FS", Short())
    state = torch.randn(5000)
    atomic_torch_save(state, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True), state)


def test_a_file_system_without_directory_sync_is_named_once(tmp_path, ops):
    ops(at=0, code=errno.EINVAL, only={"dirsync"})
    with pytest.warns(UserWarning, match="cannot sync directories"):
        atomic_json_dump(1, tmp_path / "x.json")
    ops(at=0, code=errno.EINVAL, only={"dirsync"})
    atomic_json_dump(2, tmp_path / "x.json")  # warnings are errors: a second one would fail
    assert (tmp_path / "x.json").read_text() == "2\n"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_in_a_write_removes_the_temp_and_passes_on(tmp_path, monkeypatch, kind):
    class Interrupted(FailingOps):
        def write(self, fd, data):
            raise kind

    atomic_torch_save({"old": 1}, tmp_path / "x.pt")
    monkeypatch.setattr(atomic, "FS", Interrupted())
    with pytest.raises(kind):
        atomic_torch_save({"new": torch.ones(100_000)}, tmp_path / "x.pt")
    assert names(tmp_path) == ["x.pt"]
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {"old": 1}


def save_for_ever(state, path):
    while True:
        atomic_torch_save(state, path)


def test_a_real_signal_during_a_save(tmp_path):
    atomic_torch_save({"old": 1}, tmp_path / "x.pt")
    timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])
    state = {"new": torch.ones(30_000_000)}
    # a process that was started in the background may have been told to ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            save_for_ever(state, tmp_path / "x.pt")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(tmp_path) == ["x.pt"]
    assert set(torch.load(tmp_path / "x.pt", weights_only=True)) <= {"old", "new"}


def test_temps_of_the_dead_are_swept_and_of_the_living_left(tmp_path):
    def named(**parts):
        host, boot, pid, start, rest = temp_name("x.pt").removesuffix(".tmp").rpartition(".")[2].split("-")
        found = {"host": host, "boot": boot, "pid": pid, "start": start} | parts
        return ".x.pt.{host}-{boot}-{pid}-{start}-{rest}.tmp".format(rest=rest, **found)

    dead = [named(pid="999999999"), named(start="1"), named(boot="0" * 8)]
    alive = [named(), named(host="0" * 8), named(pid="1", start=str(start_of(1))), ".y.pt" + named()[5:]]
    for name in dead + alive:
        (tmp_path / name).write_text("")
    atomic_torch_save({}, tmp_path / "x.pt")
    assert set(names(tmp_path)) == {*alive, "x.pt"}
    # under the writer's lock even our own: a failed save could not remove it
    assert all(is_dead(name, ours=lambda target: target == "x.pt", alone=True) for name in alive[:3])
    assert not is_dead(alive[3], ours=lambda target: target == "x.pt", alone=True)


def start_of(pid):
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a plain read of /proc
        return int(file.read().rpartition(")")[2].split()[19])


def test_a_planted_link_at_the_temp_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "temp_name", lambda name: ".planted.tmp")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".planted.tmp").symlink_to(victim)
    with pytest.raises(CheckpointWriteError) as caught:
        atomic_json_dump(1, tmp_path / "x.json")
    assert caught.value.errno == errno.EEXIST
    assert victim.read_text() == "mine"


# ── a manager's save, call by call ───────────────────────────────────────────────────────────────────


def value_of(found):
    return found.extra["value"].tolist()


def managed(directory, ops):
    manager = CheckpointManager(directory, keep_last=2)
    manager._ops = ops
    return manager


def count_calls(directory):
    with managed(directory, FailingOps()) as manager:
        for step in (1, 2):
            manager.save(step, {"value": torch.full((3,), float(step))})
        manager._ops = FailingOps()
        manager.save(3, {"value": torch.full((3,), 3.0)})
        return manager._ops.calls


def test_each_call_of_a_managed_save_may_fail(tmp_path):
    calls = count_calls(tmp_path / "count")
    commit_point = [i for i, name in enumerate(calls) if name == "dirsync"][1]
    assert calls[:commit_point].count("rename") == 2
    # both temps, the index, the commit; the pointer; the tombstone, its deletion and the index's
    order = "fsync fsync rename dirsync rename dirsync fsync rename dirsync rename unlink unlink"
    assert [name for name in calls if name in set(order.split())] == order.split()
    outcomes = set()
    for at in range(len(calls)):
        directory = tmp_path / str(at)
        with managed(directory, FailingOps()) as manager:
            for step in (1, 2):
                manager.save(step, {"value": torch.full((3,), float(step))})
            manager._ops = FailingOps(at=at, code=errno.ENOSPC)
            if at <= commit_point:
                with pytest.raises(CheckpointWriteError) as caught:
                    manager.save(3, {"value": torch.full((3,), 3.0)})
                assert caught.value.errno == errno.ENOSPC
                newest = 2
            else:  # committed and durable: what follows is tidying
                with pytest.warns(UserWarning, match="step 3 is committed"):
                    assert manager.save(3, {"value": torch.full((3,), 3.0)}).exists()
                newest = 3
            outcomes.add(newest)
            assert [name for name in debris(directory) if name.endswith(".tmp")] == []
            assert value_of(CheckpointManager(directory).load_latest()) == [newest] * 3
            manager._ops = FailingOps()
            manager.save(4, {"value": torch.full((3,), 4.0)})
            found = CheckpointManager(directory).load_latest()
            assert (found.step, value_of(found), found.skipped) == (4, [4.0] * 3, ())
            assert debris(directory) == []
            pairs = {name.partition(".")[0] for name in names(directory) if name.startswith("step_")}
            assert all({f"{stem}.pt", f"{stem}.json"} <= set(names(directory)) for stem in pairs)
    assert outcomes == {2, 3}


def test_a_full_disk_for_good_leaves_the_old_checkpoint(tmp_path):
    class Full(FailingOps):
        def write(self, fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with managed(tmp_path, FailingOps()) as manager:
        manager.save(1, {"value": torch.zeros(3)})
        before = names(tmp_path)
        manager._ops = Full()
        for _ in range(3):
            with pytest.raises(CheckpointWriteError, match=r"needs \d+ bytes") as caught:
                manager.save(2, {"value": torch.zeros(3)})
        assert caught.value.errno == errno.ENOSPC
        assert names(tmp_path) == before


def test_a_long_name_in_any_script_is_saved_and_its_dead_temps_are_swept(tmp_path):
    path = tmp_path / ("\u00e9" * 110 + ".pt")
    atomic_torch_save({"n": 1}, path)
    temp = temp_name(path.name)
    assert len(os.fsencode(temp)) < 256
    parts = temp.split("-")
    parts[2:4] = ["999999999", "1"]  # no such process
    (tmp_path / "-".join(parts)).touch()
    atomic_torch_save({"n": 2}, path)
    assert names(tmp_path) == [path.name]


def test_an_interrupt_outside_the_try_of_the_sink_comes_out_as_itself(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    real = atomic.Sink.write
    calls = []

    def write(self, data):
        calls.append(len(data))
        if len(calls) == 8:
            raise KeyboardInterrupt  # as a signal does before the first line
        return real(self, data)

    monkeypatch.setattr(atomic.Sink, "write", write)

    with pytest.raises(KeyboardInterrupt):
        atomic_torch_save({"x": torch.zeros(10)}, path)
    assert names(tmp_path) == []


def test_an_error_of_torch_is_not_taken_for_the_interrupt_that_led_to_the_save(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("torch's own")

    monkeypatch.setattr(torch, "save", fail)

    def interrupted():
        raise KeyboardInterrupt

    try:
        interrupted()
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="torch's own"):
            atomic_torch_save({"x": 1}, tmp_path / "state.pt")


def test_a_directory_that_cannot_be_named_is_a_write_error(tmp_path):
    with pytest.raises(CheckpointWriteError) as caught:
        atomic_torch_save({"x": 1}, tmp_path / ("x" * 300) / "state.pt")
    assert caught.value.errno == errno.ENAMETOOLONG
