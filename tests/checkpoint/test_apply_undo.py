"""A failure in any phase, an interrupt included, leaves every object as it was."""

import pytest
import torch

from checkpoint.helpers import Run
from checkpoint.payloads import picture, through_a_file, whole
from resumable_data.checkpoint import apply_payload, build_payload, models, payload, undo
from resumable_data.errors import CheckpointMismatchError, StateMismatchError


class Hooked(torch.nn.Linear):
    """Sets a state in a way of its own, and draws while it does."""

    def _load_from_state_dict(self, *args, **options):
        torch.rand(3)
        super()._load_from_state_dict(*args, **options)


class Holder:
    """An object that takes a state, draws, and may then fail."""

    def __init__(self, value=0):
        self.value, self.error = value, None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        torch.rand(1)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def everything(seed, steps):
    """Objects of every kind, trained to inside an accumulation window, with gradients."""
    run = Run(seed=seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 + seed)
    hooked = Hooked(2, 2)
    hooked(torch.ones(1, 2)).sum().backward()
    hooked.requires_grad_(seed % 2 == 0)
    if seed % 2:
        run.model[1].eval()
    objects = {"first": Holder(seed), **run.objects, "scaler": scaler, "hooked": hooked, "last": Holder(seed)}
    run.train(steps)
    return objects


def identities(objects):
    model, optimizer = objects["model"], objects["optimizer"]
    tensors = [p for name in ("model", "hooked") for p in objects[name].parameters()]
    groups = [optimizer.param_groups, *optimizer.param_groups, optimizer.state, *optimizer.state.values()]
    buffers = list(model.buffers())
    return [id(x) for x in [*tensors, *[p.grad for p in tensors], *groups, *buffers]]


PHASES = [
    "first",
    "last",
    "scheduler",
    "scaler",
    "data",
    "optimizer",
    "hooked",
    "model's gradients",
    "hooked's gradients",
    "model's training flags",
    "hooked's training flags",
    "rng",
]


@pytest.fixture
def failing(monkeypatch):
    """Let the step of one name do its work and then fail."""

    def install(name, error):
        def run(steps):
            last = max(i for i, step in enumerate(steps) if step.name == name)
            step = steps[last]

            def late():
                step.apply()
                raise error

            plain([*steps[:last], step._replace(apply=late), *steps[last + 1 :]])

        monkeypatch.setattr(payload, "run_steps", run)

    plain = payload.run_steps
    return install


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("name", PHASES)
def test_a_failure_in_any_phase_changes_nothing(name, error, failing):
    saved = through_a_file(build_payload(everything(1, 5), step=5))
    objects = everything(2, 3)
    before, same = whole(objects), identities(objects)
    failing(name, error)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointMismatchError
    with pytest.raises(kind) as caught:
        apply_payload(saved, objects)
    if kind is CheckpointMismatchError:
        assert f"{name}: setting its state failed (OSError: no); everything was put back" in str(caught.value)
    assert whole(objects) == before
    assert identities(objects) == same


def test_the_phases_above_are_all_that_there_are(monkeypatch):
    names = []
    monkeypatch.setattr(payload, "run_steps", lambda steps: names.extend(step.name for step in steps))
    objects = everything(2, 3)
    apply_payload(build_payload(objects, step=3), objects)
    assert names[-1] == "model"  # the only one without a way back, and the last
    assert set(names) == {*PHASES, "model"}
    monkeypatch.undo()
    saved = build_payload(everything(1, 5), step=5)
    apply_payload(saved, objects)
    assert whole(objects, 5) == picture(saved)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_a_plain_model_is_set_says_so(kind, monkeypatch):
    saved = build_payload(everything(1, 5), step=5)
    objects = everything(2, 3)
    before = whole(objects)
    plain = models.load_module

    def late(module, state):
        plain(module, state)
        raise kind

    monkeypatch.setattr(models, "load_module", lambda m, s: (late if m is objects["model"] else plain)(m, s))
    with pytest.raises(kind, match=r"could not be put back: model$"):
        apply_payload(saved, objects)
    after = whole(objects)
    assert after["model"] != before["model"]
    del after["model"], before["model"]
    assert after == before


def test_an_object_that_drew_and_failed_moved_no_stream():
    objects = {"first": Holder(1)}
    saved = build_payload(objects, step=0)
    torch.rand(5)
    before = whole(objects)
    objects["first"].error = ValueError("no")
    with pytest.raises(CheckpointMismatchError, match=r"first: .*ValueError: no\); everything was put back"):
        apply_payload(saved, objects)
    assert whole(objects) == before


class Late(torch.nn.Linear):
    """Replaces what it holds, takes the state, and fails once."""

    def __init__(self, how):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.how, self.extra = how, {"n": [1]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _load_from_state_dict(self, *args, **options):
        super()._load_from_state_dict(*args, **options)
        self.seen.fill_(7)
        self.extra["n"].append(2)
        if self.how == "replace":
            self.weight = torch.nn.Parameter(torch.full((2, 2), 9.0))
            self.seen = torch.ones(2)
        if self.how is not None:
            raise OSError("no")


@pytest.mark.parametrize("how", ["write", "replace"])
def test_a_module_with_loading_of_its_own_is_put_back_from_a_copy(how):
    saved = build_payload({"model": Late(None)}, step=0)
    saved["model"]["_extra_state"] = {"n": [5]}
    model = torch.nn.Sequential(Late(how))
    saved["model"] = {f"0.{key}": value for key, value in saved["model"].items()}
    saved["modes"]["model"] = {"": True, "0": True}
    model[0].weight.grad = torch.ones(2, 2)
    before, held = picture(model.state_dict()), [model[0].weight, model[0].seen, model[0].weight.grad]
    with pytest.raises(CheckpointMismatchError, match=r"model: .*OSError: no\); everything was put back"):
        apply_payload(saved, {"model": model})
    assert picture(model.state_dict()) == before
    assert model[0].extra == {"n": [1]}
    assert model[0].seen.tolist() == [0, 0]
    after = [model[0].weight, model[0].seen, model[0].weight.grad]
    assert all(a is b for a, b in zip(after, held, strict=True))


def hook(*args):
    """Does nothing, but is the caller's."""


class Subclass(torch.Tensor):
    pass


def own_load(module):
    module.load_state_dict = lambda *args, **options: None


UNPLAIN = {
    "pre hook": lambda m: m[0].register_load_state_dict_pre_hook(hook),
    "post hook": lambda m: m[1].register_load_state_dict_post_hook(hook),
    "own load_state_dict": own_load,
    "tensor subclass": lambda m: m[0].register_buffer("odd", torch.ones(1).as_subclass(Subclass)),
    "own parts": lambda m: m.append(Hooked(1, 1)),
    "extra state": lambda m: m.append(Late(None)),
}


@pytest.mark.parametrize("case", UNPLAIN)
def test_what_is_not_plain(case):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    assert undo.loads_plainly(model)
    UNPLAIN[case](model)
    assert not undo.loads_plainly(model)


def test_torchs_own_modules_are_plain():
    model = torch.nn.Sequential(
        torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
        torch.nn.LSTM(2, 2),
        torch.nn.BatchNorm2d(2),
        torch.nn.Embedding(3, 2),
        torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))]),
        torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(1))}),
    )
    assert undo.loads_plainly(model)
    assert undo.loads_plainly(torch.nn.DataParallel(model))


def test_a_plain_model_has_no_copy(monkeypatch):
    model = torch.nn.Linear(2, 2)
    saved = build_payload({"model": model}, step=0)
    monkeypatch.setattr(undo, "module_undo", None)
    apply_payload(saved, {"model": model})
    with pytest.raises(TypeError, match="NoneType"):
        apply_payload(build_payload({"model": Hooked(2, 2)}, step=0), {"model": Hooked(2, 2)})


class Writing(torch.optim.SGD):
    """Writes into its own tensors while it loads, and fails."""

    def load_state_dict(self, state):
        for fields in self.state.values():
            fields["momentum_buffer"].zero_()
            fields["more"] = 1
        self.state["mine"] = {"calls": 1}
        self.param_groups[0] |= {"lr": 7.0, "more": 1}
        del self.param_groups[1:]
        raise OSError("no")


def test_an_optimizer_with_loading_of_its_own_is_put_back_with_its_values():
    def build(kind):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        for p in parameters:
            p.grad = torch.ones(2)
        optimizer = kind([{"params": [p]} for p in parameters], lr=0.1, momentum=0.9)
        optimizer.step()
        return {"optimizer": optimizer}

    objects = build(Writing)
    saved = build_payload(objects, step=1)
    before = whole(objects)
    held = [fields["momentum_buffer"] for fields in objects["optimizer"].state.values()]
    with pytest.raises(CheckpointMismatchError, match=r"optimizer: .*everything was put back"):
        apply_payload(saved, objects)
    assert whole(objects) == before
    after = [fields["momentum_buffer"] for fields in objects["optimizer"].state.values()]
    assert all(a is b for a, b in zip(after, held, strict=True))


def test_the_parameters_in_an_optimizers_groups_are_not_copied():
    tensor = torch.ones(1)
    assert list(undo._tensors_in([{"params": [torch.nn.Parameter(tensor)], "x": (tensor,)}])) == [tensor]


@pytest.mark.parametrize("register", ["pre", "post"])
def test_an_optimizer_with_hooks_is_put_back_with_its_values(register):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    moment = optimizer.state[parameter]["momentum_buffer"]
    saved = build_payload({"optimizer": optimizer}, step=1)

    def spoil(*args):
        moment.zero_()
        raise OSError("no")

    getattr(optimizer, f"register_load_state_dict_{register}_hook")(spoil)
    with pytest.raises(CheckpointMismatchError, match="everything was put back"):
        apply_payload(saved, {"optimizer": optimizer})
    assert optimizer.state[parameter]["momentum_buffer"] is moment
    assert moment.tolist() == [1, 1]


def test_after_a_failure_the_run_goes_on_as_if_nothing_had_been(monkeypatch):
    expected = Run(seed=1).train(9)
    ahead = build_payload(Run(seed=9).objects, step=0)
    run = Run(seed=1)
    run.train(5)
    monkeypatch.setattr(run.optimizer, "__setstate__", None, raising=False)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer: .*everything was put back"):
        apply_payload(ahead, run.objects)
    assert run.train(9) == expected


def test_an_error_of_ours_passes_unchanged_once_all_is_put_back():
    objects = {"first": Holder(1), "last": Holder(2)}
    saved = build_payload({"first": Holder(3), "last": Holder(4)}, step=0)
    error = StateMismatchError("another loader", fields={})
    objects["last"].error = error
    with pytest.raises(StateMismatchError) as caught:
        apply_payload(saved, objects)
    assert caught.value is error
    assert (objects["first"].value, objects["last"].value) == (1, 2)


class Checked(Holder):
    """Says itself what it takes."""

    def check_state_dict(self, state):
        if state["value"] < 0:
            raise CheckpointMismatchError("value is negative")


def test_an_object_that_checks_is_asked_before_anything_changes():
    saved = build_payload({"first": Holder(4), "second": Checked(-1)}, step=0)
    first, second = Holder(0), Checked(1)
    with pytest.raises(CheckpointMismatchError, match=r"^value is negative$"):
        apply_payload(saved, {"first": first, "second": second})
    assert (first.value, second.value) == (0, 1)


def test_an_object_without_a_check_is_put_back_from_its_snapshot():
    saved = build_payload({"first": Holder(4), "second": Holder(-1)}, step=0)
    first, second = Holder(0), Holder(1)
    second.error = TypeError("negative")
    with pytest.raises(CheckpointMismatchError, match=r"second: .*TypeError: negative"):
        apply_payload(saved, {"first": first, "second": second})
    assert (first.value, second.value) == (0, 1)


def test_gradients_are_written_in_place():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    saved = build_payload({"model": model}, step=0)
    held = model.weight.grad
    held.zero_()
    apply_payload(saved, {"model": model})
    assert model.weight.grad is held
    assert torch.equal(held, saved["grads"]["weight"])


def test_a_model_made_for_inference_only_is_refused():
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    source = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError, match=r"weight was made under torch\.inference_mode"):
        apply_payload(build_payload({"model": source}, step=0), {"model": model})


class Sized(torch.nn.Linear):
    def __init__(self, value):
        super().__init__(1, 1)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def test_extra_state_may_change_its_size_but_not_its_type():
    saved = build_payload({"model": Sized(torch.ones(5))}, step=0)
    model = Sized(torch.ones(2))
    apply_payload(saved, {"model": model})
    assert model.value.numel() == 5
    with pytest.raises(CheckpointMismatchError, match="_extra_state is a Tensor in the file, a dict"):
        apply_payload(saved, {"model": Sized({})})
    apply_payload(saved, {"model": (empty := Sized(None))})
    assert empty.value.numel() == 5
    apply_payload(build_payload({"model": Sized(None)}, step=0), {"model": model})
    assert model.value is None
