"""Words from labelled coordinates, in plain integers.

``derive`` hashes a tag and any number of coordinates (seed, epoch, position, ...) into 64-bit words.
Coordinates are hashed, never added, so (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common.
The mixer is SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). The words are frozen by golden vectors: a change is a new order or seeding
name, never an edit.
"""

from __future__ import annotations

MASK64 = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E37_79B9_7F4A_7C15


def mix(z: int) -> int:
    """Scramble one 64-bit word; a bijection of [0, 2**64)."""
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK64
    return z ^ (z >> 31)


def absorb(state: int, word: int) -> int:
    """The state after one more coordinate; ``absorb(start(tag), w)`` begins a family keyed by w."""
    return mix(((state + GOLDEN) & MASK64) ^ mix((word + GOLDEN) & MASK64))


def start(tag: int) -> int:
    """The state of a family of words, named by its tag."""
    return mix((tag + GOLDEN) & MASK64)


def emit(state: int, count: int) -> list[int]:
    """The first ``count`` words of a state."""
    return [mix((state + i * GOLDEN) & MASK64) for i in range(1, count + 1)]


def words_after(state: int, *words: int, count: int) -> list[int]:
    """``count`` words after these coordinates: ``emit(absorb(absorb(state, w1), w2), count)`` in one frame.

    It runs for every batch and every sample, and a call of ``mix`` costs more than the mixing.
    """
    for word in words:
        z = (word + GOLDEN) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK64
        z = ((state + GOLDEN) & MASK64) ^ z ^ (z >> 31)
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK64
        state = z ^ (z >> 31)
    emitted = []
    for _ in range(count):
        state = (state + GOLDEN) & MASK64
        z = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK64
        emitted.append(z ^ (z >> 31))
    return emitted


def derive(tag: int, *words: int, count: int) -> list[int]:
    """``count`` words in [0, 2**64) that belong to these coordinates and to no others.

    Args:
        tag: What the words are for; every use in the package has its own.
        words: The coordinates, each in [0, 2**64).
        count: How many words to give.
    """
    state = start(tag)
    for word in words:
        state = absorb(state, word)
    return emit(state, count)
