"""What a loader asks of the source of its order, whatever that is; ``dealers`` has the sources."""

from __future__ import annotations

from typing import Protocol

from resumable_data.cursor import Place
from resumable_data.deals import Deal
from resumable_data.draws import GeneratorDraws, SavedDraws


class Dealer(Protocol):
    """What a loader asks of the source of its order."""

    name: str
    #: Whether any epoch and batch can be had at any time.
    random_access: bool
    #: Whether a state of another topology can be continued.
    elastic: bool
    #: Whether the digest of the order can be compared without reading the user's sampler.
    comparable: bool
    draws: GeneratorDraws | None

    def deal(self, epoch: int, start: tuple[int, int] = (0, 0)) -> Deal:
        """An epoch, or what is left of it after (samples, batches) under another topology."""
        ...

    def deal_at(self, place: Place, start: tuple[int, int], seed: int, *, trusted: bool) -> Deal:
        """An epoch that is continued at a place.

        Args:
            place: Where.
            start: (samples, batches) of the epoch that were delivered under another topology.
            seed: What will be the run's seed, but need not be yet.
            trusted: Whether the order is taken for the saved one without a comparison.
        """
        ...

    def prepare(self, epoch: int) -> None:
        """A pass over the epoch begins: make the epoch's draws, tell the user's sampler."""
        ...

    def announce(self, epoch: int) -> None:
        """Tell the user's sampler which epoch this is."""
        ...

    def told(self) -> int | None:
        """The epoch the user has announced to the sampler itself, if it differs from ours."""
        ...

    def leave(self) -> None:
        """The epoch that was prepared last is over."""
        ...

    def restore(self, saved: SavedDraws | None) -> None:
        """A state is loaded: put the user's generators back, and forget what was known of other orders."""
        ...

    def digest(self, place: Place) -> str:
        """What stands for the indices before a place; "" for the built-in orders."""
        ...

    def digest_saved(self, epoch: int, samples: int, seed: int, draws: SavedDraws | None) -> str:
        """The digest that a state saved there must hold; asked only where ``comparable``."""
        ...

    def sampler_state(self, place: Place) -> str | None:
        """The sampler's own state at a place, as text; None where it has none."""
        ...


def restore_draws(draws: GeneratorDraws | None, saved: SavedDraws | None) -> None:
    """Put a loader's generators where a saved state has them; None: no epoch is open."""
    if draws is not None:
        draws.forget()
        if saved is not None:
            draws.restore(saved)
