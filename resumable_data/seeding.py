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
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from resumable_data.mersenne import PythonStream
from resumable_data.splitmix import MASK64, absorb, derive, start, words_after

TAG_BATCH = 0x42415443  # "BATC": before the samples of a batch
TAG_SAMPLE = 0x53414D50  # "SAMP": before one sample
TAG_COLLATE = 0x434F4C4C  # "COLL": before collate_fn
TAG_WORKER = 0x574F524B  # "WORK": what torch seeds its workers from
TAG_EPOCH = 0x45504F43  # "EPOC": before a dataset is told the epoch
TAG_ORDER = 0x4F524452  # "ORDR": before a user's sampler is read

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
    return Words(*words_after(_epoch_state(tag, seed, epoch), first, rank, count=4))


@lru_cache(maxsize=64)
def _epoch_state(tag: int, seed: int, epoch: int) -> int:
    return absorb(absorb(start(tag), seed), epoch)


class SampleWords:
    """The words of the samples of one epoch, with the common coordinates hashed once."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._state = _epoch_state(TAG_SAMPLE, seed, epoch)

    def at(self, position: int) -> Words:
        """The words of the sample that stands at this position of the epoch's global order."""
        return Words(*words_after(self._state, position, count=4))


_user_word: int | None = None  # of the sample or batch that is being fetched in this process


def sample_seed() -> int:
    """The 64-bit word of the sample (``seeding="sample"``) or batch (``"batch"``) that is being fetched.

    For datasets and transforms that hold generators of their own: seeded from this word, their draws belong to
    the sample as those from the global streams do. The word is the same however often the run was killed.

    Returns:
        An int in [0, 2**64). To be called inside a dataset's ``__getitem__`` or a ``collate_fn`` only.

    Raises:
        RuntimeError: Called elsewhere, or under ``seeding=None``.
    """
    if _user_word is None:
        raise RuntimeError(
            "sample_seed() has no sample: call it inside a dataset or collate_fn that a ResumableLoader runs "
            "with seeding='batch' or 'sample'"
        )
    return _user_word


def set_user_word(word: int | None) -> None:
    """What ``sample_seed`` answers from now on; one process fetches one sample at a time."""
    global _user_word  # see above
    _user_word = word


def seed_streams(words: Words) -> None:
    """Seed python's ``random``, numpy's legacy global stream and torch's CPU stream; about 10 us."""
    random.seed(words.python)
    np.random.seed(words.numpy & _MASK32)
    # torch.manual_seed would also reseed every accelerator, at 200 times the cost
    torch.default_generator.manual_seed(words.torch)


#: numpy's global RandomState; its functions in ``np.random`` are bound methods.
_GLOBAL: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method has one
_CHEAP = np.random.SFC64(0)  # a state of four words


def has_cached_gaussian() -> bool:
    """Whether numpy's global stream holds the second half of a legacy Gaussian pair.

    Only ``get_state`` tells, and spends 40 us on copying 624 words. Here it is shown a bit generator with a small
    state for the moment: the attribute is numpy's own but no public way to it exists, so this one adapter
    holds it, and a test compares it with ``get_state``.
    """
    bits = _GLOBAL._bit_generator
    _GLOBAL._bit_generator = _CHEAP
    try:
        state: Any = _GLOBAL.get_state(legacy=False)
    finally:
        _GLOBAL._bit_generator = bits
    return bool(state["has_gauss"])


class StreamsAside:
    """Set this process's global streams aside, and put them back whatever happens in between.

    Inside, numpy's global functions draw from a private MT19937, which costs 1 us where saving and setting
    the real one costs 100. torch runs on one thread inside, as it does in DataLoader workers: the last bit of
    a reduction depends on the number of threads.
    """

    def __init__(self) -> None:
        self._private = np.random.MT19937(0)
        self._python = PythonStream()

    def around(self, function: Callable[[_A], _R], argument: _A) -> _R:
        """Call ``function(argument)`` with the streams aside."""
        global _user_word  # see set_user_word; an assignment, unlike a call, gives no signal handler its moment
        python = self._python.save()
        # swapping the bit generator drops a cached legacy Gaussian
        legacy: Any = np.random.get_state(legacy=False) if has_cached_gaussian() else None
        bits = get_bit_generator()
        torch_state = torch.default_generator.get_state()
        threads = torch.get_num_threads()
        word = _user_word
        try:
            set_bit_generator(self._private)
            if threads != 1:
                torch.set_num_threads(1)
            return function(argument)
        finally:
            _user_word = word
            # one by one: a signal handler that raises after one of them must not keep the rest from running
            try:
                set_bit_generator(bits)
            finally:
                try:
                    if legacy is not None:
                        np.random.set_state(legacy)
                finally:
                    try:
                        torch.default_generator.set_state(torch_state)
                    finally:
                        try:
                            self._python.restore(python)
                        except BaseException:
                            self._python.restore(
                                python
                            )  # unlike the others it is Python code: raised inside it
                            raise
                        finally:
                            if threads != 1:
                                torch.set_num_threads(threads)


class StreamStates(NamedTuple):
    """The three global streams of a process at one moment."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> StreamStates:
        """As they stand."""
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state())

    def equals(self, other: StreamStates) -> bool:
        """Whether all three stand where the others do."""
        mine, theirs = dict(self.numpy), dict(other.numpy)
        same = all(np.array_equal(mine["state"][key], theirs["state"][key]) for key in mine["state"])
        same = same and (mine["has_gauss"], mine["gauss"]) == (theirs["has_gauss"], theirs["gauss"])
        return same and self.python == other.python and torch.equal(self.torch, other.torch)

    def put_back(self) -> None:
        """Set all three."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Let the inside draw from this process's own global streams, and take the draws back afterwards."""
    global _user_word  # see set_user_word
    kept, word = StreamStates.now(), _user_word
    try:
        yield
    finally:
        _user_word = word
        kept.put_back()


class OwnStreams:
    """Global streams of somebody's own: inside ``around`` they stand where the last call left them.

    Args:
        words: What the streams are seeded from before the first call.
        states: Where they stand instead, for somebody who is resumed.
        tracked: Whether ``states`` and ``moved`` are kept, at 0.1 ms a call.
    """

    def __init__(self, words: Words, states: StreamStates | None = None, *, tracked: bool = False) -> None:
        self.states = states
        self.moved = states is not None  # whether anything was drawn since the seeding
        self._words = words
        self._tracked = tracked
        self._aside = StreamsAside()  # its private bit generator keeps numpy's stream between calls
        self._left: tuple[Any, torch.Tensor, Any] | None = (
            None  # python, torch, numpy if a Gaussian is cached
        )

    def around(self, function: Callable[[_A], _R], argument: _A) -> _R:
        """Call ``function(argument)`` on the own streams; the process's are as they were afterwards."""
        return self._aside.around(lambda _: self._inside(function, argument), None)

    def _inside(self, function: Callable[[_A], _R], argument: _A) -> _R:
        self._enter()
        before = StreamStates.now() if self._tracked else None
        result = function(argument)
        if before is not None:
            self.states = StreamStates.now()
            self.moved = self.moved or not self.states.equals(before)
        legacy = np.random.get_state(legacy=False) if has_cached_gaussian() else None
        self._left = (random.getstate(), torch.default_generator.get_state(), legacy)
        return result

    def _enter(self) -> None:
        if self._left is not None:
            python, torch_state, legacy = self._left
            random.setstate(python)
            torch.default_generator.set_state(torch_state)
            if legacy is not None:
                np.random.set_state(legacy)
        elif self.states is not None:
            self.states.put_back()
        else:
            seed_streams(self._words)


def epoch_words(seed: int, epoch: int) -> Words:
    """The words under which a dataset is told the epoch; the same in every worker and on every rank."""
    return Words(*derive(TAG_EPOCH, seed, epoch, count=4))


def order_words(seed: int, epoch: int) -> Words:
    """The words a user's sampler is read under; the same on every rank, since samplers shard by themselves."""
    return Words(*derive(TAG_ORDER, seed, epoch, count=4))


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
