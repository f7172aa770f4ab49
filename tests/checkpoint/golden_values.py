"""What the checkpoints in tests/golden/checkpoints hold. `python -m checkpoint.golden_values DIR` wrote them, once."""

from __future__ import annotations

import collections
import random
import sys
from pathlib import Path

import numpy as np
import torch

from resumable_data import ResumableLoader
from resumable_data.checkpoint.committing import Form
from resumable_data.checkpoint.fsops import FS
from resumable_data.checkpoint.layout import Stamp
from resumable_data.checkpoint.payload import build_payload
from resumable_data.checkpoint.store import Store

KEY = b"the key of the golden checkpoints"
FORMS = {
    "single": Form(),
    "sharded": Form(shards=2),
    "signed": Form(hmac_key=KEY, durability="process"),
    "signed-sharded": Form(shards=lambda key: 5 if key in ("half", "count") else 2, hmac_key=KEY),
}
STAMP = Stamp("00112233445566778899aabbccddeeff", 3, 42, 1, {"loss": 0.1, "n": 7, "worst": None})


def payload():
    """Every kind of value that is saved, every number exact in binary."""
    weight = torch.tensor([[0.5, -1.25], [2.0, 0.125]])
    model = dict(  # noqa: C408 - names are shorter to read than strings here
        weight=torch.nn.Parameter(weight, requires_grad=False),
        tied=weight,
        row=weight[1],
        half=torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        count=torch.tensor(2**40),
        mask=torch.tensor([True, False]),
        wave=torch.tensor([1 + 2j]),
        wide=torch.tensor([3.0]).expand(4),
        none=torch.empty(0, 3),
    )
    plain = [
        None,
        True,
        -3,
        2**200,
        0.1,
        -0.0,
        float("inf"),
        1j,
        "ä\n",
        b"\x00\xff",
        bytearray(b"x"),
        (1, (2,)),
    ]
    special = [torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.strided, {1, 2}]
    counted = [collections.Counter("aab"), collections.OrderedDict(b=1, a=2), {1: {(2, 3): []}}]
    return {
        "schema": "ckpt.v1",
        "model": model,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        },
        "scheduler": None,
        "data": None,
        "extra": {"plain": plain, "special": special, "counted": counted},
        "state": {"step": 42, "epoch": None, "batch_in_epoch": None, "losses": [1.0, 0.5]},
        "rng": {},
        "modes": {"model": {"": True}},
        "grads": {"weight": torch.ones(2, 2)},
        "wiring": {"frozen": {"model": ["weight"]}, "places": {}, "classes": {}},
        "config": {"width": 2},
        "wall_saved_at": 1.75e9,
    }


def objects():
    """A run of a model, an optimizer with momentum, a schedule and a loader, before its first step."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "data": ResumableLoader(list(range(10)), batch_size=2, shuffle=True, seed=7),
        "ema": [0.25, 0.75],
    }


def advanced():
    """The same after one step with given gradients: sums and products of powers of two, the same everywhere."""
    run = objects()
    with torch.no_grad():
        for number, parameter in enumerate(run["model"].parameters()):
            parameter.fill_(number + 1)
            parameter.grad = torch.full_like(parameter, 0.25)
    run["optimizer"].step()
    run["scheduler"].step()
    run["model"][2].eval()
    batches = iter(run["data"])
    next(batches), next(batches)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    return run


def draws():
    """One draw of each global stream."""
    return [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]


def main(directory: Path) -> None:
    """Write all of them."""
    for name, form in FORMS.items():
        (directory / name).mkdir(parents=True)
        Store(directory / name, FS, form).commit(payload(), STAMP)
    (directory / "run").mkdir()
    saved = build_payload(advanced(), step=42, state={"losses": [0.5]}, config={"width": 2})
    Store(directory / "run", FS).commit(saved, STAMP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
