"""What do saving and loading a checkpoint cost, durable and verified, beside those that are neither or one of it?

Run it alone: ``python benchmarks/checkpoints.py [--quick] [--json PATH] [--check] [--mb 500] [--dir PATH]``.

One state of so many megabytes, fifty tensors of a model, on the file system of ``--dir`` (the working directory).
Everything that was written before is on the disk when a clock is started, and what a case wrote is deleted after
it. Saves: ours (``CheckpointManager.save``, one file and four shards; it syncs, hashes, indexes and points),
``torch.save`` with fsync of file and directory, ``torch.distributed.checkpoint.save``. Loads: ours through the
whole gate, and plain ``torch.load``, whose file is in the page cache as ours is; the machine's sha256 rate is
measured in the same rounds. Background: how long ``save(blocking=False)`` and ``async_save`` hold training up, from
the second save on. Memory: by how much a blocking save raises the peak of a process that holds the state.

Bars: a save takes at most 1.0 of ``torch.save`` with fsync (the faster of two in each round) and 0.85 of
``dcp.save``; a load at most plain ``torch.load`` plus the bytes over the sha256 rate, plus 10 %; a background save
holds training up for at most 0.35 of ``async_save``; a blocking save needs at most 16 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _common import ROOT, Case, Measured, Record, heading, interleave, parser, quiet, rounds_of, table

from resumable_data import CheckpointManager

TENSORS = 50
MINE, SHARDED = "CheckpointManager", "CheckpointManager, shards=4"
PLAIN, DCP = "torch.save, fsync", "dcp.save"
#: Run in a process of its own: the peak of a blocking save above what the state takes.
PEAK = """
import sys, torch
from pathlib import Path
from resumable_data import CheckpointManager

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024

mb, folder = float(sys.argv[1]), sys.argv[2]
model = torch.nn.ParameterList(torch.ones(max(1, int(mb * 2**18 / 50))) for _ in range(50))
with CheckpointManager(folder, keep_last=1) as manager:
    manager.save(1, {"model": torch.nn.Linear(2, 2)})  # what any first save loads of the interpreter
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    manager.save(2, {"model": model})
    print(status("VmHWM") - before)
"""


class Bench:
    """The state and the place; each method is one measurement."""

    def __init__(self, megabytes: float, folder: Path) -> None:
        self.folder = folder
        count = max(1, int(megabytes * 2**20 / 4 / TENSORS))
        self.model = torch.nn.ParameterList(torch.randn(count) for _ in range(TENSORS))
        self.state = {"model": self.model.state_dict()}
        self.bytes = 4 * count * TENSORS
        self._step = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A fresh directory, with nothing left to be written from before."""
        made = Path(tempfile.mkdtemp(dir=self.folder))
        os.sync()
        try:
            yield made
        finally:
            shutil.rmtree(made)

    def save_ours(self, shards: int | None = None) -> dict[str, float]:
        """A blocking save."""
        with self.place() as place, CheckpointManager(place, shards=shards) as manager:
            return timed(lambda: manager.save(1, {"model": self.model}))

    def save_plain(self) -> dict[str, float]:
        """The usual way, made durable."""
        with self.place() as place:
            return timed(lambda: durable_torch_save(self.state, place / "x.pt"))

    def save_dcp(self) -> dict[str, float]:
        """torch.distributed.checkpoint without a process group."""
        with self.place() as place:
            return timed(lambda: dcp.save(self.state, checkpoint_id=place / "x"))

    def load_ours(self, place: Path) -> dict[str, float]:
        """Verified."""
        manager = CheckpointManager(place)
        return timed(manager.load_latest)

    def load_plain(self, path: Path) -> dict[str, float]:
        """Not verified."""
        return timed(lambda: torch.load(path, map_location="cpu", weights_only=True))

    def sha256(self, path: Path) -> dict[str, float]:
        """The hash of the same bytes, read as a loader reads them."""

        def hashed() -> None:
            digest, buffer = hashlib.sha256(), bytearray(1 << 20)
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])

        return timed(hashed)

    def background_ours(self, manager: CheckpointManager) -> dict[str, float]:
        """How long the caller is held up; the rest is waited for outside the clock."""
        self._step += 1
        os.sync()
        found = timed(lambda: manager.save(self._step, {"model": self.model}, blocking=False))
        manager.latest_path()
        manager.prune()  # waits for the save in flight
        return found

    def background_dcp(self) -> dict[str, float]:
        """The same of async_save's default."""
        with self.place() as place:
            futures: list[Any] = []
            found = timed(lambda: futures.append(dcp.async_save(self.state, checkpoint_id=place / "x")))
            futures[0].result()
            return found


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call."""
    begun = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - begun}


def durable_torch_save(state: Any, path: Path) -> None:
    """What a careful script does by hand."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# -- sections ---------------------------------------------------------------------------------------


def show(record: Record, what: str, measured: Measured, base: str) -> None:
    """Rows and table of one section."""
    lines = []
    for name in measured.values:
        seconds = measured.of(name, "seconds")
        ratio = inverse(measured, name, base)
        record.row(what=what, loader=name, seconds=seconds, of_base=ratio, base=base)
        lines.append([name, seconds.text(3), ratio.text(3)])
    print(what)
    table(["engine", "seconds", f"of {base}"], lines)


def inverse(measured: Measured, name: str, base: str) -> Any:
    """This case's seconds over the base's, round by round: below 1 where this case is faster."""
    return measured.ratio(base, name, "seconds")


def measure_saves(record: Record, bench: Bench) -> None:
    """Blocking saves."""
    cases: dict[str, Case] = {
        PLAIN: bench.save_plain,
        f"{PLAIN} again": bench.save_plain,
        DCP: bench.save_dcp,
        MINE: bench.save_ours,
        SHARDED: partial(bench.save_ours, 4),
    }
    measured = interleave(cases, rounds_of(record.args))
    show(record, "save", measured, PLAIN)
    # what a case finds of the last one's memory and disk is not the same for all: ours against the better of two
    both = zip(*(measured.values[name]["seconds"] for name in (PLAIN, f"{PLAIN} again")), strict=True)
    measured.values["best"] = {"seconds": [min(pair) for pair in both]}
    for name, key in ((MINE, "save"), (SHARDED, "save.shards4")):
        record.at_most(f"{key}.of_torch", inverse(measured, name, "best").median, 1.0)
        record.at_most(f"{key}.of_dcp", inverse(measured, name, DCP).median, 0.85)


def measure_loads(record: Record, bench: Bench) -> None:
    """Verified loads beside plain ones."""
    with bench.place() as place:
        durable_torch_save(bench.state, place / "plain.pt")
        for name, shards in (("one", None), ("four", 4)):
            with CheckpointManager(place / name, shards=shards) as manager:
                manager.save(1, {"model": bench.model})
        cases: dict[str, Case] = {
            "torch.load": partial(bench.load_plain, place / "plain.pt"),
            "sha256 of the bytes": partial(bench.sha256, place / "plain.pt"),
            MINE: partial(bench.load_ours, place / "one"),
            SHARDED: partial(bench.load_ours, place / "four"),
        }
        measured = interleave(cases, rounds_of(record.args))
    show(record, "load", measured, "torch.load")
    allowed = [
        1.1 * (plain + sha)
        for plain, sha in zip(
            measured.values["torch.load"]["seconds"],
            measured.values["sha256 of the bytes"]["seconds"],
            strict=True,
        )
    ]
    for name, key in ((MINE, "load"), (SHARDED, "load.shards4")):
        ratios = [ours / limit for ours, limit in zip(measured.values[name]["seconds"], allowed, strict=True)]
        record.at_most(f"{key}.of_allowed", sorted(ratios)[len(ratios) // 2], 1.0)


def measure_background(record: Record, bench: Bench) -> None:
    """What training waits for."""
    with bench.place() as place, group(place), CheckpointManager(place / "ours", keep_last=1) as manager:
        bench.background_ours(manager)  # the buffers are made once
        cases: dict[str, Case] = {
            "dcp.async_save": bench.background_dcp,
            MINE: partial(bench.background_ours, manager),
        }
        measured = interleave(cases, rounds_of(record.args))
    show(record, "held up by a background save", measured, "dcp.async_save")
    record.at_most("background.of_dcp", inverse(measured, MINE, "dcp.async_save").median, 0.35)


@contextlib.contextmanager
def group(place: Path) -> Iterator[None]:
    """async_save asks for a process group: one of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{place}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_memory(record: Record, bench: Bench) -> None:
    """The peak of a blocking save."""
    if not Path("/proc/self/clear_refs").exists():
        record.skip("memory of a save", "no /proc/self/clear_refs to begin a peak anew")
        return

    def peak() -> dict[str, float]:
        with bench.place() as place:
            command = (sys.executable, "-c", PEAK, str(bench.bytes / 2**20), str(place))
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            return {"peak_mb": float(done.stdout)}

    measured = interleave({MINE: peak}, min(3, rounds_of(record.args)))
    found = measured.of(MINE, "peak_mb")
    record.row(what="memory of a blocking save", loader=MINE, peak_mb=found)
    print("memory of a blocking save")
    table(["engine", "MB above the state"], [[MINE, found.text(1)]])
    record.at_most("save.peak_mb", found.median, 16.0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where ``--check`` finds a bar missed."""
    options = parser("cost of saving and loading checkpoints")
    options.add_argument("--mb", type=float, help="megabytes of state; 500, with --quick 4")
    options.add_argument(
        "--dir", type=Path, default=Path(), help="on which file system; the working directory"
    )
    args = options.parse_args(argv)
    quiet()
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    record = Record("checkpoints", args)
    heading(record)
    bench = Bench(args.mb or (4 if args.quick else 500), args.dir.resolve())
    with contextlib.redirect_stderr(io.StringIO()):  # gloo and DCP talk
        for measure in (measure_saves, measure_loads, measure_background, measure_memory):
            measure(record, bench)
    return record.finish()


if __name__ == "__main__":
    sys.exit(main())
