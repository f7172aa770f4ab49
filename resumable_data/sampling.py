"""What the samplers of this package share: a seed and an epoch, and an epoch's batches held in arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from resumable_data.permutation import integer, plain_integer

Indices = npt.NDArray[np.int64]

# Seeds and epochs are 64-bit words.
MAX_WORD = 2**64


class ArrayPlan:
    """A ``BatchPlan`` held in two arrays: batch i is the next ``sizes[i]`` of ``indices``.

    Args:
        indices: The epoch's samples in the order of delivery: integers, shape (samples,).
        sizes: Samples in each batch: integers, shape (batches,), each >= 1, together ``len(indices)``.

    Attributes:
        indices: As given, int64, read-only.
        sizes: As given, int64, read-only.
        offsets: int64, shape (batches + 1,), read-only: samples delivered before each batch; the last entry
            is the number of samples.

    Raises:
        TypeError: An array does not hold integers.
        ValueError: An array is not one-dimensional, a size is below 1, or the sizes do not add up.
    """

    indices: Indices
    sizes: Indices
    offsets: Indices

    def __init__(self, indices: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        self.indices = integers("indices", indices)
        self.sizes = integers("sizes", sizes)
        if self.sizes.size and self.sizes.min() < 1:
            raise ValueError(
                f"sizes must be at least 1, found {self.sizes.min()} for batch {self.sizes.argmin()}; "
                "leave empty batches out"
            )
        self.offsets = np.zeros(self.sizes.size + 1, np.int64)
        np.cumsum(self.sizes, out=self.offsets[1:])
        if self.offsets[-1] != self.indices.size:
            raise ValueError(
                f"sizes must add up to the number of indices, {self.indices.size}, found {self.offsets[-1]}"
            )
        for array in (self.indices, self.sizes, self.offsets):
            array.flags.writeable = False

    def __len__(self) -> int:
        return int(self.sizes.size)

    def batch(self, number: int) -> Indices:
        """The samples of batch ``number``, in [0, len): int64, shape (sizes[number],), a new array.

        Raises:
            IndexError: There is no such batch.
            TypeError: ``number`` is not an integer (a bool is none).
        """
        at = plain_integer("number", number)
        if not 0 <= at < len(self):
            raise IndexError(f"number must be in [0, {len(self)}), found {at}; that is all the epoch has")
        return self.indices[self.offsets[at] : self.offsets[at + 1]].copy()


class SeededByEpoch:
    """Seed and epoch of a sampler that torch's own ``DataLoader`` iterates.

    Args:
        seed: The run's constant, 0 <= seed < 2**64. None: ``torch.initial_seed()`` as it stands when the
            sampler is first iterated, frozen from then on; nothing is drawn.

    Attributes:
        seed: As given; an adopted seed leaves it None.
        epoch: The epoch that the next ``iter()`` reads, 0-based.
    """

    seed: int | None
    epoch: int

    def __init__(self, seed: int | None) -> None:
        self.seed = None if seed is None else integer("seed", seed, MAX_WORD, "2**64")
        self.epoch = 0
        self._adopted: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` reads this epoch; without a call every pass reads the same one.

        Args:
            epoch: 0-based, 0 <= epoch < 2**64.

        Raises:
            TypeError: ``epoch`` is not an integer (a bool is none).
            ValueError: ``epoch`` is out of range.
        """
        self.epoch = integer("epoch", epoch, MAX_WORD, "2**64")

    def run_seed(self) -> int:
        """The seed of this run: the one that was given, or else the adopted one."""
        if self.seed is not None:
            return self.seed
        if self._adopted is None:
            self._adopted = torch.initial_seed()
        return self._adopted


def integers(name: str, values: npt.ArrayLike) -> Indices:
    """A copy of ``values`` as int64, one-dimensional; no other number is taken for an integer.

    Raises:
        TypeError: The values are no integers.
        ValueError: There is another number of dimensions, or a value is 2**63 or more.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, found shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, found an array of {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name} must be below 2**63, found {array.max()} at index {array.argmax()}")
    return array.astype(np.int64)  # a copy in any case
