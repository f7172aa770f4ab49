"""How much a data file may ask for: what is refused when saving is the same that is refused when loading."""

from __future__ import annotations

from dataclasses import dataclass

DEEPEST = 64  # levels of containers
INT_BITS = 8 * 255 - 1  # the longest int that a safe load reads; its unpickler has no opcode for more
EXPANDED_BYTES = 1 << 34  # 16 GiB
CONTAINERS = 1 << 23


@dataclass(frozen=True)
class Limits:
    """Bounds on one data file, each far beyond what a training run saves.

    Attributes:
        entries: Of the archive, one for each tensor's storage and a few more.
        pickle_bytes: Size of the pickle, which holds everything but the tensors' bytes.
        opcodes: Steps of the pickle; a run of floats is one.
        containers: Lists, tuples, dicts and sets that the pickle makes, some four for each tensor.
        values: In the whole tree, with what is in several places counted at each of them.
        depth: Levels of containers.
        expanded_bytes: That one tensor seems to have where its elements share memory (`Tensor.expand`).
    """

    entries: int = 1 << 20
    pickle_bytes: int = 1 << 30
    opcodes: int = 1 << 27
    containers: int = CONTAINERS
    values: int = 1 << 26
    depth: int = DEEPEST
    expanded_bytes: int = EXPANDED_BYTES


DEFAULT = Limits()
