"""Ready-made values for ``reseed=``: libraries and datasets with generators of their own.

A reseeder is called as ``reseed(dataset, seed)`` beside the dataset wherever the global streams are seeded,
with a 64-bit word that belongs to the sample or batch. These are plain functions, so they pickle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resumable_data.splitmix import derive

_TAG_HELD = 0x48454C44  # "HELD": one word for each generator that is found
#: How deep below the dataset is looked: dataset -> Subset's dataset -> transform -> list -> transform -> generator.
DEPTH = 6
#: How many objects are looked at, plain values apart.
BREADTH = 4096
#: A longer list, tuple or dict holds samples, not transforms, and is not looked into.
LENGTH = 64
_GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
_PLAIN = (str, bytes, int, float, complex, type, type(None), torch.Tensor, np.ndarray, Path)
_SETTERS = ("set_random_seed", "set_random_state")


def reseed_held(dataset: Any, seed: int) -> None:
    """Reseed every generator the dataset or its transforms hold.

    numpy Generators and RandomStates, torch.Generators and random.Random objects found among the attributes
    of the dataset and, a few levels down, of what it holds (lists, tuples, dicts, ``Subset``, transforms),
    each from a word of its own; and objects with ``set_random_seed(seed)`` (albumentations) or
    ``set_random_state(seed=...)`` (MONAI). Objects met twice are reseeded once.

    Args:
        dataset: The dataset beside which this runs.
        seed: The word of the sample or batch, in [0, 2**64).
    """
    for number, (_, held) in enumerate(_find(dataset)):
        _reseed_one(held, derive(_TAG_HELD, seed, number, count=1)[0])


def find_generators(dataset: Any) -> list[tuple[str, Any]]:
    """What ``reseed_held`` would reseed: (path from the dataset, such as ``.transform.rng``, object)."""
    return list(_find(dataset))


def _reseed_one(held: Any, word: int) -> None:
    if isinstance(held, np.random.Generator):
        fresh = type(held.bit_generator)(word)  # every bit generator takes a seed
        held.bit_generator.state = fresh.state
    elif isinstance(held, np.random.RandomState):
        held.seed([word & 0xFFFF_FFFF, word >> 32])
    elif isinstance(held, torch.Generator):
        held.manual_seed(word)
    elif isinstance(held, random.Random):
        held.seed(word)
    elif hasattr(held, "set_random_seed"):
        held.set_random_seed(word & 0xFFFF_FFFF)  # libraries check for 32 bits
    else:
        held.set_random_state(seed=word & 0xFFFF_FFFF)


def _find(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Breadth first, in the order of attributes: the same in every process that holds the same dataset."""
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", dataset)]
    looked = 0
    for _ in range(DEPTH):
        below: list[tuple[str, Any]] = []
        for path, item in level:
            if isinstance(item, _PLAIN) or id(item) in seen or looked >= BREADTH:
                continue
            seen.add(id(item))
            looked += 1
            if isinstance(item, _GENERATORS) or (
                path and any(callable(getattr(item, n, None)) for n in _SETTERS)
            ):
                yield path, item
            else:
                below += [(path + step, inner) for step, inner in _inside(item)]
        level = below


def _inside(item: Any) -> list[tuple[str, Any]]:
    if isinstance(item, (dict, list, tuple)) and len(item) > LENGTH:
        return []
    if isinstance(item, dict):
        return [(f"[{key!r}]", inner) for key, inner in item.items()]
    if isinstance(item, (list, tuple)):
        return [(f"[{at}]", inner) for at, inner in enumerate(item)]
    return [(f".{name}", inner) for name, inner in getattr(item, "__dict__", {}).items()]
