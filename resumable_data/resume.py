"""A loader's state made and a saved one checked: everything is decided here before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from resumable_data.cursor import Cursor
from resumable_data.draws import SavedDraws
from resumable_data.errors import StateError
from resumable_data.options import Options
from resumable_data.orders import Order, Stored
from resumable_data.plan import Plan
from resumable_data.state import COMPARED, SCHEMA, LoaderState, check_override, differences, mismatch


@dataclass(frozen=True)
class Identity:
    """What one loader is, as far as its state tells: the parts that do not move with the position."""

    order: Order
    plan: Plan
    options: Options
    dataset_size: int
    tail: str

    def compared(self, seed: int | None) -> dict[str, Any]:
        """The fields a saved state must share. A seed of None was adopted and matches any."""
        fields: dict[str, Any] = {
            "dataset_size": self.dataset_size,
            "dataset_id": self.options.dataset_id,
            "order": self.order.name,
            "drop_last": self.plan.drop_last,
            "tail": self.tail,
            "batches_per_epoch": None,
            "seeding": self.options.seeding,
        }
        if seed is not None:
            fields["seed"] = seed
        return fields


def make_state(identity: Identity, cursor: Cursor, seed: int) -> LoaderState:
    """The state of a loader as of the last delivered batch."""
    order, plan, place = identity.order, identity.plan, cursor.place
    samples = plan.samples_at(place.batch)
    return LoaderState(
        schema=SCHEMA,
        epoch=place.epoch,
        batch_in_epoch=place.batch,
        samples_in_epoch=samples,
        consumed_samples=place.consumed,
        segment=(0, 0),
        skipped=cursor.skipped,
        order=order.name,
        order_digest=order.digest(place.epoch, samples, seed),
        torch_version=str(torch.__version__),
        seed=seed,
        dataset_size=identity.dataset_size,
        dataset_id=identity.options.dataset_id,
        batch_size=plan.batch_size,
        num_replicas=plan.num_replicas,
        drop_last=plan.drop_last,
        tail=identity.tail,
        batches_per_epoch=None,
        seeding=identity.options.seeding,
        delivered_ahead=(),
        generator=order.draws.capture() if order.draws is not None else None,
        sampler=None,
        stream=None,
    )


@dataclass(frozen=True)
class Accepted:
    """A saved state that may be loaded, and what of it has to be set."""

    state: LoaderState
    seed: int
    draws: SavedDraws | None


def check_state(
    state: Mapping[str, Any], identity: Identity, seed: int | None, override: Iterable[str]
) -> Accepted:
    """Read and compare a saved state; nothing is changed.

    Args:
        state: What ``state_dict()`` returned.
        identity: The loader it is to be loaded into.
        seed: The loader's explicit seed, or None.
        override: Fields whose present value holds although the saved one differs.

    Raises:
        StateError: The state cannot be read, or no run can have reached it.
        StateMismatchError: It belongs to another run.
        NotImplementedError: It was saved with another batch_size or num_replicas.
    """
    accepted = check_override(override)
    saved = LoaderState.from_dict(state)
    current = identity.compared(seed)
    different = differences(saved, current, [name for name in COMPARED if name in current])
    refused = {name: values for name, values in different.items() if name not in accepted}
    if refused:
        raise mismatch(refused)
    _refuse_other_topology(saved, identity.plan)
    kept_seed = saved.seed if seed is None else seed
    changed_order = {"dataset_size", "order", "seed"} & set(different)
    draws = _check_draws(saved, identity.order, "order" in changed_order)
    _check_position(saved, identity, changed_order)
    if identity.order.digested and not changed_order and "order_digest" not in accepted:
        _check_digest(saved, identity.order, kept_seed, draws)
    return Accepted(saved, kept_seed, draws)


def _refuse_other_topology(saved: LoaderState, plan: Plan) -> None:
    current = {"batch_size": plan.batch_size, "num_replicas": plan.num_replicas}
    for name, (was, now) in differences(saved, current, current).items():
        raise NotImplementedError(
            f"{name}: the state was saved with {was}, this loader has {now}; continuing under another "
            f"{name} is not supported by this version of resumable_data"
        )
    beyond = {"segment": list(saved.segment) != [0, 0], "delivered_ahead": bool(saved.delivered_ahead)}
    for name, used in {**beyond, "sampler": saved.sampler, "stream": saved.stream}.items():
        if used:
            raise NotImplementedError(
                f"state[{name!r}] is set: it was saved by a version of resumable_data that can do more"
            )


def _check_draws(saved: LoaderState, order: Order, changed: bool) -> SavedDraws | None:
    if order.draws is None:
        if saved.generator is not None and not changed:
            raise mismatch({"generator": ("generator states", None)})
        return None
    if saved.generator is None:
        if changed:
            return None
        raise mismatch({"generator": (None, "a generator")})
    return order.draws.check(saved.generator)


def _check_position(saved: LoaderState, identity: Identity, changed_order: set[str]) -> None:
    plan, batch = identity.plan, saved.batch_in_epoch
    if batch > plan.batches:
        _refuse("batch_in_epoch", batch, f"at most {plan.batches}, the batches of an epoch")
    samples = plan.samples_at(batch)
    if saved.samples_in_epoch != samples and not changed_order:
        _refuse("samples_in_epoch", saved.samples_in_epoch, f"{samples} after batch {batch}")


def _check_digest(saved: LoaderState, order: Order, seed: int, draws: SavedDraws | None) -> None:
    samples = saved.samples_in_epoch or 0
    if draws is not None and order.draws is not None and not order.random_access:
        digest = order.digest_of(Stored(order.draws.order_of(draws)), samples)
    else:
        digest = order.digest_of(order.look(saved.epoch, seed), samples)
    if digest != saved.order_digest:
        raise mismatch({"order_digest": (saved.order_digest, digest)})


def _refuse(name: str, found: Any, expected: str) -> NoReturn:
    raise StateError(
        f"state[{name!r}] is {found!r}, which this loader cannot reach, expected {expected}; "
        "build the loader as it was when the state was saved",
        expected=expected,
        found=found,
    )
