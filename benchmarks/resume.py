"""How long from ``load_state_dict`` to the first batch, deep in an epoch of a large dataset?

Run it alone: ``python benchmarks/resume.py [--quick] [--json PATH] [--check]``.

The dataset is virtual (item i is i), so that what is measured is the loader and not the reading. States at 0, 50
and 90 % of the epoch are loaded into a new loader each time. The peers do the same work in the ways in use:

* StatefulDataLoader: its own state;
* DataLoader, batches thrown away: iterate from the start up to the position;
* DataLoader, sampler skipped: a batch sampler that draws and drops, as accelerate's ``skip_first_batches`` does
  (which is used where it is installed);
* Grain, where it is installed: its DataLoader's own state.

Grain reads ahead: what it fetched beyond the first batch counts as fetched in vain here, though it will be used.

A peer that would take longer than a few seconds at some n is left out there, and its time at the largest n at
which it was measured says why. A log of every ``__getitem__`` says whose samples were fetched in vain.

Bars: the built-in orders without workers at most 5 ms at 90 % of every n, and the slowest n at most 3 times the
fastest; with workers at most 5 ms over DataLoader's own start; no sample fetched but those of the first batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from _common import Measured, Record, Summary, heading, installed, interleave, parser, quiet, rounds_of, table
from _datasets import Virtual
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resumable_data import ResumableLoader

BATCH = 64
PLACES = (0, 50, 90)
SIZES = (10**5, 10**6, 10**7, 10**8, 10**9, 10**12)
QUICK_SIZES = (10**4, 10**12)
QUICK_PLACES = (90,)
WORKERS = (0, 2)
SLOW_ROUNDS = 3
#: From here on the peers take seconds: fewer rounds, and at 90 % only.
SLOW = 10**6
#: Largest n of each peer without workers: beyond, it takes tens of seconds and gigabytes, in proportion to n.
LARGEST = {
    "StatefulDataLoader": 10**7,
    "DataLoader, batches thrown away": 10**6,
    "DataLoader, sampler skipped": 10**7,
    "accelerate skip_first_batches": 10**7,
    "Grain": 10**9,
}
#: With workers the peers do the same and start workers as well: once is enough to see it.
LARGEST_WITH_WORKERS = 10**5
START = "DataLoader, start alone"
ORDERS = {"ResumableLoader, shuffled": True, "ResumableLoader, sequential": False}


def first_batch(build: Callable[[], Iterator[Any]], dataset: Virtual) -> dict[str, float]:
    """Milliseconds to the first batch, and how many samples were fetched for nothing in this process."""
    dataset.asked.clear()
    begun = time.perf_counter()
    iterator = build()
    batch = next(iterator)
    seconds = time.perf_counter() - begun
    keys = batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
    return {"ms": seconds * 1e3, "in_vain": float(len(dataset.asked) - len(keys)) if dataset.asked else 0.0}


def our_state(loader: ResumableLoader, batch: int) -> dict[str, Any]:
    """The state of a run that has delivered so many batches of its first epoch."""
    loader.seek(0, batch)
    return {**loader.state_dict(), "skipped": [], "consumed_samples": batch * BATCH}


def ours(dataset: Virtual, shuffle: bool, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Load our state into a new loader."""
    build = partial(ResumableLoader, dataset, BATCH, shuffle=shuffle, num_workers=workers, seed=1)
    state = our_state(build(), dataset.n // BATCH * percent // 100)

    def go() -> Iterator[Any]:
        loader = build()
        loader.load_state_dict(state)
        return iter(loader)

    return go


def stateful(dataset: Virtual, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Load a StatefulDataLoader's state into a new one."""
    build = partial(StatefulDataLoader, dataset, BATCH, shuffle=True, num_workers=workers)
    state = stateful_state(build(), dataset.n // BATCH * percent // 100)

    def go() -> Iterator[Any]:
        loader = build()
        loader.load_state_dict(state)
        return iter(loader)

    return go


def stateful_state(loader: StatefulDataLoader, batch: int) -> dict[str, Any]:
    """The state after so many batches: one of the first batch, its counters set.

    Iterating up to there would take minutes. ``--quick`` compares it with an iterated one.
    """
    iterator = iter(loader)
    next(iterator)
    state: dict[str, Any] = loader.state_dict()
    if not batch:
        return state
    main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    main["_sampler_iter_yielded"] = batch
    main["_sampler_iter_state"]["samples_yielded"] = batch * BATCH
    main["_sampler_iter_state"]["sampler_iter_state"]["yielded"] = batch * BATCH
    if "_snapshot" in state:
        workers = len(state["_snapshot"]["_worker_snapshots"])
        state["_snapshot"]["_snapshot_step"] = batch
        state["_snapshot"]["_last_yielded_worker_id"] = (batch - 1) % workers
    else:
        state["_num_yielded"] = batch
    return state


def thrown_away(dataset: Virtual, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Iterate a DataLoader from the start."""
    batch = dataset.n // BATCH * percent // 100

    def go() -> Iterator[Any]:
        return islice(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers), batch, None)

    return go


class Skipping(BatchSampler):
    """A batch sampler that draws the first batches and drops them."""

    def __init__(self, inner: BatchSampler, skip: int) -> None:
        self.inner, self.skip = inner, skip

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.inner), self.skip, None)

    def __len__(self) -> int:
        return len(self.inner) - self.skip


def sampler_skipped(dataset: Virtual, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Skip in the batch sampler."""
    batch = dataset.n // BATCH * percent // 100

    def go() -> Iterator[Any]:
        inner = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
        return iter(DataLoader(dataset, batch_sampler=Skipping(inner, batch), num_workers=workers))

    return go


def accelerate_skips(dataset: Virtual, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Skip with accelerate's own function."""
    from accelerate import skip_first_batches

    batch = dataset.n // BATCH * percent // 100

    def go() -> Iterator[Any]:
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
        return iter(skip_first_batches(loader, batch))

    return go


def grain(dataset: Virtual, workers: int, percent: int) -> Callable[[], Iterator[Any]]:
    """Grain's DataLoader and its iterator's state."""
    import grain.python as pygrain

    def build() -> Any:
        sampler = pygrain.IndexSampler(
            num_records=dataset.n, shuffle=True, seed=1, num_epochs=1, shard_options=pygrain.NoSharding()
        )
        batching = [pygrain.Batch(BATCH)]
        return iter(
            pygrain.DataLoader(
                data_source=dataset, sampler=sampler, operations=batching, worker_count=workers
            )
        )

    begun = build()
    next(begun)
    state = begun.get_state()
    batch = dataset.n // BATCH * percent // 100
    seen = f'"last_seen_indices": {{"0": {batch * BATCH - 1}'.encode()
    state = state.replace(f'"last_seen_indices": {{"0": {BATCH - 1}'.encode(), seen)

    def go() -> Iterator[Any]:
        iterator = build()
        iterator.set_state(state)
        return iterator

    return go


def peers() -> dict[str, Callable[[Virtual, int, int], Callable[[], Iterator[Any]]]]:
    """Name -> what makes the case; the optional ones where they are installed."""
    made = {
        "StatefulDataLoader": stateful,
        "DataLoader, batches thrown away": thrown_away,
        "DataLoader, sampler skipped": sampler_skipped,
    }
    if installed("accelerate"):
        made["accelerate skip_first_batches"] = accelerate_skips
    if installed("grain"):
        made["Grain"] = grain
    return made


def largest(name: str, workers: int) -> int:
    """The largest n at which a peer is measured."""
    return min(LARGEST[name], LARGEST_WITH_WORKERS) if workers else LARGEST[name]


def cases_of(n: int, workers: int, percent: int, slow: bool) -> dict[str, Callable[[], Mapping[str, float]]]:
    """The cases at one place: those of milliseconds, or the slow ones.

    Each has a dataset of its own: the threads of a peer may go on asking after their turn.
    """
    found: dict[str, Callable[[], Mapping[str, float]]] = {}

    def add(name: str, make: Callable[[Virtual], Callable[[], Iterator[Any]]]) -> None:
        dataset = Virtual(n)
        found[name] = partial(first_batch, make(dataset), dataset)

    if not slow:
        for name, shuffle in ORDERS.items():
            add(name, partial(ours, shuffle=shuffle, workers=workers, percent=percent))
        # DataLoader without shuffling draws no order: what is left is its start
        add(START, lambda dataset: lambda: iter(DataLoader(dataset, BATCH, num_workers=workers)))
    for name, peer in peers().items():
        if (n >= SLOW) is slow and n <= largest(name, workers) and not (slow and percent != 90):
            add(name, lambda dataset, peer=peer: peer(dataset, workers, percent))
    return found


def check_stateful_state() -> None:
    """The state that was made up is the one that iterating gives."""
    made = StatefulDataLoader(Virtual(10_000), BATCH, shuffle=True)
    made.load_state_dict(stateful_state(StatefulDataLoader(Virtual(10_000), BATCH, shuffle=True), 100))
    assert len(list(made)) == 10_000 // BATCH + 1 - 100, (
        "torchdata's state has another layout: see stateful_state"
    )


def measure(record: Record, n: int, workers: int) -> dict[str, Measured]:
    """One n with one number of workers: place -> what was measured there."""
    quick, rounds = record.args.quick, rounds_of(record.args)
    if not workers and not quick:
        rounds *= 3  # of milliseconds each
    kept: dict[str, Measured] = {}
    lines = []
    for percent in QUICK_PLACES if quick else PLACES:
        for slow in (False, True):
            cases = cases_of(n, workers, percent, slow)
            if not cases:
                continue
            measured = interleave(cases, min(rounds, SLOW_ROUNDS) if slow else rounds)
            if not slow:
                kept[str(percent)] = measured
            for name in cases:
                ms, in_vain = measured.of(name, "ms"), measured.of(name, "in_vain")
                vain = in_vain.median if not workers else None  # in workers nobody keeps the log
                record.row(loader=name, n=n, workers=workers, percent=percent, ms=ms, fetched_in_vain=vain)
                lines.append([name, f"{percent} %", ms.text(2), "-" if vain is None else f"{vain:.0f}"])
    print(f"n = {n:.0e}, workers {workers}")
    table(["loader", "at", "ms to the first batch", "fetched in vain"], sorted(lines))
    return kept


def add_bars(record: Record, found: dict[tuple[int, int], dict[str, Measured]]) -> None:
    """The bars over all sizes."""
    for name in ORDERS:
        direct = {n: at["90"].of(name, "ms").median for (n, workers), at in found.items() if not workers}
        for n, ms in direct.items():
            record.at_most(f"{name.split()[-1]}.n{n:.0e}.ms", ms, 5.0)
        record.at_most(f"{name.split()[-1]}.flat", max(direct.values()) / min(direct.values()), 3.0)
        for (n, workers), at in found.items():
            if workers:
                added: Summary = at["90"].added(name, START, "ms")
                record.at_most(f"{name.split()[-1]}.n{n:.0e}.workers{workers}.added_ms", added.median, 5.0)
            else:
                vain = max(max(m.values[name]["in_vain"]) for m in at.values())
                record.at_most(f"{name.split()[-1]}.n{n:.0e}.in_vain", vain, 0.0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    args = parser("seconds from load_state_dict to the first batch").parse_args(argv)
    quiet()
    check_stateful_state()
    record = Record("resume", args)
    heading(record)
    sizes = QUICK_SIZES if args.quick else SIZES
    found = {(n, workers): measure(record, n, workers) for workers in WORKERS for n in sizes}
    for name, workers in product(peers(), WORKERS):
        limit = largest(name, workers)
        if beyond := ", ".join(f"{n:.0e}" for n in sizes if n > limit):
            why = f"its time and memory grow with n; measured up to {limit:.0e}"
            record.skip(f"{name} at n = {beyond}, workers {workers}", why)
    for name, package in (("accelerate skip_first_batches", "accelerate"), ("Grain", "grain")):
        if not installed(package):
            record.skip(name, f"{package} is not installed")
    add_bars(record, found)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
