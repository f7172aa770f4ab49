"""Checkpoints of the first version that wrote this format, read to exact values.

A change that fails here breaks the checkpoints people have: CHECKPOINT BREAKING in CHANGELOG.md, and a new schema name.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import golden_values, page_format
from checkpoint.test_format_page import same
from resumable_data import CheckpointManager
from resumable_data.checkpoint import layout
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS
from resumable_data.checkpoint.store import Store

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "checkpoints"
FORMS = golden_values.FORMS
NAMES = {
    "single": ["step_000000000042.g1.json", "step_000000000042.g1.pt"],
    "sharded": ["index.json", "meta.pt", "model.shard-000.pt", "model.shard-001.pt"],
}
# what comes after the save: one draw of python's, numpy's and torch's stream each, and the epoch's other batches
DRAWS = ["0x1.132d8f91b7584p-3", "0x1.be757297b0c50p-2", "0x1.176a121b06980p-5"]
REST = [[3, 0], [7, 5], [2, 4]]


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def index_of(directory):
    (path,) = [path for path in files_of(directory) if path.suffix == ".json"]
    return path


@pytest.mark.parametrize("name", FORMS)
def test_a_golden_checkpoint_is_read_to_these_values(name):
    loaded = Store(GOLDEN / name, FS, Form(hmac_key=FORMS[name].hmac_key)).newest_good()
    assert same(loaded.payload, golden_values.payload())
    assert loaded.skipped == ()
    stamp = {key: getattr(loaded.index, key) for key in vars(golden_values.STAMP)}
    assert stamp == vars(golden_values.STAMP)
    model = loaded.payload["model"]
    assert len({model[key].untyped_storage().data_ptr() for key in ("weight", "tied", "row")}) == 1
    assert model["wide"].untyped_storage().nbytes() == 4


@pytest.mark.parametrize("name", FORMS)
def test_the_reader_of_the_page_reads_it_too(name):
    payload, index, skipped = page_format.read_newest(GOLDEN / name, FORMS[name].hmac_key)
    assert same(payload, golden_values.payload())
    assert (index["step"], index["generation"], skipped) == (42, 1, {})


@pytest.mark.parametrize("name", FORMS)
def test_the_bytes_of_an_index_are_still_these(name):
    form, path = FORMS[name], index_of(GOLDEN / name)
    sharded = form.shards is not None
    index = layout.parse_index(path.read_bytes(), path.name, step=42, generation=1, sharded=sharded)
    assert layout.index_bytes(index, form.hmac_key) == path.read_bytes()


@pytest.mark.parametrize("name", FORMS)
def test_what_is_saved_now_has_the_same_form(tmp_path, name):
    form, golden = FORMS[name], GOLDEN / name
    Store(tmp_path, FS, form).commit(golden_values.payload(), golden_values.STAMP)
    assert [path.name for path in files_of(tmp_path)] == NAMES["single" if form.shards is None else "sharded"]
    for path in files_of(tmp_path):
        then, now = golden / path.relative_to(tmp_path), path
        if path.suffix == ".pt":
            assert same(*(torch.load(file, weights_only=True) for file in (then, now)))
    was, is_now = (json.loads(index_of(directory).read_bytes()) for directory in (golden, tmp_path))
    for content in (was, is_now):  # torch's own bytes are torch's business
        content.pop("index_sha256"), content.pop("hmac_sha256", None)
        for file in content["files"]:
            file.pop("size"), file.pop("sha256")
    assert was == is_now


def test_a_changed_golden_file_is_seen(tmp_path):
    for name, form in FORMS.items():
        for number, path in enumerate(files_of(GOLDEN / name)):
            copy = shutil.copytree(GOLDEN / name, tmp_path / f"{name} {number}")
            place = copy / path.relative_to(GOLDEN / name)
            data = bytearray(place.read_bytes())
            data[len(data) // 3] ^= 4
            place.write_bytes(data)
            store = Store(copy, FS, replace(form, shards=None))
            assert store.check(store.entries()[0]) is not None, place


def test_a_golden_run_goes_on():
    objects, wanted = golden_values.objects(), golden_values.advanced()
    golden_values.draws()
    found = CheckpointManager(GOLDEN / "run", config={"width": 2}).restore(objects)
    assert [draw.hex() for draw in golden_values.draws()] == DRAWS
    assert list(map(torch.Tensor.tolist, objects["data"])) == REST
    assert (found.step, found.state["losses"], found.state["batch_in_epoch"]) == (42, [0.5], 2)
    assert found.extra["ema"] == [0.25, 0.75]
    for key in ("model", "optimizer", "scheduler"):
        assert same(objects[key].state_dict(), wanted[key].state_dict()), key
    assert [module.training for module in objects["model"].modules()] == [True, True, True, False]
    grads = [parameter.grad for parameter in objects["model"].parameters()]
    assert same(grads, [torch.full_like(parameter, 0.25) for parameter in objects["model"].parameters()])


def test_every_golden_checkpoint_is_read_by_a_test():
    assert {path.name for path in GOLDEN.iterdir()} == {*FORMS, "run"}
