"""Which positions of an epoch's global order a rank's batches hold. Pure integers.

Rank r of W takes positions r, r + W, r + 2W, ..., ``batch_size`` at a time, so that the t-th batches of all
ranks together are one contiguous block of W * batch_size positions: a position is a number, whatever W is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of one epoch on one rank.

    Args:
        length: Positions in the epoch's global order, >= 0.
        real: How many of them are dataset positions; the rest are repeats that a sampler put there to pad.
        batch_size: Samples in a batch of one rank, >= 1.
        num_replicas: Ranks the order is dealt over (W), >= 1.
        rank: This rank, in [0, num_replicas).
        drop_last: Drop the positions that do not fill a global batch; otherwise positions beyond
            ``length`` repeat the epoch's start so that all ranks end together.
    """

    length: int
    real: int
    batch_size: int
    num_replicas: int
    rank: int
    drop_last: bool

    @property
    def block(self) -> int:
        """Positions in a global batch: the t-th batches of all ranks together."""
        return self.num_replicas * self.batch_size

    @property
    def samples(self) -> int:
        """Samples this rank delivers in an epoch, repeats included; the same on every rank."""
        if self.drop_last:
            return self.length // self.block * self.batch_size
        return -(-self.length // self.num_replicas)

    @property
    def batches(self) -> int:
        """Batches this rank delivers in an epoch; the same on every rank."""
        return -(-self.samples // self.batch_size)

    def first(self, batch: int) -> int:
        """Position of the first sample of this rank's batch; the next ones are ``num_replicas`` apart."""
        return batch * self.block + self.rank

    def count(self, batch: int) -> int:
        """Samples in this rank's batch: ``batch_size``, or fewer in the last one."""
        return min(self.batch_size, self.samples - batch * self.batch_size)

    def samples_at(self, batch: int) -> int:
        """Dataset positions delivered over all ranks once each has delivered ``batch`` batches."""
        return min(self.real, batch * self.block)
