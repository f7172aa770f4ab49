"""Which positions of an epoch's global order a rank's batches hold. Pure integers.

Rank r of W takes positions r, r + W, r + 2W, ... of what is left of the epoch, ``batch_size`` at a time, so
that the t-th batches of all ranks together are one contiguous block of W * batch_size positions: a position
is a number, whatever W is, and a run may come back with another W or another batch size in mid-epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Plan:
    """The arithmetic of one epoch on one rank.

    Args:
        length: Positions in the epoch's global order, >= 0.
        batch_size: Samples in a batch of one rank, >= 1.
        num_replicas: Ranks the order is dealt over (W), >= 1.
        rank: This rank, in [0, num_replicas).
        drop_last: Drop the positions that do not fill a global batch.
        tail: What becomes of the positions that do not go round: "pad" repeats the epoch's start so that all
            ranks end together, "drop" drops fewer than W of them, "uneven" does neither.
        pads_first: torch's arithmetic for a ``DistributedSampler``: pad, then drop incomplete batches. Ours
            never keeps a repeat where ``drop_last`` drops a sample.
        start: (samples, batches) of this epoch that were delivered under another topology.
        limit: An epoch is at most this many batches; None: all.
    """

    length: int
    batch_size: int
    num_replicas: int
    rank: int
    drop_last: bool
    tail: str = "pad"
    pads_first: bool = False
    start: tuple[int, int] = (0, 0)
    limit: int | None = None

    def starting(self, start: tuple[int, int]) -> Plan:
        """The plan of an epoch of which (samples, batches) were delivered under another topology."""
        return self if start == self.start else replace(self, start=start)

    @cached_property
    def block(self) -> int:
        """Positions in a global batch: the t-th batches of all ranks together."""
        return self.num_replicas * self.batch_size

    @property
    def _rest(self) -> int:
        return self.length - self.start[0]

    @cached_property
    def samples(self) -> int:
        """Samples this rank delivers from ``start`` on, repeats included, before ``limit``."""
        width = self.num_replicas
        if self.drop_last and not self.pads_first:
            return self._rest // self.block * self.batch_size
        each = {
            "pad": -(-self._rest // width),
            "drop": self._rest // width,
            "uneven": max(0, -(-(self._rest - self.rank) // width)),
        }[self.tail]
        return each // self.batch_size * self.batch_size if self.drop_last else each

    @cached_property
    def batches(self) -> int:
        """Batches this rank delivers in the epoch, those before ``start`` included."""
        whole = self.start[1] + -(-self.samples // self.batch_size)
        return whole if self.limit is None else max(self.start[1], min(whole, self.limit))

    def first(self, batch: int) -> int:
        """Position of the first sample of this rank's batch; the next ones are ``num_replicas`` apart."""
        return self.start[0] + (batch - self.start[1]) * self.block + self.rank

    def count(self, batch: int) -> int:
        """Samples in this rank's batch: ``batch_size``, or fewer in the last one."""
        return min(self.batch_size, self.samples - (batch - self.start[1]) * self.batch_size)

    def samples_at(self, batch: int) -> int:
        """Dataset positions delivered over all ranks once each has delivered ``batch`` batches."""
        return self.start[0] + min(self._dealt, (batch - self.start[1]) * self.block)

    @cached_property
    def _dealt(self) -> int:
        if self.drop_last or self.tail == "drop":
            return min(self._rest, self.samples * self.num_replicas)
        return self._rest
