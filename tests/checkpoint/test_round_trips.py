"""Every optimizer and scheduler of torch's goes on bit by bit after a save and a restore."""

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from checkpoint.payloads import picture, through_a_file
from resumable_data.checkpoint import apply_payload, build_payload

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "Adam rates": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True, weight_decay=0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "RMSprop all": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
    "LBFGS search": lambda p: torch.optim.LBFGS(p, lr=1, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([w for w in p if w.dim() == 2], lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD named": lambda p: torch.optim.SGD([(f"p{i}", w) for i, w in enumerate(p)], lr=0.1, momentum=0.5),
}


def test_no_optimizer_of_torchs_is_forgotten():
    known = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert known == {name.split()[0] for name in OPTIMIZERS}


class Trained:
    """A model and an optimizer; the batch of a step depends on its number alone."""

    def __init__(self, name, seed, dtype):
        torch.manual_seed(seed)
        if name == "SparseAdam":
            self.model = torch.nn.Embedding(5, 3, sparse=True)
        else:
            self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.model.to(dtype)
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.objects = {"model": self.model, "optimizer": self.optimizer}
        self.dtype = dtype

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(5, 3, generator=generator).to(self.dtype)
        if isinstance(self.model, torch.nn.Embedding):
            x = torch.randint(5, (4,), generator=generator)

        def closure():
            self.optimizer.zero_grad()
            loss = (self.model(x) - 0.3).square().sum()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def picture(self):
        return picture(self.model.state_dict()), picture(self.optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ahead", [0, 2])
def test_each_optimizer_goes_on_exactly(name, ahead, dtype):
    first, second = Trained(name, 1, dtype), Trained(name, 2, dtype)
    for number in range(3):
        first.step(number)
    payload = through_a_file(build_payload(first.objects, step=3))
    for number in range(ahead):  # a fresh process, and a run that goes back
        second.step(number)
    apply_payload(payload, second.objects)
    assert second.picture() == first.picture()
    for number in range(3, 6):
        first.step(number)
        second.step(number)
        assert second.picture() == first.picture()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_has_stepped_goes_back_to_one_that_has_not(name):
    first, second = Trained(name, 1, torch.float32), Trained(name, 2, torch.float32)
    payload = through_a_file(build_payload(first.objects, step=0))
    second.step(0)
    apply_payload(payload, second.objects)
    first.step(1)
    second.step(1)
    assert second.picture() == first.picture()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.Rprop])
def test_complex_parameters_have_complex_state(kind):
    def build():
        parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        return parameter, kind([parameter], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def step(parameter, optimizer):
        parameter.grad = parameter.detach() * (0.5 - 0.1j)
        optimizer.step()
        parameter.grad = None

    first, second = build(), build()
    for _ in range(3):
        step(*first)
    holder = torch.nn.ParameterList([first[0]])
    payload = through_a_file(build_payload({"model": holder, "optimizer": first[1]}, step=3))
    apply_payload(payload, {"model": torch.nn.ParameterList([second[0]]), "optimizer": second[1]})
    for _ in range(3):
        step(*first)
        step(*second)
    assert torch.equal(first[0], second[0])
    assert picture(first[1].state_dict()) == picture(second[1].state_dict())


def test_lbfgs_keeps_the_real_view_of_complex_parameters():
    def build():
        parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=3)

        def step():
            def closure():
                optimizer.zero_grad()
                loss = (parameter - 0.5j).abs().pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

        return parameter, optimizer, step

    first, second = build(), build()
    first[2]()
    objects = {"model": torch.nn.ParameterList([first[0]]), "optimizer": first[1]}
    payload = through_a_file(build_payload(objects, step=1))
    apply_payload(payload, {"model": torch.nn.ParameterList([second[0]]), "optimizer": second[1]})
    for run in (first, second):
        run[2]()
    assert torch.equal(first[0], second[0])
    assert picture(first[1].state_dict()) == picture(second[1].state_dict())


class Decay:
    """A rate as an object, which the scheduler saves with it."""

    def __init__(self, rate):
        self.rate, self.calls = rate, []

    def __call__(self, epoch):
        self.calls.append(float(epoch))
        return self.rate**epoch


def sequential(o):
    parts = [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.MultiStepLR(o, [2, 4])]
    return lr_scheduler.SequentialLR(o, [*parts, lr_scheduler.ExponentialLR(o, 0.9)], [3, 5])


def chained(o):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)])


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, Decay(0.9)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "MultiplicativeLR object": lambda o: lr_scheduler.MultiplicativeLR(o, Decay(0.9)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2),
    "SequentialLR": sequential,
    "SequentialLR object": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, Decay(0.9)), lr_scheduler.ExponentialLR(o, 0.9)], [9]
    ),
    "ChainedScheduler": chained,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5),
    "CyclicLR object": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Decay(0.9)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "OneCycleLR phases": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20, three_phase=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ReduceLROnPlateau max": lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", patience=1, cooldown=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}


def test_no_scheduler_of_torchs_is_forgotten():
    known = set(lr_scheduler.__all__) - {"LRScheduler"}
    assert known | {"SWALR"} == {name.split()[0] for name in SCHEDULERS}


def scheduled(name):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters, 1)], momentum=0.9
    )
    return optimizer, SCHEDULERS[name](optimizer)


def advance(optimizer, scheduler):
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def rates(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("steps", "ahead"), [(0, 0), (3, 0), (3, 5), (4, 1), (0, 4)])
def test_each_scheduler_goes_on_exactly(name, steps, ahead):
    first, second = scheduled(name), scheduled(name)
    for _ in range(steps):
        advance(*first)
    for _ in range(ahead):
        advance(*second)
    payload = through_a_file(build_payload({"optimizer": first[0], "scheduler": first[1]}, step=steps))
    apply_payload(payload, {"optimizer": second[0], "scheduler": second[1]})
    assert picture(second[1].state_dict()) == picture(first[1].state_dict())
    for _ in range(5):
        advance(*first)
        advance(*second)
        assert rates(second[0]) == rates(first[0])
    assert picture(second[1].state_dict()) == picture(first[1].state_dict())


def test_a_scheduler_of_tensor_rates():
    def build():
        optimizer = torch.optim.AdamW(
            [torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1), foreach=False
        )
        return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9)

    first, second = build(), build()
    for _ in range(3):
        advance(*first)
    payload = through_a_file(build_payload({"optimizer": first[0], "scheduler": first[1]}, step=3))
    apply_payload(payload, {"optimizer": second[0], "scheduler": second[1]})
    for _ in range(3):
        advance(*first)
        advance(*second)
        assert picture(second[0].state_dict()) == picture(first[0].state_dict())
