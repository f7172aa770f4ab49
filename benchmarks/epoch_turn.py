"""How long does the training loop wait at the turn of an epoch?

Run it alone: ``python benchmarks/epoch_turn.py [--quick] [--json PATH] [--check]``.

Milliseconds from the last batch of an epoch to the first of the next, with 0 and 2 workers, persistent and not.
What there is to wait for: the old workers' end and the new ones' start, the next epoch's order, the first batch.
An epoch is 50 batches of 64; the second size is a dataset of a million of which an epoch takes 50 batches as well
(``num_samples`` of torch's RandomSampler, our ``batches_per_epoch``), so that the order of a large dataset is
drawn at each turn without iterating over all of it.

Bar: our turn is at most 5 ms longer than DataLoader's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from _common import Case, Record, heading, interleave, parser, quiet, rounds_of, table
from _datasets import Virtual
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resumable_data import ResumableLoader

BATCH = 64
SIZES = (50 * BATCH, 10**6)
BASE, CONTROL, MINE = "DataLoader", "DataLoader again", "ResumableLoader"
#: (workers, persistent)
SETTINGS = ((0, False), (2, False), (2, True))


def loaders(n: int, batches: int, workers: int, persistent: bool) -> dict[str, Callable[[], Any]]:
    """Name -> a function that builds the loader."""
    dataset = Virtual(n)
    common = {"num_workers": workers, "persistent_workers": persistent}

    def theirs(kind: Callable[..., Any]) -> Any:
        return kind(dataset, BATCH, sampler=RandomSampler(dataset, num_samples=batches * BATCH), **common)

    return {
        BASE: partial(theirs, DataLoader),
        CONTROL: partial(theirs, DataLoader),
        "StatefulDataLoader": partial(theirs, StatefulDataLoader),
        MINE: partial(ResumableLoader, dataset, BATCH, True, seed=1, batches_per_epoch=batches, **common),
    }


def turns(make: Callable[[], Any], epochs: int) -> dict[str, float]:
    """Milliseconds of a turn, the mean over a few epochs of one loader, the last batch in hand."""
    loader = make()
    waited, last = 0.0, 0.0
    for epoch in range(epochs + 1):
        for number, _ in enumerate(loader):
            now = time.perf_counter()
            if number == 0 and epoch:
                waited += now - last
            last = now
    return {"ms": waited / epochs * 1e3}


def measure(record: Record, n: int, workers: int, persistent: bool) -> None:
    """One size with one kind of workers."""
    quick = record.args.quick
    batches = 5 if quick else 50
    made = loaders(n, batches, workers, persistent)
    cases: dict[str, Case] = {kind: partial(turns, make, 1 if quick else 2) for kind, make in made.items()}
    measured = interleave(cases, rounds_of(record.args))
    print(f"n = {n}, workers {workers}{', persistent' if persistent else ''}")
    lines = []
    for kind in cases:
        ms, added = measured.of(kind, "ms"), measured.added(kind, BASE, "ms")
        record.row(loader=kind, n=n, workers=workers, persistent=persistent, ms=ms, added_ms=added)
        lines.append([kind, ms.text(2), added.text(2)])
    table(["loader", "ms at the turn", "added ms"], lines)
    where = f"n{n}.workers{workers}{'.persistent' if persistent else ''}"
    record.at_most(f"{where}.added_ms", measured.added(MINE, BASE, "ms").median, 5.0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    args = parser("seconds at the turn of an epoch").parse_args(argv)
    quiet()
    record = Record("epoch_turn", args)
    heading(record)
    for n in SIZES[:1] if args.quick else SIZES:
        for workers, persistent in SETTINGS:
            measure(record, n, workers, persistent)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
