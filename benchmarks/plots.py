"""The plots and tables of the performance page, from the records of the other benchmarks.

Run it alone: ``python benchmarks/plots.py``. It takes the newest ``DATE-NAME.json`` of each benchmark in
``benchmarks/results/``, draws what there is into ``docs/explanation/``, and writes each table between its two marks
in ``docs/explanation/performance.md``, with the command, the machine and the versions below it. No figure of
that page is written by hand. Needs matplotlib. With ``--quick`` it draws into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from _common import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "explanation" / "performance.md"
NAMES = ("throughput", "resume", "memory", "state", "epoch_turn", "checkpoints", "small_saves")
#: The same file from the same record: no dates, no random identifiers.
STABLE = {"svg.hashsalt": "resumable_data", "svg.fonttype": "none", "font.size": 9.0}
MINE = "ResumableLoader"
OURS = (MINE, "CheckpointManager")

Row = dict[str, Any]
Lines = list[list[str]]


def newest(folder: Path, name: str) -> tuple[str, dict[str, Any]] | None:
    """(file name, record) of the newest full run; names begin with the date."""
    found = sorted(folder.glob(f"*-{name}.json"))
    return (found[-1].name, json.loads(found[-1].read_text())) if found else None


def spread(values: Row, digits: int = 1) -> str:
    """Median and quartiles."""
    return f"{values['median']:,.{digits}f} ({values['low']:,.{digits}f} to {values['high']:,.{digits}f})"


def marked(text: str) -> str:
    """Ours stands out."""
    return f"**{text}**" if text.startswith(OURS) else text


# -- tables -----------------------------------------------------------------------------------------


def throughput_table(rows: Iterable[Row]) -> Lines:
    """CPU time a batch."""
    lines = [
        [
            "data",
            "workers",
            "loader",
            "CPU us a batch",
            "added to DataLoader's",
            "DataLoader's / its CPU time",
        ]
    ]
    for row in rows:
        where = [row["dataset"], str(row["workers"]), marked(row["loader"])]
        lines.append([*where, spread(row["cpu_us"], 0), spread(row["added_us"]), spread(row["cpu_ratio"], 3)])
    return lines


def resume_table(rows: Iterable[Row]) -> Lines:
    """Milliseconds at 90 %."""
    lines = [["n", "workers", "loader", "ms to the first batch at 90 %", "samples fetched in vain"]]
    for row in rows:
        if row["percent"] == 90:
            vain = row["fetched_in_vain"]
            where = [f"{row['n']:.0e}", str(row["workers"]), marked(row["loader"])]
            lines.append([*where, spread(row["ms"], 2), "" if vain is None else f"{vain:,.0f}"])
    return lines


def memory_table(rows: Iterable[Row]) -> Lines:
    """Megabytes above the smallest n."""
    lines = [["n", "loader", "peak MB", "above the smallest n"]]
    return lines + [
        [f"{r['n']:.0e}", marked(r["loader"]), f"{r['peak_mb']['median']:,.0f}", f"{r['above_mb']:+,.1f}"]
        for r in rows
    ]


def state_table(rows: Iterable[Row]) -> Lines:
    """Cost of the calls; bytes through the pipes."""
    lines = [
        ["loader", "workers", "state_dict us", "load_state_dict us", "bytes by torch.save", "sent a batch"]
    ]
    for row in rows:
        costs = [spread(row["state_us"]), spread(row["load_us"])] if "state_us" in row else ["", ""]
        saved = f"{row['saved_bytes']:,}" if "saved_bytes" in row else ""
        sent = f"{row['sent_bytes']['median']:,.0f}" if "sent_bytes" in row else ""
        lines.append([marked(row["loader"]), str(row["workers"]), *costs, saved, sent])
    return lines


def epoch_turn_table(rows: Iterable[Row]) -> Lines:
    """Milliseconds at the turn."""
    lines = [["n", "workers", "loader", "ms at the turn", "added to DataLoader's"]]
    for row in rows:
        kind = f"{row['workers']}{', persistent' if row['persistent'] else ''}"
        where = [f"{row['n']:,}", kind, marked(row["loader"])]
        lines.append([*where, spread(row["ms"], 2), spread(row["added_ms"], 2)])
    return lines


# -- plots ------------------------------------------------------------------------------------------


def checkpoints_table(rows: Iterable[Row]) -> Lines:
    """Seconds of saves and loads, and the one row in megabytes."""
    lines = [["what", "engine", "seconds", "of the first"]]
    for row in rows:
        if "seconds" in row:
            times = [spread(row["seconds"], 3), spread(row["of_base"], 3)]
        else:
            times = [f"{spread(row['peak_mb'])} MB", ""]
        lines.append([row["what"], marked(row["loader"]), *times])
    return lines


def small_saves_table(rows: Iterable[Row]) -> Lines:
    """Milliseconds of a small save."""
    lines = [["engine", "ms a save of 100 KB", "times one write and fsync"]]
    lines += [[marked(row["loader"]), spread(row["ms"], 2), spread(row["times"], 1)] for row in rows]
    return lines


def by_n(axes: Any, rows: Iterable[Row], value: Callable[[Row], Row]) -> None:
    """One curve a loader over n, both axes logarithmic, with quartiles."""
    rows = list(rows)
    for name in dict.fromkeys(row["loader"] for row in rows):
        mine = [row for row in rows if row["loader"] == name]
        points = [value(row) for row in mine]
        middle = [max(p["median"], 1e-3) for p in points]
        low = [max(0.0, m - p["low"]) for m, p in zip(middle, points, strict=True)]
        high = [max(0.0, p["high"] - m) for m, p in zip(middle, points, strict=True)]
        width = 2.5 if name.startswith(MINE) else 1.2
        axes.errorbar([row["n"] for row in mine], middle, [low, high], label=name, lw=width, marker="o", ms=3)
    axes.set(xscale="log", yscale="log", xlabel="n, samples in the dataset")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def bars(axes: Any, rows: Iterable[Row], value: str, label: Callable[[Row], str]) -> None:
    """Horizontal bars with quartiles."""
    rows = list(rows)
    middle = [row[value]["median"] for row in rows]
    low = [row[value]["median"] - row[value]["low"] for row in rows]
    high = [row[value]["high"] - row[value]["median"] for row in rows]
    colours = ["C0" if row["loader"].startswith(OURS) else "0.7" for row in rows]
    axes.barh(range(len(rows)), middle, xerr=[low, high], color=colours, error_kw={"lw": 0.8})
    axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")


def throughput_plot(rows: Iterable[Row]) -> Any:
    """CPU time added to a batch, by data, seeding="batch" and the peers."""
    wanted = ("DataLoader again", "StatefulDataLoader", f"{MINE}, seeding='batch'")
    shown = [r for r in rows if r["loader"] in wanted and r["dataset"] not in ("jpeg", "tensors")]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.2 * len(shown)), layout="constrained")
    bars(axes, shown, "added_us", lambda r: f"{r['dataset']}, workers {r['workers']}: {r['loader']}")
    axes.set_xlabel("CPU us added to a batch of 64 in the training process, over DataLoader")
    return figure


def resume_plot(rows: Iterable[Row]) -> Any:
    """Time to the first batch over n."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    rows = [row for row in rows if row["percent"] == 90]
    for panel, workers in zip(axes, (0, 2), strict=True):
        by_n(panel, [row for row in rows if row["workers"] == workers], lambda row: row["ms"])
        panel.set_title(f"workers {workers}, at 90 % of the epoch")
    axes[0].set_ylabel("ms from load_state_dict to the first batch")
    return figure


def memory_plot(rows: Iterable[Row]) -> Any:
    """Peak memory over n."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    by_n(axes, rows, lambda row: row["peak_mb"])
    axes.set_ylabel("peak resident MB of the process")
    return figure


def state_plot(rows: Iterable[Row]) -> Any:
    """Cost of state_dict()."""
    shown = [row for row in rows if "state_us" in row]
    figure, axes = plt.subplots(figsize=(6, 0.8 + 0.3 * len(shown)), layout="constrained")
    bars(axes, shown, "state_us", lambda row: f"{row['loader']}, workers {row['workers']}")
    axes.set_xlabel("CPU us of state_dict()")
    return figure


def epoch_turn_plot(rows: Iterable[Row]) -> Any:
    """The wait at the turn."""
    shown = list(rows)
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.2 * len(shown)), layout="constrained")
    bars(
        axes,
        shown,
        "ms",
        lambda r: f"n {r['n']:,}, workers {r['workers']}{' kept' if r['persistent'] else ''}: {r['loader']}",
    )
    axes.set(xscale="log", xlabel="ms from an epoch's last batch to the next one's first")
    return figure


def checkpoints_plot(rows: Iterable[Row]) -> Any:
    """Seconds of saves and loads."""
    shown = [row for row in rows if "seconds" in row]
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.25 * len(shown)), layout="constrained")
    bars(axes, shown, "seconds", lambda row: f"{row['what']}: {row['loader']}")
    axes.set_xlabel("seconds")
    return figure


def small_saves_plot(rows: Iterable[Row]) -> Any:
    """Milliseconds of a small save."""
    shown = list(rows)
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.3 * len(shown)), layout="constrained")
    bars(axes, shown, "ms", lambda row: row["loader"])
    axes.set_xlabel("ms a save of 100 KB")
    return figure


# -- the page ---------------------------------------------------------------------------------------


def source(file: str, record: dict[str, Any]) -> str:
    """Where the figures come from."""
    env = record["environment"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("python", "torch", "torchdata", "numpy"))
    return (
        f"`{record['command']}` on {env['date']}, {env['machine']}, {env['cpus']} CPUs (load {env['load']} at the "
        f"start), {versions}; record: `benchmarks/results/{file}`."
    )


def section(name: str, file: str, record: dict[str, Any]) -> str:
    """What stands between the two marks of a benchmark."""
    head, *body = globals()[f"{name}_table"](record["rows"])
    lines = [f"![{name.replace('_', ' ')}](performance-{name}.svg)", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
    lines += ["", source(file, record)]
    missed = [bar for bar in record["bars"] if not bar["holds"]]
    lines += ["", f"{len(record['bars']) - len(missed)} of {len(record['bars'])} bars held in this run."]
    lines += [f"Missed: `{bar['name']}`, {bar['found']:.4g} against {bar['limit']:.4g}." for bar in missed]
    return "\n".join(lines)


def fill(page: str, name: str, text: str) -> str:
    """The page with what stands between a benchmark's marks replaced."""
    begin, end = f"<!-- figures: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks {begin} ... {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def draw(results: Path, out: Path, page: Path) -> list[str]:
    """Draw and fill in what there are records of; gives their names."""
    text, done = page.read_text(), []
    for name in NAMES:
        found = newest(results, name)
        if found is None:
            print(f"{name}: no record in {results.name}/, left as it is")
            continue
        file, record = found
        with mpl.rc_context(STABLE):
            figure = globals()[f"{name}_plot"](record["rows"])
            figure.savefig(out / f"performance-{name}.svg", metadata={"Date": None})
            plt.close(figure)
        text = fill(text, name, section(name, file, record))
        done.append(name)
        print(f"{name}: drawn from {file}")
    (out / page.name).write_text(text)
    return done


def main(argv: list[str] | None = None) -> int:
    """Draw all plots and fill in all tables."""
    options = argparse.ArgumentParser(description="plots and tables from the records of the benchmarks")
    options.add_argument("--results", type=Path, default=RESULTS, help="where the records are")
    options.add_argument("--out", type=Path, help="where to draw, instead of beside the page")
    options.add_argument("--page", type=Path, default=PAGE, help="the page whose tables are filled in")
    options.add_argument("--quick", action="store_true", help="draw into a temporary folder")
    args = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or (Path(folder) if args.quick else args.page.parent)
        draw(args.results, out, args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
