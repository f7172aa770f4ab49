"""A loader's state made and a saved one checked: everything is decided here before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from resumable_data.cursor import Place, Standing
from resumable_data.dealing import Dealer
from resumable_data.deals import Deal
from resumable_data.draws import SavedDraws
from resumable_data.errors import StateError
from resumable_data.options import Options
from resumable_data.sampled import Mark, decode_mark
from resumable_data.state import COMPARED, SCHEMA, LoaderState, check_override, differences, mismatch


@dataclass(frozen=True)
class Identity:
    """What one loader is, as far as its state tells: the parts that do not move with the position."""

    dealer: Dealer
    options: Options
    dataset_size: int | None
    batch_size: int | None
    num_replicas: int
    drop_last: bool
    tail: str

    def compared(self, seed: int | None) -> dict[str, Any]:
        """The fields a saved state must share. A seed of None was adopted and matches any."""
        fields: dict[str, Any] = {
            "dataset_size": self.dataset_size,
            "dataset_id": self.options.dataset_id,
            "order": self.dealer.name,
            "drop_last": self.drop_last,
            "tail": self.tail,
            "batches_per_epoch": self.options.batches_per_epoch,
            "seeding": self.options.seeding,
        }
        if seed is not None:
            fields["seed"] = seed
        return fields

    @property
    def topology(self) -> dict[str, int | None]:
        """What a state may differ in where the order is global."""
        return {"batch_size": self.batch_size, "num_replicas": self.num_replicas}


def make_state(identity: Identity, place: Place, skipped: tuple[int, ...], seed: int) -> LoaderState:
    """The state of a loader at one of its places.

    Args:
        identity: What the loader is.
        place: Where it stands, or stood.
        skipped: What was passed over by seeking.
        seed: The run's seed.
    """
    dealer = identity.dealer
    return LoaderState(
        schema=SCHEMA,
        epoch=place.epoch,
        batch_in_epoch=place.batch,
        samples_in_epoch=place.samples,
        consumed_samples=place.consumed,
        segment=place.start,
        skipped=skipped,
        order=dealer.name,
        order_digest=dealer.digest(place),
        torch_version=str(torch.__version__),
        seed=seed,
        dataset_size=identity.dataset_size,
        dataset_id=identity.options.dataset_id,
        batch_size=identity.batch_size,
        num_replicas=identity.num_replicas,
        drop_last=identity.drop_last,
        tail=identity.tail,
        batches_per_epoch=identity.options.batches_per_epoch,
        seeding=identity.options.seeding,
        delivered_ahead=place.ahead,
        generator=dealer.draws.capture(place.epoch) if dealer.draws is not None else None,
        sampler=dealer.sampler_state(place),
        stream=None,
    )


@dataclass(frozen=True)
class Accepted:
    """A saved state that may be loaded, and what of it has to be set."""

    saved: LoaderState
    seed: int
    draws: SavedDraws | None
    place: Place
    deal: Deal


def check_state(
    state: Mapping[str, Any], identity: Identity, seed: int | None, override: Iterable[str]
) -> Accepted:
    """Read and compare a saved state; nothing is changed.

    A user's sampler is not read here: its digest is compared when the next pass skips forward in it.

    Args:
        state: What ``state_dict()`` returned.
        identity: The loader it is to be loaded into.
        seed: The loader's explicit seed, or None.
        override: Fields whose present value holds although the saved one differs.

    Raises:
        StateError: The state cannot be read, or no run can have reached it.
        StateMismatchError: It belongs to another run.
    """
    names = check_override(override)
    saved = LoaderState.from_dict(state)
    current = identity.compared(seed)
    different = differences(saved, current, [name for name in COMPARED if name in current])
    refused = {name: values for name, values in different.items() if name not in names}
    refused |= _refused_topology(saved, identity)
    if saved.delivered_ahead:  # numbers of batches, which mean nothing in another order
        refused |= {name: different[name] for name in ("dataset_size", "order", "seed") if name in different}
    if refused:
        raise mismatch(refused)
    if saved.stream is not None:
        raise mismatch({"stream": ("the state of a stream", None)})
    if saved.sampler is not None and identity.dealer.comparable:
        raise mismatch({"sampler": ("the state of a sampler", None)})
    kept_seed = saved.seed if seed is None else seed
    changed = {"dataset_size", "order", "seed"} & set(different)
    trusted = bool(changed) or "order_digest" in names
    draws = _check_draws(saved, identity.dealer, "order" in changed)
    if identity.dealer.comparable and not trusted:
        _check_digest(saved, identity.dealer, kept_seed, draws)
    place, deal = _check_position(saved, identity, kept_seed, trusted=trusted)
    return Accepted(saved, kept_seed, draws, place, deal)


def _refused_topology(saved: LoaderState, identity: Identity) -> dict[str, tuple[Any, Any]]:
    different = differences(saved, identity.topology, identity.topology)
    if identity.dealer.elastic and not saved.delivered_ahead:
        return {}
    return different


def _check_draws(saved: LoaderState, dealer: Dealer, changed: bool) -> SavedDraws | None:
    if dealer.draws is None:
        if saved.generator is not None and not changed:
            raise mismatch({"generator": ("generator states", None)})
        return None
    if saved.generator is None:
        if changed:
            return None
        raise mismatch({"generator": (None, "a generator")})
    return dealer.draws.check(saved.generator)


def _check_position(
    saved: LoaderState, identity: Identity, seed: int, *, trusted: bool
) -> tuple[Place, Deal]:
    """The place a state stands for, and the epoch as it is dealt from there."""
    start = (saved.segment[0], saved.segment[1])
    moved = differences(saved, identity.topology, identity.topology)
    if moved:
        start = (saved.samples_in_epoch or 0, saved.batch_in_epoch) if saved.batch_in_epoch else (0, 0)
    place = Place(
        saved.epoch,
        saved.batch_in_epoch,
        saved.samples_in_epoch,
        saved.consumed_samples,
        Standing.PENDING,
        saved.delivered_ahead,
        None if identity.dealer.comparable else _read_mark(saved, identity),
        start,
    )
    deal = identity.dealer.deal_at(place, start, seed, trusted=trusted)
    if not identity.dealer.comparable:
        return place, deal
    if trusted and max(start[0], saved.samples_in_epoch or 0) > (deal.length or 0):
        _refuse(
            "samples_in_epoch",
            saved.samples_in_epoch,
            f"at most {deal.length}, the length of an epoch's order",
        )
    if deal.batches is not None and saved.batch_in_epoch > deal.batches and not trusted:
        _refuse("batch_in_epoch", saved.batch_in_epoch, f"at most {deal.batches}, the batches of an epoch")
    samples = deal.samples_at(place.prefix)
    if saved.samples_in_epoch != samples:
        if not trusted:
            _refuse("samples_in_epoch", saved.samples_in_epoch, f"{samples} after batch {place.prefix}")
        # another size under override: the position stays, and what is left from there is dealt out anew
        place = place._replace(start=(saved.samples_in_epoch or 0, saved.batch_in_epoch))
        deal = identity.dealer.deal_at(place, place.start, seed, trusted=True)
    return place, deal


def _read_mark(saved: LoaderState, identity: Identity) -> Mark:
    mark = decode_mark(saved.order_digest, saved.sampler)
    stateful = getattr(identity.dealer, "stateful", False)
    if stateful != (mark.state is not None):
        raise mismatch({"sampler": ("a state" if mark.state is not None else None, "a stateful sampler")})
    return mark


def _check_digest(saved: LoaderState, dealer: Dealer, seed: int, draws: SavedDraws | None) -> None:
    digest = dealer.digest_saved(saved.epoch, saved.samples_in_epoch or 0, seed, draws)
    if digest != saved.order_digest:
        raise mismatch({"order_digest": (saved.order_digest, digest)})


def _refuse(name: str, found: Any, expected: str) -> NoReturn:
    raise StateError(
        f"state[{name!r}] is {found!r}, which this loader cannot reach, expected {expected}; "
        "build the loader as it was when the state was saved",
        expected=expected,
        found=found,
    )
