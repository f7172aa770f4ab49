import hashlib
import os
import signal
import threading
import time
import types

import pytest
import torch

from resumable_data.checkpoint import sink as module
from resumable_data.checkpoint.fsops import FsOps
from resumable_data.checkpoint.sink import Sink, torch_save


class Noting(FsOps):
    def __init__(self, short=None, slow=0.0):
        self.short, self.slow, self.calls = short, slow, []

    def write(self, fd, data):
        self.calls.append("write")
        time.sleep(self.slow)
        return super().write(fd, data if self.short is None else data[: self.short])

    def writeback(self, fd, offset, count):
        self.calls.append(("writeback", offset, count))
        super().writeback(fd, offset, count)

    def fsync(self, fd):
        self.calls.append("fsync")
        super().fsync(fd)


@pytest.fixture
def opened(tmp_path):
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield fd, tmp_path / "x"
    os.close(fd)


def state(megabytes):
    return {f"w{i}": torch.rand(megabytes << 18) for i in range(3)} | {"small": torch.ones(3), "step": 7}


@pytest.mark.parametrize("megabytes", [0, 1, 5, 9])
@pytest.mark.parametrize("durable", [True, False])
def test_size_and_hash_are_of_the_bytes_on_the_disk(opened, megabytes, durable):
    fd, path = opened
    ops = Noting(short=3_000_001)
    sink = Sink(ops, fd, durable=durable)
    torch_save(state(megabytes), sink)
    sink.release()
    digest = sink.finish()
    data = path.read_bytes()
    assert (sink.size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert ops.calls.count("fsync") == durable
    assert torch.load(path, weights_only=True)["step"] == 7


def test_the_disk_is_told_of_whole_pieces_in_order_and_only_where_it_is_to_be_durable(opened):
    fd, _path = opened
    for durable in (True, False):
        ops = Noting()
        sink = Sink(ops, fd, durable=durable)
        sink.write(bytes(20 << 20))
        told = [call for call in ops.calls if type(call) is tuple]
        piece = 8 << 20
        assert told == ([("writeback", 0, piece), ("writeback", piece, piece)] if durable else [])
        sink.release()


def test_memory_is_given_back_only_when_its_hash_is_complete(opened, monkeypatch):
    fd, _path = opened
    sink = Sink(FsOps(), fd)

    class Slow:
        def __init__(self):
            self.done = False

        def update(self, view):
            time.sleep(0.2)
            self.done = bool(len(view))  # a released memoryview raises here

    sink._hash = Slow()
    sink.write(bytes(4 << 20))
    assert sink._hash.done
    sink.release()


def test_an_interrupt_while_the_hash_is_under_way_comes_out_of_the_end(opened):
    fd, _path = opened
    sink = Sink(FsOps(), fd)
    done = []

    class Slow:
        def update(self, view):
            time.sleep(0.5)
            done.append(len(view))

    sink._hash = Slow()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert sink.write(bytes(4 << 20)) == 4 << 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sink.release()
    assert done == [4 << 20]
    with pytest.raises(KeyboardInterrupt):
        sink.finish()


def test_torchs_checksum_switch_is_put_back_whatever_happens_and_by_the_last_of_several(opened):
    fd, _path = opened
    get, put = torch.serialization.get_crc32_options, torch.serialization.set_crc32_options
    before = get()
    try:
        for setting in (True, False):
            put(setting)
            seen = []

            class Watching(Noting):
                def write(self, fd, data, seen=seen):
                    seen.append(get())
                    return super().write(fd, data)

            torch_save(state(1), Sink(Watching(), fd))
            assert set(seen) == {False}
            assert get() is setting
            with pytest.raises(TypeError):
                torch_save({"a": threading.Lock()}, Sink(FsOps(), fd))
            assert get() is setting

        put(True)
        inner, outer, seen = threading.Event(), threading.Event(), []

        def other():
            with module._without_checksums():
                inner.set()
                outer.wait(10)
                seen.append(get())
            seen.append(get())

        thread = threading.Thread(target=other)
        thread.start()
        inner.wait(10)
        torch_save(state(0), Sink(FsOps(), fd))
        assert get() is module._switch_is_per_thread()  # else the other save is still under way
        outer.set()
        thread.join()
        assert (seen, get()) == ([False, True], True)
        with module._without_checksums():
            with module._without_checksums():
                assert get() is False
            assert get() is False
        assert get() is True
    finally:
        put(before)


@pytest.mark.parametrize("per_thread", [True, False])
def test_the_switch_is_kept_for_whoever_shares_it(monkeypatch, per_thread):
    switch = threading.local() if per_thread else types.SimpleNamespace()
    monkeypatch.setattr(torch.serialization, "get_crc32_options", lambda: getattr(switch, "on", True))
    monkeypatch.setattr(torch.serialization, "set_crc32_options", lambda value: setattr(switch, "on", value))
    module._switch_is_per_thread.cache_clear()
    try:
        assert module._switch_is_per_thread() is per_thread
        inside, leave = threading.Event(), threading.Event()

        def other():
            with module._without_checksums():
                inside.set()
                leave.wait(10)
            after.append(switch.on)

        after = []
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        with module._without_checksums():
            leave.set()
            thread.join()
            assert switch.on is False
        assert [*after, switch.on] == [after[0], True]
        assert after[0] is per_thread  # shared, it is put back by the last
    finally:
        module._switch_is_per_thread.cache_clear()


@pytest.mark.parametrize("refusals", [1, 2, 9])
def test_without_a_thread_to_hash_in_the_hash_is_the_same(opened, monkeypatch, refusals):
    fd, path = opened
    start, left = threading.Thread.start, [refusals]

    def refused(self):
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("can't start new thread")
        start(self)

    module._switch_is_per_thread()  # asks a thread, once in a process
    monkeypatch.setattr(threading.Thread, "start", refused)
    sink = Sink(Noting(), fd)
    torch_save(state(9), sink)
    sink.release()
    assert sink.finish() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert left[0] < refusals
