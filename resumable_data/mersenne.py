"""Python's global random stream, set aside and put back as the memory it is.

``random.getstate`` makes an int object of each of 624 words and ``setstate`` reads them back: 10 us a batch, three
quarters of what setting all streams aside costs. CPython keeps the words and the position in one block
behind the object's header, which is copied here in 0.1 us. No public way leads there, so this one adapter
holds it: it compares the block with ``getstate`` before it is first used, and wherever the two differ (another
interpreter, another layout) ``getstate`` and ``setstate`` do the work. A test fails when CPython's layout moves.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from functools import lru_cache
from typing import Any, NamedTuple

_WORDS = 624
# _randommodule.c: PyObject_HEAD, int index, uint32_t state[624]
_BLOCK = struct.Struct(f"=i{_WORDS}I")
_HEADER = object.__basicsize__

#: The instance behind ``random.random`` and its like, which are bound methods of it.
GLOBAL: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method has one


class Saved(NamedTuple):
    """A state of python's global stream: of the block, or of ``getstate`` where there is no block."""

    block: bytes | None
    rest: Any  # the cached second half of a Gaussian pair, or all that ``getstate`` gave


class PythonStream:
    """Saves and restores python's global stream; exact as ``getstate`` and ``setstate`` are.

    Args:
        block: Whether to go by the memory; None: wherever it is laid out as expected.
    """

    def __init__(self, block: bool | None = None) -> None:
        wanted = layout_known() if block is None else block
        self._block = _block_of(GLOBAL) if wanted else None

    def save(self) -> Saved:
        """The state as it is now."""
        if self._block is None:
            return Saved(None, random.getstate())
        return Saved(bytes(self._block), GLOBAL.gauss_next)

    def restore(self, saved: Saved) -> None:
        """Put back what `save` of this object gave."""
        if self._block is None or saved.block is None:
            random.setstate(saved.rest)
        else:
            self._block[:] = saved.block
            GLOBAL.gauss_next = saved.rest


@lru_cache(maxsize=1)
def layout_known() -> bool:
    """Whether this interpreter lays the words out as expected, found on generators of our own."""
    if sys.implementation.name != "cpython" or type(GLOBAL) is not random.Random:
        return False
    base = random.Random.__base__
    if base is None or not _BLOCK.size <= base.__basicsize__ - _HEADER < _BLOCK.size + 8:
        return False
    one, other = random.Random(1), random.Random(2)
    one.random()
    if not _reads(one) or not _reads(other):
        return False
    _block_of(other)[:] = bytes(_block_of(one))
    return bool(one.getstate() == other.getstate())


def _reads(generator: random.Random) -> bool:
    _version, words, _gauss = generator.getstate()
    position, *state = _BLOCK.unpack(_block_of(generator))
    return bool((*state, position) == words)


def _block_of(generator: Any) -> memoryview:
    """The generator's words in place; the view must not outlive it."""
    whole = ctypes.c_char * _BLOCK.size
    return memoryview(whole.from_address(id(generator) + _HEADER)).cast("B")
