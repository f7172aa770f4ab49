"""The picture: the losses of the four runs, the kills, and where the usual recipe leaves its own run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from resumable_data.demo.lanes import Row, Story
from resumable_data.demo.verdict import Outcome, times

_CALM, _OURS, _USUAL, _KILL = "#9db4c8", "#12324f", "#b5461a", "#c03030"
_WINDOW = 9  # losses averaged for the curves: mixed batches make single ones noisy
_FLOOR = 1e-9  # below any difference of two float32 losses near 1, so that zero has a place on a log axis

Pair = tuple[Outcome, Outcome]


def draw(path: Path, *, ours: Pair, usual: Pair, stories: Mapping[str, Story], batches: int) -> None:
    """Write the picture as a PNG.

    Args:
        path: The file.
        ours: The uninterrupted run and the killed one, with this package.
        usual: The same with the usual recipe.
        stories: What the processes of the runs reported, by the names of the runs.
        batches: Batches in an epoch.
    """
    with mpl.rc_context(
        {"backend": "agg", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        _draw(path, ours, usual, stories, batches)


def _draw(path: Path, ours: Pair, usual: Pair, stories: Mapping[str, Story], batches: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2.2))
    kills, usual_kills = stories["killed"].kills, stories["usual-killed"].kills
    differ, steps = int((_difference(ours) > 0).sum()), len(ours[0].losses)
    figure.suptitle(
        f"Killed {times(len(kills))}, compared with a run that never was: {differ} of {steps} losses differ",
        fontsize=13,
        fontweight="bold",
    )
    _curves(panels[0], ours, _OURS, kills, "resumable_data")
    _curves(panels[1], usual, _USUAL, usual_kills, "usual recipe")
    _differences(panels[2], ours, usual)
    first = next(iter(_steps(_difference(usual) > 0)), None)
    if first is not None:
        for panel in panels[1:]:
            panel.axvline(first, color=_USUAL, lw=1.1, ls="--")
        panels[1].annotate(
            f"leaves its own run\nat step {first}",
            xy=(first, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # a kill may stand behind it
            color=_USUAL,
        )
    panels[2].set_xlim(0, steps + 1)
    panels[2].set_xlabel("step (batches trained on)")
    epochs = panels[2].secondary_xaxis(-0.42, functions=(lambda x: x / batches, lambda x: x * batches))
    epochs.set_xlabel("epoch")
    epochs.set_xticks(range(steps // batches + 1))
    figure.savefig(path, dpi=130)


def _curves(panel: Any, pair: Pair, colour: str, kills: list[Row], name: str) -> None:
    """One recipe: the uninterrupted run broad and pale, the killed one thin upon it."""
    for at, kill in enumerate(kills):
        panel.axvline(kill.step, color=_KILL, lw=0.8, alpha=0.75, label="SIGKILL" if at == 0 else None)
    for outcome, style, label in (
        (pair[0], {"color": _CALM, "lw": 5}, "uninterrupted"),
        (pair[1], {"color": colour, "lw": 1.2}, f"killed {times(len(kills))}"),
    ):
        steps, losses = _smooth(np.array(outcome.losses))
        panel.plot(steps, losses, label=label, **style)
    panel.set_title(name, loc="left", fontweight="bold")
    panel.set_ylabel(f"training loss (nats),\nmean of {_WINDOW} batches")
    _legend(panel, 3)


def _differences(panel: Any, ours: Pair, usual: Pair) -> None:
    """How far each killed run is from its uninterrupted one, batch by batch, on a log axis with a zero."""
    for pair, colour, label, size in (
        (usual, _USUAL, "usual recipe", 8),  # larger, so that it shows behind the other where both are 0
        (ours, _OURS, "resumable_data", 4),
    ):
        difference = _difference(pair)
        steps = np.arange(1, len(difference) + 1)
        panel.plot(steps, np.maximum(difference, _FLOOR), ".", ms=size, color=colour, label=label)
    panel.set_yscale("log")
    panel.set_ylim(_FLOOR / 3, 30)
    panel.set_yticks([_FLOOR, 1e-6, 1e-3, 1], ["0 (==)", "$10^{-6}$", "$10^{-3}$", "1"])
    panel.minorticks_off()
    panel.set_title("difference from the uninterrupted run, each batch", loc="left", fontweight="bold")
    panel.set_ylabel("|loss difference| (nats)")
    _legend(panel, 2)


def _legend(panel: Any, columns: int) -> None:
    """Above the panel, at the height of its title: nothing is covered."""
    panel.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
        ncols=columns,
        borderaxespad=0.1,
        borderpad=0.2,
    )


def _difference(pair: Pair) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|difference| of each loss, shape (steps,); steps that one of them lacks are left out."""
    steps = min(len(pair[0].losses), len(pair[1].losses))
    calm, killed = (np.array(outcome.losses[:steps], dtype=np.float64) for outcome in pair)
    return np.asarray(np.abs(calm - killed))


def _steps(where: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    """The steps, from 1, at which this holds."""
    return [int(at) + 1 for at in np.flatnonzero(where)]


def _smooth(losses: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[Any, Any]:
    """Steps and the means of the windows that end there."""
    width = min(_WINDOW, len(losses))
    return np.arange(width, len(losses) + 1), np.convolve(losses, np.ones(width) / width, mode="valid")
