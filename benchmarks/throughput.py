"""What does a batch cost over torch's ``DataLoader`` and torchdata's ``StatefulDataLoader``?

Run it alone: ``python benchmarks/throughput.py [--quick] [--json PATH] [--check]``.

Batches of 64, shuffled, from five datasets (a sixth where Hugging Face ``datasets`` is installed), with 0, 2 and
4 workers. Three numbers a batch, once the workers are up: wall-clock time, CPU time of the training process, and
CPU time of the workers. The CPU times hold on a machine that is shared; wall-clock ratios swing with what
else it does. ``DataLoader again`` is the control: the same loader against itself says what the machine can
tell apart. Without workers all loaders are open at once and take turns every few batches, many rounds long;
with workers each is started in its turn, so that nobody's workers run beside another's.

Collating photographs is work that torch spreads over threads, and threads that wait for each other use CPU time.
So for these torch runs on one thread, as it does in workers; for the others it stands as torch sets it.

Bars: CPU time added to a batch over DataLoader at most 40 us without workers and 30 us in the training process
with them; as a ratio of CPU times without workers at least 0.98 for photographs and 0.93 for rows, 5 for a
``TensorDataset``; never more CPU time than StatefulDataLoader; ``seeding="sample"`` at most 17 us a sample.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _common import (
    Case,
    Measured,
    Record,
    cpu_seconds,
    heading,
    installed,
    interleave,
    parser,
    quiet,
    rounds_of,
    table,
    tells_apart,
    worker_pids,
)
from _datasets import makers
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from resumable_data import ResumableLoader

BATCH = 64
#: Batches in a round with workers; without, a round is a tenth of it and there are six times as many rounds.
BATCHES = {"rows": 300, "tensors": 300, "tokens": 150, "jpeg": 8, "getitems": 300, "arrow": 30}
QUICK_BATCHES = {"rows": 20, "tensors": 20, "tokens": 10, "jpeg": 1, "getitems": 20, "arrow": 2}
TURNS = 6
WORKERS = (0, 2, 4)
SEEDINGS = ("batch", "sample", None)
#: In flight at the end of the measurement: torch's default is two a worker.
AHEAD = 2

BASE, CONTROL, PEER = "DataLoader", "DataLoader again", "StatefulDataLoader"
ADDED_US = {0: 40.0, 2: 30.0, 4: 30.0}
RATIO = {"rows": 0.93, "jpeg": 0.98, "tensors": 5.0}


def ours(seeding: str | None) -> str:
    """The name of our loader in the table."""
    return f"ResumableLoader, seeding={seeding!r}"


def loaders(dataset: Any, batch: int, workers: int) -> dict[str, Callable[[], Any]]:
    """Name -> a function that builds the loader."""
    common = {"dataset": dataset, "batch_size": batch, "shuffle": True, "num_workers": workers}
    plain = partial(DataLoader, **common)
    made: dict[str, Callable[[], Any]] = {
        BASE: plain,
        CONTROL: plain,
        PEER: partial(StatefulDataLoader, **common),
    }
    for seeding in SEEDINGS:
        if seeding == "sample" and hasattr(dataset, "__getitems__"):
            continue  # such a dataset is never asked for one sample
        made[ours(seeding)] = partial(ResumableLoader, **common, seed=1, seeding=seeding)
    return made


class Steady:
    """Microseconds a batch once the workers are up: wall clock, this process's CPU, the workers' CPU.

    Args:
        make: Builds the loader.
        batches: How many are measured at a time.
        skip: How many are left out after the start.
        keep: Whether the next round goes on with the same iterator.
    """

    def __init__(self, make: Callable[[], Any], batches: int, skip: int, *, keep: bool) -> None:
        self._make, self._batches, self._skip, self._keep = make, batches, skip, keep
        self._open: Iterator[Any] | None = None

    def __call__(self) -> dict[str, float]:
        """One round."""
        iterator = self._open
        if iterator is None:
            iterator = iter(self._make())
            for _ in range(self._skip):
                next(iterator)
            self._open = iterator if self._keep else None
        return self._take(iterator)

    def _take(self, iterator: Iterator[Any]) -> dict[str, float]:
        pids = worker_pids()
        theirs = cpu_seconds(pids)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._batches):
            next(iterator)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        after = cpu_seconds(pids)
        found = {"wall_us": wall / self._batches * 1e6, "cpu_us": cpu / self._batches * 1e6}
        if pids and theirs is not None and after is not None:
            found["workers_us"] = (after - theirs) / self._batches * 1e6
        return found


def opened(
    record: Record, name: str, make: Callable[[int], Any], workers: int
) -> tuple[dict[str, Case], int]:
    """The cases of one dataset with one number of workers, and their rounds."""
    quick, rounds = record.args.quick, rounds_of(record.args)
    batches = (QUICK_BATCHES if quick else BATCHES)[name]
    batch = 4 if quick and name == "jpeg" else BATCH
    skip = 2 + 2 * AHEAD * workers
    total = skip + batches + AHEAD * workers + 2  # more than is read: the workers must not run dry
    if not workers:
        batches, rounds = max(1, batches // 10), rounds if quick else rounds * TURNS
        total = skip + batches * rounds
    made = loaders(make(batch * total), batch, workers)
    return {kind: Steady(build, batches, skip, keep=not workers) for kind, build in made.items()}, rounds


def measure(record: Record, name: str, make: Callable[[int], Any], workers: int) -> None:
    """One dataset with one number of workers."""
    torch.set_num_threads(1 if name == "jpeg" else record.environment["torch_threads"])
    cases, rounds = opened(record, name, make, workers)
    measured = interleave(cases, rounds)
    control = measured.ratio(CONTROL, BASE, "cpu_us")
    print(f"{name}, workers {workers}")
    lines = []
    for kind in cases:
        values = {
            "wall_us": measured.of(kind, "wall_us"),
            "cpu_us": measured.of(kind, "cpu_us"),
            "added_us": measured.added(kind, BASE, "cpu_us"),
            "cpu_ratio": measured.ratio(kind, BASE, "cpu_us"),
            "wall_ratio": measured.ratio(kind, BASE, "wall_us"),
        }
        if "workers_us" in measured.values[kind]:
            values["workers_us"] = measured.of(kind, "workers_us")
        record.row(dataset=name, workers=workers, loader=kind, **values)
        cells = [values["cpu_us"].text(), values["added_us"].text(), values["cpu_ratio"].text(3)]
        beside = values["workers_us"].text(0) if "workers_us" in values else "-"
        lines.append(
            [kind, f"{1e6 / values['wall_us'].median:.0f}", values["wall_ratio"].text(3), *cells, beside]
        )
    table(
        ["loader", "batches/s", "of DataLoader", "CPU us", "added us", "CPU ratio", "workers' CPU us"], lines
    )
    add_bars(record, measured, name, workers, tells_apart(control))


def add_bars(record: Record, measured: Measured, name: str, workers: int, noise: float) -> None:
    """The bars of one dataset with one number of workers."""
    where, mine = f"{name}.workers{workers}", ours("batch")
    if name != "jpeg":  # 40 us of 100 ms is what no clock tells: photographs have a ratio instead
        added = measured.added(mine, BASE, "cpu_us").median
        record.at_most(f"{where}.added_us", added, ADDED_US[workers])
    peer = measured.ratio(mine, PEER, "cpu_us").median
    record.at_least(f"{where}.stateful_ratio", peer, 1.0, noise)
    if workers:
        return
    if name in RATIO:
        ratio = measured.ratio(mine, BASE, "cpu_us").median
        record.at_least(f"{where}.ratio", ratio, RATIO[name], noise if name == "jpeg" else 0.0)
    if name == "rows":
        each = measured.added(ours("sample"), BASE, "cpu_us").median / BATCH
        record.at_most(f"{where}.sample_us", each, 17.0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    options = parser("batches per second and CPU time over DataLoader and StatefulDataLoader")
    options.add_argument("--datasets", nargs="+", choices=list(BATCHES), help="only these")
    options.add_argument("--workers", nargs="+", type=int, choices=WORKERS, help="only these")
    args = options.parse_args(argv)
    quiet()
    record = Record("throughput", args)
    heading(record)
    names = args.datasets or list(BATCHES)
    if "arrow" in names and not installed("datasets", "pyarrow"):
        names.remove("arrow")
        record.skip("arrow", "Hugging Face datasets is not installed")
    if "jpeg" in names and not installed("PIL", "sklearn"):
        names.remove("jpeg")
        record.skip("jpeg", "pillow or scikit-learn is not installed")
    with tempfile.TemporaryDirectory() as path:
        make = makers(path)
        for name in names:
            for workers in args.workers or ((0, 2) if args.quick and name == "rows" else WORKERS):
                if args.quick and workers and name != "rows":
                    continue
                measure(record, name, make[name], workers)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
