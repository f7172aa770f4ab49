"""A list of changes, made one after another, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from resumable_data.errors import CheckpointMismatchError, ResumableDataError


class Step(NamedTuple):
    """One change.

    Attributes:
        name: Of the object, as errors name it.
        apply: Makes the change.
        undo: Puts back what stood there before, also after an `apply` that failed half-way; None where
            there is no way back.
    """

    name: str
    apply: Callable[[], object]
    undo: Callable[[], object] | None


def run_steps(steps: Sequence[Step]) -> None:
    """Make the changes in their order; on any failure, an interrupt included, put back all that were begun.

    Steps without a way back stand last, so that as little as possible can fail after them.

    Raises:
        CheckpointMismatchError: A step failed; it says whether everything was put back, else names what was
            not. The errors of this package pass unchanged where everything was put back.
        BaseException: An interrupt passes on; what could not be put back is added to its arguments.
    """
    begun: list[Step] = []
    try:
        for step in steps:
            begun.append(step)
            step.apply()
    except BaseException as error:
        lost = _put_back(begun)
        if not isinstance(error, Exception):
            if lost:
                error.args = (*error.args, f"restore interrupted; could not be put back: {', '.join(lost)}")
            raise
        if isinstance(error, ResumableDataError) and not lost:
            raise
        outcome = f"could not be put back: {', '.join(lost)}" if lost else "everything was put back"
        raise CheckpointMismatchError(
            f"{begun[-1].name}: setting its state failed ({type(error).__name__}: {error}); {outcome}. "
            + ("Build these objects anew before training on." if lost else "Build it as when it was saved.")
        ) from error


def _put_back(steps: Sequence[Step]) -> list[str]:
    lost = []
    for name, _, undo in reversed(steps):
        if undo is None:
            lost.append(name)
            continue
        try:
            undo()
        except Exception as error:  # noqa: BLE001 - the others must still be put back; the caller names it
            lost.append(f"{name} ({type(error).__name__}: {error})")
    return lost
