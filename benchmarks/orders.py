"""What does each order cost: to resume deep in an epoch, and, where batches are of similar length, to run?

Run it alone: ``python benchmarks/orders.py [--quick] [--json PATH] [--check]``. Several minutes of CPU and
more than 1 GB of memory. Figures are medians of interleaved rounds in this process (five, or three where one takes
more than a second), CPU seconds with the smallest and the largest beside them.

Resume: n samples, batches of 64, ``num_workers=0``, a state taken at 90 % of epoch 0. ``build`` is the
constructor of sampler and loader; ``load`` is ``load_state_dict``; ``first`` is ``iter()`` and the first
batch. Every repetition begins with new objects. The first batch is compared with the one that the loader
which gave the state went on with, and samples read from the dataset are counted: 64, none for what was
skipped. "private streams" and "with state_dict" are samplers as users write them, in plain Python.

Throughput: sequences with log-normal lengths, padded in ``collate_fn``. ``DataLoader`` and
``ResumableLoader``, each with shuffled batches of a fixed size and with ``BucketBatchSampler`` under the
budget of padded tokens that gives batches of that many samples on average, in short runs of so many batches
that take turns. ``useful`` are tokens of the data, without padding. Ratios are medians of the ratios turn by
turn, since a machine that slows down slows down for all.

``--check`` exits with 1 unless the resume of each order that is a function of the position (shuffled,
sequential, mixture) takes at most 5 ms of CPU, and ``ResumableLoader`` delivers at least 0.93 of the useful
tokens a CPU second that ``DataLoader`` does with the same ``BucketBatchSampler``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from resumable_data import ResumableLoader
from resumable_data.bucketing import BucketBatchSampler
from resumable_data.mixture import Mixture

BATCH = 64
FULL = {"n": 10_000_000, "rounds": 5, "sequences": 100_000, "batches": 25, "turns": 60}
QUICK = {"n": 20_000, "rounds": 2, "sequences": 2_000, "batches": 10, "turns": 4}
BAR_SECONDS = 5e-3
BAR_RATIO = 0.93
BY_POSITION = ("shuffled", "sequential", "mixture")
#: Repetitions in each round of what takes milliseconds, so that a median means something on a shared machine.
SHORT_ROUNDS = 4
#: Rounds of what takes seconds.
LONG_ROUNDS = 3
BARRED = "ResumableLoader over DataLoader, both bucketing"
RATIOS = (
    (BARRED, "ResumableLoader, bucketing", "DataLoader, bucketing"),
    ("ResumableLoader over DataLoader, both shuffled", "ResumableLoader, shuffled", "DataLoader, shuffled"),
    (
        "bucketing over shuffled, both ResumableLoader",
        "ResumableLoader, bucketing",
        "ResumableLoader, shuffled",
    ),
)


class Numbers:
    """``n`` samples that cost nothing, and a count of those that were read."""

    def __init__(self, n):
        self.n = n
        self.read = 0

    def __len__(self):
        return self.n

    def __getitem__(self, key):
        self.read += 1
        return key


class Drawing:
    """A sampler of a user's that draws from a global stream as it goes."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return (random.randrange(self.n) for _ in range(self.n))


class Stateful(Drawing):
    """A sampler of a user's whose state is carried."""

    def __init__(self, n):
        super().__init__(n)
        self.at = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield (self.at * 7919) % self.n
        self.at = 0

    def state_dict(self):
        """Where it stands."""
        return {"at": self.at}

    def load_state_dict(self, state):
        """Stand there."""
        self.at = state["at"]


def lengths_of(n: int) -> np.ndarray:
    """Log-normal lengths, 8 to 512, median about 90."""
    drawn = np.random.default_rng(0).lognormal(4.5, 0.6, n)
    return np.clip(drawn, 8, 512).astype(np.int64)


def orders(n: int) -> dict[str, Callable[[], ResumableLoader]]:
    """Name -> how its loader is built from nothing; what is the user's data is made once, here."""
    lengths, weights = lengths_of(n), torch.ones(n, dtype=torch.float64)
    web, books = Numbers(n * 6 // 10), Numbers(n - n * 6 // 10)

    def build(**order):
        return ResumableLoader(Numbers(n), order.pop("batch_size", BATCH), seed=7, **order)

    def generator():
        return torch.Generator().manual_seed(7)

    def distributed():
        return DistributedSampler(range(n), num_replicas=1, rank=0, seed=7)

    def weighted(**options):
        return WeightedRandomSampler(weights, n, **options)

    def mixture():
        return ResumableLoader(Mixture([web, books], [0.7, 0.3], length=n), BATCH, seed=7)

    def buckets():
        return BucketBatchSampler(lengths, max_tokens=BATCH * 128)

    return {
        "shuffled": lambda: build(shuffle=True),
        "sequential": lambda: build(shuffle=False),
        "mixture": mixture,
        "bucketing": lambda: build(batch_size=1, batch_sampler=buckets()),
        "DistributedSampler": lambda: build(sampler=distributed()),
        "generator=": lambda: build(shuffle=True, generator=generator()),
        "WeightedRandomSampler, generator=": lambda: build(sampler=weighted(generator=generator())),
        "WeightedRandomSampler": lambda: build(sampler=weighted()),
        "RandomSampler": lambda: build(sampler=RandomSampler(range(n))),
        "custom, global streams": lambda: build(sampler=Drawing(n)),
        "custom, with state_dict": lambda: build(sampler=Stateful(n)),
    }


def keys_of(batch) -> list[int]:
    """The keys a batch holds, whatever collated them."""
    return torch.as_tensor(batch).tolist()


def deep_state(build: Callable[[], ResumableLoader]) -> tuple[str, list[int]]:
    """A state at 90 % of epoch 0, as JSON text, and the keys of the batch that comes next."""
    loader = build()
    batches = iter(loader)
    next(batches)
    stop = len(loader) * 9 // 10
    if hasattr(loader.sampler, "load_state_dict"):
        # it cannot be sought in, and its state costs the same wherever it stands: it is begun there
        loader = build()
        loader.sampler.load_state_dict({"at": stop * BATCH})
    else:
        loader.seek(0, stop - 1)
    batches = iter(loader)
    next(batches)
    text = json.dumps(loader.state_dict())
    return text, keys_of(next(batches))


def resume_once(build, text: str, expected: list[int]) -> dict[str, float]:
    """CPU seconds of each part of one resume by new objects, and the wall seconds of load and first batch."""
    gc.collect()
    state = json.loads(text)
    marks = [time.process_time()]
    loader = build()
    marks.append(time.process_time())
    wall = time.perf_counter()
    loader.load_state_dict(state)
    marks.append(time.process_time())
    first = next(iter(loader))
    marks.append(time.process_time())
    wall = time.perf_counter() - wall
    assert keys_of(first) == expected, "the resumed run is another run"
    read = getattr(loader.dataset, "read", None)  # a mixture reads through its sources
    assert read is None or read == len(expected), f"{read} samples read for a batch of {len(expected)}"
    build_s, load_s, first_s = (after - before for before, after in itertools.pairwise(marks))
    return {"build": build_s, "load": load_s, "first": first_s, "resume": load_s + first_s, "wall": wall}


def measure_resume(n: int, rounds: int) -> dict[str, dict]:
    """For each order: medians and ranges in CPU seconds, and the size of the state."""
    made = orders(n)
    states = {name: deep_state(build) for name, build in made.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for number in range(rounds):
        for name, build in made.items():
            if number >= LONG_ROUNDS and taken[name][0]["build"] + taken[name][0]["resume"] > 1:
                continue
            for _ in range(SHORT_ROUNDS if name in BY_POSITION else 1):
                taken[name].append(resume_once(build, *states[name]))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        name: {
            **{part: spread([one[part] for one in times]) for part in times[0]},
            "rounds": len(times),
            "state_bytes": len(states[name][0]),
        }
        for name, times in taken.items()
    }


class Sequences:
    """Token sequences: views of one buffer."""

    def __init__(self, lengths):
        self.lengths = lengths.tolist()
        self.buffer = torch.ones(int(max(lengths)), dtype=torch.int64)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, key):
        return self.buffer[: self.lengths[key]]


def pad(batch):
    """(useful tokens, padded batch)."""
    return sum(map(len, batch)), pad_sequence(batch, batch_first=True)


class Runner:
    """Batches of one loader, in turns of so many, epoch after epoch."""

    def __init__(self, loader, sampler=None):
        self.loader, self.sampler = loader, sampler
        self.epoch = 0
        self.batches = iter(loader)

    def turn(self, count: int) -> dict[str, float]:
        """Run so many batches: rates in each CPU second, and the share of padding."""
        useful = padded = samples = 0
        began, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            try:
                tokens, batch = next(self.batches)
            except StopIteration:
                self.epoch += 1
                if self.sampler is not None:
                    self.sampler.set_epoch(self.epoch)
                self.batches = iter(self.loader)
                tokens, batch = next(self.batches)
            useful += tokens
            padded += batch.numel()
            samples += len(batch)
        cpu, wall = time.process_time() - began, time.perf_counter() - wall
        return {
            "batches_per_cpu_s": count / cpu,
            "samples_per_cpu_s": samples / cpu,
            "useful_per_cpu_s": useful / cpu,
            "padded_per_cpu_s": padded / cpu,
            "batches_per_wall_s": count / wall,
            "padding": 1 - useful / padded,
            "samples_per_batch": samples / count,
        }


def budget_for(lengths: np.ndarray, samples: int) -> int:
    """The budget of padded tokens under which batches hold about so many samples on average."""
    low, high = int(lengths.max()), int(lengths.max()) * samples
    while high - low > 64:
        middle = (low + high) // 2
        mean = len(lengths) / len(BucketBatchSampler(lengths, max_tokens=middle))
        low, high = (middle, high) if mean < samples else (low, middle)
    return high


def measure_throughput(sequences: int, batches: int, turns: int) -> tuple[dict[str, dict], dict[str, dict]]:
    """For each of four loaders: rates in each CPU second over the turns. For pairs of them: useful tokens, ratios."""
    lengths = lengths_of(sequences)
    data = Sequences(lengths)
    budget = budget_for(lengths, BATCH)
    theirs = BucketBatchSampler(lengths, max_tokens=budget, seed=7)
    ours = BucketBatchSampler(lengths, max_tokens=budget)
    runners = {
        "DataLoader, shuffled": Runner(DataLoader(data, BATCH, shuffle=True, collate_fn=pad)),
        "ResumableLoader, shuffled": Runner(ResumableLoader(data, BATCH, True, collate_fn=pad, seed=7)),
        "DataLoader, bucketing": Runner(DataLoader(data, batch_sampler=theirs, collate_fn=pad), theirs),
        "ResumableLoader, bucketing": Runner(
            ResumableLoader(data, batch_sampler=ours, collate_fn=pad, seed=7)
        ),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(turns + 1):
        for name in names if turn % 2 else reversed(names):
            rates = runners[name].turn(batches)
            if turn:  # the first one makes permutations and plans and warms up
                taken[name].append(rates)
    rates_of = {
        name: {what: spread([one[what] for one in rates]) for what in rates[0]}
        for name, rates in taken.items()
    }
    return rates_of, {label: useful_ratio(taken[ours], taken[theirs]) for label, ours, theirs in RATIOS}


def useful_ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Useful tokens a CPU second, turn by turn: median, quartiles."""
    ratios = [a["useful_per_cpu_s"] / b["useful_per_cpu_s"] for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"median": statistics.median(ratios), "min": low, "max": high}


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def missed(resume: dict[str, dict], ratios: dict[str, dict]) -> list[str]:
    """The bars that were not met."""
    found = [
        f"{name}: {resume[name]['resume']['median'] * 1e3:.1f} ms to resume, at most {BAR_SECONDS * 1e3:.0f} wanted"
        for name in BY_POSITION
        if resume[name]["resume"]["median"] > BAR_SECONDS
    ]
    ratio = ratios[BARRED]["median"]
    if ratio < BAR_RATIO:
        found.append(f"{BARRED}: {ratio:.3f}, at least {BAR_RATIO} wanted")
    return found


def environment() -> dict[str, str]:
    """The machine and the versions."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}, load {load}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def cell(part: dict[str, float], scale: float = 1.0) -> str:
    """``median [min, max]``."""
    median, low, high = (f"{part[key] * scale:.4g}" for key in ("median", "min", "max"))
    return f"{median} [{low}, {high}]"


def show(resume: dict[str, dict], throughput: dict[str, dict], ratios: dict[str, dict]) -> None:
    """Print the tables."""
    print(
        f"\n{'to resume, CPU ms':<34} {'build':>26} {'load':>26} {'first batch':>26} {'load + first':>26}  state"
    )
    for name, row in resume.items():
        parts = "".join(f" {cell(row[part], 1e3):>26}" for part in ("build", "load", "first", "resume"))
        print(f"{name:<34}{parts}  {row['state_bytes']} B")
    print(f"\n{'in a CPU second':<28} {'batches':>24} {'1000 samples':>24} {'M useful tokens':>24}  padding")
    for name, row in throughput.items():
        parts = (
            f" {cell(row['batches_per_cpu_s']):>24} {cell(row['samples_per_cpu_s'], 1e-3):>24}"
            f" {cell(row['useful_per_cpu_s'], 1e-6):>24}"
        )
        print(f"{name:<28}{parts}  {row['padding']['median']:.1%}")
    for label, row in ratios.items():
        print(f"useful tokens, {label}: {cell(row)} (quartiles)")


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; the exit status is 1 where ``--check`` finds a bar that was not met."""
    parser = argparse.ArgumentParser(description="the cost of each order")
    parser.add_argument("--quick", action="store_true", help="toy size, seconds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the bars are met")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    env = environment()
    print(", ".join(f"{key} {value}" for key, value in env.items()))
    print(f"n = {size['n']:,}, batches of {BATCH}, 90 % of an epoch; {size['sequences']:,} sequences")
    resume = measure_resume(size["n"], size["rounds"])
    throughput, ratios = measure_throughput(size["sequences"], size["batches"], size["turns"])
    show(resume, throughput, ratios)
    wanting = missed(resume, ratios)
    print("; ".join(wanting) or "every bar is met")
    if args.json:
        record = {"environment": env, "quick": args.quick, **size, "resume": resume}
        record |= {"throughput": throughput, "ratios": ratios, "missed": wanting}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(args.check and bool(wanting))


if __name__ == "__main__":
    sys.exit(main())
