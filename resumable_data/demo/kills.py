"""When and where the demonstration kills: drawn from a seed, with the hard moments made certain."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable

KINDS = ("save", "window", "boundary", "random")
# (a system call of a save, its number within that save): the process is killed just before it
SAVE_CALLS = (("rename", 2), ("fsync", 1), ("rename", 3), ("rename", 1), ("fsync", 2), ("unlink", 1))


@dataclasses.dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        kind: "save": inside a save. "window": between two batches whose gradients are summed, with the
            newest checkpoint in a window too. "boundary": after an epoch's last batch, before its evaluation.
            "random": wherever the process is, ``delay`` seconds after it has reported a step.
        step: The first step (counted in batches, from 1) at which it may fall.
        call: For "save": the system call before which the process is held and killed.
        nth: For "save": which of these calls within the save, from 1.
        delay: For "random": seconds.
    """

    kind: str
    step: int
    call: str = ""
    nth: int = 0
    delay: float = 0.0

    def to_json(self) -> str:
        """Text for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Kill:
        """What `to_json` gave."""
        return cls(**json.loads(text))


def plan_kills(
    count: int, *, epochs: int, batches: int, save_every: int, accumulate: int, seed: int
) -> list[Kill]:
    """That many kills, spread over the run, in the order of their steps.

    The first three are one inside a save, one inside an accumulation window and one at an epoch boundary
    behind a checkpoint of the epoch's last batch; the others are at random moments and inside saves by turns.

    Args:
        count: How many, >= 1.
        epochs: Epochs of the run.
        batches: Batches of an epoch.
        save_every: Batches between two checkpoints.
        accumulate: Batches of an accumulation window.
        seed: The same seed, the same plan.
    """
    draw = random.Random(seed)
    kinds = [("save", "window", "boundary")[i] if i < 3 else ("random", "save")[i % 2] for i in range(count)]
    ends = [epoch * batches for epoch in range(1, epochs) if epoch * batches % save_every == 0]
    if not ends:
        kinds = [kind if kind != "boundary" else "random" for kind in kinds]
    draw.shuffle(kinds)
    low, high = save_every + 1, epochs * batches - 3 * save_every * accumulate
    edges = [low + (high - low) * i // count for i in range(count + 1)]
    calls = iter(SAVE_CALLS * count)
    kills = []
    for kind, (first, last) in zip(kinds, itertools.pairwise(edges), strict=True):
        step = draw.randrange(first, max(last, first + 1))
        if kind == "save":
            call, nth = next(calls)
            kills.append(Kill(kind, step, call, nth))
        elif kind == "window":
            kills.append(Kill(kind, _next(step, in_window(save_every, accumulate))))
        elif kind == "boundary":
            kills.append(Kill(kind, min(ends, key=lambda end: abs(end - step))))
        else:
            kills.append(Kill(kind, step, delay=draw.uniform(0, 0.05)))
    return sorted(kills, key=lambda kill: kill.step)


def in_window(save_every: int, accumulate: int) -> Callable[[int], bool]:
    """Whether after a step gradients wait for the optimizer, in the process and in its newest checkpoint."""

    def inside(step: int) -> bool:
        saved = (step - 1) // save_every * save_every
        return step % accumulate != 0 and saved % accumulate != 0

    return inside


def _next(step: int, wanted: Callable[[int], bool]) -> int:
    while not wanted(step):
        step += 1
    return step
