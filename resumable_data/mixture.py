"""Several map-style datasets read as one, each as often as its weight says.

The order ``mixture.v1``. Positions come in blocks. How often each source stands in the blocks up to any block
is the rounded share of its weight, so no proportion ever drifts; where in a block it stands is decided by
sorting derived words. The j-th visit of a source of n samples in an epoch takes position j % n of the pass
j // n of the source, each pass a ``shuffled.v1`` permutation of its own. So what stands at a position is a
function of (seed, epoch, position) and of the mixture alone, at a cost that does not grow with the position.
Golden vectors freeze the order: a change is a new order name, never an edit.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset, Sampler

from resumable_data.permutation import check_positions, integer, plain_integer
from resumable_data.sampling import MAX_WORD, SeededByEpoch
from resumable_data.schedule import Schedule, drawn

Indices = npt.NDArray[np.int64]
Sample_co = TypeVar("Sample_co", covariant=True)

_MAX_POSITIONS = 2**62
# Blocks that nobody chose have about this many positions; none has more than the second number.
_BLOCK = 1024
_MAX_BLOCK = 2**16
# Positions that the sampler asks for at a time.
_AHEAD = 4096


@runtime_checkable
class OrderedDataset(Protocol):
    """A map-style dataset that brings the order in which it is read, a function of (seed, epoch, position).

    A class of a user's that has these members is treated like ``Mixture``.
    """

    @property
    def order_name(self) -> str:
        """The name of the rule, with its version; another rule must have another name."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the order depends on besides seed and epoch, as a short text that differs where that does."""
        ...

    def __len__(self) -> int:
        """Positions in an epoch."""
        ...

    def __getitem__(self, key: int) -> Any:
        """The sample with this key; needs no position, seed or epoch."""
        ...

    def indices_at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        """The keys at these positions of an epoch, over all replicas; the same in any process."""
        ...


class Mixture(Dataset[Sample_co]):
    """A weighted mixture of map-style datasets, read in an order of its own.

    A key stands for one sample of one source, numbered as in ``torch.utils.data.ConcatDataset``: the samples
    of the first source, then those of the second, and so on. ``indices_at`` says which key stands at a
    position. Within a source nothing repeats before all of it was seen; a source that its weight does not
    exhaust is read in part, another part each epoch.

    Weights count samples. After any number of whole blocks, each source was visited its exact share of the
    positions to within one sample, and so it is at the end of the epoch (the last block takes in what would
    have been an incomplete one). The counts are those of the sources' running sums, rounded down.

    ``len()`` is the number of positions in an epoch, not of keys. torch's ``DataLoader(mixture,
    shuffle=True)`` would take it for the number of keys and leave the weights out: give it ``sampler()``.

    Args:
        datasets: The sources, one or more, each with ``__len__`` and ``__getitem__`` for 0 to ``len - 1``;
            the sizes are read once, here.
        weights: One for each source, >= 0, not all 0, in any unit: numbers of samples, shares, percentages.
            Floats are read as the decimal numbers that they print as. A source of weight 0 is never visited.
        length: Positions in an epoch, 0 <= length < 2**62. None: as many as the sources of positive weight
            have samples.
        block: Positions in a block, 1 <= block <= 65536, at least 1 / the smallest positive share. A larger
            one leaves the arrangement more to chance. None: about 1024, more where the smallest share needs
            it; a multiple of the weights' common sum where that is at most 1024, and then the proportions
            are exact in every block.

    Attributes:
        datasets: The sources, a list.
        block: Positions in a block.
        order_name: "mixture.v1".
        fingerprint: 32 hex digits over the sizes, the weights, the length and the block.

    Raises:
        TypeError: An argument is of another type, or a source has no length.
        ValueError: An argument is out of range, a source to be visited is empty, or its share is so small
            that it needs a larger block.
    """

    order_name = "mixture.v1"
    datasets: list[Dataset[Sample_co]]
    block: int
    fingerprint: str

    def __init__(
        self,
        datasets: Sequence[Dataset[Sample_co]],
        weights: Sequence[float | Fraction],
        *,
        length: int | None = None,
        block: int | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self._sizes = [_size(number, source) for number, source in enumerate(self.datasets)]
        whole = _whole(weights, self._sizes)
        if length is None:
            length = sum(size for size, weight in zip(self._sizes, whole, strict=True) if weight)
        length = integer("length", length, _MAX_POSITIONS, "2**62")
        self.block = _block(block, whole)
        self._schedule = Schedule(tuple(accumulate(whole)), self.block, length)
        self._ends = list(accumulate(self._sizes))
        integer("the number of samples of all datasets", self._ends[-1], _MAX_POSITIONS, "2**62")
        self._counts = np.array(self._sizes, np.int64)
        self._begins = np.array([0, *self._ends[:-1]], np.int64)
        text = f"{self.order_name} {self._sizes} {whole} {length} {self.block}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """Positions in an epoch."""
        return self._schedule.length

    def __getitem__(self, key: int) -> Sample_co:
        """The sample with this key.

        Raises:
            IndexError: ``key`` is outside [0, samples of all sources).
            TypeError: ``key`` is not an integer (a bool is none).
        """
        source, index = self.locate(key)
        return self.datasets[source][index]

    def locate(self, key: int) -> tuple[int, int]:
        """The number of the source that a key belongs to, and the index in that source.

        Raises:
            IndexError: ``key`` is outside [0, samples of all sources).
            TypeError: ``key`` is not an integer (a bool is none).
        """
        at = plain_integer("key", key)
        if not 0 <= at < self._ends[-1]:
            raise IndexError(
                f"key must be in [0, {self._ends[-1]}), found {at}; keys come from sampler() or "
                "indices_at(), they are not positions"
            )
        source = bisect_right(self._ends, at)
        return source, at - (self._ends[source - 1] if source else 0)

    def indices_at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        """The keys that stand at these positions of an epoch: a function of the mixture and of the arguments.

        Any process may ask for any positions in any order. The cost is that of the blocks they lie in.

        Args:
            seed: The run's constant, 0 <= seed < 2**64.
            epoch: 0-based, 0 <= epoch < 2**64.
            positions: int64, shape (k,) for any k >= 0, each in [0, len), repeats allowed; only read.

        Returns:
            int64, shape (k,), a new array.

        Raises:
            IndexError: A position is outside [0, len); the message names the first one.
            TypeError: ``positions`` is not an int64 array, or another argument is not an integer.
            ValueError: ``positions`` is not one-dimensional, or another argument is out of range.
        """
        seed = integer("seed", seed, MAX_WORD, "2**64")
        epoch = integer("epoch", epoch, MAX_WORD, "2**64")
        check_positions(positions)
        for bad in positions[(positions < 0) | (positions >= len(self))][:1].tolist():
            raise IndexError(f"positions must be in [0, {len(self)}), found {bad}; the epoch has no more")
        sources, visits = self._schedule.visits(seed, epoch, positions)
        return drawn(self._counts, seed, epoch, sources, visits) + self._begins[sources]

    def sampler(self, seed: int | None = None) -> MixtureSampler:
        """A sampler over the mixture for torch's own ``DataLoader``.

        Args:
            seed: See ``MixtureSampler``.
        """
        return MixtureSampler(self, seed=seed)


class MixtureSampler(SeededByEpoch, Sampler[int]):
    """The keys of an ``OrderedDataset``, position by position, for torch's own ``DataLoader``.

    ``set_epoch`` chooses the epoch that ``iter()`` reads. It knows nothing of ranks.

    Args:
        dataset: A ``Mixture``, or another dataset that brings its order.
        seed: The run's constant, 0 <= seed < 2**64. None: ``torch.initial_seed()`` as it stands at the first
            ``iter()``, frozen from then on.
    """

    def __init__(self, dataset: OrderedDataset, *, seed: int | None = None) -> None:
        super().__init__(seed)
        self._dataset = dataset

    def __len__(self) -> int:
        """Positions in an epoch."""
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return self._keys(self.run_seed(), self.epoch)

    def _keys(self, seed: int, epoch: int) -> Iterator[int]:
        length = len(self)
        for begin in range(0, length, _AHEAD):
            positions = np.arange(begin, min(begin + _AHEAD, length), dtype=np.int64)
            yield from self._dataset.indices_at(seed, epoch, positions).tolist()


def _size(number: int, source: Any) -> int:
    # A stream inherits a __getitem__ that only raises.
    indexed = hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)
    if not indexed or not hasattr(source, "__len__"):
        raise TypeError(
            f"datasets[{number}] must be a map-style dataset with __len__ and __getitem__, found "
            f"{type(source).__name__}"
        )
    return len(source)


def _whole(weights: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    # The weights in the smallest whole numbers of the same proportions.
    if len(weights) != len(sizes) or not sizes:
        raise ValueError(
            f"weights must have one entry for each of the datasets, at least one; found {len(weights)} "
            f"weights for {len(sizes)} datasets"
        )
    exact = [_weight(number, weight) for number, weight in enumerate(weights)]
    if not any(exact):
        raise ValueError(f"weights must not all be 0, found {list(weights)}")
    for number, (weight, size) in enumerate(zip(exact, sizes, strict=True)):
        if weight and not size:
            raise ValueError(
                f"datasets[{number}] is empty and has weight {weights[number]}; give it weight 0 or "
                "leave it out"
            )
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


def _weight(number: int, weight: Any) -> Fraction:
    kinds = (int, float, Fraction, np.integer, np.floating)
    if isinstance(weight, bool) or not isinstance(weight, kinds):
        kind = type(weight).__name__
        raise TypeError(f"weights[{number}] must be a number, found {weight!r} of type {kind}")
    if not 0 <= weight < math.inf:  # false for NaN too
        raise ValueError(f"weights[{number}] must be in [0, inf), found {weight}")
    # As written: 0.7, 0.2 and 0.1 are to be 7 : 2 : 1, which their binary values are not.
    if isinstance(weight, float | np.floating):
        return Fraction(repr(float(weight)))
    return Fraction(int(weight)) if isinstance(weight, np.integer) else Fraction(weight)


def _block(block: int | None, whole: Sequence[int]) -> int:
    total, least = sum(whole), min(weight for weight in whole if weight)
    needed = -(-total // least)  # so that each source has a share of at least 1 in a block
    if block is None:
        whole_blocks = total * (_BLOCK // total)  # 0 where the sum of the weights is above _BLOCK
        block = whole_blocks or max(_BLOCK, needed)
    else:
        block = plain_integer("block", block)
        if not 1 <= block <= _MAX_BLOCK:
            raise ValueError(f"block must be in [1, {_MAX_BLOCK}], found {block}")
    if needed > block or block > _MAX_BLOCK:
        smallest = list(whole).index(least)
        raise ValueError(
            f"weights[{smallest}] is 1/{needed} of all and needs a block of {needed} positions, found "
            f"{min(block, _MAX_BLOCK)}; give a larger weight or block (at most {_MAX_BLOCK}), or weight 0"
        )
    return block
