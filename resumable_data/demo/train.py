"""Train a small network on handwritten digits. Kill it whenever you like; the same line goes on from there.

::

    python -m resumable_data.demo.train runs/digits

Nothing here makes it easy: images are distorted with draws from three random generators, batches are mixed at
random, the network has dropout and batch norm, gradients gather over four batches, the learning rate falls
each epoch, and an evaluation runs in between.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from resumable_data import CheckpointManager, ResumableLoader
from resumable_data.demo.digits import split

EPOCHS, BATCH, SEED = 9, 32, 7
ACCUMULATE = 4  # batches to one step of the optimizer; 45 batches an epoch, so windows span epochs
SAVE_EVERY = 6  # batches; every other checkpoint falls inside a window


class Distorted(Dataset[tuple[Tensor, Tensor]]):
    """Digits shifted by python's ``random``, made noisy by numpy and partly erased by torch."""

    def __init__(self, digits: TensorDataset) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.digits[index]
        image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), dims=(1, 2))
        image = image + torch.from_numpy(np.random.normal(0, 0.1, image.shape).astype(np.float32))
        if torch.rand(()) < 0.3:
            row, column = torch.randint(0, 6, (2,)).tolist()
            image[:, row : row + 3, column : column + 3] = 0
        return image, label


def mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A batch in which each image is blended with another: (B, 1, 8, 8), and class shares (B, 10)."""
    images, labels = default_collate(samples)
    targets = nn.functional.one_hot(labels, 10).float()
    share, partner = float(np.random.beta(0.2, 0.2)), torch.randperm(len(images))
    return share * images + (1 - share) * images[partner], share * targets + (1 - share) * targets[partner]


def build_model() -> nn.Module:
    """Images (B, 1, 8, 8) to class scores (B, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any) -> float:
    """The share of images that the model gets right, in [0, 1]."""
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def train(directory: str, *, epochs: int = EPOCHS, workers: int = 0) -> None:
    """Train, or go on with what the directory holds; prints one JSON line a batch and one an epoch."""
    # how many threads share a sum decides its last bit, and a restart may find other cores
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    training, evaluation = split()
    loader = ResumableLoader(
        Distorted(training), BATCH, shuffle=True, num_workers=workers, collate_fn=mixup, seed=SEED
    )
    evaluation_loader = ResumableLoader(evaluation, 120, seed=SEED)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}

    with CheckpointManager(directory, every_steps=SAVE_EVERY, keep_last=3) as manager:
        found = manager.restore(objects)
        step = found.step if found else 0
        record = {name: found.state[name] if found else [] for name in ("losses", "accuracies")}
        for epoch in loader.epochs(epochs):
            for number, (images, targets) in loader.enumerate():
                loss = nn.functional.cross_entropy(model(images), targets)
                (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]  # torch leaves it so
                step += 1
                if step % ACCUMULATE == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                record["losses"].append(loss.item())
                say(step=step, epoch=epoch, batch=number, loss=loss.item())
                if manager.should_save(step):
                    manager.save(step, objects, state=record)
            record["accuracies"].append(evaluate(model, evaluation_loader))
            scheduler.step()
            say(epoch=epoch, accuracy=record["accuracies"][-1])
        manager.finish(step, objects, state=record)


def say(**values: object) -> None:
    """One line of JSON on standard output, at once: whoever reads along knows as much as the process."""
    print(json.dumps(values), flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on digits, or go on where a killed run was.")
    parser.add_argument("directory", help="where the checkpoints are")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of the whole run")
    parser.add_argument("--workers", type=int, default=0, help="loader processes; free to change in between")
    options = parser.parse_args(argv)
    train(options.directory, epochs=options.epochs, workers=options.workers)


if __name__ == "__main__":
    main()
