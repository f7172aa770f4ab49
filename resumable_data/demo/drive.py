"""The driver: four runs side by side, the kills, the comparison, the picture."""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from resumable_data.demo import lanes, train, verdict
from resumable_data.demo.digits import TRAINING
from resumable_data.demo.draw import draw
from resumable_data.demo.kills import Kill, plan_kills
from resumable_data.demo.process import Children
from resumable_data.demo.screen import Screen, kill_table, make_console

BATCHES = math.ceil(TRAINING / train.BATCH)  # of an epoch
MARKER = ".resumable-data-demo"  # in a directory that a demonstration may clear
PICTURE = "demo.png"
RUNS = ("uninterrupted", "killed", "usual-uninterrupted", "usual-killed")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One demonstration.

    Attributes:
        out: The directory for the runs and the picture.
        seed: Of the kills; the training has a seed of its own.
        kills: How often the run is killed, >= 1.
        epochs: Length of each run.
        usual_kills: How often the run with the usual recipe is killed.
    """

    out: Path
    seed: int
    kills: int
    epochs: int
    usual_kills: int


def run_demo(out: str, *, seed: int = 0, kills: int | None = None, quick: bool = False) -> int:
    """Run the demonstration and print its verdict.

    Args:
        out: The directory for the runs and the picture; what an earlier demonstration left there is removed.
        seed: Of the kills.
        kills: How many; None: 8, or 3 if quick.
        quick: Three epochs instead of nine.

    Returns:
        The exit status: 0 if the killed run is the uninterrupted one, else 1.

    Raises:
        FileExistsError: The directory holds something, and not of a demonstration.
        ChildError: A training process failed by itself.
    """
    settings = Settings(
        out=Path(out),
        seed=seed,
        kills=kills if kills is not None else (3 if quick else 8),
        epochs=3 if quick else train.EPOCHS,
        usual_kills=1 if quick else 2,
    )
    console = make_console()
    began = time.perf_counter()
    clear(settings.out)
    with Screen(console) as screen:
        stories = _run_all(settings, screen)
    console.print(kill_table(stories["killed"].kills))
    pair = [verdict.read_outcome(settings.out / name) for name in RUNS[:2]]
    usual = [verdict.read_usual_outcome(settings.out / name) for name in RUNS[2:]]
    ours = verdict.compare(pair[0], pair[1], stories["killed"].losses)
    theirs = verdict.compare(usual[0], usual[1], stories["usual-killed"].losses)
    picture = settings.out / PICTURE
    draw(picture, ours=(pair[0], pair[1]), usual=(usual[0], usual[1]), stories=stories, batches=BATCHES)
    for line in [
        *_describe_ours(ours, pair[1], len(stories["killed"].kills)),
        *_describe_usual(theirs, stories["usual-killed"].kills),
        f"picture: {picture}    {time.perf_counter() - began:.0f} s in all",
    ]:
        screen.say(line)
    return 0 if ours.same else 1


def clear(out: Path) -> None:
    """Make the directory, or remove the runs of an earlier demonstration from it.

    Raises:
        FileExistsError: It holds something, and no demonstration has marked it as its own.
    """
    if out.exists() and not (out / MARKER).exists() and any(out.iterdir()):
        raise FileExistsError(
            f"{out} is not empty and not the output of an earlier demonstration: nothing there is touched; "
            "choose another directory with --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    for name in RUNS:
        shutil.rmtree(out / name, ignore_errors=True)
    for leftover in [*out.glob("*.stderr"), out / PICTURE]:
        leftover.unlink(missing_ok=True)


def _run_all(settings: Settings, screen: Screen) -> dict[str, lanes.Story]:
    """All four runs, two at a time; the longest begins first."""
    steps = settings.epochs * BATCHES
    plans: dict[str, tuple[str, list[Kill]]] = {
        "killed": (lanes.CHILD, _plan(settings)),
        "uninterrupted": (lanes.TRAIN, []),
        "usual-killed": (lanes.USUAL, _plan_usual(settings)),
        "usual-uninterrupted": (lanes.USUAL, []),
    }
    with Children() as children, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {}
        for name, (module, kills) in plans.items():
            jobs[name] = pool.submit(
                lanes.run,
                children,
                module,
                settings.out / name,
                epochs=settings.epochs,
                kills=kills,
                report=screen.follow(name.replace("usual-", "usual recipe, "), steps),
            )
        try:
            return {name: job.result() for name, job in jobs.items()}
        except BaseException:
            children.close()  # or the pool would wait for runs that nobody wants any more
            raise


def _plan(settings: Settings) -> list[Kill]:
    return plan_kills(
        settings.kills,
        epochs=settings.epochs,
        batches=BATCHES,
        save_every=train.SAVE_EVERY,
        accumulate=train.ACCUMULATE,
        seed=settings.seed,
    )


def _plan_usual(settings: Settings) -> list[Kill]:
    """Kills at random moments after the first epoch, one in each equal part of the run but the last.

    In the first epoch skipping draws all numbers again from the seeds, so that only gradients would be lost.
    """
    chance = random.Random(settings.seed + 1)
    first = BATCHES + train.SAVE_EVERY
    part = (settings.epochs * BATCHES - first) // (settings.usual_kills + 1)
    steps = [first + part * i + chance.randrange(part) for i in range(settings.usual_kills)]
    return [Kill("random", step, delay=chance.uniform(0, 0.05)) for step in steps]


def _describe_ours(result: verdict.Comparison, outcome: verdict.Outcome, kills: int) -> list[str]:
    killed = f"Killed {verdict.times(kills)}"
    if result.same:
        return [
            f"verdict: THE SAME RUN. {killed}; {result.losses} of {result.losses} losses == "
            "those of the uninterrupted run, evaluations too.",
            f"         {result.undone} losses were computed, lost to a kill and computed again: all ==.",
            f"         final weights: sha256 {outcome.weights} in both",
        ]
    first = f", the first at step {result.differing[0]}" if result.differing else ""
    return [
        f"verdict: ANOTHER RUN. {killed}; {len(result.differing)} of {result.losses} losses "
        f"differ{first}; {result.undone_differing} of those reported on the way differ.",
        f"         evaluations {_equal(result.accuracies)}, final weights {_equal(result.weights)}",
    ]


def _equal(equal: bool) -> str:
    return "equal" if equal else "NOT equal"


def _describe_usual(result: verdict.Comparison, kills: list[lanes.Row]) -> list[str]:
    times = verdict.times(len(kills))
    if not result.differing:
        return [f"usual recipe: killed {times}, no loss differs this time"]
    return [
        f"usual recipe: killed {times}; leaves its own uninterrupted run at step {result.differing[0]}, "
        f"after a resume from step {kills[0].resumed_from}:",
        f"         {len(result.differing)} of {result.losses} losses differ, final weights "
        f"{_equal(result.weights)}",
    ]
