"""The same training with the usual recipe, carefully done: an honest contrast, not a straw man.

The order is reseeded each epoch, so that it is the same after a restart. The checkpoint is written beside
its target and renamed. On a restart the batches that were trained on are skipped, and torch's generator is
set to where it stood before the first batch that was not. What the recipe leaves out is left out: the streams
of python's ``random`` and of numpy, and the gradients gathered so far.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumable_data.demo.digits import split
from resumable_data.demo.train import (
    ACCUMULATE,
    BATCH,
    EPOCHS,
    SAVE_EVERY,
    SEED,
    Distorted,
    build_model,
    evaluate,
    mixup,
    say,
)

FILE = "usual.pt"


def train(directory: str, *, epochs: int = EPOCHS) -> None:
    """Train, or go on with what the directory holds; prints what ``train.train`` prints."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    training, evaluation = split()
    evaluation_loader = DataLoader(evaluation, 120)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = Path(directory) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0, "losses": [], "accuracies": []}
    if path.exists():
        state = torch.load(path, weights_only=True)
        for name, target in objects.items():
            target.load_state_dict(state[name])
    say(restored=state["step"])

    skip = state["batch"]
    for epoch in range(state["epoch"], epochs):
        order = torch.Generator().manual_seed(SEED + epoch)
        loader = DataLoader(Distorted(training), BATCH, shuffle=True, collate_fn=mixup, generator=order)
        for number, (images, targets) in enumerate(loader):
            if number < skip:
                if number == skip - 1:
                    torch.set_rng_state(state["rng"])
                continue
            loss = nn.functional.cross_entropy(model(images), targets)
            (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]  # torch leaves it so
            state.update(step=state["step"] + 1, epoch=epoch, batch=number + 1)
            if state["step"] % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
            state["losses"].append(loss.item())
            say(step=state["step"], epoch=epoch, batch=number, loss=loss.item())
            if state["step"] % SAVE_EVERY == 0:
                save(path, state, objects)
        skip = 0
        state["accuracies"].append(evaluate(model, evaluation_loader))
        scheduler.step()
        say(epoch=epoch, accuracy=state["accuracies"][-1])
    save(path, state, objects)


def save(path: Path, state: dict[str, Any], objects: dict[str, Any]) -> None:
    """Write the checkpoint beside its target, then rename it."""
    state.update({name: target.state_dict() for name, target in objects.items()}, rng=torch.get_rng_state())
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The usual recipe, for contrast.")
    parser.add_argument("directory", help="where the checkpoint is")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of the whole run")
    options = parser.parse_args(argv)
    train(options.directory, epochs=options.epochs)


if __name__ == "__main__":
    main()
