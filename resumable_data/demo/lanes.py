"""The runs of the demonstration: each takes a directory and a plan and gives what its processes reported."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resumable_data.demo.kills import Kill
from resumable_data.demo.process import Child, ChildError, Children

TRAIN, CHILD, USUAL = (f"resumable_data.demo.{name}" for name in ("train", "child", "usual"))


@dataclasses.dataclass
class Row:
    """One kill, and how the next process went on.

    Attributes:
        step: The last step (in batches, from 1) that the process had trained on.
        epoch: The epoch of that step.
        batch: Its number in the epoch, from 0.
        where: What the process was doing.
        workers: Loader workers of the next process.
        resumed_from: The step of the checkpoint that the next process used; 0 for none.
        seconds: From the start of the next process to its first batch, imports included.
        restoring: Of these, from the start of the restore to the first batch.
    """

    step: int
    epoch: int
    batch: int
    where: str
    workers: int = 0
    resumed_from: int = 0
    seconds: float = 0.0
    restoring: float = 0.0


@dataclasses.dataclass
class Story:
    """What the processes of one run reported, in order.

    Attributes:
        losses: (step, loss) of every batch trained on, also of those that a kill made undone.
        kills: One row for each kill.
    """

    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    kills: list[Row] = dataclasses.field(default_factory=list)


Report = Callable[[dict[str, Any]], None]


def run(
    children: Children, module: str, directory: Path, *, epochs: int, kills: list[Kill], report: Report
) -> Story:
    """One process after another, each killed but the last; each knows nothing but the directory.

    Without kills, one process from the beginning to the end. The children of `CHILD` alternate between 0
    and 2 loader workers and can be held; the others keep to 0 workers and are killed at random moments only.

    Raises:
        ChildError: A process failed by itself, or was over before its kill.
    """
    story = Story()
    for number, kill in enumerate([*kills, None]):
        arguments = [str(directory), "--epochs", str(epochs)]
        workers = number % 2 * 2 if module == CHILD else 0
        if module == CHILD:
            arguments += ["--workers", str(workers)]
            if kill is not None and kill.kind != "random":
                arguments += ["--kill", kill.to_json()]
        if story.kills:
            story.kills[-1].workers = workers
        child = children.start(module, arguments, directory.with_name(f"{directory.name}-{number}.stderr"))
        _follow(child, kill, story, report)
    return story


def _follow(child: Child, kill: Kill | None, story: Story, report: Report) -> None:
    """Read along with one process and kill it where the plan says."""
    last: dict[str, Any] = {}
    where = None
    for event in child.events():
        report(event)
        _note(story, event)
        if story.kills and "restored" in event:
            story.kills[-1].resumed_from = event["restored"]
        if story.kills and "first_batch" in event and not story.kills[-1].seconds:
            story.kills[-1].seconds = time.perf_counter() - child.began
            story.kills[-1].restoring = event["first_batch"]
        if "loss" in event:
            last = event
        if kill is None or where is not None:
            continue
        if "held" in event:
            where = event["held"]
            child.kill()
        elif kill.kind == "random" and "loss" in event and event["step"] >= kill.step:
            time.sleep(kill.delay)
            child.kill()
            where = "at a random moment"
    if kill is not None:
        if where is None:
            raise ChildError(f"the run was over before the kill that was planned for step {kill.step}")
        row = Row(last.get("step", 0), last.get("epoch", 0), last.get("batch", 0), where)
        story.kills.append(row)
        report({"killed": row})


def _note(story: Story, event: dict[str, Any]) -> None:
    if "loss" in event:
        story.losses.append((event["step"], event["loss"]))
