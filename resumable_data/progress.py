"""A progress bar for what takes over a second, and nothing for what does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("resumable_data")

#: Seconds before anything is shown.
PATIENCE = 1.0


@contextmanager
def slow_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields ``advance(count)``. After a second a tqdm bar appears where tqdm is installed, else log lines."""
    begun = time.monotonic()
    done = 0
    shown: Any = None

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if shown is None and time.monotonic() - begun > PATIENCE:
            shown = _make_bar(what, total)
            shown.update(done)
        elif shown is not None:
            shown.update(count)

    try:
        yield advance
    finally:
        if shown is not None:
            shown.close()


def _make_bar(what: str, total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _LoggedProgress(what, total)
    return tqdm(total=total, desc=what, unit="batch", leave=False)


class _LoggedProgress:
    """One INFO line every few seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._said = 0.0

    def update(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            logger.info("%s: %d of %d batches", self._what, self._done, self._total)

    def close(self) -> None:
        logger.info("%s: done, %d batches", self._what, self._done)
