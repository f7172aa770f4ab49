"""``process_group=``: width and rank from a group or a mesh, and the warning for data that every process reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.datasets import Indices, keep
from support.fresh import ROOT, TESTS
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler

from resumable_data import ResumableLoader

N = 23


def make(**arguments):
    return ResumableLoader(Indices(N), 3, collate_fn=keep, **{"shuffle": True, "seed": 5, **arguments})


def shape(loader):
    state = loader.state_dict()
    return [state["num_replicas"], list(loader)]


def warned(loader):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
        list(loader)
    return [str(one.message) for one in caught if "reads the whole dataset" in str(one.message)]


def refused(call):
    try:
        call()
    except (ValueError, TypeError) as error:
        return [type(error).__name__, str(error)]
    return None


def in_each_process(rank, directory):
    """What one of two processes finds, as JSON in the directory."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        only_first, everyone = dist.new_group([0]), dist.group.WORLD
        found = {
            "group": shape(make(process_group=everyone)),
            "mesh": shape(make(process_group=mesh)),
            "sub_mesh": shape(make(process_group=grid["dp"])),
            "grid": refused(lambda: make(process_group=grid)),
            "numbers": shape(make(num_replicas=2, rank=rank)),
            "both": refused(lambda: make(process_group=everyone, num_replicas=2, rank=rank)),
            "no seed": refused(lambda: make(process_group=everyone, seed=None)),
            "outside": refused(lambda: make(process_group=only_first)),
            "unshared": warned(make()),
            "unshuffled": warned(make(shuffle=False)),
            "shared": warned(make(process_group=everyone)),
            "sampler": warned(make(shuffle=None, seed=None, sampler=DistributedSampler(Indices(N), seed=5))),
        }
        running, loader = resumed_half(everyone)
        found["half"] = [running, loader.state_dict()]
    finally:
        dist.destroy_process_group()
    Path(directory, f"{rank}.json").write_text(json.dumps(found))


def resumed_half(group):
    loader = make(process_group=group)
    list(loader)
    live = iter(loader)
    head = [next(live), next(live)]
    return head, loader


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__)), str(rank), str(directory)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def alone(rank):
    return shape(make(num_replicas=2, rank=rank))


@pytest.mark.parametrize("how", ["group", "mesh", "sub_mesh", "numbers"])
def test_width_and_rank_come_from_the_group(found, how):
    for rank in range(2):
        assert found[rank][how] == alone(rank)
    assert found[0][how] != found[1][how]


def test_a_mesh_of_more_dimensions_is_refused(found):
    for each in found:
        kind, message = each["grid"]
        assert kind == "ValueError"
        assert "one-dimensional" in message
        assert "mesh['dp']" in message


def test_a_group_and_numbers_are_refused(found):
    assert [each["both"][0] for each in found] == ["ValueError"] * 2
    assert all("process_group" in each["both"][1] for each in found)


def test_every_rank_needs_the_same_seed(found):
    assert all("seed must be given" in each["no seed"][1] for each in found)


def test_a_group_without_this_process_is_refused(found):
    assert found[0]["outside"] is None
    assert found[1]["outside"] is not None
    assert "process_group" in found[1]["outside"][1]


def test_data_that_every_process_reads_is_said_once(found):
    for each in found:
        (message,) = each["unshared"]
        assert "2 processes" in message
        assert "process_group=" in message
        assert each["shared"] == each["sampler"] == each["unshuffled"] == []


def test_states_of_two_processes_are_equal_and_one_process_goes_on(found):
    (head, state), (other_head, other_state) = (each["half"] for each in found)
    assert state == other_state
    assert state["epoch"] == 1
    loader = make()
    loader.seek(1, 0)
    order = [index for batch in loader for index in batch]
    got = [
        index
        for pair in zip(head, other_head, strict=True)
        for row in zip(*pair, strict=True)
        for index in row
    ]
    loader = make()
    loader.load_state_dict(state)
    assert got + [index for batch in loader for index in batch] == order


@pytest.mark.parametrize("group", [object(), "WORLD", 2])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match="process_group"):
        make(process_group=group)


def test_one_process_alone_is_not_warned():
    assert not dist.is_initialized()
    assert warned(make()) == []
    assert torch.distributed.is_available()


if __name__ == "__main__":
    in_each_process(int(sys.argv[1]), sys.argv[2])
