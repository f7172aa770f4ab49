"""Which source of a mixture stands at a position, and which of its samples a visit gets.

Both are closed forms of the position, a block or a window at a time. The latest blocks and windows are kept:
consecutive batches mostly ask for the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from resumable_data.permutation import Permutation
from resumable_data.splitmix import GOLDEN, derive

Indices = npt.NDArray[np.int64]

_TAG_BLOCK = 0x4D495842  # "MIXB": the words that order a block
_TAG_PASS = 0x4D495850  # "MIXP": the keys of a source's passes
# Places of a pass that are worked out together.
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the sources of a mixture stand in an epoch.

    Args:
        sums: Running sums of the whole-numbered weights; the last is the sum of all, >= 1.
        block: Positions in a block; each source of positive weight has a share of at least 1 in it.
        length: Positions in an epoch. The last block takes in what would be an incomplete one.
    """

    sums: tuple[int, ...]
    block: int
    length: int

    def visits(self, seed: int, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """The source at each position, and how often it stood at earlier positions of the epoch.

        Args:
            seed: In [0, 2**64).
            epoch: In [0, 2**64).
            positions: Shape (k,), each in [0, length).

        Returns:
            Two int64 arrays of shape (k,).
        """
        sources = np.empty(positions.size, np.int64)
        visits = np.empty(positions.size, np.int64)
        blocks = np.minimum(positions // self.block, max(0, self.length // self.block - 1))
        for lanes in _groups(blocks):
            number = int(blocks[lanes[0]])
            slots = positions[lanes] - number * self.block
            of_slot, earlier = _table(self, seed, epoch, number)
            sources[lanes] = of_slot[slots]
            visits[lanes] = earlier[slots]
        return sources, visits

    def counts(self, positions: int) -> list[int]:
        """How often each source stands in the first so many positions, a whole number of blocks.

        Each is within one of the source's share. None is smaller than it was a block earlier, because a
        share of a block is at least 1 and the two sums each lose less than 1 by rounding down.
        """
        upto = [positions * weight // self.sums[-1] for weight in self.sums]
        return [high - low for high, low in zip(upto, [0, *upto], strict=False)]

    def span(self, number: int) -> tuple[int, int]:
        """Where a block begins and ends."""
        begin = number * self.block
        return begin, self.length if begin + 2 * self.block > self.length else begin + self.block


def drawn(sizes: Indices, seed: int, epoch: int, sources: Indices, visits: Indices) -> Indices:
    """The index in its source that each visit gets.

    Visit j of a source of n samples gets what stands at place j % n of pass j // n; each pass is a
    ``shuffled.v1`` permutation of its own.

    Args:
        sizes: Samples in each source, shape (sources,); >= 1 where a source is visited.
        seed: In [0, 2**64).
        epoch: In [0, 2**64).
        sources: The source visited, shape (k,), each a place in ``sizes``.
        visits: How often it was visited before in the epoch, >= 0, shape (k,).

    Returns:
        int64, shape (k,), each in [0, size of its source).
    """
    size = sizes[sources]
    passes, places = np.divmod(visits, size)
    # Windows are numbered through all passes of a source.
    windows = passes * -(-size // _WINDOW) + places // _WINDOW
    places %= _WINDOW
    indices = np.empty_like(visits)
    for lanes in _groups(windows, sources):
        one = lanes[0]
        key = _key(seed, epoch, int(sources[one]))
        indices[lanes] = _window(int(size[one]), key, int(windows[one]))[places[lanes]]
    return indices


def _groups(*labels: Indices) -> Iterator[Indices]:
    # The lanes of each combination of labels that occurs.
    order = np.lexsort(labels)
    begins = np.zeros(order.size, np.bool_)
    begins[:1] = True
    for label in labels:
        ordered = label[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    edges = [*np.flatnonzero(begins).tolist(), order.size]
    return (order[begin:end] for begin, end in pairwise(edges))


@lru_cache(maxsize=1024)
def _key(seed: int, epoch: int, source: int) -> int:
    return derive(_TAG_PASS, seed, epoch, source, count=1)[0]


@lru_cache(maxsize=16)
def _table(schedule: Schedule, seed: int, epoch: int, number: int) -> tuple[npt.NDArray[Any], Indices]:
    # For each slot of a block: the source, and its visits earlier in the epoch. Shape (slots,) both.
    begin, end = schedule.span(number)
    before = np.array(schedule.counts(begin), np.int64)
    counts = np.array(schedule.counts(end), np.int64) - before
    slots = np.arange(end - begin, dtype=np.uint64)
    words = _words(derive(_TAG_BLOCK, seed, epoch, number, count=1)[0], slots)
    # The slot is written into the word's low bits: no ties, and sorting values is faster than arguments.
    low = np.uint64((1 << (end - begin - 1).bit_length()) - 1)
    shuffled = (np.sort((words & ~low) | slots) & low).astype(np.int64)
    names = np.arange(counts.size, dtype=np.uint16 if counts.size < 2**16 else np.uint32)
    sources = np.empty(slots.size, names.dtype)
    sources[shuffled] = np.repeat(names, counts)
    visits = np.empty(slots.size, np.int64)
    first = np.repeat(before - (np.cumsum(counts) - counts), counts)
    visits[np.argsort(sources, kind="stable")] = first + np.arange(slots.size)
    return sources, visits


def _words(state: int, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # splitmix.emit(state, slots.size), vectorised; unsigned array arithmetic wraps modulo 2**64.
    z = (slots + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(state)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=512)
def _window(size: int, key: int, number: int) -> Indices:
    # The indices at some consecutive places of a pass.
    turn, window = divmod(number, -(-size // _WINDOW))
    begin = window * _WINDOW
    places = np.arange(begin, min(begin + _WINDOW, size), dtype=np.int64)
    return Permutation(size, key, turn).take(places)
