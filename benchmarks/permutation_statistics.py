"""Is ``shuffled.v1`` a shuffle? Its orders against Fisher-Yates (``numpy.random.Generator.permutation``).

Run it alone: ``python benchmarks/permutation_statistics.py [--quick] [--json PATH] [--check]``. Needs scipy.

For each n the orders of many neighbouring keys (seeds 0, 1, 2, ... and epochs 0, 1, 2, 3) are measured:

* tables, compared with their exact expectation: position against index, index against the index a lag
  later (lags 1, 2, 3, 7 and the network's own side), index in one epoch against index in the next, and
  batch against class for data sorted by class;
* numbers per order, compared with a Fisher-Yates sample of the same size: the chi-square of each of those
  tables, fixed points, cycles, longest cycle, descents, rank correlation with the position, the largest
  share of one class in any batch; and with their exact means where these are known;
* parity, and for n = 4, 5, 6 how often each of the n! orders occurs.

A source fails when its smallest p-value is below 0.001 / (number of tests): by chance alone that happens
once in a thousand runs, however many tests there are. Two controls run with it: a second Fisher-Yates
sample, which must pass, and the same network with 4 rounds, which must fail. The keys are fixed, so
that the outcome on one version of numpy is always the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import scipy
from scipy import stats

from resumable_data.permutation import Permutation, _sides

FAMILY_ALPHA = 1e-3
EPOCHS = 4
CLASSES = 10
BATCH = 64
SIZES = {16: 2000, 64: 2000, 256: 2000, 400: 2000, 1000: 1200, 4095: 600, 4096: 600, 16384: 300, 65536: 160}
QUICK_SIZES = {16: 240, 400: 160, 5000: 80}
SMALL = {4: 40, 5: 40, 6: 20}  # n -> expected occurrences of each of the n! orders
QUICK_SMALL = {4: 20}

Order = Callable[[int, int, int], np.ndarray]


class FourRounds(Permutation):
    """The negative control: the same network, too short."""

    __slots__ = ()

    def _rounds(self) -> int:
        return 4


def feistel(kind: type[Permutation]) -> Order:
    """The whole order of a network as a function of (n, seed, epoch)."""
    return lambda n, seed, epoch: kind(n, seed, epoch).take(np.arange(n, dtype=np.int64))


def fisher_yates(stream: int) -> Order:
    """The shuffle of numpy, one generator per (stream, n, seed, epoch)."""
    return lambda n, seed, epoch: np.random.default_rng([stream, n, seed, epoch]).permutation(n)


@dataclass
class Table:
    """Counts of pairs (u, v) summed over orders, and their exact expectation for one order."""

    expected: np.ndarray
    orders: int = 0
    counts: np.ndarray = field(init=False)

    def __post_init__(self):
        self.counts = np.zeros_like(self.expected)

    def add(self, u: np.ndarray, v: np.ndarray) -> float:
        """Count one order; gives its own chi-square."""
        shape = self.expected.shape
        seen = np.bincount(u * shape[1] + v, minlength=self.expected.size).reshape(shape)
        self.counts += seen
        self.orders += 1
        return float(((seen - self.expected) ** 2 / self.expected).sum())

    @property
    def freedom(self) -> int:
        """Degrees of freedom: both margins of every order are fixed."""
        rows, columns = self.expected.shape
        return (rows - 1) * (columns - 1)

    def pooled(self) -> float:
        """The chi-square of the sum over orders."""
        expected = self.orders * self.expected
        return float(((self.counts - expected) ** 2 / expected).sum())


@dataclass
class Sample:
    """What was measured over all keys: tables, and one number per order and statistic."""

    tables: dict[str, Table]
    numbers: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        """Append one order's value of a statistic."""
        self.numbers.setdefault(name, []).append(value)


def bins_of(n: int, count: int) -> np.ndarray:
    """The bin of each of range(n): ``count`` contiguous bins of nearly equal size."""
    return np.arange(n, dtype=np.int64) * count // n


def lags_of(n: int) -> list[int]:
    """Lags to look at; the last is the network's right side, at which only the left half differs."""
    return sorted({1, 2, 3, 7, _sides(n)[1]})


def tables_of(n: int, bins: np.ndarray, classes: np.ndarray, batches: np.ndarray) -> dict[str, Table]:
    """Empty tables with exact expectations under a uniformly random order."""
    m, c, b = (np.bincount(x).astype(float) for x in (bins, classes, batches))
    independent = np.outer(m, m) / n
    # Two different positions never hold the same index.
    lagged = (np.outer(m, m) - np.diag(m)) / (n - 1)
    tables = {"position-index": Table(independent), "epoch-epoch": Table(independent)}
    tables |= {f"lag {lag}": Table(lagged) for lag in lags_of(n)}
    tables["batch-class"] = Table(np.outer(b, c) / n)
    return tables


def cycles_of(order: np.ndarray) -> np.ndarray:
    """The lengths of the cycles, by pointer doubling: every element learns the least of its cycle."""
    least, jump = np.arange(order.size), order
    for _ in range(max(1, order.size.bit_length())):
        least = np.minimum(least, least[jump])
        jump = jump[jump]
    lengths = np.bincount(least)
    return lengths[lengths > 0]


def measure(order_of: Order, n: int, orders: int) -> Sample:
    """Every statistic of ``orders`` orders of one source."""
    bins = bins_of(n, 8 if n >= 256 else 4)
    classes = bins_of(n, min(CLASSES, n // 4))
    size = min(BATCH, n // 4)
    batches = np.arange(n, dtype=np.int64) // size
    sample = Sample(tables_of(n, bins, classes, batches))
    tables, positions = sample.tables, np.arange(n)
    for seed in range(orders // EPOCHS):
        before = None
        for epoch in range(EPOCHS):
            order = order_of(n, seed, epoch)
            at = bins[order]
            pairs = {"position-index": (bins, at), "batch-class": (batches, classes[order])}
            pairs |= {f"lag {lag}": (at, np.roll(at, -lag)) for lag in lags_of(n)}
            if before is not None:
                pairs["epoch-epoch"] = (before, at)
            for name, (u, v) in pairs.items():
                sample.note(f"chi-square {name}", tables[name].add(u, v))
            before = at
            cycles = cycles_of(order)
            share = np.bincount(batches * CLASSES + classes[order]).max()
            sample.note("fixed points", int((order == positions).sum()))
            sample.note("cycles", cycles.size)
            sample.note("longest cycle", int(cycles.max()))
            sample.note("odd", (n - cycles.size) % 2)
            sample.note("descents", int((order[1:] < order[:-1]).sum()))
            sample.note("rank correlation", float(np.corrcoef(positions, order)[0, 1]))
            sample.note("largest class share", int(share))
    return sample


def exact_moments(n: int) -> dict[str, tuple[float, float]]:
    """Mean and variance under a uniformly random order, where they are known in closed form."""
    inverse = 1.0 / np.arange(1, n + 1)
    return {
        "fixed points": (1.0, 1.0),
        "cycles": (inverse.sum(), (inverse - inverse**2).sum()),
        "descents": ((n - 1) / 2, (n + 1) / 12),
        "rank correlation": (0.0, 1 / (n - 1)),
        "odd": (0.5, 0.25),
    }


def two_sided(low: float, high: float) -> float:
    """One p-value of the two tails."""
    return min(1.0, 2 * min(low, high))


def compare(n: int, sample: Sample, reference: Sample) -> dict[str, float]:
    """The p-value of every test of one n."""
    found = {}
    for name, table in sample.tables.items():
        # The chi-square of one order and of a sum of orders have the same mean, a little off the degrees of
        # freedom since positions are drawn without replacement: n / (n - 1) exactly, but for lags measured.
        own = np.mean(reference.numbers[f"chi-square {name}"])
        scale = own / table.freedom if name.startswith("lag") else n / (n - 1)
        x = table.pooled() / scale
        tails = stats.chi2.cdf(x, table.freedom), stats.chi2.sf(x, table.freedom)
        found[f"{name}, pooled"] = two_sided(*map(float, tails))
    for name, (mean, variance) in exact_moments(n).items():
        values = np.array(sample.numbers[name], float)
        z = (values.mean() - mean) / math.sqrt(variance / values.size)
        found[f"{name}, mean"] = float(2 * stats.norm.sf(abs(z)))
    for name, values in sample.numbers.items():
        if name != "odd":  # two values: its mean says all
            found[f"{name}, distribution"] = float(stats.ks_2samp(values, reference.numbers[name]).pvalue)
        if name.startswith("chi-square"):
            found[f"{name}, mean"] = float(
                stats.ttest_ind(values, reference.numbers[name], equal_var=False).pvalue
            )
    points = np.minimum(np.array(sample.numbers["fixed points"], np.int64), 4)
    poisson = stats.poisson.pmf(np.arange(4), 1.0)  # within 1/n! of the truth
    expected = points.size * np.append(poisson, 1 - poisson.sum())
    found["fixed points, histogram"] = float(
        stats.chisquare(np.bincount(points, minlength=5), expected).pvalue
    )
    return found


def all_orders(order_of: Order, n: int, each: int) -> float:
    """The p-value of the counts of all n! orders."""
    weights = n ** np.arange(n)
    kinds = math.factorial(n)
    seen: dict[int, int] = {}
    for key in range(each * kinds):
        code = int(order_of(n, key // EPOCHS, key % EPOCHS) @ weights)
        seen[code] = seen.get(code, 0) + 1
    counts = np.array([*seen.values(), *[0] * (kinds - len(seen))])
    x = float(((counts - each) ** 2).sum() / each)
    return two_sided(float(stats.chi2.cdf(x, kinds - 1)), float(stats.chi2.sf(x, kinds - 1)))


SOURCES: dict[str, Order] = {
    "shuffled.v1": feistel(Permutation),
    "Fisher-Yates": fisher_yates(1),
    "4 rounds": feistel(FourRounds),
}
SHOULD_PASS = {"shuffled.v1": True, "Fisher-Yates": True, "4 rounds": False}


def run(sizes: dict[int, int], small: dict[int, int]) -> dict[str, dict[int, dict[str, float]]]:
    """Source -> n -> test -> p-value."""
    results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in SOURCES}
    for n, each in small.items():
        for name, order_of in SOURCES.items():
            results[name][n] = {f"all {n}! orders": all_orders(order_of, n, each)}
    for n, orders in sizes.items():
        reference = measure(fisher_yates(0), n, orders)
        for name, order_of in SOURCES.items():
            results[name][n] = compare(n, measure(order_of, n, orders), reference)
    return results


def verdict(per_n: dict[int, dict[str, float]]) -> tuple[bool, int, int, float, str]:
    """(passed, tests, tests below the threshold, smallest p, where) of one source."""
    flat = {f"n={n} {test}": p for n, tests in per_n.items() for test, p in tests.items()}
    threshold = FAMILY_ALPHA / len(flat)
    worst = min(flat, key=lambda name: flat[name])
    failed = sum(p < threshold for p in flat.values())
    return failed == 0, len(flat), failed, flat[worst], worst


def environment() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def show(results: dict[str, dict[int, dict[str, float]]]) -> None:
    """Print smallest p (and how many below 0.01) by n and source."""
    print(f"{'n':>6} {'tests':>5}  " + "  ".join(f"{name:>20}" for name in results))
    for n in next(iter(results.values())):
        cells = []
        for per_n in results.values():
            ps = list(per_n[n].values())
            cells.append(f"{min(ps):.1e} ({sum(p < 0.01 for p in ps)} < .01)")
        count = len(next(iter(results.values()))[n])
        print(f"{n:>6} {count:>5}  " + "  ".join(f"{cell:>20}" for cell in cells))


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; the exit status is 1 where ``--check`` finds an unexpected verdict."""
    parser = argparse.ArgumentParser(description="shuffled.v1 against Fisher-Yates")
    parser.add_argument("--quick", action="store_true", help="toy size, seconds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every p-value here")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 unless all three verdicts are as they should"
    )
    args = parser.parse_args(argv)
    sizes, small = (QUICK_SIZES, QUICK_SMALL) if args.quick else (SIZES, SMALL)
    begun = time.perf_counter()
    results = run(sizes, small)
    seconds = time.perf_counter() - begun
    env = environment()
    print(", ".join(f"{key} {value}" for key, value in env.items()))
    show(results)
    verdicts = {name: verdict(per_n) for name, per_n in results.items()}
    for name, (passed, tests, failed, p, where) in verdicts.items():
        print(
            f"{name}: {'passes' if passed else 'FAILS'} ({failed} of {tests} tests below "
            f"{FAMILY_ALPHA / tests:.1e}; smallest p {p:.1e}, {where})"
        )
    as_expected = all(verdicts[name][0] is wanted for name, wanted in SHOULD_PASS.items())
    print(f"{seconds:.0f} s; verdicts {'as they should be' if as_expected else 'NOT AS THEY SHOULD BE'}")
    if args.json:
        record = {"environment": env, "quick": args.quick, "seconds": seconds, "orders": sizes}
        record |= {"as_expected": as_expected, "p": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(args.check and not as_expected)


if __name__ == "__main__":
    sys.exit(main())
