"""What the constructor is given, checked and turned into an order and a plan."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from resumable_data.draws import GeneratorDraws
from resumable_data.orders import Distributed, Generated, Order, Sequential, Shuffled
from resumable_data.plan import Plan
from resumable_data.splitmix import MASK64

SEEDING_MODES = {"batch": "batch.v1", "sample": "sample.v1", None: "none"}


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
    seeding: str
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
        NotImplementedError: An argument whose feature is not there yet, naming it.
    """
    as_count("snapshot_every_n_steps", snapshot_every_n_steps, 1)
    if tail not in ("pad", "drop", "uneven"):
        raise ValueError(f"tail must be 'pad', 'drop' or 'uneven', found {tail!r}")
    if not (seeding is None or isinstance(seeding, str)) or seeding not in SEEDING_MODES:
        raise ValueError(f"seeding must be 'batch', 'sample' or None, found {seeding!r}")
    if dataset_id is not None and not isinstance(dataset_id, str):
        raise TypeError(f"dataset_id must be a string or None, found {dataset_id!r}")
    later = {
        "process_group": process_group is not None,
        f"tail={tail!r}": tail != "pad",
        "batches_per_epoch": batches_per_epoch is not None,
        "reseed": reseed is not None,
    }
    _refuse_later(later)
    width, place = _read_replicas(num_replicas, rank)
    return Options(
        None if seed is None else as_count("seed", seed),
        width,
        place,
        tail,
        SEEDING_MODES[seeding],
        dataset_id,
    )


def _read_replicas(num_replicas: Any, rank: Any) -> tuple[int, int]:
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


def _refuse_later(later: dict[str, bool]) -> None:
    for name, asked in later.items():
        if asked:
            raise NotImplementedError(f"{name} is not supported by this version of resumable_data")


def refuse_unsupported(template: DataLoader[Any], *, sampler: Any, batch_sampler: Any) -> None:
    """Refuse what DataLoader takes and this version does not.

    Raises:
        NotImplementedError: Naming the argument.
    """
    dataset: Any = template.dataset
    stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    own_generator = type(sampler) is RandomSampler and sampler.generator is not None
    _refuse_later(
        {
            "dataset (an IterableDataset)": isinstance(dataset, IterableDataset),
            "dataset (with a state_dict of its own)": stateful,
            "batch_sampler": batch_sampler is not None,
            "batch_size=None": batch_sampler is None and template.batch_size is None,
            "in_order=False": not template.in_order,
            f"sampler ({type(sampler).__name__})": not (
                sampler is None or type(sampler) is DistributedSampler or own_generator
            ),
        }
    )


def build_order(template: DataLoader[Any], sampler: Any, shuffle: bool, options: Options) -> Order:
    """The order these arguments ask for.

    Raises:
        ValueError: Sharding asked for twice, or over an order that cannot be dealt out.
    """
    generator: torch.Generator | None = template.generator
    asked = options.num_replicas > 1
    if sampler is not None and asked:
        raise ValueError(
            f"num_replicas={options.num_replicas} with sampler={type(sampler).__name__}: a sampler is never "
            "sharded again; leave num_replicas out"
        )
    if generator is not None and asked:
        raise ValueError(
            f"num_replicas={options.num_replicas} with generator=: its draws belong to one process; use seed="
        )
    draws = GeneratorDraws(generator, None) if generator is not None else None
    if type(sampler) is DistributedSampler:
        return Distributed(sampler, draws)
    if type(sampler) is RandomSampler or (shuffle and generator is not None):
        own: Any = sampler if sampler is not None else template.sampler
        return Generated(GeneratorDraws(generator, own))
    size = len(template.dataset)  # type: ignore[arg-type]  # without a length, Python's own TypeError is right
    return Shuffled(size, size, draws) if shuffle else Sequential(size, size, draws)


def build_plan(template: DataLoader[Any], order: Order, sampler: Any, options: Options) -> Plan:
    """How the order is dealt out: by the arguments, or by a DistributedSampler's."""
    shared = type(sampler) is DistributedSampler
    if template.batch_size is None:
        raise ValueError("batch_size must be an int >= 1, found None")
    return Plan(
        length=order.length,
        real=order.real,
        batch_size=template.batch_size,
        num_replicas=sampler.num_replicas if shared else options.num_replicas,
        rank=sampler.rank if shared else options.rank,
        drop_last=template.drop_last,
    )


def choose_seed(sampler: Any, options: Options, plan: Plan) -> int | None:
    """The explicit seed, a DistributedSampler's, or None: torch's initial seed is adopted at first use.

    Raises:
        ValueError: Several replicas and no seed they all share.
    """
    if options.seed is not None:
        return options.seed
    if type(sampler) is DistributedSampler:
        return int(sampler.seed) & MASK64
    if plan.num_replicas > 1:
        raise ValueError(
            f"seed must be given with num_replicas={plan.num_replicas}, found None: every rank needs the same"
        )
    return None
