"""What does a durable save cost where there is little to save?

Run it alone: ``python benchmarks/small_saves.py [--quick] [--json PATH] [--check] [--dir PATH]``.

A state of 100 KB through ``CheckpointManager`` (one file: two files synced, two renames and the pointer, with the
directory synced after each, and what was pruned) beside one write and one fsync of as many bytes, which is the
least that a disk can be asked for, and beside ``torch.save`` with fsync of file and directory. Medians of
many saves in each round.

Bar: at most 8 times the one write and fsync.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _common import Case, Record, heading, interleave, parser, quiet, rounds_of, table

from resumable_data import CheckpointManager

FLOOR, PLAIN, MINE = "one write, fsync", "torch.save, fsync", "CheckpointManager"
LAX = "CheckpointManager, durability='process'"


def floor(folder: Path, data: bytes, number: int) -> None:
    """A new file with these bytes, on the disk."""
    fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)


def plain(folder: Path, state: object, number: int) -> None:
    """What a careful script does by hand."""
    with (folder / f"{number}.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def each(save: Callable[[int], object], saves: int) -> dict[str, float]:
    """The median of so many saves, in ms."""
    taken = []
    for number in range(1, saves + 1):
        begun = time.perf_counter()
        save(number)
        taken.append(time.perf_counter() - begun)
    return {"ms": sorted(taken)[len(taken) // 2] * 1e3}


def ours(parent: Path, model: torch.nn.Module, durability: str, saves: int) -> dict[str, float]:
    """Saves of one run, three kept."""
    with CheckpointManager(tempfile.mkdtemp(dir=parent), durability=durability) as manager:
        return each(lambda number: manager.save(number, {"model": model}), saves)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    options = parser("cost of a small save")
    options.add_argument(
        "--dir", type=Path, default=Path(), help="on which file system; the working directory"
    )
    args = options.parse_args(argv)
    quiet()
    record = Record("small_saves", args)
    heading(record)
    saves = 5 if args.quick else 40
    model = torch.nn.Linear(160, 159)
    data = os.urandom(100 * 1024)
    with tempfile.TemporaryDirectory(dir=args.dir.resolve()) as name:
        folder = Path(name)

        def fresh(save: Callable[..., None], what: object) -> dict[str, float]:
            return each(partial(save, Path(tempfile.mkdtemp(dir=folder)), what), saves)

        cases: dict[str, Case] = {
            FLOOR: partial(fresh, floor, data),
            f"{FLOOR} again": partial(fresh, floor, data),
            PLAIN: partial(fresh, plain, {"model": model.state_dict()}),
            MINE: partial(ours, folder, model, "full", saves),
            LAX: partial(ours, folder, model, "process", saves),
        }
        measured = interleave(cases, rounds_of(args))
    lines = []
    for name in cases:
        times = measured.ratio(FLOOR, name, "ms")
        record.row(loader=name, ms=measured.of(name, "ms"), times=times)
        lines.append([name, measured.of(name, "ms").text(2), times.text(2)])
    table(["engine", "ms a save", f"times {FLOOR}"], lines)
    record.at_most("small.times", measured.ratio(FLOOR, MINE, "ms").median, 8.0)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
