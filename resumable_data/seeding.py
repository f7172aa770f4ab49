"""Seeds that belong to a batch or a sample, and seeding that never leaks.

Every word is derived from labelled coordinates (see ``splitmix``), so an augmentation is a function of where
its sample stands in the run and of nothing else: not of workers, prefetching or how often the run was killed.
The tags and the order of the coordinates are frozen by golden draws under the names ``batch.v1`` and
``sample.v1``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from resumable_data.splitmix import MASK64, absorb, derive, emit, start

TAG_BATCH = 0x42415443  # "BATC": before the samples of a batch
TAG_SAMPLE = 0x53414D50  # "SAMP": before one sample
TAG_COLLATE = 0x434F4C4C  # "COLL": before collate_fn
TAG_WORKER = 0x574F524B  # "WORK": what torch seeds its workers from

_MASK32 = 0xFFFF_FFFF
_A = TypeVar("_A")
_R = TypeVar("_R")


class Words(NamedTuple):
    """Four 64-bit words of one place: a seed for each global stream, and one for generators of the user's."""

    python: int
    numpy: int  # its low 32 bits are used: numpy's legacy seeding by one int takes no more
    torch: int  # likewise: torch's CPU generator looks at the low 32 bits only
    user: int


def batch_words(tag: int, seed: int, epoch: int, first: int, rank: int) -> Words:
    """The words of one batch: ``first`` is the position of its first sample."""
    return Words(*derive(tag, seed, epoch, first, rank, count=4))


class SampleWords:
    """The words of the samples of one epoch, with the common coordinates hashed once."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._state = absorb(absorb(start(TAG_SAMPLE), seed), epoch)

    def at(self, position: int) -> Words:
        """The words of the sample that stands at this position of the epoch's global order."""
        return Words(*emit(absorb(self._state, position), 4))


def seed_streams(words: Words) -> None:
    """Seed python's ``random``, numpy's legacy global stream and torch's CPU stream; about 10 us."""
    random.seed(words.python)
    np.random.seed(words.numpy & _MASK32)
    # torch.manual_seed would also reseed every accelerator, at 200 times the cost
    torch.default_generator.manual_seed(words.torch)


class StreamsAside:
    """Set this process's global streams aside, and put them back whatever happens in between.

    Inside, numpy's global functions draw from a private MT19937, which costs 1 us where saving and setting
    the real one costs 100. torch runs on one thread inside, as it does in DataLoader workers: the last bit of
    a reduction depends on the number of threads.
    """

    def __init__(self) -> None:
        self._private = np.random.MT19937(0)

    def around(self, function: Callable[[_A], _R], argument: _A) -> _R:
        """Call ``function(argument)`` with the streams aside."""
        python = random.getstate()
        # swapping the bit generator drops a cached legacy Gaussian, and nothing cheaper tells if there is one
        legacy: Any = np.random.get_state(legacy=False)
        bits = get_bit_generator()
        torch_state = torch.default_generator.get_state()
        threads = torch.get_num_threads()
        try:
            set_bit_generator(self._private)
            if threads != 1:
                torch.set_num_threads(1)
            return function(argument)
        finally:
            # one by one: a signal handler that raises after one of them must not keep the rest from running
            try:
                set_bit_generator(bits)
            finally:
                try:
                    if legacy["has_gauss"]:
                        np.random.set_state(legacy)
                finally:
                    try:
                        torch.default_generator.set_state(torch_state)
                    finally:
                        try:
                            random.setstate(python)
                        except BaseException:
                            random.setstate(python)  # unlike the others it is Python code: raised inside it
                            raise
                        finally:
                            if threads != 1:
                                torch.set_num_threads(threads)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Let the inside draw from this process's own global streams, and take the draws back afterwards."""
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(torch_state)


def worker_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """A private generator from which torch draws the base seed of one epoch's workers on one rank."""
    generator = torch.Generator()
    generator.manual_seed(derive(TAG_WORKER, seed, epoch, rank, count=1)[0])
    return generator


def draw_base_seed(generator: torch.Generator) -> int:
    """One draw, the one that ``torch.utils.data.DataLoader`` makes at the start of an iterator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def initial_seed() -> int:
    """The seed torch's global CPU stream was last seeded with, in [0, 2**64); nothing is drawn."""
    return torch.initial_seed() & MASK64
