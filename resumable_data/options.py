"""What the constructor is given, checked; and the dealer that these arguments ask for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from resumable_data.bucketing import BatchPlanner
from resumable_data.dealers import PlannedDealer, PositionDealer, SamplerDealer
from resumable_data.dealing import Dealer
from resumable_data.draws import TORCH_SAMPLERS, GeneratorDraws
from resumable_data.mixture import OrderedDataset
from resumable_data.orders import Distributed, Generated, Order, Ordered, Sequential, Shuffled
from resumable_data.plan import Plan
from resumable_data.splitmix import MASK64
from resumable_data.state import TAILS

SEEDING_MODES = {"batch": "batch.v1", "sample": "sample.v1", None: "none"}
Reseed = Callable[[Any, int], Any]


def as_count(name: str, value: Any, low: int = 0, high: int = MASK64) -> int:
    """``value`` as a plain int in [low, high].

    Raises:
        TypeError: Not an integer (a bool is none).
        ValueError: Out of range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int in [{low}, {high}], found {value!r}")
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], found {number}")
    return number


@dataclass(frozen=True)
class Options:
    """The arguments that DataLoader does not have, checked."""

    seed: int | None
    num_replicas: int
    rank: int
    tail: str
    batches_per_epoch: int | None
    seeding: str
    reseed: Reseed | None
    dataset_id: str | None


def read_options(
    *,
    snapshot_every_n_steps: Any,
    seed: Any,
    num_replicas: Any,
    rank: Any,
    process_group: Any,
    tail: Any,
    batches_per_epoch: Any,
    seeding: Any,
    reseed: Any,
    dataset_id: Any,
) -> Options:
    """Check what stands after DataLoader's own arguments.

    Raises:
        TypeError, ValueError: A wrong type or range, naming the argument.
    """
    as_count("snapshot_every_n_steps", snapshot_every_n_steps, 1)
    if not isinstance(tail, str) or tail not in TAILS:
        raise ValueError(f"tail must be 'pad', 'drop' or 'uneven', found {tail!r}")
    if not (seeding is None or isinstance(seeding, str)) or seeding not in SEEDING_MODES:
        raise ValueError(f"seeding must be 'batch', 'sample' or None, found {seeding!r}")
    if dataset_id is not None and not isinstance(dataset_id, str):
        raise TypeError(f"dataset_id must be a string or None, found {dataset_id!r}")
    if reseed is not None and not callable(reseed):
        raise TypeError(f"reseed must be a function of (dataset, seed) or None, found {reseed!r}")
    if reseed is not None and seeding is None:
        raise ValueError("reseed is never called under seeding=None: use seeding='batch' or 'sample'")
    width, place = _read_replicas(num_replicas, rank, process_group)
    return Options(
        seed=None if seed is None else as_count("seed", seed),
        num_replicas=width,
        rank=place,
        tail=tail,
        batches_per_epoch=None
        if batches_per_epoch is None
        else as_count("batches_per_epoch", batches_per_epoch, 1),
        seeding=SEEDING_MODES[seeding],
        reseed=reseed,
        dataset_id=dataset_id,
    )


def _read_replicas(num_replicas: Any, rank: Any, process_group: Any) -> tuple[int, int]:
    if process_group is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                f"process_group with num_replicas={num_replicas!r}, rank={rank!r}: pass the group, or the numbers"
            )
        return _read_group(process_group)
    if num_replicas is None:
        if rank is not None:
            raise ValueError(
                f"rank={rank!r} without num_replicas: pass both, or neither for a single replica"
            )
        return 1, 0
    width = as_count("num_replicas", num_replicas, 1)
    if rank is None and width > 1:
        raise ValueError(f"num_replicas={width} needs rank, in [0, {width - 1}], found None")
    return width, as_count("rank", 0 if rank is None else rank, 0, width - 1)


def _read_group(group: Any) -> tuple[int, int]:
    """(num_replicas, rank) of a ProcessGroup or a one-dimensional DeviceMesh."""
    if not torch.distributed.is_available():
        raise ValueError("process_group needs a torch that was built with torch.distributed")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"process_group must be a one-dimensional DeviceMesh, found {group.ndim} dimensions: pass the "
                "data-parallel one, such as mesh['dp']"
            )
        return int(group.size()), int(group.get_local_rank())
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"process_group must be a ProcessGroup or a DeviceMesh, found {group!r}")
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ValueError("process_group does not contain this process: build the loader on its members only")
    return torch.distributed.get_world_size(group), rank


def refuse_unsupported(template: DataLoader[Any]) -> None:
    """Refuse what DataLoader takes and this version does not.

    Raises:
        NotImplementedError: Naming the argument.
    """
    dataset: Any = template.dataset
    if isinstance(dataset, IterableDataset):
        raise NotImplementedError("dataset (an IterableDataset) is not supported by this version")
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        raise NotImplementedError("dataset (with a state_dict of its own) is not supported by this version")


class Choice:
    """The source of the order that a set of arguments asks for.

    Args:
        template: The DataLoader built from the user's arguments.
        sampler: The user's ``sampler``, or None.
        batch_sampler: The user's ``batch_sampler``, or None.
        shuffle: The user's ``shuffle``.
        options: The other arguments.
    """

    def __init__(
        self, template: DataLoader[Any], sampler: Any, batch_sampler: Any, shuffle: bool, options: Options
    ) -> None:
        self.batch_size, self.drop_last = template.batch_size, template.drop_last
        if type(batch_sampler) is BatchSampler:  # torch's own has no order of its own
            sampler, self.batch_size = batch_sampler.sampler, batch_sampler.batch_size
            self.drop_last, batch_sampler = batch_sampler.drop_last, None
        self.single = self.batch_size is None and batch_sampler is None
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.dataset: Any = template.dataset
        self.generator: torch.Generator | None = template.generator
        self.shuffle, self.options = shuffle, options
        self.shared = type(sampler) is DistributedSampler
        self.num_replicas, self.rank = self._read_width()
        self.tail = options.tail
        if self.shared:
            self.tail = "drop" if sampler.drop_last else "pad"
        self.order = self._choose_order()

    def _read_width(self) -> tuple[int, int]:
        asked = (self.options.num_replicas, self.options.rank)
        if not self.shared:
            return asked
        theirs = (int(self.sampler.num_replicas), int(self.sampler.rank))
        if asked not in ((1, 0), theirs):
            raise ValueError(
                f"(num_replicas, rank) = {asked} with a DistributedSampler of {theirs}: leave them out"
            )
        if self.options.tail != "pad":
            raise ValueError(
                f"tail={self.options.tail!r} with a DistributedSampler: its own drop_last decides"
            )
        return theirs

    def _choose_order(self) -> Order | None:
        """The order, where it is a function of the position; None for a user's sampler."""
        draws = GeneratorDraws(self.generator, None) if self.generator is not None else None
        if self.shared:
            return Distributed(self.sampler, draws)
        carried = type(self.sampler) in TORCH_SAMPLERS and self.sampler.generator is not None
        if self.num_replicas > 1 and (carried or self.generator is not None):
            raise ValueError(
                f"num_replicas={self.num_replicas} with a generator: its draws belong to one process; use seed= "
                "instead of generator="
            )
        if carried or (self.shuffle and self.generator is not None):
            return Generated(GeneratorDraws(self.generator, self._own_sampler()))
        if self.sampler is not None or self.batch_sampler is not None:
            return None
        if isinstance(self.dataset, OrderedDataset):
            return Ordered(self.dataset, draws)
        size = len(self.dataset)
        return Shuffled(size, draws) if self.shuffle else Sequential(size, draws)

    def _own_sampler(self) -> Any:
        if self.sampler is not None:
            return self.sampler
        return torch.utils.data.RandomSampler(self.dataset, generator=self.generator)

    def seed(self) -> int | None:
        """The explicit seed, a DistributedSampler's, or None: torch's initial seed is adopted at first use.

        Raises:
            ValueError: Several replicas and no seed they all share.
        """
        if self.options.seed is not None:
            return self.options.seed
        if self.shared:
            return int(self.sampler.seed) & MASK64
        if self.num_replicas > 1:
            raise ValueError(
                f"seed must be given with num_replicas={self.num_replicas}, found None: every rank needs the same"
            )
        return None

    def dealer(self, seed: Callable[[], int]) -> Dealer:
        """What deals the epochs; ``seed`` is asked when it is needed."""
        plan = Plan(
            length=0 if self.order is None else self.order.length,
            batch_size=self.batch_size or 1,
            num_replicas=self.num_replicas,
            rank=self.rank,
            drop_last=self.drop_last,
            tail=self.tail,
            pads_first=self.shared,
            limit=self.options.batches_per_epoch,
        )
        draws = GeneratorDraws(self.generator, None) if self.generator is not None else None
        if self.order is not None:
            return PositionDealer(self.order, plan, seed)
        if isinstance(self.batch_sampler, BatchPlanner):
            return PlannedDealer(self.batch_sampler, plan, seed, draws)
        return SamplerDealer(
            self.sampler if self.batch_sampler is None else self.batch_sampler,
            "sampler" if self.batch_sampler is None else "batch_sampler",
            batch_size=1 if self.single else self.batch_size,
            drop_last=self.drop_last,
            limit=self.options.batches_per_epoch,
            width=(self.num_replicas, self.rank),
            seed=seed,
            draws=draws,
        )
