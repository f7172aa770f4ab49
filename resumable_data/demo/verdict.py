"""Whether two runs are the same run: every loss with ``==``, and a hash over the weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from resumable_data.checkpoint.manager import CheckpointManager
from resumable_data.demo import usual


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run left in its directory.

    Attributes:
        losses: One for each batch of the run.
        accuracies: One for each epoch.
        weights: sha256 over the names, types, shapes and bytes of the model's tensors, in hex.
    """

    losses: list[float]
    accuracies: list[float]
    weights: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a run differs from the one that was not disturbed.

    Attributes:
        losses: Losses compared.
        differing: The steps, from 1, whose losses are not equal or that one run lacks.
        accuracies: Whether all evaluations are equal.
        weights: Whether the final weights are.
        undone: Losses that were computed, lost to a kill and computed again.
        undone_differing: How many of the losses ever reported are not those of the undisturbed run.
    """

    losses: int
    differing: list[int]
    accuracies: bool
    weights: bool
    undone: int
    undone_differing: int

    @property
    def same(self) -> bool:
        """Nothing differs at all."""
        return not self.differing and self.accuracies and self.weights and not self.undone_differing


def compare(reference: Outcome, other: Outcome, reported: list[tuple[int, float]]) -> Comparison:
    """Compare a run with the undisturbed one.

    Args:
        reference: What the undisturbed run left.
        other: What the other left.
        reported: (step, loss) of all that the other run's processes computed.
    """
    steps = max(len(reference.losses), len(other.losses))
    theirs = dict(enumerate(reference.losses, 1))
    ours = dict(enumerate(other.losses, 1))
    # a loss that is not a number equals nothing, and so counts as a difference
    differing = [step for step in range(1, steps + 1) if not _equal(theirs.get(step), ours.get(step))]
    return Comparison(
        losses=steps,
        differing=differing,
        accuracies=reference.accuracies == other.accuracies,
        weights=reference.weights == other.weights,
        undone=len(reported) - len({step for step, _ in reported}),
        undone_differing=sum(not _equal(theirs.get(step), loss) for step, loss in reported),
    )


def _equal(one: float | None, other: float | None) -> bool:
    return one is not None and one == other


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def read_outcome(directory: Path) -> Outcome:
    """What a run with this package left in its directory.

    Raises:
        FileNotFoundError: Nothing is there.
    """
    with CheckpointManager(directory) as manager:
        found = manager.load_latest()
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    state = found.state
    return Outcome(state["losses"], state["accuracies"], weights_digest(found.payload["model"]))


def read_usual_outcome(directory: Path) -> Outcome:
    """What a run with the usual recipe left."""
    state = torch.load(directory / usual.FILE, weights_only=True)
    return Outcome(state["losses"], state["accuracies"], weights_digest(state["model"]))


def times(count: int) -> str:
    """``once`` or ``3 times``."""
    return "once" if count == 1 else f"{count} times"
