"""A random-access permutation of ``range(n)``: what stands at any position, without the ones before it.

The order ``shuffled.v1``: a generalised Feistel network on Z_a x Z_b with a * b >= n, after Black and
Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002); results outside ``range(n)`` are sent
through again (cycle walking) until they fall inside. Memory is constant in n, and every rank and every
worker computes the same order from (n, seed, epoch) alone. All arithmetic is on unsigned 64-bit integers,
modulo 2**64. The order is frozen by golden vectors: a change of any of them is a new order name, never an
edit.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .splitmix import GOLDEN, MASK64, derive

_TAG = 0x52445031
_FACTOR = 0xD6E8_FEB8_6659_FD93
_MAX_N = 2**62
_MAX_WORD = 2**64

# Positions worked on at a time: four buffers of this many words fit in a core's second-level cache.
_BLOCK = 8192
# Up to this many positions plain integers are faster than one round of numpy calls, whatever the rounds.
_FEW = 10

# Constants of the vectorised path are 0-d arrays: numpy takes them over without a conversion.
_V_GOLDEN = np.array(GOLDEN, np.uint64)
_V_FACTOR = np.array(_FACTOR, np.uint64)
_V_32 = np.array(32, np.uint64)

_CONVERT = "convert it with np.asarray(positions, dtype=np.int64)"


class Permutation:
    """Random-access permutation of ``range(n)``, keyed by (n, seed, epoch), in constant memory.

    The same on every rank, in every process and on every machine. The three numbers are hashed, never added:
    (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common. Objects keep nothing between calls, may be
    shared between threads, and pickle as their three numbers.

    Args:
        n: How many indices there are, 0 <= n < 2**62.
        seed: The run's constant, 0 <= seed < 2**64.
        epoch: 0-based number of the pass over the data, 0 <= epoch < 2**64.

    Raises:
        TypeError: An argument is not an integer (a bool is none).
        ValueError: An argument is outside its range.
    """

    __slots__ = ("_a", "_b", "_keys", "_v_a", "_v_b", "_v_keys", "_v_n", "epoch", "n", "seed")

    n: int
    seed: int
    epoch: int

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = integer("n", n, _MAX_N, "2**62")
        self.seed = integer("seed", seed, _MAX_WORD, "2**64")
        self.epoch = integer("epoch", epoch, _MAX_WORD, "2**64")
        self._a, self._b = _sides(self.n)
        rounds = self._rounds() if self.n > 1 else 0
        keys = derive(_TAG, self.n, self.seed, self.epoch, count=rounds)
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))
        self._v_n, self._v_a, self._v_b = (np.array(x, np.uint64) for x in (self.n, self._a, self._b))
        vectors = [np.array(key, np.uint64) for key in keys]
        self._v_keys = tuple(zip(vectors[::2], vectors[1::2], strict=True))

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, seed={self.seed}, epoch={self.epoch})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n, self.seed, self.epoch)

    def index(self, position: int) -> int:
        """The index that stands at ``position``, in [0, n).

        Raises:
            IndexError: ``position`` is outside [0, n).
            TypeError: ``position`` is not an integer (a bool is none).
        """
        x = plain_integer("position", position)
        if not 0 <= x < self.n:
            raise IndexError(_outside(x, self.n))
        return self._walk(self._scramble(x))

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices that stand at ``positions``: ``[index(p) for p in positions]``, vectorised.

        Args:
            positions: int64, shape (k,) for any k >= 0, each in [0, n), in any order, repeats allowed; only
                read.

        Returns:
            int64, shape (k,), a new array.

        Raises:
            IndexError: A position is outside [0, n); the message names the first one.
            TypeError: ``positions`` is not an int64 array.
            ValueError: ``positions`` is not one-dimensional.
        """
        check_positions(positions)
        # Read as unsigned, a negative position is beyond every n: one comparison sees both ends.
        unsigned = positions.view(np.uint64)
        if unsigned.size and unsigned.max() >= self._v_n:
            bad = positions[np.argmax(unsigned >= self._v_n)]
            raise IndexError(_outside(int(bad), self.n))
        if unsigned.size <= _FEW:
            few = [self._walk(self._scramble(x)) for x in positions.tolist()]
            return np.array(few, np.int64)
        out = unsigned.copy()
        work = np.empty((3, min(out.size, _BLOCK)), np.uint64)
        for begin in range(0, out.size, _BLOCK):
            self._walk_block(out[begin : begin + _BLOCK], work)
        return out.view(np.int64)

    def _rounds(self) -> int:
        # Measured against Fisher-Yates: 6 rounds and more pass from n = 400, and small domains need more.
        return 24 if self.n < 4096 else 8

    def _scramble(self, x: int) -> int:
        # One pass of the network, a bijection of range(a * b).
        a, b = self._a, self._b
        left, right = divmod(x, b)
        for key_left, key_right in self._keys:
            h = (right * GOLDEN + key_left) & MASK64
            h = ((h ^ (h >> 32)) * _FACTOR) & MASK64
            left = (left + (((h >> 32) * a) >> 32)) % a
            h = (left * GOLDEN + key_right) & MASK64
            h = ((h ^ (h >> 32)) * _FACTOR) & MASK64
            right = (right + (((h >> 32) * b) >> 32)) % b
        return left * b + right

    def _walk(self, x: int) -> int:
        while x >= self.n:
            x = self._scramble(x)
        return x

    def _walk_block(self, x: NDArray[np.uint64], work: NDArray[np.uint64]) -> None:
        # Positions to indices, in place; only the lanes that fell outside go through again.
        self._scramble_block(x, work)
        if self._a * self._b == self.n:
            return
        lanes = np.flatnonzero(x >= self._v_n)
        while lanes.size > _FEW:
            again = x[lanes]
            self._scramble_block(again, work)
            x[lanes] = again
            lanes = lanes[again >= self._v_n]
        for lane in lanes.tolist():
            x[lane] = self._walk(int(x[lane]))

    def _scramble_block(self, x: NDArray[np.uint64], work: NDArray[np.uint64]) -> None:
        # _scramble for every lane, in place. Nothing but the products meant to wraps: (h >> 32) * a < 2**64
        # and left * b + right < 2**63, since both sides are below 2**32 and a * b < 2**62 + 2**32.
        left, right, h = work[:, : x.size]
        np.floor_divide(x, self._v_b, out=left)
        np.multiply(left, self._v_b, out=right)
        np.subtract(x, right, out=right)
        for key_left, key_right in self._v_keys:
            _half_round(left, right, key_left, self._v_a, h, x)
            _half_round(right, left, key_right, self._v_b, h, x)
        np.multiply(left, self._v_b, out=x)
        np.add(x, right, out=x)


def _half_round(
    target: NDArray[np.uint64],
    source: NDArray[np.uint64],
    key: NDArray[np.uint64],
    side: NDArray[np.uint64],
    h: NDArray[np.uint64],
    spare: NDArray[np.uint64],
) -> None:
    # target = (target + F(source, key, side)) mod side, in place; h and spare are overwritten.
    np.multiply(source, _V_GOLDEN, out=h)
    np.add(h, key, out=h)
    np.right_shift(h, _V_32, out=spare)
    np.bitwise_xor(h, spare, out=h)
    np.multiply(h, _V_FACTOR, out=h)
    np.right_shift(h, _V_32, out=h)
    np.multiply(h, side, out=h)
    np.right_shift(h, _V_32, out=h)
    np.add(target, h, out=target)
    # The sum is below 2 * side; where it is below side, the difference wraps to a huge number. The least of
    # the two is the residue.
    np.subtract(target, side, out=spare)
    np.minimum(target, spare, out=target)


def _sides(n: int) -> tuple[int, int]:
    # (a, b) near sqrt(n) with a even and a * b >= n, the least excess among up to 64 candidates.
    if n <= 1:
        return 1, 1
    root = math.isqrt(n - 1) + 1  # the ceiling of sqrt(n), exact where floats are not
    root += root % 2
    candidates = range(root, root + 2 * max(1, min(64, root // 8)), 2)
    a = min(candidates, key=lambda a: -(-n // a) * a)  # min keeps the first, the smallest, on a tie
    return a, -(-n // a)


def plain_integer(name: str, value: Any) -> int:
    """``value`` as a plain int; TypeError where it is none (a bool is none)."""
    wrong = f"{name} must be an integer, found {value!r} of type {type(value).__name__}; pass an int"
    if isinstance(value, bool):
        raise TypeError(wrong)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(wrong) from None


def integer(name: str, value: Any, stop: int, stop_text: str) -> int:
    """``value`` as a plain int in [0, stop); TypeError and ValueError name the argument and the range."""
    x = plain_integer(name, value)
    if not 0 <= x < stop:
        raise ValueError(f"{name} must be in [0, {stop_text}), found {x}; pass a value in that range")
    return x


def _outside(position: int, n: int) -> str:
    return f"position must be in [0, {n}), found {position}; the permutation has {n} positions"


def check_positions(positions: Any) -> None:
    """TypeError unless these are positions: a one-dimensional int64 array."""
    if not isinstance(positions, np.ndarray):
        raise TypeError(
            f"positions must be a numpy array of int64, found {type(positions).__name__}; {_CONVERT}"
        )
    if positions.dtype != np.int64:
        raise TypeError(f"positions must be a numpy array of int64, found {positions.dtype}; {_CONVERT}")
    if positions.ndim != 1:
        raise ValueError(
            f"positions must have one dimension, found shape {positions.shape}; flatten it first"
        )
