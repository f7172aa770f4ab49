"""What the demonstration shows while it works, on a terminal or without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from resumable_data.demo.lanes import Row

_WIDTH = 110  # columns where there is no terminal to ask


def make_console() -> Console:
    """A console on standard output; plain text of a fixed width where that is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


class Screen:
    """A bar for each run, and one line for each kill; without a terminal, only lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def follow(self, name: str, steps: int) -> Callable[[dict[str, Any]], None]:
        """A new bar, and the function that takes the events of the run it stands for."""
        task = self._progress.add_task(name, start=False, total=steps, note="waits")
        kills = 0

        def report(event: dict[str, Any]) -> None:
            nonlocal kills
            self._progress.start_task(task)  # once only; at the first event
            if "loss" in event:
                self._progress.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}")
            elif event.get("restored"):
                self._progress.update(task, completed=event["restored"], note="back from its checkpoint")
            elif "killed" in event:
                kills += 1
                row: Row = event["killed"]
                self._progress.update(task, note="killed")
                self.say(f"{name}: kill {kills} at step {row.step}, {row.where}")
            if event.get("step") == steps and not self.console.is_terminal:
                self.say(f"{name}: step {steps} of {steps}")

        return report

    def say(self, text: str) -> None:
        """One line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def kill_table(rows: list[Row]) -> Table:
    """One row for each kill: what the process was doing, and how the next one went on.

    The seconds to the first batch are those from the start of the process, imports included; the last column
    says how long of it the restore and the batch took.
    """
    table = Table(
        title="kills, and how the next process went on",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("kill", "step", "epoch", "batch"):
        table.add_column(name, justify="right")
    table.add_column("doing")
    for name in ("resumed from", "workers", "first batch", "restoring"):
        table.add_column(name, justify="right")
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            *(str(row.step), str(row.epoch), str(row.batch), row.where),
            f"step {row.resumed_from}" if row.resumed_from else "nothing yet",
            str(row.workers),
            f"{row.seconds:.1f} s",
            f"{row.restoring * 1000:.0f} ms",
        )
    return table
