"""Payloads that no honest run made: each is refused by name, and everything is as it was."""

import copy
import math

import pytest
import torch
from torch.optim import lr_scheduler

from checkpoint.helpers import Run
from checkpoint.payloads import del_at, picture, set_at, through_a_file, whole
from resumable_data.checkpoint import apply_payload, build_payload
from resumable_data.errors import CheckpointMismatchError, RNGRestoreError

HUGE = 10**5000  # math.isfinite and str refuse it, with errors of their own


def poisoned(change, objects, step=5):
    payload = through_a_file(build_payload(objects, step=step))
    change(payload)
    return payload


def refused(payload, objects, match, error=CheckpointMismatchError):
    before = whole(objects)
    with pytest.raises(error, match=match) as caught:
        apply_payload(payload, objects)
    assert whole(objects) == before
    return str(caught.value)


def group(key, value):
    return set_at("optimizer", "param_groups", 0, key, value=value)


def field(name, value, parameter=0):
    return set_at("optimizer", "state", parameter, name, value=value)


PAYLOADS = {
    "negative step": (r"'state\.step' is -1, expected an int", set_at("state", "step", value=-1)),
    "huge step": (r"'state\.step' is .*expected an int", set_at("state", "step", value=1e300)),
    "step missing": (r"'state\.step' is None", del_at("state", "step")),
    "step true": (r"'state\.step' is True", set_at("state", "step", value=True)),
    "saved at nan": ("'wall_saved_at' is nan", set_at("wall_saved_at", value=math.nan)),
    "saved at text": ("'wall_saved_at' is 'now'", set_at("wall_saved_at", value="now")),
    "schema a list": ("schema is a list", set_at("schema", value=["ckpt.v1"])),
    "unknown key": ("keys differ.*evil", set_at("evil", value=1)),
    "odd key": ("keys differ", set_at(HUGE, value=1)),
    "extra of an odd name": ("'extra' is a dict with odd keys", set_at("extra", 3, value=1)),
    "extra in a place": ("'extra' is a dict with the names", set_at("extra", "model", value={})),
    "modes of an odd name": ("'modes' is a dict with odd keys", set_at("modes", HUGE, value={})),
    "grads of an odd name": ("'grads' is a dict with odd keys", set_at("grads", b"", value=1)),
    "wiring": ("'wiring' is without 'classes'", del_at("wiring", "classes")),
    "class a list": ("file's is a a list of 1", set_at("wiring", "classes", "optimizer", value=["AdamW"])),
    "places of numbers": ("name the parameters", set_at("wiring", "places", "optimizer", value=[3])),
    "places of huge ints": (
        "name the parameters",
        set_at("wiring", "places", "optimizer", value=[[HUGE] * 6]),
    ),
    "frozen": ("which of its parameters", set_at("wiring", "frozen", "model", value={"0.weight": 1})),
    "weights of odd names": ("an int of .* bits is only in", set_at("model", HUGE, value=torch.ones(1))),
    "weights of a long name": (
        "a string of 9000000 characters is only in",
        set_at("model", "x" * 9_000_000, value=torch.ones(1)),
    ),
    "weights of a terminal's name": (
        r"'\\x1b\[2J' is only in",
        set_at("model", "\x1b[2J", value=torch.ones(1)),
    ),
    "weight on meta": (
        "0.weight has no values",
        set_at("model", "0.weight", value=lambda w: w.to("meta")),
    ),
    "float64 weights": ("torch.float64 in the file", set_at("model", "0.weight", value=lambda w: w.double())),
    "transposed weights": (r"\[4, 6\]", set_at("model", "0.weight", value=lambda w: w.t())),
    "0-dim into (1,)": (r"3.bias is \[\]", set_at("model", "3.bias", value=lambda b: b.squeeze())),
    "sparse weights": ("torch.sparse_coo", set_at("model", "0.weight", value=lambda w: w.to_sparse())),
    "gradient a number": ("gradient 0.bias is a float", set_at("grads", "0.bias", value=1.0)),
    "int gradient": ("int8", set_at("grads", "0.bias", value=lambda g: g.to(torch.int8))),
    "mode of nobody": ("submodule 9 is only", set_at("modes", "model", "9", value=True)),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_a_poisoned_payload(case):
    match, change = PAYLOADS[case]
    run = Run()
    run.train(5)
    payload = poisoned(change, run.objects)
    other = Run(seed=3)
    other.train(4)
    refused(payload, other.objects, match)


GROUPS = {
    "lr inf": (r"group 0\.lr is inf in the file, a finite", group("lr", math.inf)),
    "lr -inf": (r"group 0\.lr is -inf", group("lr", -math.inf)),
    "lr None": (r"group 0\.lr is None", group("lr", None)),
    "lr true": (r"group 0\.lr is a bool", group("lr", True)),
    "lr a tensor": (r"group 0\.lr is a Tensor", group("lr", torch.ones(10))),
    "lr huge": (r"group 0\.lr is an int of \d+ bits", group("lr", HUGE)),
    "lr complex": (r"group 0\.lr is a complex", group("lr", 1j)),
    "betas a list": (r"group 0\.betas is a list", group("betas", [0.9, 0.999])),
    "betas of text": (r"group 0\.betas\[1\] is a str", group("betas", (0.9, "evil"))),
    "betas nan": (r"group 0\.betas\[0\] is nan", group("betas", (math.nan, 0.9))),
    "betas None": (r"group 0\.betas is None", group("betas", None)),
    "betas of three": (r"group 0\.betas has 3 items", group("betas", (0.9, 0.9, 0.9))),
    "amsgrad an int": (r"group 0\.amsgrad is a int", group("amsgrad", 1)),
    "initial_lr nan": (r"group 0\.initial_lr is nan", group("initial_lr", math.nan)),
    "a scheduler's value": (r"group 0\.max_lr is 'evil'", group("max_lr", "evil")),
    "group a list": ("group 0 of the file has no list", set_at("optimizer", "param_groups", 0, value=[])),
    "groups a dict": ("dict for the parameter groups", set_at("optimizer", "param_groups", value={})),
    "ids of text": ("has no list of parameters", group("params", list("abcdef"))),
    "id too large": ("parameter id 99", group("params", [0, 1, 2, 3, 4, 99])),
    "id negative": ("parameter id -1", group("params", [0, 1, 2, 3, 4, -1])),
    "lr missing": (r"lacks \['lr'\]", del_at("optimizer", "param_groups", 0, "lr")),
    "state a list": ("per-parameter state is a list", set_at("optimizer", "state", value=[1])),
    "state of a list": ("of parameter 2 is a list", set_at("optimizer", "state", 2, value=[])),
    "state under a name": ("of parameter evil, which", set_at("optimizer", "state", "evil", value={})),
    "state of nobody": ("an int of .* bits, which", set_at("optimizer", "state", HUGE, value={})),
    "step negative": ("step of parameter 0 is -1.0", field("step", torch.tensor(-1.0))),
    "step nan": ("step of parameter 0 is nan", field("step", torch.tensor(math.nan))),
    "step inf": ("step of parameter 0 is inf", field("step", math.inf)),
    "step text": ("step of parameter 0 is a str", field("step", "evil")),
    "step None": ("step of parameter 0 is a NoneType", field("step", None)),
    "step true": ("step of parameter 0 is a bool", field("step", True)),
    "step huge": ("step of parameter 0 is an int of", field("step", HUGE)),
    "step of shape (1,)": (r"step of parameter 0 is \[1\]", field("step", torch.ones(1))),
    "step complex": ("step of parameter 0 is .*complex64", field("step", torch.tensor(1j))),
    "moment missing": ("exp_avg_sq of parameter 0 is missing", del_at("optimizer", "state", 0, "exp_avg_sq")),
    "moment a list": ("exp_avg of parameter 0 is a list", field("exp_avg", [1.0])),
    "moment complex": ("complex64", field("exp_avg", lambda v: v.to(torch.complex64))),
    "moment bool": ("torch.bool", field("exp_avg", lambda v: v > 0)),
    "moment of another": ("exp_avg of parameter 1", field("exp_avg", torch.ones(6, 4), parameter=1)),
    "amsgrad without": ("max_exp_avg_sq of parameter", group("amsgrad", True)),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_poisoned_optimizer(case):
    match, change = GROUPS[case]
    run = Run()
    run.train(5)
    payload = poisoned(change, run.objects)
    other = Run(seed=3)
    other.train(4)
    refused(payload, other.objects, match)


def test_a_scheduled_value_that_is_only_in_the_file_must_be_finite():
    run = Run()
    run.train(2)
    payload = poisoned(group("max_lr", math.inf), run.objects)
    refused(payload, run.objects, r"group 0\.max_lr is inf")


def parameter(*shape):
    p = torch.nn.Parameter(torch.ones(*shape))
    p.grad = torch.ones(*shape)
    return p


def stepped(kind, *shape, **options):
    optimizer = kind([parameter(*shape)], lr=0.1, **options)
    for _ in range(3):
        optimizer.step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
    return optimizer


FIELDS = {
    "RMSprop momentum": (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
    "RMSprop centered": (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
    "ASGD eta": (torch.optim.ASGD, {}, "eta"),
    "ASGD mu": (torch.optim.ASGD, {}, "mu"),
    "NAdam": (torch.optim.NAdam, {}, "mu_product"),
    "Adafactor row": (torch.optim.Adafactor, {}, "row_var"),
    "Adafactor col": (torch.optim.Adafactor, {}, "col_var"),
    "Rprop": (torch.optim.Rprop, {}, "step_size"),
    "Adadelta": (torch.optim.Adadelta, {}, "acc_delta"),
    "Adagrad": (torch.optim.Adagrad, {}, "sum"),
    "Adamax": (torch.optim.Adamax, {}, "exp_inf"),
    "RAdam": (torch.optim.RAdam, {}, "exp_avg_sq"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_every_field_of_torchs_optimizers_is_known(case):
    kind, options, name = FIELDS[case]
    first, second = stepped(kind, 2, 3, **options), stepped(kind, 2, 3, **options)
    payload = poisoned(field(name, torch.ones(7)), {"optimizer": first})
    refused(payload, {"optimizer": second}, f"{name} of parameter 0")
    payload = poisoned(field(name, lambda v: v.to(torch.complex64)), {"optimizer": first})
    refused(payload, {"optimizer": second}, f"{name} of parameter 0")
    payload = poisoned(del_at("optimizer", "state", 0, name), {"optimizer": first})
    refused(payload, {"optimizer": second}, f"{name} of parameter 0 is missing")


def test_a_vector_of_adafactor_has_a_variance():
    optimizer = stepped(torch.optim.Adafactor, 3)
    payload = poisoned(del_at("optimizer", "state", 0, "variance"), {"optimizer": optimizer})
    refused(payload, {"optimizer": optimizer}, "variance of parameter 0 is missing")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("d", torch.ones(5), r"d of parameter 0 has shape \[5\] in the file, \[6\]"),
        ("d", torch.ones(6, dtype=torch.int8), "int8"),
        ("prev_flat_grad", [1.0], "prev_flat_grad of parameter 0 is a list"),
        ("old_dirs", [torch.ones(5)], r"old_dirs of parameter 0 has shape \[5\]"),
        ("old_stps", 3, "old_stps of parameter 0 is a int"),
        ("old_stps", [None], "old_stps of parameter 0 is a NoneType"),
        ("n_iter", -1, "n_iter of parameter 0 is -1"),
        ("func_evals", "x", "func_evals of parameter 0 is a str"),
    ],
)
def test_lbfgs_keeps_flat_state(name, value, match):
    optimizer = stepped(torch.optim.LBFGS, 2, 3)
    payload = poisoned(field(name, value), {"optimizer": optimizer})
    refused(payload, {"optimizer": optimizer}, match)


def test_a_tensor_for_a_rate_keeps_shape_dtype_and_is_finite():
    def build():
        return torch.optim.Adam([parameter(2)], lr=torch.tensor(0.1), foreach=False)

    for value, match in [
        (torch.ones(2), r"lr is \[2\] torch.float32 in the file, \[\] torch.float32 here"),
        (torch.tensor(1), "lr is .*int64"),
        (torch.tensor(math.nan), "lr is not finite"),
        (0.1, "lr is a float"),
    ]:
        payload = poisoned(group("lr", value), {"optimizer": build()})
        refused(payload, {"optimizer": build()}, match)


def test_a_tensor_of_many_rates_is_finite_throughout():
    optimizer = foreign(1)
    optimizer.param_groups[0]["rank"] = torch.ones(3)
    payload = poisoned(group("rank", torch.tensor([1, math.inf, 1])), {"optimizer": optimizer})
    refused(payload, {"optimizer": optimizer}, "rank is not finite")


def test_an_optimizers_own_tensors_may_be_infinite():
    first, second = foreign(1), foreign(1)
    first.param_groups[0] |= {"rank": torch.tensor(math.inf), "mine": torch.tensor(math.inf)}
    second.param_groups[0] |= {"rank": torch.tensor(-math.inf), "mine": torch.tensor(1.0)}
    apply_payload(build_payload({"optimizer": first}, step=1), {"optimizer": second})
    assert second.param_groups[0]["rank"] == second.param_groups[0]["mine"] == math.inf


# ── schedulers and scalers ───────────────────────────────────────────────────────────────────────────


def sgd():
    return torch.optim.SGD([parameter(1)], lr=0.1, momentum=0.9)


def sequential(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, [parts[0], lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


class Decay:
    def __init__(self):
        self.rate, self.seen = 0.5, None

    def __call__(self, epoch):
        self.seen = epoch
        return self.rate**epoch


COSINE = lambda o: lr_scheduler.CosineAnnealingLR(o, 9)  # noqa: E731 - a table of builders
MULTI = lambda o: lr_scheduler.MultiStepLR(o, [2, 4])  # noqa: E731 - a table of builders
PLATEAU = lr_scheduler.ReduceLROnPlateau
LAMBDA = lambda o: lr_scheduler.LambdaLR(o, Decay())  # noqa: E731 - a table of builders
PLAIN_LAMBDA = lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5)  # noqa: E731 - a table of builders


def at(*path, value):
    return set_at("scheduler", *path, value=value)


SCHEDULES = {
    "no state": (COSINE, "a list, no state of it", set_at("scheduler", value=[])),
    "nan": (COSINE, "T_max is nan in the file", at("T_max", value=math.nan)),
    "inf": (COSINE, "eta_min is inf in the file", at("eta_min", value=math.inf)),
    "huge": (COSINE, "last_epoch is an int of", at("last_epoch", value=HUGE)),
    "None": (COSINE, "last_epoch is None in the file", at("last_epoch", value=None)),
    "rates nan": (COSINE, r"base_lrs\[0\] is nan", at("base_lrs", value=[math.nan])),
    "rates None": (COSINE, "_last_lr is None", at("_last_lr", value=None)),
    "rates of another length": (COSINE, "_last_lr has 2 items", at("_last_lr", value=[0.1, 0.1])),
    "rates of text": (COSINE, r"_last_lr\[0\] is a str", at("_last_lr", value=["evil"])),
    "a method": (COSINE, "step is only in the file", at("step", value=3)),
    "an optimizer": (COSINE, "optimizer is only in the file", at("optimizer", value=3)),
    "an odd key": (COSINE, "an int of .* only in the file", at(HUGE, value=3)),
    "milestones a dict": (MULTI, "milestones is a dict", at("milestones", value={2: 1})),
    "milestones of text": (
        MULTI,
        "milestones holds something else than numbers",
        at("milestones", value=lambda m: type(m)({"evil": 1})),
    ),
    "milestones nan": (
        MULTI,
        "milestones holds something else than numbers",
        at("milestones", value=lambda m: type(m)({2: math.nan})),
    ),
    "plateau": (PLATEAU, "factor is nan", at("factor", value=math.nan)),
    "plateau's lengths": (PLATEAU, "min_lrs has 2 items", at("min_lrs", value=[0, 0])),
    "in a sequence": (
        sequential,
        r"_schedulers\[1\]\.gamma is nan",
        at("_schedulers", 1, "gamma", value=math.nan),
    ),
    "key in a sequence": (
        sequential,
        r"_schedulers\[1\]\.evil is only in",
        at("_schedulers", 1, "evil", value=1),
    ),
    "key gone in a sequence": (
        sequential,
        r"_schedulers\[1\]\.gamma is missing",
        del_at("scheduler", "_schedulers", 1, "gamma"),
    ),
    "shorter sequence": (sequential, "_schedulers has 1 items", at("_schedulers", value=lambda s: s[:1])),
    "lambdas": (LAMBDA, "lr_lambdas is not a list of 1", at("lr_lambdas", value=[None, None])),
    "function for object": (LAMBDA, "a function in the file, an object", at("lr_lambdas", value=[None])),
    "object for function": (
        PLAIN_LAMBDA,
        "an object in the file, a function",
        at("lr_lambdas", value=[{"rate": 1.0}]),
    ),
    "no attributes": (LAMBDA, "no attributes of an object", at("lr_lambdas", value=["evil"])),
    "odd attributes": (LAMBDA, "no attributes of an object", at("lr_lambdas", 0, 3, value=1)),
    "attribute's type": (LAMBDA, r"lr_lambdas\[0\]\.rate is a str", at("lr_lambdas", 0, "rate", value="x")),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("case", SCHEDULES)
def test_a_poisoned_scheduler(case):
    build, match, change = SCHEDULES[case]
    first, second = build(sgd()), build(sgd())
    refused(poisoned(change, {"scheduler": first}), {"scheduler": second}, match)


def scaler(enabled=True, scale=8.0):
    return torch.amp.GradScaler("cpu", enabled=enabled, init_scale=scale)


SCALERS = {
    "nan": ("scale is nan in the file", set_at("extra", "scaler", "scale", value=math.nan)),
    "inf": ("scale is inf in the file", set_at("extra", "scaler", "scale", value=math.inf)),
    "negative": ("scale is -1.0 in the file", set_at("extra", "scaler", "scale", value=-1.0)),
    "text": ("scale is a str in the file", set_at("extra", "scaler", "scale", value="evil")),
    "None": ("growth_factor is a NoneType", set_at("extra", "scaler", "growth_factor", value=None)),
    "tensor": ("scale is a Tensor", set_at("extra", "scaler", "scale", value=torch.ones(9))),
    "half a count": (
        "growth_interval is 0.5 in the file, an int",
        set_at("extra", "scaler", "growth_interval", value=0.5),
    ),
    "huge": ("_growth_tracker is an int of", set_at("extra", "scaler", "_growth_tracker", value=HUGE)),
    "missing": ("scale is missing", del_at("extra", "scaler", "scale")),
    "too many": ("evil is only in the file", set_at("extra", "scaler", "evil", value=1)),
    "empty": ("the file's scaler was disabled, this one is enabled", set_at("extra", "scaler", value={})),
    "a list": ("a list, no state of it", set_at("extra", "scaler", value=[])),
}


@pytest.mark.parametrize("case", SCALERS)
def test_a_poisoned_scaler(case):
    match, change = SCALERS[case]
    refused(poisoned(change, {"scaler": scaler()}), {"scaler": scaler(scale=2.0)}, match)


def test_an_enabled_scalers_state_is_not_for_a_disabled_one():
    payload = build_payload({"scaler": scaler()}, step=0)
    refused(payload, {"scaler": scaler(enabled=False)}, "was enabled, this one is disabled")


# ── random streams ───────────────────────────────────────────────────────────────────────────────────

STREAMS = {
    "a long list": ("torch_cuda: found a list of 10000000", set_at("rng", "torch_cuda", value=[0] * 10**7)),
    "a list of words": ("torch_cpu: found a list of", set_at("rng", "torch_cpu", value=[7] * 10**6)),
    "long text": ("torch_cpu: found 20000000 char", set_at("rng", "torch_cpu", value="00" * 10**7)),
    "python's words a list": (
        "python.words: found a list",
        set_at("rng", "python", "words", value=[2**40] * 625),
    ),
    "python's words short": ("python.words: found 2 char", set_at("rng", "python", "words", value="00")),
    "position": ("numpy.state.pos: found 10000000", set_at("rng", "numpy", "state", "pos", value=10**7)),
    "huge int": ("numpy.state.pos: found an int of", set_at("rng", "numpy", "state", "pos", value=HUGE)),
    "negative": ("numpy.has_gauss: found -1", set_at("rng", "numpy", "has_gauss", value=-1)),
    "gauss inf": ("numpy.gauss: found 'inf'", set_at("rng", "numpy", "gauss", value="inf")),
    "rank": ("rank: found an int of", set_at("rng", "rank", value=HUGE)),
    "stream of nobody": ("evil: an unknown stream", set_at("rng", "evil", value=1)),
    "generators a list": ("generators: found a list", set_at("rng", "generators", value=[])),
}


@pytest.mark.parametrize("case", STREAMS)
def test_poisoned_streams(case):
    match, change = STREAMS[case]
    run = Run()
    run.train(5)
    other = Run(seed=3)
    payload = poisoned(change, run.objects)
    message = refused(payload, other.objects, match, RNGRestoreError)
    assert len(message) < 500


# ── no false alarms ──────────────────────────────────────────────────────────────────────────────────


def test_weights_and_moments_of_nan_come_back_bit_by_bit():
    run = Run()
    run.train(5)
    bits = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800000], dtype=torch.int32)  # two NaNs, and infinity
    with torch.no_grad():
        run.model[0].bias[:3] = bits.view(torch.float32)
    run.optimizer.state[run.model[0].bias]["exp_avg"][:3] = bits.view(torch.float32)
    payload = through_a_file(build_payload(run.objects, step=5))
    other = Run(seed=3)
    apply_payload(payload, other.objects)
    assert torch.equal(other.model[0].bias[:3].detach().view(torch.int32), bits)
    moment = other.optimizer.state[other.model[0].bias]["exp_avg"]
    assert torch.equal(moment[:3].view(torch.int32), bits)


class Numbered(torch.nn.Linear):
    """Has a number among its tensors."""

    def __init__(self):
        super().__init__(2, 2)
        self.number = 3

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "number"] = self.number

    def _load_from_state_dict(self, state, prefix, *args):
        self.number = state.pop(prefix + "number")
        super()._load_from_state_dict(state, prefix, *args)


def test_a_modules_state_may_hold_numbers():
    source, target = Numbered(), Numbered()
    source.number = 4
    payload = through_a_file(build_payload({"model": source}, step=0))
    apply_payload(payload, {"model": target})
    assert target.number == 4
    payload["model"]["number"] = torch.ones(1)
    with pytest.raises(CheckpointMismatchError, match="number is a tensor in the file, a int in the model"):
        apply_payload(payload, {"model": target})
    assert target.number == 4


def test_a_sparse_buffer_takes_no_values():
    model, payload = torch.nn.Linear(2, 2), build_payload({"model": torch.nn.Linear(2, 2)}, step=0)
    model.register_buffer("eye", torch.eye(2).to_sparse())
    payload["model"]["eye"] = torch.eye(2).to_sparse()
    with pytest.raises(CheckpointMismatchError, match=r"eye is torch\.sparse_coo here, and only dense"):
        apply_payload(payload, {"model": model})


def test_a_model_on_the_meta_device_keeps_nothing():
    payload = build_payload({"model": torch.nn.Linear(2, 2)}, step=0)
    with pytest.raises(CheckpointMismatchError, match="weight is on the meta device"):
        apply_payload(payload, {"model": torch.nn.Linear(2, 2, device="meta")})


def test_a_parameter_whose_state_was_only_looked_at_has_none():
    optimizer, other = torch.optim.Adam([parameter(2)]), torch.optim.Adam([parameter(2)])
    assert optimizer.state[optimizer.param_groups[0]["params"][0]] == {}
    apply_payload(through_a_file(build_payload({"optimizer": optimizer}, step=0)), {"optimizer": other})
    other.step()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.outer.weight = self.inner.weight


def test_one_tensor_under_two_names_takes_one_value():
    source, target = Tied(), Tied()
    with torch.no_grad():
        source.inner.weight[0, 0] = math.nan
    payload = build_payload({"model": source}, step=0)
    apply_payload(payload, {"model": target})
    payload["model"]["outer.weight"] = payload["model"]["outer.weight"].clone()
    apply_payload(payload, {"model": target})
    payload["model"]["outer.weight"][1, 1] += 1
    refused(payload, {"model": target}, r"inner\.weight and outer\.weight differ in the file")


def test_a_rate_may_be_an_int():
    run = Run()
    run.train(5)
    payload = build_payload(run.objects, step=5)
    payload["optimizer"]["param_groups"][0]["lr"] = 1
    other = Run(seed=3)
    apply_payload(payload, other.objects)
    assert other.optimizer.param_groups[0]["lr"] == 1


def test_what_is_infinite_here_too_is_no_alarm():
    def build():
        optimizer = sgd()
        optimizer.param_groups[0]["dampening"] = math.inf
        optimizer.param_groups[0]["weight_decay"] = math.nan
        return optimizer

    apply_payload(build_payload({"optimizer": build()}, step=0), {"optimizer": build()})


def test_a_plateau_goes_back_to_where_nothing_was_best():
    scheduler = PLATEAU(sgd())
    payload = through_a_file(build_payload({"scheduler": scheduler}, step=0))
    scheduler.step(0.5)
    ahead = through_a_file(build_payload({"scheduler": scheduler}, step=1))
    apply_payload(payload, {"scheduler": scheduler})
    assert scheduler.best == math.inf
    apply_payload(ahead, {"scheduler": scheduler})
    assert scheduler.best == 0.5


class Growing(lr_scheduler.LRScheduler):
    """Keeps a history, and begins with nothing best."""

    def __init__(self, optimizer):
        self.history, self.best_loss, self.note, self.table = [], None, math.inf, {}
        super().__init__(optimizer)

    def get_lr(self):
        return [g["lr"] for g in self.optimizer.param_groups]

    def learn(self, loss):
        self.history.append(loss)
        self.best_loss = self.note = loss
        self.late = {"a": loss}


def test_the_state_of_a_foreign_scheduler_may_grow_and_hold_odd_numbers():
    first, second = Growing(sgd()), Growing(sgd())
    empty = through_a_file(build_payload({"scheduler": first}, step=0))
    first.learn(math.nan)
    grown = through_a_file(build_payload({"scheduler": first}, step=0))
    apply_payload(grown, {"scheduler": second})
    assert picture(second.state_dict()) == picture(first.state_dict())
    second.learn(0.5)
    apply_payload(grown, {"scheduler": second})
    third = Growing(sgd())
    third.history, third.best_loss = [1.0], 1.0
    apply_payload(empty, {"scheduler": third})
    assert (third.history, third.best_loss) == ([], None)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("step is only in the file", at("step", value=3)),
        ("optimizer is only in the file", at("optimizer", value=3)),
        ("history is a str", at("history", value="evil")),
        ("note is a dict", at("note", value={})),
        ("table is a str", at("table", value="evil")),
        ("last_epoch is nan", at("last_epoch", value=math.nan)),
        ("best_loss is missing", del_at("scheduler", "best_loss")),
    ],
)
def test_a_foreign_scheduler_keeps_its_methods_and_types(match, change):
    payload = poisoned(change, {"scheduler": Growing(sgd())})
    refused(payload, {"scheduler": Growing(sgd())}, match)


class Constant:
    """Stands at "scheduler", and is none of torch's."""

    def __init__(self):
        self.rate = 0.5

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def test_any_object_at_scheduler_keeps_its_keys_and_types():
    apply_payload(build_payload({"scheduler": Constant()}, step=0), {"scheduler": Constant()})
    for match, change in [
        ("evil is only in the file", at("evil", value=1)),
        ("rate is missing in the file", del_at("scheduler", "rate")),
        ("rate is a str", at("rate", value="evil")),
    ]:
        refused(poisoned(change, {"scheduler": Constant()}), {"scheduler": Constant()}, match)


class Foreign(torch.optim.Optimizer):
    """A projected moment, a growing history, text, and state of its own beside that of parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "rank": 1})

    def step(self, closure=None):
        self.state["shared"] = {"calls": self.state.get("shared", {"calls": 0})["calls"] + 1}
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            count = state.setdefault("count", 0) + 1
            state |= {
                "count": count,
                "exp_avg": torch.ones(1, *p.shape[1:]),
                "full": p.detach().clone(),
                "mask": torch.zeros(3, dtype=torch.uint8),
                "kind": "projected",
                "step": [0.0] * count,
            }
            state["history"] = torch.ones(count, 2)


def foreign(steps):
    optimizer = Foreign([parameter(4, 2)])
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("present", [0, 1, 5])
def test_a_foreign_optimizer_raises_no_alarm(present):
    first, second = foreign(3), foreign(present)
    apply_payload(through_a_file(build_payload({"optimizer": first}, step=3)), {"optimizer": second})
    assert picture(second.state_dict()) == picture(first.state_dict())
    assert second.state[second.param_groups[0]["params"][0]]["kind"] == "projected"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("exp_avg", lambda v: v.to(torch.int32), "exp_avg of parameter 0 is torch.int32"),
        ("full", torch.ones(4, 3), r"full of parameter 0 has shape \[4, 3\] in the file, \[4, 2\]"),
        ("mask", torch.zeros(3), "mask of parameter 0 is torch.float32"),
        ("mask", "evil", "mask of parameter 0 is a str"),
        ("kind", 3, "kind of parameter 0 is a int in the file, a str here"),
        ("count", "evil", "count of parameter 0 is a str in the file, a int here"),
    ],
)
def test_a_foreign_optimizers_present_state_tells(name, value, match):
    payload = poisoned(field(name, value), {"optimizer": foreign(3)})
    refused(payload, {"optimizer": foreign(1)}, match)
    apply_payload(payload, {"optimizer": foreign(0)})


@pytest.mark.parametrize(("name", "value"), [("full", None), ("count", torch.tensor(3.0)), ("count", 3.0)])
def test_a_foreign_optimizer_may_hold_nothing_or_count_in_a_tensor(name, value):
    payload = poisoned(field(name, value), {"optimizer": foreign(3)})
    optimizer = foreign(1)
    apply_payload(payload, {"optimizer": optimizer})
    assert picture(optimizer.state_dict()["state"][0][name]) == picture(value)


def test_a_foreign_optimizers_rates_are_checked_too():
    payload = poisoned(group("rank", math.nan), {"optimizer": foreign(1)})
    refused(payload, {"optimizer": foreign(1)}, r"group 0\.rank is nan")
    payload = poisoned(set_at("optimizer", "state", 7, value={}), {"optimizer": foreign(1)})
    refused(payload, {"optimizer": foreign(1)}, "parameter 7, which no group has")


def test_applying_leaves_the_payload_as_it_was():
    run = Run()
    run.train(5)
    payload = build_payload(run.objects | {"scaler": scaler()}, step=5)
    kept = copy.deepcopy(payload)
    apply_payload(payload, Run(seed=2).objects)  # without the scaler, which is made later
    assert picture(payload) == picture(kept)
    late = scaler(scale=2.0)
    late.load_state_dict(payload["extra"]["scaler"])
    assert late.state_dict() == scaler().state_dict()
