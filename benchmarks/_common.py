"""What the benchmarks share: interleaved rounds, medians with their spread, bars, the record and the table.

A case is a function without arguments that measures once and gives numbers by name. All cases of a
comparison run once in every round, each round in another order, and are compared round by round, so that a
machine that becomes slower for a while becomes slower for all of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchdata

ROOT = Path(__file__).resolve().parent.parent
#: Rounds of a full run; a case that takes seconds may have fewer, and its row then says so.
ROUNDS = 7
QUICK_ROUNDS = 2

Case = Callable[[], Mapping[str, float]]


# -- the command line -------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="toy size, seconds; its figures mean nothing")
    made.add_argument("--json", type=Path, metavar="PATH", help="write the record here")
    made.add_argument("--check", action="store_true", help="exit 1 unless every bar holds")
    made.add_argument(
        "--bar",
        action="append",
        default=[],
        metavar="NAME=LIMIT",
        help="another limit for one bar, for machines on which the usual one says nothing; may be repeated",
    )
    made.add_argument(
        "--rounds", type=int, help=f"rounds of each case; {ROUNDS}, with --quick {QUICK_ROUNDS}"
    )
    return made


def rounds_of(args: argparse.Namespace) -> int:
    """How many rounds were asked for."""
    return args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)


def installed(*names: str) -> bool:
    """Whether an optional peer is there."""
    return all(importlib.util.find_spec(name) is not None for name in names)


def quiet() -> None:
    """Leave out the warnings of peers that say nothing about the measurement."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", ".*set_vital.*")
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*")


# -- measuring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The median of what was measured, its quartiles, and the least, which other load cannot lower."""

    median: float
    low: float
    high: float
    least: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of one value per round."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, min(values), len(values))

    def text(self, digits: int = 1) -> str:
        """Median and quartiles, for a table."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


class Measured:
    """Case -> number -> one value per round, round by round in step."""

    def __init__(self, cases: Iterable[str]) -> None:
        self.values: dict[str, dict[str, list[float]]] = {name: {} for name in cases}

    def note(self, case: str, numbers: Mapping[str, float]) -> None:
        """Append what one round measured."""
        for name, value in numbers.items():
            self.values[case].setdefault(name, []).append(value)

    def of(self, case: str, number: str) -> Summary:
        """The summary of one number of one case."""
        return Summary.of(self.values[case][number])

    def added(self, case: str, base: str, number: str) -> Summary:
        """By how much a number is above that of the base, in the same rounds."""
        return self._paired(case, base, number, lambda ours, theirs: ours - theirs)

    def ratio(self, case: str, base: str, number: str) -> Summary:
        """The base's number over this case's: above 1 where this case is the cheaper one."""
        return self._paired(case, base, number, lambda ours, theirs: theirs / ours)

    def _paired(self, case: str, base: str, number: str, how: Callable[[float, float], float]) -> Summary:
        pairs = zip(self.values[case][number], self.values[base][number], strict=True)
        return Summary.of([how(ours, theirs) for ours, theirs in pairs])


def interleave(cases: Mapping[str, Case], rounds: int) -> Measured:
    """Measure all cases, once in each round; each round begins with another case."""
    names = list(cases)
    measured = Measured(names)
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            gc.collect()
            measured.note(name, cases[name]())
    return measured


def tells_apart(control: Summary) -> float:
    """What this machine can tell apart in ratios: how far a thing is from itself, median and quartiles."""
    return max(abs(control.median - 1.0), abs(control.low - 1.0), abs(control.high - 1.0))


def worker_pids() -> list[int]:
    """The worker processes that live now."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def cpu_seconds(pids: Iterable[int]) -> float | None:
    """CPU seconds that these processes have used, all their threads; None where the system does not say."""
    total = 0
    try:
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return total / 1e9


def available_bytes() -> int:
    """Memory that can be had without swapping; all that is installed where the system does not say more."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: see the next line
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- the record -------------------------------------------------------------------------------------


@dataclass
class Bar:
    """One thing that must hold.

    ``allowance`` is what the control says the machine cannot tell apart; it is recorded beside the limit.
    """

    name: str
    found: float
    limit: float
    at_most: bool
    allowance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether it holds; NaN never does."""
        if self.at_most:
            return self.found <= self.limit + self.allowance
        return self.found >= self.limit - self.allowance

    def text(self) -> str:
        """One line."""
        sign = "<=" if self.at_most else ">="
        spare = f" (control: {self.allowance:.3g})" if self.allowance else ""
        verdict = "holds" if self.holds else "MISSED"
        return f"{verdict:6}  {self.name}: {self.found:.4g} {sign} {self.limit:.4g}{spare}"


@dataclass
class Record:
    """What one run of one benchmark found."""

    benchmark: str
    args: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    environment: dict[str, Any] = field(default_factory=lambda: environment())

    def row(self, **values: Any) -> None:
        """Add a row; a Summary becomes its five numbers."""
        self.rows.append({k: vars(v) if isinstance(v, Summary) else v for k, v in values.items()})

    def at_most(self, name: str, found: float, limit: float, allowance: float = 0.0) -> None:
        """A bar from above."""
        self.bars.append(Bar(name, float(found), limit, True, allowance))

    def at_least(self, name: str, found: float, limit: float, allowance: float = 0.0) -> None:
        """A bar from below."""
        self.bars.append(Bar(name, float(found), limit, False, allowance))

    def skip(self, what: str, why: str) -> None:
        """Say what was not measured, and why."""
        self.skipped.append({"what": what, "why": why})

    def finish(self) -> int:
        """Print bars and what was skipped, write the JSON; the exit status."""
        _other_limits(self.bars, self.args.bar)
        for entry in self.skipped:
            print(f"not measured: {entry['what']}: {entry['why']}")
        for bar in self.bars:
            print(bar.text())
        missed = [bar.name for bar in self.bars if not bar.holds]
        seconds = time.perf_counter() - self.begun
        print(
            f"{self.benchmark}: {len(self.bars) - len(missed)} of {len(self.bars)} bars hold, {seconds:.0f} s"
        )
        if self.args.json:
            self.args.json.write_text(json.dumps(self._as_json(seconds), indent=1) + "\n")
        return int(bool(self.args.check and missed))

    def _as_json(self, seconds: float) -> dict[str, Any]:
        script = Path(sys.argv[0]).name if sys.argv[0] else self.benchmark
        return {
            "benchmark": self.benchmark,
            "command": " ".join(["python", f"benchmarks/{script}", *_arguments(sys.argv[1:])]),
            "quick": self.args.quick,
            "rounds": rounds_of(self.args),
            "seconds": round(seconds, 1),
            "environment": self.environment,
            "rows": self.rows,
            "skipped": self.skipped,
            "bars": [{**vars(bar), "holds": bar.holds} for bar in self.bars],
        }


def _arguments(given: Sequence[str]) -> list[str]:
    """The command line without the place the record was written to."""
    kept, hide = [], False
    for text in given:
        kept.append(Path(text).name if hide else text)
        hide = text == "--json"
    return kept


def _other_limits(bars: list[Bar], changes: Sequence[str]) -> None:
    known = {bar.name: bar for bar in bars}
    for change in changes:
        name, _, limit = change.partition("=")
        if name not in known:
            sys.exit(f"--bar {change}: there is no bar {name!r} in this run; there are {sorted(known)}")
        known[name].limit = float(limit)


def environment() -> dict[str, Any]:
    """The machine and the versions the numbers were measured on."""
    import resumable_data

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {_cpu_model()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchdata": torchdata.__version__,
        "numpy": np.__version__,
        "resumable_data": f"{getattr(resumable_data, '__version__', '')} {_commit()}".strip(),
        "torch_threads": torch.get_num_threads(),
        "start_method": multiprocessing.get_start_method(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: platform knows something too
    return platform.processor() or "unknown"


def _commit() -> str:
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""  # not a checkout
    return done.stdout.strip()


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print aligned columns: the first left, the others right."""
    rows = [list(heads), *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    print()


def heading(record: Record) -> None:
    """Print what the numbers below were measured on."""
    print(", ".join(f"{key} {value}" for key, value in record.environment.items()))
    print(
        "medians of the rounds, quartiles in brackets" + ("; QUICK: no figures" if record.args.quick else "")
    )
    print()
