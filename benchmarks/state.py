"""What do ``state_dict()`` and ``load_state_dict()`` cost, and what do workers send for the state's sake?

Run it alone: ``python benchmarks/state.py [--quick] [--json PATH] [--check]``.

CPU microseconds of one call in the middle of an epoch, and bytes of the state, as JSON where it is JSON and as
``torch.save`` writes it, which is what a checkpoint holds. Then the bytes a worker process writes and reads for a
batch of 64, as Linux counts them (``/proc/PID/io``): samples travel in shared memory, so what is counted are the
messages: the batch's description and whatever else the loader has its workers send.

Bars: ``state_dict()`` at most 20 us and 1 KB as JSON; a worker writes at most 32 bytes a batch more than under
DataLoader.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Case, Record, heading, interleave, parser, quiet, rounds_of, table, worker_pids
from _datasets import Rows
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from resumable_data import ResumableLoader

BATCH = 64
BASE, MINE = "DataLoader", "ResumableLoader"
KINDS: dict[str, Callable[..., Any]] = {
    BASE: DataLoader,
    "StatefulDataLoader": StatefulDataLoader,
    "StatefulDataLoader, snapshot every 100": partial(StatefulDataLoader, snapshot_every_n_steps=100),
    MINE: partial(ResumableLoader, seed=1),
}


class Calls:
    """Microseconds of ``state_dict`` and ``load_state_dict`` of one loader in the middle of an epoch."""

    def __init__(self, make: Callable[..., Any], dataset: Rows, workers: int, calls: int) -> None:
        self._loader = make(dataset, BATCH, shuffle=True, num_workers=workers)
        self._iterator = iter(self._loader)
        for _ in range(10):
            next(self._iterator)
        self._other = make(dataset, BATCH, shuffle=True, num_workers=workers)
        self.state = self._loader.state_dict()
        self._calls = calls

    def __call__(self) -> dict[str, float]:
        """One round."""
        return {
            "state_us": self._each(self._loader.state_dict),
            "load_us": self._each(partial(self._other.load_state_dict, self.state)),
        }

    def _each(self, call: Callable[[], Any]) -> float:
        begun = time.process_time()
        for _ in range(self._calls):
            call()
        return (time.process_time() - begun) / self._calls * 1e6


def json_bytes(state: Any) -> int | None:
    """Bytes of the state as compact JSON, None where it holds what JSON cannot."""
    try:
        return len(json.dumps(state, separators=(",", ":")).encode())
    except TypeError:
        return None


def saved_bytes(state: Any) -> int:
    """Bytes of the state as a file of ``torch.save``."""
    held = io.BytesIO()
    torch.save(state, held)
    return held.tell()


def traffic(make: Callable[..., Any], dataset: Rows, batches: int) -> dict[str, float]:
    """Bytes that a worker writes and reads for a batch; nothing where the system does not count them."""
    loader = make(dataset, BATCH, shuffle=True, num_workers=2)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    # both times when all that was asked for is done, so that as many batches lie between as were taken
    time.sleep(0.2)
    before = counted(worker_pids())
    for _ in range(batches):
        next(iterator)
    time.sleep(0.2)
    after = counted(worker_pids())
    if before is None or after is None:
        return {}
    return {name: (after[name] - before[name]) / batches for name in before}


def counted(pids: list[int]) -> dict[str, float] | None:
    """What these processes have written and read so far, in bytes; sockets are not counted."""
    total = {"sent_bytes": 0.0, "received_bytes": 0.0}
    try:
        for pid in pids:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            values = dict(line.split(": ") for line in lines)
            total["sent_bytes"] += int(values["wchar"])
            total["received_bytes"] += int(values["rchar"])
    except (OSError, KeyError, ValueError):
        return None
    return total


def measure_calls(record: Record, dataset: Rows, workers: int) -> None:
    """The cost of the calls, and the size of what they give."""
    calls = 20 if record.args.quick else 300
    cases = {
        kind: Calls(make, dataset, workers, calls)
        for kind, make in KINDS.items()
        if kind != BASE and not ("every" in kind and not workers)
    }
    measured = interleave(cases, rounds_of(record.args))
    lines = []
    for kind, case in cases.items():
        cost, load = measured.of(kind, "state_us"), measured.of(kind, "load_us")
        sizes = {"json_bytes": json_bytes(case.state), "saved_bytes": saved_bytes(case.state)}
        record.row(loader=kind, workers=workers, state_us=cost, load_us=load, **sizes)
        as_json = "-" if sizes["json_bytes"] is None else sizes["json_bytes"]
        lines.append([kind, cost.text(), load.text(), as_json, sizes["saved_bytes"]])
        if kind == MINE:
            record.at_most(f"workers{workers}.state_us", cost.median, 20.0)
            record.at_most(f"workers{workers}.json_bytes", sizes["json_bytes"] or float("nan"), 1024)
    print(f"workers {workers}")
    table(["loader", "state_dict us", "load_state_dict us", "bytes as JSON", "bytes by torch.save"], lines)


def measure_traffic(record: Record, dataset: Rows, batches: int) -> None:
    """What goes through the workers' pipes."""
    cases: dict[str, Case] = {kind: partial(traffic, make, dataset, batches) for kind, make in KINDS.items()}
    measured = interleave(cases, min(rounds_of(record.args), 3))
    if "sent_bytes" not in measured.values[BASE]:
        record.skip("bytes a worker sends", "/proc/PID/io cannot be read")
        return
    lines = []
    for kind in cases:
        sent, received = measured.of(kind, "sent_bytes"), measured.of(kind, "received_bytes")
        record.row(loader=kind, workers=2, sent_bytes=sent, received_bytes=received)
        lines.append([kind, sent.text(), received.text()])
    table(["loader", "bytes a worker writes for a batch", "reads"], lines)
    more = measured.added(MINE, BASE, "sent_bytes").median
    record.at_most("worker.sent_bytes_more", more, 32.0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    args = parser("cost and size of the loader's state").parse_args(argv)
    quiet()
    record = Record("state", args)
    heading(record)
    batches = 50 if args.quick else 500
    dataset = Rows(BATCH * (batches + 40))
    for workers in (0,) if args.quick else (0, 2):
        measure_calls(record, dataset, workers)
    measure_traffic(record, dataset, batches)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
