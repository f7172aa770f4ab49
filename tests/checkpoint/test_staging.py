"""Staging: the payload at the time of the call, in buffers that the next call uses again."""

import collections
import errno
import io
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.helpers import Run
from resumable_data.checkpoint import build_payload, staging
from resumable_data.checkpoint.payload import collect
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.staging import Staging
from resumable_data.errors import CheckpointWriteError


def saved(tree):
    """What a checkpoint of it would give back."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def storages(tree):
    return [t.untyped_storage().data_ptr() for t in staging.tensors_of(tree)]


def payload_of(run):
    return collect(run.objects, len(run.losses), {"losses": run.losses}, None, None)


def the_same(one, other):
    """Bit for bit, types, strides and flags included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape, one.stride(), one.requires_grad)
            == (other.dtype, other.shape, other.stride(), other.requires_grad)
            and one.device == other.device
            and bool((one == other).logical_or((one != one) & (other != other)).all())
        )
    if isinstance(one, dict):
        hung = [getattr(value, "__dict__", {}) for value in (one, other)]
        return (
            list(one) == list(other) and all(the_same(one[k], other[k]) for k in one) and hung[0] == hung[1]
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(the_same, one, other))
    return one == other


# ── the values are those at the call ─────────────────────────────────────────────────────────────────


def test_a_run_trained_on_is_saved_as_it_was():
    run = Run()
    run.train(3)  # inside an accumulation window: gradients are saved too
    prepared = prepare(payload_of(run))
    before = saved(prepared)
    staged = Staging().copy(prepared)
    run.train(9)
    assert not the_same(saved(prepared)["model"], before["model"])
    assert the_same(saved(staged), before)


def test_plain_tied_and_view_tensors_changed_in_place():
    whole = torch.arange(12.0)
    tree = {
        "plain": torch.ones(3, dtype=torch.bfloat16),
        "tied": [whole, whole, whole.view(3, 4)],
        "columns": whole.view(3, 4).t(),
        "slice": torch.arange(100.0)[10:20:3],
        "wide": torch.ones(1).expand(5),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
    }
    prepared = prepare(tree)
    before = saved(prepared)
    staged = Staging().copy(prepared)
    with torch.no_grad():
        for tensor in staging.tensors_of(prepared):
            if tensor.is_neg():
                continue  # writing to it would change nothing but memory of its own
            tensor[..., :1].add_(1) if tensor.dim() else tensor.add_(1)
    after = saved(staged)
    assert the_same(after, before)
    with torch.no_grad():
        after["tied"][2][0, 1] = 50  # what shared memory, and only that, still does
    assert after["tied"][0][1] == after["tied"][1][1] == after["columns"][1, 0] == 50
    assert after["slice"].untyped_storage().nbytes() == before["slice"].untyped_storage().nbytes()


def test_containers_and_bytearrays_changed_in_place():
    shared = [1, 2]
    tree = {
        "losses": [0.5] * 1000,
        "nested": {"a": [[1], (2, [3])], "b": {4}},
        "twice": [shared, shared],
        "ordered": collections.OrderedDict(x=[1]),
        "counter": collections.Counter("aab"),
        "raw": bytearray(b"abc"),
        "raws": [bytearray(b"abc"), 1],
    }
    tree["ordered"].hung = {"version": [1]}
    staged = Staging().copy(tree)
    before = saved(tree)
    assert staged["twice"][0] is staged["twice"][1]
    tree["losses"].append(1.0)
    tree["nested"]["a"][0].append(9)
    tree["nested"]["a"][1][1].append(9)
    tree["nested"]["b"].add(9)
    shared.append(9)
    tree["ordered"]["x"].append(9)
    tree["ordered"].hung["version"].append(9)
    tree["counter"]["a"] = 9
    tree["raw"][0] = tree["raws"][0][0] = 9
    assert not the_same(saved(tree), before)
    assert the_same(saved(staged), before)
    assert saved(staged)["ordered"].hung == {"version": [1]}


def test_a_copied_payload_has_bytearrays_of_its_own():
    raw = bytearray(b"abc")
    payload = build_payload({"raw": raw, "raws": [raw]}, step=0)
    raw[0] = 9
    assert payload["extra"] == {"raw": bytearray(b"abc"), "raws": [bytearray(b"abc")]}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 70), st.sampled_from(["new", "tie", "view", "t"])), max_size=12))
def test_any_mix_of_ties_and_views_is_saved_as_it_is_without_staging(parts):
    tree = []
    for size, kind in parts:
        last = tree[-1] if tree else torch.zeros(2, 2)
        tree.append(
            {
                "new": lambda size=size: torch.randn(size, 3),
                "tie": lambda last=last: last,
                "view": lambda last=last: last[: max(1, len(last) // 2)],
                "t": lambda last=last: last.t(),
            }[kind]()
        )
    prepared = prepare(tree)
    staged = Staging().copy(prepared)
    assert the_same(staged, prepared)

    def shape_of_sharing(values):
        addresses = [t.untyped_storage().data_ptr() for t in values]
        return [addresses.index(address) for address in addresses]

    assert shape_of_sharing(staged) == shape_of_sharing(prepared)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_copied_in_pieces_by_several_threads(monkeypatch, threads):
    monkeypatch.setattr(staging, "_PIECE", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tree = {str(n): torch.randn(n) for n in (1, 249, 250, 251, 5000, 3)} | {"odd": torch.ones(1001).bool()}
    staged = Staging().copy(tree)
    assert the_same(staged, tree)
    assert not set(storages(staged)) & set(storages(tree))


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_buffers_are_used_again():
    run, area = Run(), Staging()
    run.train(4)
    first = area.copy(prepare(payload_of(run)))
    places = storages(first)
    run.train(8)
    second = area.copy(prepare(payload_of(run)))
    assert storages(second) == places
    assert the_same(second["model"], dict(run.model.state_dict()))


def test_buffers_of_other_sizes_are_freed_before_new_ones_are_made(monkeypatch):
    held = []
    original = staging._empty
    area = Staging()

    def counted(nbytes, *, pinned):
        held.append(sum(len(buffers) for buffers in area._buffers.values()))
        return original(nbytes, pinned=pinned)

    monkeypatch.setattr(staging, "_empty", counted)
    area.copy([torch.zeros(10), torch.zeros(10), torch.zeros(20)])
    held.clear()
    area.copy([torch.zeros(10), torch.zeros(30), torch.zeros(30)])
    assert held == [1, 2]
    assert sorted(kind[0] for kind, buffers in area._buffers.items() for _ in buffers) == [40, 120, 120]
    area.release()
    assert area._buffers == {}


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
@pytest.mark.parametrize("at", range(4))
def test_without_memory_nothing_is_changed_and_the_next_copy_works(monkeypatch, kind, at):
    tree = {str(n): torch.full((n,), float(n)) for n in (1, 2, 3, 4)}
    before = {key: tensor.clone() for key, tensor in tree.items()}
    original = staging._empty
    left = [at]

    def scarce(nbytes, *, pinned):
        left[0] -= 1
        if left[0] < 0:
            raise kind("DefaultCPUAllocator: can't allocate memory")
        return original(nbytes, pinned=pinned)

    area = Staging()
    monkeypatch.setattr(staging, "_empty", scarce)
    with pytest.raises(CheckpointWriteError, match="blocking=True") as caught:
        area.copy(tree)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.needed in (4, 8, 12, 16)
    assert isinstance(caught.value.__cause__, kind)
    assert the_same(tree, before)
    assert area._buffers == {}
    left[0] = 100
    assert the_same(area.copy(tree), before)


def test_without_memory_for_plain_values(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(staging, "rebuild", fail)
    area = Staging()
    with pytest.raises(CheckpointWriteError) as caught:
        area.copy({"x": torch.ones(2)})
    assert caught.value.errno == errno.ENOMEM
    assert area._buffers == {}


def test_an_interrupt_passes_on_and_frees_the_buffers(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    area = Staging()
    monkeypatch.setattr(staging, "_copy_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        area.copy({"x": torch.ones(2)})
    assert area._buffers == {}


def test_a_failure_in_a_copying_thread_is_raised(monkeypatch):
    def fail(_):
        raise ValueError("bad memory")

    monkeypatch.setattr(staging, "_PIECE", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(staging, "_copy_batch", fail)
    with pytest.raises(ValueError, match="bad memory"):
        Staging().copy({"x": torch.ones(20)})


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────


class FakeDevice:
    """Makes host memory pass for a device's, whose copies may be late until the stream is waited for."""

    def __init__(self, monkeypatch, home):
        self.events, self.late = [], []
        monkeypatch.setattr(staging, "_home", lambda device: home)
        monkeypatch.setattr(staging, "_empty", self.empty)
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        self.home = home

    def empty(self, nbytes, *, pinned):
        self.events.append(f"pinned {pinned}")
        return LateTensor.make(nbytes, self)

    def current_stream(self, device):
        return self

    def synchronize(self):
        self.events.append("synchronize")
        for target, source in self.late:
            torch.Tensor.copy_(target, source)
        self.late.clear()


class LateTensor(torch.Tensor):
    """A buffer into which copies arrive when the device is waited for."""

    @staticmethod
    def make(nbytes, device):
        tensor = torch.zeros(nbytes, dtype=torch.uint8).as_subclass(LateTensor)
        tensor.device_queue = device
        return tensor

    def copy_(self, source, non_blocking=False):
        self.device_queue.events.append(f"copy {non_blocking}")
        self.device_queue.late.append((self.as_subclass(torch.Tensor), source))
        return self


@pytest.mark.parametrize("home", ["cuda", "xpu"])
def test_copies_from_a_device_are_complete_when_it_returns(monkeypatch, home):
    device = FakeDevice(monkeypatch, home)
    tree = {"a": torch.arange(5.0), "b": torch.arange(7)}
    area = Staging()
    fast = home == "cuda"
    copied = [f"copy {fast}", f"copy {fast}", "synchronize"]
    for events in ([f"pinned {fast}"] * 2 + copied, copied):
        device.events.clear()
        staged = area.copy(tree)
        assert device.events == events
        assert the_same(staged, tree)
        tree["a"].add_(1)


@pytest.mark.gpu
def test_a_model_on_a_gpu():
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 2000)).cuda()
    model[1].weight = model[0].weight
    area = Staging()
    for _ in range(3):
        before = {key: value.cpu().clone() for key, value in model.state_dict().items()}
        staged = area.copy(prepare({"model": dict(model.state_dict()), "host": torch.arange(3)}))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        assert the_same(staged["model"], before)
        assert staged["model"]["0.weight"].data_ptr() == staged["model"]["1.weight"].data_ptr()
    kinds = {home for _, home in area._buffers}
    assert kinds == {"cuda", "cpu"}
    assert all(
        b.is_pinned() for (_, home), buffers in area._buffers.items() if home == "cuda" for b in buffers
    )


def test_real_want_of_memory():
    """Under a ceiling on the address space, in a process of its own."""
    code = """
import resource, torch
from resumable_data.checkpoint.staging import Staging
from resumable_data.errors import CheckpointWriteError
tree = {"big": torch.ones(30_000_000)}
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
area = Staging()
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), -1))
try:
    area.copy(tree)
except CheckpointWriteError as error:
    print("refused", error.errno, error.needed, float(tree["big"].sum()))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print("copied", float(area.copy(tree)["big"].sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["refused 12 120000000 30000000.0", "copied 30000000.0", ""], (
        done.stderr
    )
