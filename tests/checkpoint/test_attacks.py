"""What was found by trying to break checkpoints: each case saved wrongly, hung, or was lost, once."""

import errno
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch

from resumable_data.checkpoint import CheckpointManager, layout, opcodes, saveable
from resumable_data.checkpoint.committing import Form, commit
from resumable_data.checkpoint.fsops import FS
from resumable_data.checkpoint.sink import torch_save
from resumable_data.checkpoint.store import Store
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointLimitError,
    CheckpointSecurityError,
    CheckpointWriteError,
)

BOTH_WAYS = pytest.mark.parametrize("blocking", [True, False])


def nested(value, levels):
    for _ in range(levels):
        value = [value]
    return value


def saved(directory, value, *, blocking=True):
    """The value through a save and a load."""
    with CheckpointManager(directory, durability="process") as manager:
        manager.save(1, {"value": value}, blocking=blocking)
    return CheckpointManager(directory).load_latest().extra["value"]


@pytest.mark.parametrize("shallow_first", [True, False])
def test_a_container_in_two_places_is_as_deep_as_its_deeper_place(tmp_path, shallow_first):
    shallow = nested(1, 40)
    deep = nested(shallow, 30)
    with pytest.raises(TypeError, match="nests deeper than 64"):
        saved(tmp_path, [shallow, deep] if shallow_first else [deep, shallow])
    assert list(tmp_path.glob("step_*")) == []


def test_a_container_in_two_places_is_still_saved_within_the_limit(tmp_path):
    shared = nested(1, 20)
    value = [nested(shared, 30), shared]
    assert saved(tmp_path, value) == value


@BOTH_WAYS
def test_a_default_device_does_not_get_into_a_save(tmp_path, blocking):
    model = torch.nn.Linear(3, 2)
    view, empty = torch.arange(100.0)[3:5], torch.empty(0, 3)
    torch.set_default_device("meta")
    try:
        value = saved(tmp_path, [model.weight, view, empty], blocking=blocking)
    finally:
        torch.set_default_device(None)
    assert [tensor.device.type for tensor in value] == ["cpu"] * 3
    assert torch.equal(value[0], model.weight)
    assert value[1].tolist() == [3.0, 4.0]
    assert value[2].shape == (0, 3)


@BOTH_WAYS
def test_lazy_views_of_another_dtype_are_saved_beside_what_they_view(tmp_path, blocking):
    numbers = torch.complex(torch.arange(4.0), torch.arange(4.0))
    found = saved(tmp_path, [numbers, numbers.conj().imag], blocking=blocking)
    assert torch.equal(found[0], numbers)
    assert found[1].tolist() == [-0.0, -1.0, -2.0, -3.0]


@BOTH_WAYS
def test_memory_of_numpy_under_two_storages_and_dtypes_is_saved(tmp_path, blocking):
    array = np.arange(4, dtype=np.float32)
    value = [torch.from_numpy(array), torch.from_numpy(array.view(np.int32)[:2])]
    found = saved(tmp_path, value, blocking=blocking)
    assert all(map(torch.equal, found, value))


def test_no_generation_is_saved_that_no_name_can_have(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"value": 1})
        (tmp_path / "step_000000000001.g999999.pt").touch()
        with pytest.raises(CheckpointWriteError, match="last generation") as caught:
            manager.save(1, {"value": 2})
        assert caught.value.errno == errno.EOVERFLOW
        manager.save(2, {"value": 3})
    assert CheckpointManager(tmp_path).load_latest().extra == {"value": 3}


def test_no_run_is_begun_that_no_index_can_have(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"value": 1})
    path = tmp_path / "step_000000000001.json"
    index = layout.parse_index(path.read_bytes(), path.name, step=1, generation=0, sharded=False)
    path.write_bytes(layout.index_bytes(replace(index, run_ordinal=layout.MAX_ORDINAL)))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointWriteError, match="none can be newer") as caught,
    ):
        manager.save(2, {"value": 2})
    assert caught.value.errno == errno.EOVERFLOW
    assert sorted(tmp_path.glob("step_*2*")) == []


def test_a_mark_stays_while_the_other_layout_of_its_checkpoint_is_there(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, {"value": "single"})
    with CheckpointManager(tmp_path / "other", shards=2) as manager:
        (manager.save(5, {"value": "sharded"})).rename(tmp_path / "run" / "step_000000000005")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.mark_bad(5, "diverged")
        store: Store = manager._store()
        for left in (1, 0):
            store.delete(store.entries()[0])
            assert [entry.marked for entry in store.entries()] == ["diverged"] * left
    assert list((tmp_path / "run").glob("step_*")) == []


def test_a_file_in_the_place_of_a_directory_is_called_a_file(tmp_path):
    (tmp_path / "step_000000000001").touch()
    with pytest.raises(CheckpointSecurityError, match="step_000000000001: a file; expected a directory"):
        CheckpointManager(tmp_path).load_latest()


@pytest.mark.parametrize("value", [[[i] for i in range(20)], [torch.zeros(1) for _ in range(20)]])
def test_more_containers_than_a_load_reads_are_not_saved(value, monkeypatch):
    saveable.prepare(value)
    monkeypatch.setattr(saveable, "CONTAINERS", 20)
    with pytest.raises(TypeError, match="which a load would refuse"):
        saveable.prepare([value, []])


class Keeper(torch.nn.Module):
    """Keeps a tensor that hangs on a graph, as a module's extra state."""

    def __init__(self, value):
        super().__init__()
        self.kept = torch.full((2,), value, requires_grad=True) * 2

    def get_extra_state(self):
        return {"kept": [self.kept]}

    def set_extra_state(self, state):
        (self.kept,) = state["kept"]


class Plain:
    """The same of an object that is no module."""

    def __init__(self, value):
        self.kept = torch.full((2,), value, requires_grad=True) * 2

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize("kind", [Keeper, Plain])
def test_a_tensor_on_a_graph_in_the_present_state_hinders_no_restore(tmp_path, kind):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"kept": kind(1.0)})
    other = kind(3.0)
    CheckpointManager(tmp_path).restore({"kept": other})
    assert other.kept.tolist() == [2.0, 2.0]


class LateError(Exception):
    """What the handler of a timer raises."""


class Interrupted:
    """A sink in whose first write a signal handler raises, outside of all that the sink catches."""

    def write(self, data):
        raise LateError

    def flush(self):
        pass


def test_what_a_signal_handler_raises_in_a_save_comes_out_as_itself():
    with pytest.raises(LateError):
        torch_save({"value": torch.ones(3)}, Interrupted())


# ── hostile ──────────────────────────────────────────────────────────────────────────────────────────


def test_attributes_that_hide_methods_of_a_dict_are_not_saved(tmp_path):
    value = OrderedDict(a=1)
    value.keys = 5
    with pytest.raises(TypeError, match=r"hide its methods: \['keys'\]"):
        saved(tmp_path, value)


def pickled(value):
    return opcodes.pickle.dumps(value, protocol=2)


def test_attributes_that_hide_methods_of_a_dict_are_not_loaded():
    value = OrderedDict(a=1)
    value.keys = 5
    with pytest.raises(CheckpointSecurityError, match="no dict of names"):
        opcodes.scan(pickled(value), {}, opcodes.Limits())


@pytest.mark.parametrize("form", [dict.fromkeys, set], ids=["dict", "set"])
@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: (key, 1)], ids=["int", "tuple"])
def test_keys_of_one_hash_are_refused(form, wrap):
    alike = [wrap(i * (2**61 - 1)) for i in range(1, 1100)]
    with pytest.raises(CheckpointLimitError, match="have a hash"):
        opcodes.scan(pickled(form(alike)), {}, opcodes.Limits())


@pytest.mark.parametrize("keys", [range(5000), [(i, -i) for i in range(5000)], [i / 7 for i in range(5000)]])
def test_many_keys_as_they_come_are_read(keys):
    opcodes.scan(pickled([dict.fromkeys(keys), set(keys)]), {}, opcodes.Limits())


@pytest.mark.parametrize("state", [[1], None, {"step": torch.ones(3)}, {"step": True}], ids=repr)
def test_a_state_of_another_shape_is_damage(tmp_path, state):
    commit(tmp_path, FS, Form(), {"state": state}, layout.Stamp("a" * 32, 1, 1, 0, {}))
    with pytest.raises(CheckpointCorruptError, match="its index says 1"):
        CheckpointManager(tmp_path).load_latest()
