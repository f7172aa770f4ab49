import copy
import math

import numpy as np
import pytest
import torch

from checkpoint.helpers import FakeLoader, Run
from checkpoint.payloads import del_at, picture, set_at, through_a_file, whole
from resumable_data.checkpoint import apply_payload, build_payload
from resumable_data.errors import CheckpointMismatchError, RNGRestoreError, StateMismatchError
from resumable_data.rng import capture_rng_state


def test_the_shape_of_a_payload():
    run = Run()
    run.train(3)
    objects = run.objects | {"best": 1.5}
    payload = build_payload(objects, step=3, state={"losses": run.losses}, config={"a": 1})
    keys = "schema model optimizer scheduler data state rng modes grads wiring config extra wall_saved_at"
    assert set(payload) == set(keys.split())
    assert payload["schema"] == "ckpt.v1"
    assert payload["state"] == {"step": 3, "epoch": 0, "batch_in_epoch": 3, "losses": run.losses}
    assert payload["extra"] == {"best": 1.5}
    assert payload["modes"] == {"model": {"": True, "0": True, "1": True, "2": True, "3": True}}
    assert set(payload["grads"]) == {name for name, _ in run.model.named_parameters()}
    assert picture(through_a_file(payload)) == picture(payload)


def test_a_payload_is_a_copy_and_applying_it_goes_back_exactly():
    run = Run()
    run.train(5)
    payload = build_payload(run.objects, step=5)
    before, losses = picture(payload), list(run.losses)
    ahead = run.train(9)[5:]
    assert whole(run.objects) != before
    assert picture(payload) == before
    apply_payload(payload, run.objects)
    assert whole(run.objects, 5) == before
    run.losses = losses
    assert run.train(9)[5:] == ahead
    assert picture(payload) == before  # what was set shares nothing with it
    apply_payload(payload, run.objects)
    assert whole(run.objects, 5) == before


@pytest.mark.parametrize("stop", [4, 5])
def test_another_object_continues_inside_and_outside_an_accumulation_window(stop):
    run = Run()
    run.train(stop)
    payload = through_a_file(build_payload(run.objects, step=stop))
    expected = run.train(12)[stop:]
    other = Run(seed=9)
    other.train(7)  # has gradients and state of its own
    apply_payload(payload, other.objects)
    other.losses = [0.0] * stop
    assert other.train(12)[stop:] == expected


def test_gradients_that_the_file_lacks_become_none():
    run = Run()
    payload = build_payload(run.objects, step=0)
    assert payload["grads"] == {}
    run.train(1)
    run.model[3].weight.grad = None
    partial = build_payload(run.objects, step=1)
    apply_payload(payload, run.objects)
    assert all(p.grad is None for p in run.model.parameters())
    apply_payload(partial, run.objects)
    assert run.model[3].weight.grad is None
    assert torch.equal(run.model[0].weight.grad, partial["grads"]["0.weight"])


def test_modes_of_every_submodule():
    run = Run()
    run.model[1].eval()
    payload = build_payload(run.objects, step=0)
    run.model.eval()
    run.model[1].train()
    apply_payload(payload, run.objects)
    assert [module.training for module in run.model.modules()] == [True, True, False, True, True]


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_names_are_those_of_the_bare_model():
    run = Run()
    run.train(1)
    plain = build_payload(run.objects, step=1)
    parallel = torch.nn.DataParallel(run.model)
    distributed = torch.nn.parallel.DistributedDataParallel(run.model)
    compiled = torch.compile(run.model, backend="eager")
    both = torch.compile(distributed, backend="eager")
    for wrapped in (parallel, distributed, compiled, both, torch.nn.DataParallel(compiled)):
        payload = build_payload(run.objects | {"model": wrapped}, step=1)
        for key in ("model", "modes", "grads"):
            assert picture(payload[key]) == picture(plain[key])
        other = Run(seed=4)
        apply_payload(payload, other.objects)
        assert whole(other.objects, 1) == picture(plain)
        apply_payload(plain, run.objects | {"model": wrapped})
    inside = Wrapper(torch.compile(Run().model, backend="eager"))
    assert set(build_payload({"model": inside}, step=0)["model"]) == {
        f"inner.{key}" for key in plain["model"]
    }


def test_a_module_called_module_keeps_its_name():
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1), "_orig_mod": torch.nn.Linear(1, 1)})
    names = set(build_payload({"model": model}, step=0)["model"])
    assert names == {"module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"}


def test_further_modules_optimizers_and_values():
    def build(seed):
        torch.manual_seed(seed)
        critic = torch.nn.Linear(2, 1)
        critic(torch.ones(1, 2)).sum().backward()
        sgd = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        sgd.step()
        return {
            "model": torch.nn.Linear(2, 2),
            "critic": critic,
            "sgd": sgd,
            "note": "x",
            "loader": FakeLoader(),
        }

    first, second = build(1), build(2)
    first["critic"].eval()
    first["loader"].epoch = 4
    payload = through_a_file(build_payload(first, step=7))
    apply_payload(payload, second)
    assert whole(second, 7) == picture(payload)
    assert not second["critic"].training
    assert second["loader"].epoch == 4
    assert torch.equal(second["critic"].weight.grad, first["critic"].weight.grad)


def test_fewer_objects_are_fine_and_missing_ones_are_not():
    run = Run()
    payload = build_payload(run.objects | {"scheduler": None}, step=0)
    apply_payload(payload, {"model": Run(seed=2).model})
    apply_payload(payload, {"model": Run(seed=2).model, "scheduler": None, "optimizer": None})
    with pytest.raises(CheckpointMismatchError, match=r"scheduler: not in the file.*'model', 'optimizer'"):
        apply_payload(payload, Run().objects)
    with pytest.raises(CheckpointMismatchError, match="ema: not in the file"):
        apply_payload(payload, {"ema": Run().model})


# ── validated exactly ────────────────────────────────────────────────────────────────────────────────


MISMATCHES = {
    "weight missing": ("0.weight is missing", del_at("model", "0.weight")),
    "weight too many": ("extra is only in", set_at("model", "extra", value=torch.ones(1))),
    "shape": ("0.weight is", set_at("model", "0.weight", value=torch.ones(1, 4))),
    "int8 weights": ("torch.int8", set_at("model", "0.weight", value=lambda w: w.to(torch.int8))),
    "complex weights": ("complex64", set_at("model", "0.weight", value=lambda w: w.to(torch.complex64))),
    "bf16 weights": ("bfloat16", set_at("model", "0.weight", value=lambda w: w.to(torch.bfloat16))),
    "(1,) into 0-dim": (
        r"\[1\] torch.int64",
        set_at("model", "1.num_batches_tracked", value=torch.tensor([3])),
    ),
    "no tensor": ("0.weight is a list", set_at("model", "0.weight", value=[1.0])),
    "model is a list": ("model: the file holds a list", set_at("model", value=[])),
    "group count": ("2 parameter groups", set_at("optimizer", "param_groups", value=lambda g: g * 2)),
    "parameter count": (
        "5 parameters",
        set_at("optimizer", "param_groups", 0, "params", value=lambda p: p[:-1]),
    ),
    "lr a string": (r"group 0\.lr is a str", set_at("optimizer", "param_groups", 0, "lr", value="evil")),
    "lr nan": (r"group 0\.lr is nan", set_at("optimizer", "param_groups", 0, "lr", value=math.nan)),
    "betas": (r"group 0\.betas", set_at("optimizer", "param_groups", 0, "betas", value=(0.9,))),
    "state shape": (
        "exp_avg of parameter 0",
        set_at("optimizer", "state", 0, "exp_avg", value=torch.ones(2)),
    ),
    "state dtype": (
        "exp_avg of parameter 0",
        set_at("optimizer", "state", 0, "exp_avg", value=lambda v: v.to(torch.int32)),
    ),
    "state of nobody": ("parameter 99", set_at("optimizer", "state", 99, value={})),
    "repeated ids": ("two groups", set_at("optimizer", "param_groups", 0, "params", value=[0] * 6)),
    "optimizer is a list": ("no optimizer", set_at("optimizer", value=[1])),
    "scheduler key": ("scheduler: .*T_max", del_at("scheduler", "T_max")),
    "scheduler type": ("last_epoch is a str", set_at("scheduler", "last_epoch", value="3")),
    "mode missing": ("submodule 2", del_at("modes", "model", "2")),
    "mode no bool": ("no training flags", set_at("modes", "model", "2", value=1)),
    "grad of nobody": ("gradient nobody", set_at("grads", "nobody", value=torch.ones(1))),
    "grad shape": ("gradient 0.bias", set_at("grads", "0.bias", value=torch.ones(1))),
    "schema": ("ckpt.v2", set_at("schema", value="ckpt.v2")),
    "key missing": ("keys", del_at("rng")),
    "rng a list": ("'rng' is a list", set_at("rng", value=[])),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_named_and_nothing_has_changed(case):
    match, change = MISMATCHES[case]
    run = Run()
    run.train(5)
    payload = through_a_file(build_payload(run.objects, step=5))
    change(payload)
    other = Run(seed=3)
    other.train(4)
    before = whole(other.objects)
    with pytest.raises(CheckpointMismatchError, match=match):
        apply_payload(payload, other.objects)
    assert whole(other.objects) == before


def test_loader_and_rng_refusals_pass_through_and_nothing_has_changed():
    run = Run()
    run.train(5)
    payload = build_payload(run.objects, step=5)
    other = Run(seed=3)
    other.train(3)
    before = whole(other.objects)
    bad = copy.deepcopy(payload)
    bad["rng"]["torch_cpu"] = ""
    with pytest.raises(RNGRestoreError, match="torch_cpu"):
        apply_payload(bad, other.objects)
    bad = copy.deepcopy(payload)
    bad["data"]["dataset_size"] = 11
    with pytest.raises(StateMismatchError, match="dataset_size"):
        apply_payload(bad, other.objects)
    assert whole(other.objects) == before
    apply_payload(bad, other.objects, override=["dataset_size"])
    assert other.data.batch_in_epoch == 5
    with pytest.raises(TypeError, match="override"):
        apply_payload(bad, other.objects, override="dataset_size")


class Stubborn:
    """Takes a state and then fails, or fails for ever."""

    def __init__(self, value, fails=False, for_ever=False):
        self.value, self.fails, self.for_ever = value, fails, for_ever
        self.loads = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        self.loads += 1
        if self.fails and (self.loads == 1 or self.for_ever):
            raise OSError("no")


def test_what_fails_while_being_set_puts_everything_back(monkeypatch):
    run = Run()
    run.train(5)
    payload = build_payload(run.objects | {"a": Stubborn(1), "b": Stubborn(2)}, step=5)
    other = Run(seed=3)
    other.train(3)
    objects = other.objects | {"a": Stubborn(8), "b": Stubborn(9, fails=True)}
    before = whole(objects)
    with pytest.raises(CheckpointMismatchError, match=r"b: .*OSError: no\); everything was put back"):
        apply_payload(payload, objects)
    assert whole(objects) == before
    objects["b"] = Stubborn(9, fails=True, for_ever=True)
    with pytest.raises(CheckpointMismatchError, match=r"could not be put back: b \(OSError"):
        apply_payload(payload, objects)
    assert objects["a"].value == 8

    def broken(*args, **options):
        raise RuntimeError("hook")

    objects["b"] = Stubborn(9)
    before = whole(objects)
    monkeypatch.setattr(other.model, "load_state_dict", broken)
    with pytest.raises(CheckpointMismatchError, match=r"model: .*hook\); everything was put back"):
        apply_payload(payload, objects)
    assert whole(objects) == before
    monkeypatch.undo()
    apply_payload(payload, objects)
    assert (objects["a"].value, objects["b"].value) == (1, 2)


def test_an_optimizer_that_fails_is_put_back(monkeypatch):
    run = Run()
    run.train(6)
    payload = build_payload(run.objects, step=6)
    other = Run(seed=3)
    other.train(4)
    before = whole(other.objects)
    plain = other.optimizer.load_state_dict

    def late(state):
        plain(state)
        raise KeyboardInterrupt

    monkeypatch.setattr(other.optimizer, "load_state_dict", late)
    with pytest.raises(KeyboardInterrupt):
        apply_payload(payload, other.objects)
    monkeypatch.undo()
    assert whole(other.objects) == before
    expected = copy.deepcopy(before)
    other.train(5)
    assert whole(other.objects) != expected


def test_a_module_that_draws_while_loading_does_not_move_the_restored_streams():
    class Drawing(torch.nn.Linear):
        def _load_from_state_dict(self, *args, **options):
            torch.rand(3)
            super()._load_from_state_dict(*args, **options)

    model = Drawing(2, 2)
    payload = build_payload({"model": model}, step=0)
    torch.rand(7)
    apply_payload(payload, {"model": model})
    assert capture_rng_state() == payload["rng"]


# ── optimizers and schedulers ────────────────────────────────────────────────────────────────────────


def test_state_in_another_dtype_than_its_parameter_comes_back_exactly():
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    value = torch.tensor([1.0 + 2**-20, 3.0])
    optimizer.state[model.bias] = {"momentum_buffer": value, "mask": torch.tensor([True, False])}
    payload = through_a_file(build_payload({"optimizer": optimizer}, step=0))
    other = torch.nn.Linear(2, 2).to(torch.bfloat16)
    again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(payload["optimizer"])
    assert not torch.equal(again.state[other.bias]["momentum_buffer"].float(), value)  # torch by itself
    apply_payload(payload, {"optimizer": again})
    assert torch.equal(again.state[other.bias]["momentum_buffer"], value)
    assert again.state[other.bias]["mask"].dtype == torch.bool


def test_a_gradient_scaler_enabled_or_not():
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=8.0)
        payload = through_a_file(build_payload({"scaler": scaler}, step=0))
        other = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0)
        apply_payload(payload, {"scaler": other})
        assert other.state_dict() == scaler.state_dict()
    with pytest.raises(CheckpointMismatchError, match="scaler: "):
        apply_payload(payload, {"scaler": torch.amp.GradScaler("cpu")})


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────


def test_reserved_keys_of_the_state():
    loader = FakeLoader()
    loader.epoch, loader.batch_in_epoch = 2, 7
    build = lambda state: build_payload({"data": loader}, step=9, state=state)["state"]  # noqa: E731 - short
    assert build({"epoch": 2, "x": 1}) == {"step": 9, "epoch": 2, "batch_in_epoch": 7, "x": 1}
    with pytest.raises(ValueError, match=r"state\['epoch'\] is 3.*reserved"):
        build({"epoch": 3})
    with pytest.raises(ValueError, match=r"state\['step'\]"):
        build({"step": 9.0})
    without = build_payload({}, step=9, state={"epoch": 3})["state"]
    assert without == {"step": 9, "epoch": 3, "batch_in_epoch": None}


def test_bad_arguments():
    with pytest.raises(ValueError, match="step"):
        build_payload({}, step=-1)
    with pytest.raises(TypeError, match="step"):
        build_payload({}, step=True)
    with pytest.raises(TypeError, match=r"objects\['model'\] is a dict without state_dict"):
        build_payload({"model": {}}, step=0)
    with pytest.raises(TypeError, match=r"\['extra'\]\['x'\] is a numpy"):
        build_payload({"x": np.float64(1)}, step=0)
    with pytest.raises(TypeError, match="without load_state_dict"):
        apply_payload(build_payload({"model": torch.nn.Linear(1, 1)}, step=0), {"model": 3})


def test_generators_of_the_callers_go_among_the_objects():
    generator = torch.Generator().manual_seed(3)
    payload = build_payload({}, step=0, generators={"aug": generator})
    expected = torch.rand(3, generator=generator)
    with pytest.raises(RNGRestoreError, match="aug"):
        apply_payload(payload, {})
    fresh = torch.Generator()
    apply_payload(payload, {"aug": fresh})
    assert torch.equal(torch.rand(3, generator=fresh), expected)


def test_state_in_containers_comes_back_in_its_own_dtype():
    exact = {"list": [torch.tensor([1 / 3], dtype=torch.float64)], "deep": {"n": torch.tensor([2**24 + 1])}}
    source, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (source, target)]
    optimizers[0].state[source.weight] = exact
    apply_payload(build_payload({"optimizer": optimizers[0]}, step=1), {"optimizer": optimizers[1]})
    found = optimizers[1].state[target.weight]
    assert picture(found) == picture(exact)


class Expanded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1, 1)
        self.register_buffer("wide", torch.zeros(1).expand(5))


@pytest.mark.parametrize(
    ("model", "filled", "match"),
    [
        (lambda: torch.nn.LazyLinear(3), lambda m: m(torch.zeros(1, 4)), "run a batch through the model"),
        (Expanded, lambda m: None, r"wide is expanded"),
    ],
)
def test_models_that_cannot_take_values_are_refused_before_anything_changes(model, filled, match):
    source, target = model(), model()
    filled(source)
    payload = build_payload({"model": source}, step=1)
    before = {k: v.clone() for k, v in target.named_parameters() if not torch.nn.parameter.is_lazy(v)}
    with pytest.raises(CheckpointMismatchError, match=match):
        apply_payload(payload, {"model": target})
    assert all(torch.equal(dict(target.named_parameters())[k], v) for k, v in before.items())


def test_a_dense_gradient_replaces_a_sparse_one():
    source, target = torch.nn.Embedding(4, 2), torch.nn.Embedding(4, 2, sparse=True)
    for model in (source, target):
        model(torch.tensor([1])).sum().backward()
    apply_payload(build_payload({"model": source}, step=1), {"model": target})
    assert torch.equal(target.weight.grad, source.weight.grad)


def test_a_sparse_gradient_is_refused_with_the_way_out():
    model = torch.nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"\['grads'\]\['weight'\].*zero_grad"):
        build_payload({"model": model}, step=1)


@pytest.mark.parametrize("key", ["grads", "wiring", "config"])
def test_a_payload_of_another_maker_may_lack_what_is_optional(key):
    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    payload = build_payload({"model": source}, step=1)
    del payload[key]
    apply_payload(payload, {"model": target})
    assert torch.equal(source.weight, target.weight)
