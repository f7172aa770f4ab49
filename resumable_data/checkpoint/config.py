"""Comparing the configuration of a run with the one it was saved under."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

from resumable_data.checkpoint.mismatch import same_bits
from resumable_data.errors import CheckpointMismatchError


def check_config(saved: Any, current: Any) -> None:
    """Compare two configurations, types included; CheckpointMismatchError lists the keys that differ."""
    differing = _config_differences("", saved, current)
    if differing:
        raise CheckpointMismatchError(
            f"The configuration differs: {'; '.join(differing[:8])}. Start another directory, or accept it "
            'with override={"config"}.',
            expected=current,
            found=saved,
        )


def _config_differences(path: str, saved: Any, current: Any) -> list[str]:
    if isinstance(saved, dict) and isinstance(current, dict):
        keys = [key for key in current if key in saved]
        found = [d for key in keys for d in _config_differences(f"{path}.{key}", saved[key], current[key])]
        where = f"{path}.".lstrip(".")
        found += [f"{where}{key} is only in the file" for key in saved if key not in current]
        return found + [f"{where}{key} is not in the file" for key in current if key not in saved]
    if isinstance(saved, (list, tuple)) and type(saved) is type(current) and len(saved) == len(current):
        pairs = zip(saved, current, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in _config_differences(f"{path}[{i}]", a, b)]
    same = type(saved) is type(current) and _equal(saved, current)
    return [] if same else [f"{path.lstrip('.') or 'config'} was {_shown(saved)}, is {_shown(current)}"]


def _shown(value: Any) -> str:
    """A value as messages show it; reprlib stops in time where lists share lists."""
    return reprlib.repr(value)[:80] if isinstance(value, (list, tuple, dict, set)) else f"{value!r:.80}"


def _equal(saved: Any, current: Any) -> bool:
    """Of one type: bitwise for tensors; a nan is a nan."""
    if isinstance(saved, torch.Tensor):
        return same_bits(saved, current)
    return bool(saved == current) or bool(saved != saved and current != current)
