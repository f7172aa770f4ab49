"""The public surface is data; a change here is a change of the interface."""

from __future__ import annotations

import inspect
import pickle

import pytest

import resumable_data
from resumable_data import errors

ERRORS = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointLimitError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSecurityError",
    "CheckpointWriteError",
    "RNGRestoreError",
    "RankDisagreementError",
    "ResumableDataError",
    "StaleIteratorError",
    "StateError",
    "StateMismatchError",
    "StateVersionError",
]
NAMES = sorted(
    [
        *ERRORS,
        "CheckpointManager",
        "ResumableLoader",
        "apply_payload",
        "atomic_json_dump",
        "atomic_torch_save",
        "build_payload",
        "capture_rng_state",
        "restore_rng_state",
        "sample_seed",
    ]
)

# What a call looks like: parameters as they are written, annotations left out.
LOADER = (
    "dataset, batch_size=1, shuffle=None, sampler=None, batch_sampler=None, num_workers=0, collate_fn=None, "
    "pin_memory=False, drop_last=False, timeout=0, worker_init_fn=None, multiprocessing_context=None, "
    "generator=None, *, prefetch_factor=None, persistent_workers=False, pin_memory_device='', in_order=True, "
    "snapshot_every_n_steps=1, seed=None, num_replicas=None, rank=None, process_group=None, tail='pad', "
    "batches_per_epoch=None, seeding='batch', reseed=None, dataset_id=None"
)
FUNCTIONS = {
    "apply_payload": "payload, objects, *, override=(), strict_rng=True",
    "atomic_json_dump": "value, path",
    "atomic_torch_save": "state, path",
    "build_payload": "objects, *, step, state=None, config=None, generators=None",
    "capture_rng_state": "generators=None, *, rank=None, world_size=None",
    "sample_seed": "",
    "restore_rng_state": "state, *, generators=None, strict=True, rank=None, world_size=None",
}
LOADER_METHODS = {
    "batch_at": "epoch, batch_in_epoch",
    "check_state_dict": "state, *, override=()",
    "cycle": "",
    "end_epoch": "",
    "enumerate": "",
    "epochs": "stop",
    "load_state_dict": "state, *, override=()",
    "peek": "",
    "seek": "epoch, batch_in_epoch",
    "set_epoch": "epoch",
    "state_dict": "*, in_flight=0",
}
LOADER_READ_ONLY = [
    "batch_in_epoch",
    "batches_remaining",
    "consumed_samples",
    "epoch",
    "resumed",
    "samples_in_epoch",
]

MANAGER = (
    "directory, *, every_steps=500, keep_last=3, keep_best=None, enabled=True, shards=None, "
    "durability='full', hmac_key=None, config=None, generators=None, when_busy='wait'"
)
MANAGER_METHODS = {
    "best_path": "",
    "close": "",
    "copy_to": "directory, step=None",
    "finish": "step, objects, *, state=None, metrics=None, blocking=True",
    "latest_path": "",
    "load_latest": "",
    "mark_bad": "step, reason",
    "path_for": "step",
    "prune": "",
    "restore": "objects, *, override=(), strict_rng=True",
    "save": "step, objects, *, state=None, metrics=None, blocking=True",
    "should_save": "step",
    "verify": "step=None",
}


def written(call):
    """The parameters of a call as in a def line: ``"a, b=1, *, c=None"``; self left out."""
    parts = []
    parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(str(parameter.replace(annotation=parameter.empty)))
    return ", ".join(parts).removesuffix(", *")


def public_methods(cls):
    return {name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")}


def test_all_is_exactly_the_public_names():
    assert resumable_data.__all__ == NAMES


def test_nothing_else_public_is_reachable_but_modules():
    others = {
        name
        for name, value in vars(resumable_data).items()
        if not name.startswith("_") and name not in NAMES and not inspect.ismodule(value)
    }
    assert others <= {"annotations"}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(resumable_data, name))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_tree(name):
    assert getattr(resumable_data, name) is getattr(errors, name)


def test_no_error_of_the_tree_is_private():
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ResumableDataError)
    }
    assert tree == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_the_tree_is_drawn_in_its_docstring(name):
    assert f" {name}\n" in errors.__doc__ or f" {name} " in errors.__doc__


def test_loader_signature():
    assert written(resumable_data.ResumableLoader) == LOADER


@pytest.mark.parametrize(("name", "signature"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_function_signature(name, signature):
    assert written(getattr(resumable_data, name)) == signature


def test_loader_is_no_dataloader():
    from torch.utils.data import DataLoader

    assert not issubclass(resumable_data.ResumableLoader, DataLoader)


@pytest.mark.parametrize(("name", "signature"), LOADER_METHODS.items(), ids=LOADER_METHODS)
def test_loader_method(name, signature):
    method = getattr(resumable_data.ResumableLoader, name)
    assert written(method) == signature


@pytest.mark.parametrize("name", LOADER_READ_ONLY)
def test_loader_position_is_read_only(name):
    member = inspect.getattr_static(resumable_data.ResumableLoader, name)
    assert isinstance(member, property)
    assert member.fset is None


def test_manager_signature():
    assert written(resumable_data.CheckpointManager) == MANAGER


def test_manager_has_these_methods_and_no_others():
    assert public_methods(resumable_data.CheckpointManager) == set(MANAGER_METHODS)


@pytest.mark.parametrize(("name", "signature"), MANAGER_METHODS.items(), ids=MANAGER_METHODS)
def test_manager_method(name, signature):
    assert written(getattr(resumable_data.CheckpointManager, name)) == signature


def test_manager_is_a_context_manager():
    assert callable(resumable_data.CheckpointManager.__enter__)
    assert callable(resumable_data.CheckpointManager.__exit__)


def test_written_sees_a_changed_default_order_or_kind():
    def call(self, a, *, b=1, c="x"): ...

    assert written(call) == "a, *, b=1, c='x'"
    for other in (
        lambda self, a, *, b=2, c="x": None,
        lambda self, a, *, c="x", b=1: None,
        lambda self, a, b=1, *, c="x": None,
        lambda self, a, *, b=1: None,
    ):
        assert written(other) != "a, *, b=1, c='x'"


@pytest.mark.parametrize(
    "error",
    [
        errors.StateError("found 1, expected 2", expected=2, found=1),
        errors.StateMismatchError("differs", fields={"seed": (1, 2)}),
        errors.CheckpointWriteError("disk full", errno=28, path="/x/step_1.pt", needed=10, free=3),
        errors.CheckpointCorruptError("hash", expected="aa", found="bb"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling_with_their_values(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_kinds_of_errors():
    assert issubclass(errors.CheckpointError, RuntimeError)
    write = errors.CheckpointWriteError("disk full", errno=28, path="/x", needed=10, free=3)
    assert isinstance(write, OSError)
    assert (write.errno, write.filename, write.needed, write.free) == (28, "/x", 10, 3)
    mismatch = errors.StateMismatchError("differs", fields={"seed": (1, 2)})
    assert (mismatch.found, mismatch.expected) == ({"seed": 1}, {"seed": 2})
