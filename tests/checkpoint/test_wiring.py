"""What state dicts leave out: frozen parameters, whose state an optimizer's is, classes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from resumable_data.checkpoint import apply_payload, build_payload
from resumable_data.errors import CheckpointMismatchError


class Two(torch.nn.Module):
    def __init__(self, order="ab"):
        super().__init__()
        for name in order:
            setattr(self, name, torch.nn.Linear(2, 2, bias=False))

    def forward(self, x):
        return self.a(x) + 3 * self.b(x)


def trained(order="ab", parameters=lambda model: model.parameters(), kind=torch.optim.Adam):
    model = Two(order)
    optimizer = kind(parameters(model), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_parameter_frozen_in_the_run_is_frozen_again_and_the_other_way_round():
    source, target = trained(), trained()
    source["model"].a.weight.requires_grad_(False)
    target["model"].b.weight.requires_grad_(False)
    apply_payload(build_payload(source, step=1), target)
    assert not target["model"].a.weight.requires_grad
    assert target["model"].b.weight.requires_grad


def test_the_flags_go_back_when_a_later_object_fails(monkeypatch):
    source, target = trained(), trained()
    source["model"].a.weight.requires_grad_(False)
    payload = build_payload(source, step=1)
    second = Two()
    payload["extra"]["second"] = payload["model"]
    for part in ("modes",):
        payload[part]["second"] = payload[part]["model"]
    payload["wiring"]["frozen"]["second"] = []
    monkeypatch.setattr(second.b.weight, "requires_grad_", None, raising=False)
    second.b.weight.requires_grad = False
    with pytest.raises(CheckpointMismatchError, match="second's training flags"):
        apply_payload(payload, target | {"second": second})
    assert target["model"].a.weight.requires_grad


def test_ddp_settles_what_is_trained_so_a_difference_is_refused(tmp_path):
    source = trained()
    payload = build_payload(source, step=1)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Two()
        model.a.weight.requires_grad_(False)
        before = model.b.weight.clone()
        with pytest.raises(CheckpointMismatchError, match=r"a\.weight was frozen in only one"):
            apply_payload(payload, {"model": DistributedDataParallel(model)})
        assert torch.equal(model.b.weight, before)
        model.a.weight.requires_grad_(True)
        apply_payload(payload, {"model": DistributedDataParallel(model)})
        assert torch.equal(model.b.weight, source["model"].b.weight)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("order", "parameters"),
    [
        ("ba", lambda model: model.parameters()),
        ("ba", lambda model: model.named_parameters()),
        ("ab", lambda model: [{"params": [model.b.weight]}, {"params": [model.a.weight]}]),
    ],
)
def test_state_of_one_parameter_never_goes_to_another_of_its_shape(order, parameters):
    groups = order == "ab"
    source = trained(
        parameters=(lambda m: [{"params": [w]} for w in m.parameters()]) if groups else parameters
    )
    target = trained(order, parameters)
    with pytest.raises(
        CheckpointMismatchError, match=r"is model\.a\.weight's in the file, model\.b\.weight's"
    ):
        apply_payload(build_payload(source, step=1), target)


def test_places_without_known_names_are_not_compared():
    source, target = trained(), trained("ba")
    payload = build_payload(source, step=1)
    apply_payload(payload, {"optimizer": target["optimizer"]})
    moment = target["optimizer"].state[target["model"].b.weight]["exp_avg"]
    assert torch.equal(moment, source["optimizer"].state[source["model"].a.weight]["exp_avg"])


def test_a_file_that_knew_no_names_is_not_compared_with_those_here():
    source, target = trained(), trained("ba")
    payload = build_payload({"optimizer": source["optimizer"]}, step=1)
    payload["model"], payload["modes"] = (build_payload(source, step=1)[key] for key in ("model", "modes"))
    payload["wiring"]["frozen"]["model"] = []
    apply_payload(payload, target)
    moment = target["optimizer"].state[target["model"].b.weight]["exp_avg"]
    assert torch.equal(moment, source["optimizer"].state[source["model"].a.weight]["exp_avg"])


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.SGD, torch.optim.Adamax])
def test_another_class_of_optimizer_is_refused(kind):
    payload = build_payload(trained(), step=1)
    with pytest.raises(
        CheckpointMismatchError, match=rf"optimizer: the file's is a Adam, this one a {kind.__name__}"
    ):
        apply_payload(payload, trained(kind=kind))


def test_another_class_of_scheduler_with_the_same_keys_is_refused():
    objects = trained()
    lambdas = torch.optim.lr_scheduler.LambdaLR(objects["optimizer"], lambda step: 0.9)
    payload = build_payload({"scheduler": lambdas}, step=1)
    other = torch.optim.lr_scheduler.MultiplicativeLR(objects["optimizer"], lambda step: 0.9)
    with pytest.raises(CheckpointMismatchError, match="a LambdaLR, this one a MultiplicativeLR"):
        apply_payload(payload, {"scheduler": other})


@pytest.mark.parametrize(
    ("part", "value"),
    [("frozen", None), ("frozen", {"model": [3]}), ("frozen", {"model": ["c.weight"]}), ("places", {})],
)
def test_a_payload_without_its_wiring_is_refused(part, value):
    payload = build_payload(trained(), step=1)
    payload["wiring"][part] = value
    with pytest.raises(CheckpointMismatchError, match=r"frozen|'wiring'|name the parameters"):
        apply_payload(payload, trained())
