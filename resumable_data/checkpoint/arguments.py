"""What a manager's arguments may be; each check names the argument, what was found and what is allowed."""

from __future__ import annotations

import operator
from typing import Any

from resumable_data.checkpoint.layout import MAX_SHARDS, MAX_STEP

_SHORTEST_KEY = 16  # bytes; fewer can be tried out


def check_count(name: str, value: Any) -> None:
    """An int of at least 1.

    Raises:
        TypeError: Anything but an int.
        ValueError: Less than 1.
    """
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, found {value}")


def check_flag(name: str, value: Any) -> None:
    """True or False, and nothing that counts as either.

    Raises:
        TypeError: Anything else.
    """
    if type(value) is not bool:
        raise TypeError(f"{name} must be a bool, found {value!r}")


def check_step(step: Any) -> int:
    """The step as an int, 0 to 999,999,999,999; numpy's ints and tensors of one are taken.

    Raises:
        TypeError: Something that is no whole number.
        ValueError: Out of range.
    """
    if isinstance(step, bool):
        raise TypeError(f"step must be an int, found {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, found {step!r}") from None
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"step must be from 0 to {MAX_STEP}, found {number}")
    return number


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """One of some words.

    Raises:
        ValueError: Another one, or no word at all.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, found {value!r}")


def check_best(value: Any) -> None:
    """None, or the name of a metric and "min" or "max".

    Raises:
        TypeError: No pair of strings.
        ValueError: Another mode.
    """
    if value is None:
        return
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not pair or not all(isinstance(part, str) for part in value):
        raise TypeError(f"keep_best must be a pair like ('val_loss', 'min'), found {value!r}")
    check_choice("keep_best's mode", value[1], ("min", "max"))


def check_shards(value: Any) -> None:
    """None, a number of files from 1 to 999, or a function from keys to numbers.

    Raises:
        TypeError: Something else.
        ValueError: A number out of range.
    """
    if value is None or (callable(value) and not isinstance(value, type)):
        return
    if type(value) is not int:
        raise TypeError(f"shards must be an int, a function from keys to ints, or None, found {value!r}")
    if not 1 <= value < MAX_SHARDS:
        raise ValueError(f"shards must be from 1 to {MAX_SHARDS - 1}, found {value}")


def check_key(value: Any) -> None:
    """None, or at least 16 bytes; the key itself is in no message.

    Raises:
        TypeError: Something that is no bytes.
        ValueError: Too short.
    """
    if value is None:
        return
    if type(value) is not bytes:
        raise TypeError(f"hmac_key must be bytes, found a {type(value).__name__}")
    if len(value) < _SHORTEST_KEY:
        raise ValueError(
            f"hmac_key must have at least {_SHORTEST_KEY} bytes, found {len(value)}; secrets.token_bytes(32) "
            "makes one"
        )


def check_reason(value: Any) -> None:
    """A string that says something.

    Raises:
        TypeError: No string.
        ValueError: An empty one.
    """
    if not isinstance(value, str):
        raise TypeError(f"reason must be a str, found {value!r}")
    if not value.strip():
        raise ValueError("reason must say why, found an empty string")
