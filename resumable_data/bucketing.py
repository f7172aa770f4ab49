"""Batches of samples of similar length, planned for a whole epoch at once.

The order ``buckets.v1``: samples of similar length share a bucket, ``shuffled.v1`` decides who meets whom
inside it, the samples are cut into batches from the longest bucket to the shortest, and ``shuffled.v1``
decides the order of the batches. Where the cuts fall depends on the lengths alone, so every epoch has the
same number of batches; who is in them depends on (lengths, seed, epoch) alone, so any batch of any epoch can
be had by its number. Golden vectors freeze the order: a change is a new order name, never an edit.

Cutting a sorted list by a budget of padded tokens is fairseq's ``batch_by_size`` (Ott and others, "fairseq: A
fast, extensible toolkit for sequence modeling", NAACL 2019); fixing the cuts per bucket instead of per
sample is what makes them the same in every epoch.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from resumable_data.permutation import Permutation, integer, plain_integer
from resumable_data.sampling import MAX_WORD, ArrayPlan, SeededByEpoch, integers
from resumable_data.splitmix import derive

Indices = npt.NDArray[np.int64]

_TAG = 0x4255434B  # "BUCK": the keys of an epoch's two permutations
_MAX_LENGTH = 2**48


class BatchPlan(Protocol):
    """The batches of one epoch, any of them by its number."""

    @property
    def sizes(self) -> Indices:
        """Samples in each batch: int64, shape (number of batches,), each >= 1."""
        ...

    def __len__(self) -> int:
        """How many batches the epoch has."""
        ...

    def batch(self, number: int) -> Indices:
        """The keys of the dataset in this batch: int64, shape (sizes[number],); O(1) in the number."""
        ...


@runtime_checkable
class BatchPlanner(Protocol):
    """A batch sampler whose epochs are functions of (seed, epoch), so that any can be had at any time.

    A class of a user's that has these members is treated like ``BucketBatchSampler``.
    """

    @property
    def order_name(self) -> str:
        """The name of the rule, with its version; another rule must have another name."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the plans depend on besides seed and epoch, as a short text that differs where that does."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed the user fixed, in [0, 2**64), or None where the caller's is to be used."""
        ...

    def plan(self, seed: int, epoch: int) -> BatchPlan:
        """The batches of an epoch, over all replicas; equal arguments give equal plans, in any process."""
        ...


class BucketBatchSampler(SeededByEpoch, Sampler[list[int]]):
    """Batches of similar length, under a budget of padded tokens, a number of samples, or both.

    Every sample is in exactly one batch of an epoch (``drop_last`` apart). In every batch, longest length
    times number of samples is at most ``max_tokens``. A batch holds samples of one bucket; where a bucket
    runs out inside a batch, the batch is filled up from the next shorter ones, so that at most one batch of
    an epoch is incomplete. Pass it as ``batch_sampler=``; ``set_epoch`` chooses the epoch that ``iter()``
    reads. It knows nothing of ranks: a plan holds the batches of all replicas.

    Args:
        lengths: The length of each sample, in tokens, frames or whatever is padded: integers, shape (n,),
            each in [0, 2**48]. Copied. A length of 0 counts as 1.
        max_tokens: Most padded tokens in a batch, >= 1; None for no such budget.
        batch_size: Most samples in a batch, >= 1; None for no such limit. One of the two must be given.
        max_padding: How similar the lengths of a bucket are: each is at least ``1 - max_padding`` times the
            longest, so that padding is at most this share of a batch that lies in one bucket. In [0, 1]; 0
            puts only equal lengths together, 1 puts everything together. Wider buckets mix more samples.
            Read as the decimal number that it prints as.
        shuffle: Whether membership and order of the batches change with the epoch. Otherwise every epoch has
            the same batches, the longest bucket first.
        drop_last: Drop the one batch that may be incomplete: fewer samples than the budget allows for the
            longest of its bucket. It is the last one cut, hence of the shortest samples; with ``shuffle``
            others are dropped in each epoch.
        too_long: What becomes of a sample longer than ``max_tokens``: "raise" a ValueError here, or give it a
            batch "alone", above the budget.
        seed: The run's constant, 0 <= seed < 2**64, the same on every rank; only ``iter()`` uses it. None:
            ``torch.initial_seed()`` as it stands at the first ``iter()``, frozen from then on.

    Attributes:
        order_name: "buckets.v1".
        fingerprint: 32 hex digits over the buckets of all samples, the cuts and ``shuffle``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or a sample is too long.
    """

    order_name = "buckets.v1"
    fingerprint: str

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        max_padding: float = 0.1,
        shuffle: bool = True,
        drop_last: bool = False,
        too_long: Literal["raise", "alone"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        budget = None if max_tokens is None else _positive("max_tokens", max_tokens)
        most = None if batch_size is None else _positive("batch_size", batch_size)
        if budget is None and most is None:
            raise ValueError("max_tokens and batch_size are both None; give at least one of them")
        if too_long not in ("raise", "alone"):
            raise ValueError(f"too_long must be 'raise' or 'alone', found {too_long!r}")
        counted = _lengths(lengths)
        if budget is not None and too_long == "raise":
            _refuse_longer(counted, budget)
        self._shuffle = _flag("shuffle", shuffle)
        self._buckets, longest, counts = _bucket(counted, _share(max_padding), budget)
        limits = [_limit(length, budget, most) for length in longest]
        self._cuts = _cut(counts, limits, _flag("drop_last", drop_last))
        self.fingerprint = self._fingerprint()
        self._latest: tuple[int, int, ArrayPlan] | None = None

    def __len__(self) -> int:
        """Batches in an epoch, over all replicas; the same in every epoch."""
        return int(self._cuts.size)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan(self.run_seed(), self.epoch)
        return (plan.batch(number).tolist() for number in range(len(plan)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}  # a plan is made anew faster than it is sent

    def plan(self, seed: int, epoch: int) -> ArrayPlan:
        """The batches of an epoch, over all replicas: a function of the constructor's arguments and of these.

        The latest plan is kept, so that asking again is free. Memory: 8 bytes a sample and 16 a batch.

        Args:
            seed: The run's constant, 0 <= seed < 2**64.
            epoch: 0-based, 0 <= epoch < 2**64.

        Raises:
            TypeError: An argument is not an integer (a bool is none).
            ValueError: An argument is out of range.
        """
        seed = integer("seed", seed, MAX_WORD, "2**64")
        epoch = integer("epoch", epoch, MAX_WORD, "2**64")
        latest = self._latest
        if latest is None or latest[:2] != (seed, epoch):
            self._latest = latest = (seed, epoch, self._plan(seed, epoch))
        return latest[2]

    def _plan(self, seed: int, epoch: int) -> ArrayPlan:
        if not self._shuffle:
            return ArrayPlan(_grouped(self._buckets)[: self._cuts.sum()], self._cuts)
        # Two keys: with batches of one sample both permutations are over the same range.
        samples_key, batches_key = derive(_TAG, seed, count=2)
        order = _whole(self._buckets.size, samples_key, epoch)
        order = order[_grouped(self._buckets[order])]
        turn = _whole(self._cuts.size, batches_key, epoch)
        sizes = self._cuts[turn]
        starts = (np.cumsum(self._cuts) - self._cuts)[turn]
        ends = np.cumsum(sizes)
        # position in the epoch -> place in the cut order, shape (samples delivered,)
        places = np.arange(sizes.sum()) + np.repeat(starts - (ends - sizes), sizes)
        return ArrayPlan(order[places], sizes)

    def _fingerprint(self) -> str:
        words = hashlib.sha256(f"{self.order_name} {self._shuffle} {self._cuts.size}".encode())
        words.update(self._cuts.astype("<i8").tobytes())
        words.update(self._buckets.astype("<u4").tobytes())
        return words.hexdigest()[:32]


def _whole(n: int, key: int, epoch: int) -> Indices:
    return Permutation(n, key, epoch).take(np.arange(n, dtype=np.int64))


def _grouped(buckets: npt.NDArray[Any]) -> Indices:
    # Stable: samples of a bucket keep their order, on every platform.
    return np.argsort(buckets, kind="stable").astype(np.int64, copy=False)


def _bucket(
    lengths: Indices, padding: Fraction, budget: int | None
) -> tuple[npt.NDArray[Any], list[int], list[int]]:
    # The bucket of each sample, 0 the longest; the longest length and the number of samples of each bucket.
    values, place, repeats = np.unique(lengths, return_inverse=True, return_counts=True)
    begins = _begins(values.tolist(), padding, budget)
    ends = [values.size, *begins[:-1]][: len(begins)]
    widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    dtype = np.uint16 if len(begins) < 2**16 else np.uint32  # 16 bits are sorted by radix, six times as fast
    of_value = np.repeat(np.arange(len(begins), dtype=dtype)[::-1], widths[::-1])
    upto = [0, *np.cumsum(repeats).tolist()]
    counts = [upto[end] - upto[begin] for begin, end in zip(begins, ends, strict=True)]
    return of_value[place], [int(values[end - 1]) for end in ends], counts


def _begins(values: list[int], padding: Fraction, budget: int | None) -> list[int]:
    # Where each bucket begins among the ascending distinct lengths, the longest bucket first.
    keep = 1 - padding
    begins: list[int] = []
    end = len(values)
    while end:
        longest = values[end - 1]
        least = math.ceil(longest * keep)
        if budget is not None and longest > budget:
            least = max(least, budget + 1)  # what fits is never bucketed with what does not
        end = bisect_left(values, least, 0, end)
        begins.append(end)
    return begins


def _limit(longest: int, budget: int | None, most: int | None) -> int:
    # Samples in a batch whose longest is this long; at least the one that may be longer than the budget.
    by_tokens = None if budget is None else max(1, budget // longest)
    return min(limit for limit in (by_tokens, most) if limit is not None)


def _cut(counts: Sequence[int], limits: Sequence[int], drop_last: bool) -> Indices:
    # Sizes of the batches, the longest first; a batch takes the limit of the bucket that it begins in.
    begin = end = 0
    numbers = []
    for count, limit in zip(counts, limits, strict=True):
        end += count
        numbers.append(max(0, -(-(end - begin) // limit)))
        begin += numbers[-1] * limit
    # No batch has more samples than there are: the limit itself may be beyond int64.
    fitting = np.array([min(limit, end) for limit in limits], np.int64)
    sizes = np.repeat(fitting, np.array(numbers, np.int64))
    if begin == end:
        return sizes
    if drop_last:
        return sizes[:-1]
    sizes[-1] = end - int(sizes[:-1].sum())
    return sizes


def _lengths(lengths: npt.ArrayLike) -> Indices:
    # int64, shape (n,), each >= 1
    array = integers("lengths", lengths)
    for bad in np.flatnonzero((array < 0) | (array > _MAX_LENGTH))[:1].tolist():
        raise ValueError(f"lengths must be in [0, 2**48], found {array[bad]} at index {bad}")
    return np.maximum(array, 1)


def _refuse_longer(lengths: Indices, budget: int) -> None:
    longer = np.flatnonzero(lengths > budget)
    if longer.size:
        raise ValueError(
            f"lengths must be at most max_tokens={budget}, found {longer.size} that are longer, the first at "
            f"index {longer[0]} with {lengths[longer[0]]}; raise max_tokens, leave these samples out, or "
            "give each a batch of its own with too_long='alone'"
        )


def _positive(name: str, value: Any) -> int:
    number = plain_integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, found {number}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, found {value!r} of type {type(value).__name__}")
    return bool(value)


def _share(max_padding: Any) -> Fraction:
    if isinstance(max_padding, bool) or not isinstance(max_padding, int | float | np.floating):
        raise TypeError(
            f"max_padding must be a number, found {max_padding!r} of type {type(max_padding).__name__}"
        )
    if not 0 <= max_padding <= 1:  # false for NaN too
        raise ValueError(f"max_padding must be in [0, 1], found {max_padding}")
    # As written: with the binary 0.3, a length of 7 would be less than 0.7 of 10.
    return Fraction(repr(float(max_padding)))
