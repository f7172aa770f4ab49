"""How much memory does it take to start a shuffled epoch of n samples?

Run it alone: ``python benchmarks/memory.py [--quick] [--json PATH] [--check]``.

Every figure is the peak resident set of a process of its own that imports everything, builds one loader over a
virtual dataset (item i is i), takes five batches of the shuffled epoch and ends; what is shown is how much that
is above the same loader's at the smallest n. The peers draw the whole epoch at once: RandomSampler a list of n
Python integers, DistributedSampler likewise before it takes its share (here of two replicas). Sizes at which a
peer would need more than half of the memory that is free are left out and named.

Bar: at n = 1e9 at most 8 MB above n = 1e3.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _common import Record, Summary, available_bytes, heading, interleave, parser, quiet, rounds_of, table
from _datasets import Virtual

BATCH = 64
BATCHES = 5
REPLICAS = 2
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
QUICK_SIZES = (10**3, 10**9)
#: Bytes a sample that the peers need: a word of the permutation, a pointer and an integer object in a list.
BYTES_EACH = 48
LARGEST_PEER = 10**8
MINE = "ResumableLoader"
#: A process of its own imports torch, which takes seconds, and its peak hardly differs from the next one's.
END_ROUNDS = 3


def random_sampler(n: int) -> Any:
    """DataLoader, which puts a RandomSampler in front."""
    from torch.utils.data import DataLoader

    return DataLoader(Virtual(n), BATCH, shuffle=True)


def distributed_sampler(n: int) -> Any:
    """DataLoader with a DistributedSampler."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(Virtual(n), num_replicas=REPLICAS, rank=0, shuffle=True)
    return DataLoader(Virtual(n), BATCH, sampler=sampler)


def stateful(n: int) -> Any:
    """The loader of torchdata."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Virtual(n), BATCH, shuffle=True)


def ours(n: int) -> Any:
    """Ours."""
    from resumable_data import ResumableLoader

    return ResumableLoader(Virtual(n), BATCH, shuffle=True, seed=1)


KINDS: dict[str, Callable[[int], Any]] = {
    MINE: ours,
    "RandomSampler": random_sampler,
    "DistributedSampler": distributed_sampler,
    "StatefulDataLoader": stateful,
}


def peak_bytes() -> int:
    """The peak resident set of this process since it began.

    Not ``ru_maxrss``: on Linux a new process begins with the peak of the one that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark runs on Linux only")


def child(kind: str, n: int) -> int:
    """What the process of one figure does."""
    quiet()
    loader = KINDS[kind](n)
    begun = time.perf_counter()
    iterator = iter(loader)
    for _ in range(BATCHES):
        next(iterator)
    seconds = time.perf_counter() - begun
    print(json.dumps({"peak_mb": peak_bytes() / 1e6, "seconds": seconds}))
    return 0


def in_a_process(kind: str, n: int) -> dict[str, float]:
    """One figure."""
    command = (sys.executable, __file__, "--child", kind, str(n))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} at n = {n:.0e} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def fits(record: Record, kind: str, n: int) -> bool:
    """Whether this size is measured; says so where it is not."""
    if kind == MINE:
        return True
    needed, free = n * BYTES_EACH, available_bytes()
    if needed > free // 2:
        why = f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    elif n > LARGEST_PEER:
        why = "takes minutes"
    else:
        return True
    record.skip(f"{kind} at n = {n:.0e}", why)
    return False


def measure(record: Record) -> dict[tuple[str, int], Summary]:
    """(kind, n) -> peak."""
    args = record.args
    sizes = QUICK_SIZES if args.quick else SIZES
    found = {}
    for n in sizes:
        kinds = [kind for kind in KINDS if fits(record, kind, n)]
        kinds = kinds[:1] if args.quick else kinds  # each is a process that imports torch
        cases = {kind: partial(in_a_process, kind, n) for kind in kinds}
        ends = n in (sizes[0], sizes[-1])  # the bar hangs on these; in between the curve only has to be seen
        rounds = min(rounds_of(args), END_ROUNDS) if ends and not args.quick else 1
        measured = interleave(cases, rounds)
        for kind in kinds:
            found[kind, n] = measured.of(kind, "peak_mb")
            base = found[kind, sizes[0]].median
            record.row(
                loader=kind,
                n=n,
                peak_mb=found[kind, n],
                above_mb=found[kind, n].median - base,
                seconds=measured.of(kind, "seconds"),
            )
    return found


def show(record: Record) -> None:
    """The table."""
    lines = [
        [
            row["loader"],
            f"{row['n']:.0e}",
            f"{row['peak_mb']['median']:.1f}",
            f"{row['above_mb']:+.1f}",
            f"{row['seconds']['median'] * 1e3:.1f}",
            row["peak_mb"]["rounds"],
        ]
        for row in sorted(record.rows, key=lambda row: (list(KINDS).index(row["loader"]), row["n"]))
    ]
    table(["loader", "n", "peak MB", "above the smallest n", "ms to the fifth batch", "rounds"], lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds the bar missed."""
    options = parser("peak memory of starting a shuffled epoch")
    options.add_argument(
        "--child", nargs=2, metavar=("KIND", "N"), help="what one process of this benchmark does"
    )
    args = options.parse_args(argv)
    if args.child:
        return child(args.child[0], int(args.child[1]))
    record = Record("memory", args)
    heading(record)
    found = measure(record)
    show(record)
    sizes = [n for kind, n in found if kind == MINE]
    above = found[MINE, max(sizes)].median - found[MINE, min(sizes)].median
    record.at_most("shuffled.above_mb", above, 8.0)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
