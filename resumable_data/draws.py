"""The draws that torch's DataLoader makes from a user's generator, made once an epoch and resumable.

A DataLoader over ``RandomSampler(generator=g)`` draws three times a pass: a base seed for its workers (from
the loader's own ``generator=``), the order, and, when the pass is exhausted, the remainder of an order that
is never used. The draws of an open epoch are remembered together with the generators' states before them and
as they stand now: the states before give the order again, the states now keep what the user has drawn since.
Source of the protocol: torch, ``torch/utils/data/dataloader.py`` and ``torch/utils/data/sampler.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from resumable_data.errors import StateError
from resumable_data.seeding import draw_base_seed

#: torch's samplers that draw all they need when they are begun, from a generator they carry.
TORCH_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class GeneratorDraws:
    """One loader's draws from the user's generators.

    Args:
        generator: The loader's ``generator=``, from which torch draws base seeds; may be None.
        sampler: One of ``TORCH_SAMPLERS`` with a generator, from which the order comes; may be None.
    """

    def __init__(self, generator: torch.Generator | None, sampler: Any) -> None:
        self._base = generator
        self._sampler = sampler
        found = [generator, sampler.generator if sampler is not None else None]
        self._generators: list[torch.Generator] = []
        for item in found:
            if item is not None and all(item is not known for known in self._generators):
                self._generators.append(item)
        self._before: list[torch.Tensor] | None = None  # as they were before the open epoch's draws
        self._order: npt.NDArray[np.int64] | None = None
        self._rest: Iterator[int] = iter(())
        self._epoch = 0  # the open one's number
        self._left: _Left | None = None

    @property
    def length(self) -> int:
        """Samples the sampler gives in a pass."""
        return len(self._sampler) if self._sampler is not None else 0

    def made_of(self) -> str:
        """The sampler's class and parameters, as text that differs where its orders do."""
        sampler = self._sampler
        parts = [type(sampler).__name__, self.length]
        parts += [getattr(sampler, name, None) for name in ("replacement", "num_samples")]
        for name in ("weights", "indices"):
            values = getattr(sampler, name, None)
            if values is not None:
                data = np.ascontiguousarray(values).tobytes()
                parts.append(hashlib.sha256(data).hexdigest())
        return repr(parts)

    def open(self, epoch: int) -> None:
        """Make the epoch's draws, unless they were made: looking twice draws once."""
        self._epoch = epoch
        if self._before is None:
            self._before = self._states()
            self._draw()
        elif self._order is None:  # a loaded epoch: the draws were made in another process
            now = self._states()
            try:
                self._set(self._before)
                self._draw()
            finally:
                self._set(now)

    def close(self) -> None:
        """The epoch is over: the third draw is made, and the next epoch will draw anew."""
        if self._before is None:
            return
        self.open(self._epoch)
        self._left = _Left(self._epoch, self._before, self._states(), self.order())
        next(self._rest, None)
        self._leave()

    def forget(self) -> None:
        """No epoch is open, and none was."""
        self._left = None
        self._leave()

    def _leave(self) -> None:
        self._before, self._order, self._rest = None, None, iter(())

    def order(self, epoch: int | None = None) -> npt.NDArray[np.int64]:
        """The open epoch's order, or the one that opening it now would give; moves no generator.

        Args:
            epoch: The number of the epoch that was left last asks for that one's.
        """
        if self._left is not None and epoch == self._left.epoch:
            return self._left.order
        if self._order is not None:
            return self._order
        now = self._states()
        try:
            self._set(self._before if self._before is not None else now)
            if self._base is not None:
                draw_base_seed(self._base)
            return self._read(iter(self._sampler)) if self._sampler is not None else np.empty(0, np.int64)
        finally:
            self._set(now)

    def worker_generator(self) -> torch.Generator | None:
        """A copy of the loader's generator as it was before the epoch's draws: torch draws its base seed."""
        if self._base is None or self._before is None:
            return None
        copy = torch.Generator(self._base.device)
        copy.set_state(self._before[0])
        return copy

    def capture(self, epoch: int) -> str:
        """JSON text: the states now, and before the open epoch's draws (null where none is open).

        Args:
            epoch: The number of the epoch that was left last asks for its states just before it was left.
        """
        before, now = self._before, self._states()
        if self._left is not None and epoch == self._left.epoch:
            before, now = self._left.before, self._left.now
        elif self._left is not None and epoch < self._left.epoch:
            raise ValueError(
                f"in_flight goes back to epoch {epoch}, but a generator's draws are remembered to epoch "
                f"{self._left.epoch} only: read less far ahead, or use seed= instead of generator="
            )
        packed = None if before is None else [_encode(state) for state in before]
        return json.dumps({"before": packed, "now": [_encode(state) for state in now]})

    def check(self, text: str | None) -> SavedDraws:
        """Read what ``capture`` wrote, against these generators; changes nothing.

        Raises:
            StateError: Not such a text, another number of generators, or a state they do not accept.
        """
        try:
            read: Any = json.loads(text or "null")
            saved = SavedDraws(
                None if read["before"] is None else [_decode(item) for item in read["before"]],
                [_decode(item) for item in read["now"]],
            )
            for states in (saved.before or saved.now, saved.now):
                self._try(states)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise StateError(
                f"state['generator'] cannot be restored: {error}; pass the generators the run was saved with",
                expected=f"the states of {len(self._generators)} generator(s)",
                found=text if text is None else text[:80],
            ) from error
        return saved

    def _try(self, states: list[torch.Tensor]) -> None:
        if len(states) != len(self._generators):
            raise ValueError(f"{len(states)} saved, {len(self._generators)} here")
        for generator, state in zip(self._generators, states, strict=True):
            torch.Generator(generator.device).set_state(state)

    def restore(self, saved: SavedDraws) -> None:
        """Put the generators and the open epoch back as they were saved."""
        self.forget()
        self._before = saved.before
        self._set(saved.now)

    def order_of(self, saved: SavedDraws) -> npt.NDArray[np.int64]:
        """The order a saved epoch has under this sampler; moves nothing."""
        other = GeneratorDraws(self._base, self._sampler)
        now = self._states()
        try:
            other.restore(saved)
            return other.order()
        finally:
            self._set(now)

    def _draw(self) -> None:
        if self._base is not None:
            draw_base_seed(self._base)
        if self._sampler is not None:
            self._rest = iter(self._sampler)
            self._order = self._read(self._rest)
        else:
            self._order = np.empty(0, np.int64)

    def _read(self, indices: Iterator[int]) -> npt.NDArray[np.int64]:
        # exactly as many as a pass hands out: the draw torch makes when asked for one more is close()'s
        return np.fromiter(islice(indices, self.length), dtype=np.int64, count=self.length)

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Left(NamedTuple):
    """The epoch that was left last, as it was just before: a state may be asked for from some batches ago."""

    epoch: int
    before: list[torch.Tensor]
    now: list[torch.Tensor]
    order: npt.NDArray[np.int64]


class SavedDraws:
    """Generator states read from a loader state: now, and before the open epoch's draws (None: none open)."""

    def __init__(self, before: list[torch.Tensor] | None, now: list[torch.Tensor]) -> None:
        self.before = before
        self.now = now


def _encode(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
