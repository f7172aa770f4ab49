"""An epoch's global order: position -> index.

An ``Order`` belongs to a loader and answers for any epoch; an ``EpochOrder`` is one epoch of it. The two
built-in orders are functions of (n, seed, epoch) and cost no memory. Orders that come from outside are read
into an array and digested, so that a resumed run can tell whether it is given the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from resumable_data.bucketing import BatchPlanner
from resumable_data.draws import GeneratorDraws, SavedDraws
from resumable_data.mixture import OrderedDataset
from resumable_data.permutation import Permutation

Indices = npt.NDArray[np.int64]


class EpochOrder(Protocol):
    """One epoch's order."""

    def take(self, first: int, count: int, stride: int) -> Indices:
        """What stands at positions first, first + stride, ...; positions past the end repeat the start.

        Args:
            first: First position, >= 0.
            count: How many, >= 0. Shape of the result: (count,).
            stride: Distance between positions, >= 1.
        """
        ...


class Order:
    """What all orders share; a subclass says how an epoch is read.

    Args:
        length: Positions in an epoch's global order.
        draws: The user's generators that torch's loader would draw from in every pass, if any.
    """

    name = ""
    #: Whether any epoch can be had at any time; a stream of draws only goes forward.
    random_access = True
    #: Whether the order comes from outside and is digested.
    digested = False

    def __init__(self, length: int, draws: GeneratorDraws | None = None) -> None:
        self.length = length
        self.draws = draws
        self._digest = _RunningDigest()

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """The epoch's order; moves nothing, also not the user's generators."""
        raise NotImplementedError

    def digest(self, epoch: int, samples: int, seed: int) -> str:
        """32 hex digits that stand for the epoch's first ``samples`` indices; "" for a built-in order."""
        if not self.digested:
            return ""
        if not samples:
            return _short(self.made_of())
        return self._digest.of(lambda: self.look(epoch, seed), epoch, samples)

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """The digest that a state of this order would hold; moves nothing.

        Args:
            epoch: The saved epoch.
            samples: The saved position in it.
            seed: The seed that will hold.
            draws: The saved states of the user's generators, if there are any.
        """
        if not samples:
            return _short(self.made_of()) if self.digested else ""
        return self.digest_of(self.look(epoch, seed), samples) if self.digested else ""

    def made_of(self) -> str:
        """What an order from outside is made of: it stands for the order where no index was delivered yet."""
        return ""

    def digest_of(self, order: EpochOrder, samples: int) -> str:
        """``digest`` of an order at hand."""
        return _RunningDigest().of(lambda: order, 0, samples)

    def forget(self) -> None:
        """Begin the digest anew: the epochs now mean other orders than before (a state was loaded)."""
        self._digest = _RunningDigest()

    def told(self) -> int | None:
        """The epoch the user has announced to the sampler itself since ``announce``, if any."""
        return None

    def announce(self, epoch: int) -> None:
        """Tell the user's sampler which epoch this is."""


class Sequential(Order):
    """0, 1, 2, ..."""

    name = "sequential"

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """See the base class."""
        return _Computed(self.length, lambda positions: positions)


class Shuffled(Order):
    """``shuffled.v1``: the permutation keyed by (n, seed, epoch)."""

    name = "shuffled.v1"
    _latest: tuple[int, int, _Computed] | None = None

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """See the base class."""
        if self._latest is None or self._latest[:2] != (epoch, seed):
            permutation = Permutation(self.length, seed, epoch)
            self._latest = (epoch, seed, _Computed(self.length, permutation.take))
        return self._latest[2]


class Distributed(Order):
    """A ``torch.utils.data.DistributedSampler``'s own order, bit for bit; dealing it out is the plan's.

    Args:
        sampler: The user's; its epoch is set for the user and otherwise left alone.
    """

    name = "distributed"
    digested = True

    def __init__(self, sampler: DistributedSampler[int], draws: GeneratorDraws | None = None) -> None:
        # torch's annotation of the attribute is Dataset; the sampler itself only ever takes its length
        super().__init__(len(sampler.dataset), draws)  # type: ignore[arg-type]  # see the line above
        self._sampler = sampler
        self._announced = 0  # so that an epoch the user set before building the loader is found
        self._latest: tuple[int, Stored] | None = None

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """See the base class. Costs one ``randperm`` of the dataset's size the first time in an epoch."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, Stored(self._read(epoch)))
        return self._latest[1]

    def _read(self, epoch: int) -> Indices:
        theirs = self._sampler
        # one replica of one: torch's own code, without its padding and its dealing out
        whole: DistributedSampler[int] = DistributedSampler(
            range(self.length),  # type: ignore[arg-type]  # anything with a length serves
            num_replicas=1,
            rank=0,
            shuffle=theirs.shuffle,
            seed=theirs.seed,
        )
        whole.set_epoch(epoch)
        return np.fromiter(whole, dtype=np.int64, count=self.length)

    def made_of(self) -> str:
        """See the base class."""
        return f"{self.length} {self._sampler.shuffle} {self._sampler.seed}"

    def told(self) -> int | None:
        """See the base class."""
        return None if self._sampler.epoch == self._announced else self._sampler.epoch

    def announce(self, epoch: int) -> None:
        """See the base class."""
        self._sampler.set_epoch(epoch)
        self._announced = epoch


class Generated(Order):
    """torch's own stream of draws: a ``RandomSampler`` over a generator of the user's."""

    name = "generator"
    random_access = False
    digested = True

    def __init__(self, draws: GeneratorDraws) -> None:
        super().__init__(draws.length, draws)
        self._own = draws

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """See the base class."""
        return Stored(self._own.order(epoch))

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """See the base class."""
        if draws is None or not samples:
            return super().digest_saved(epoch, samples, seed, draws)
        return self.digest_of(Stored(self._own.order_of(draws)), samples)

    def made_of(self) -> str:
        """See the base class."""
        return self._own.made_of()


class Ordered(Order):
    """The order that a dataset brings with it, a function of (seed, epoch, position): a mixture's.

    Args:
        dataset: The dataset; its fingerprint stands for the order, so no index need be computed to compare.
    """

    name = "sampler"
    digested = True

    def __init__(self, dataset: OrderedDataset, draws: GeneratorDraws | None = None) -> None:
        super().__init__(len(dataset), draws)
        self._dataset = dataset

    def look(self, epoch: int, seed: int) -> EpochOrder:
        """See the base class."""
        return _Computed(self.length, lambda positions: self._dataset.indices_at(seed, epoch, positions))

    def digest(self, epoch: int, samples: int, seed: int) -> str:
        """See the base class."""
        return fingerprint_digest(self._dataset)

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """See the base class."""
        return fingerprint_digest(self._dataset)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint_digest(planner: OrderedDataset | BatchPlanner) -> str:
    """32 hex digits that stand for a rule and all it depends on besides seed and epoch."""
    own_seed = getattr(planner, "seed", None)  # which goes before the run's
    text = f"{planner.order_name} {planner.fingerprint} {own_seed}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Computed:
    """An order that is a function of the position."""

    def __init__(self, length: int, function: Callable[[Indices], Indices]) -> None:
        self._length = length
        self._function = function

    def take(self, first: int, count: int, stride: int) -> Indices:
        positions = np.arange(first, first + count * stride, stride, dtype=np.int64)
        if count and first + (count - 1) * stride >= self._length:
            positions %= self._length
        return self._function(positions)


class Stored:
    """An order that was read into an array."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices

    def take(self, first: int, count: int, stride: int) -> Indices:
        """See ``EpochOrder``."""
        last = first + (count - 1) * stride
        if count and last >= len(self._indices):
            return np.take(self._indices, np.arange(first, last + 1, stride), mode="wrap")
        return self._indices[first : last + 1 : stride] if count else self._indices[:0]


class _RunningDigest:
    """SHA-256 over little-endian int64 indices, extended as the epoch goes on rather than begun anew."""

    def __init__(self) -> None:
        self._at: tuple[int, int] = (-1, 0)
        self._hash = hashlib.sha256()

    def of(self, order: Callable[[], EpochOrder], epoch: int, samples: int) -> str:
        if self._at[0] != epoch or self._at[1] > samples:
            self._at, self._hash = (epoch, 0), hashlib.sha256()
        if self._at[1] < samples:
            fresh = order().take(self._at[1], samples - self._at[1], 1)
            self._hash.update(np.ascontiguousarray(fresh, dtype="<i8").tobytes())
            self._at = (epoch, samples)
        return self._hash.hexdigest()[:32]
