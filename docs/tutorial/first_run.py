"""Train a small network on points of two rings; killed and started again, it is the same run.

Usage: python first_run.py [DIRECTORY [WORKERS]]
"""

import hashlib
import random
import sys

import torch
from torch import Tensor, nn

from resumable_data import CheckpointManager, ResumableLoader

EPOCHS = 20


class Rings:
    """Points on two rings. Which ring is the label; every look at a point shakes it a little."""

    def __init__(self, size: int) -> None:
        self.labels = torch.arange(size) % 2
        angles = torch.linspace(0, 1000, size)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1) * (1 + self.labels)[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shake = torch.tensor([random.gauss(0, 0.2), random.gauss(0, 0.2)])
        return self.points[index] + shake, self.labels[index]


def main(directory: str = "runs/first", workers: str = "0") -> None:
    """Train for all epochs, or what is left of them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # how many threads share a sum decides its last bit
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ResumableLoader(Rings(4000), batch_size=32, shuffle=True, num_workers=int(workers), seed=0)

    objects = {"model": model, "optimizer": optimizer, "data": loader}
    with CheckpointManager(directory, every_steps=50, keep_last=3) as manager:
        found = manager.restore(objects)  # None where there is no checkpoint yet
        step = found.step if found else 0
        if found:
            print(f"resumed after step {step}: epoch {loader.epoch}, batch {loader.batch_in_epoch}")
        for _ in loader.epochs(EPOCHS):
            for points, labels in loader:
                loss = nn.functional.cross_entropy(model(points), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if manager.should_save(step):
                    manager.save(step, objects)
        manager.finish(step, objects)

    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"{step} steps, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
