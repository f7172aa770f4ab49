"""Where a loader stands, as a small versioned value.

``LoaderState`` is the frozen form; ``to_dict`` and ``from_dict`` are the only ways in and out. The dict is
flat and its values are leaves, so JSON, ``torch.load(weights_only=True)`` and
``torch.distributed.checkpoint`` all carry it unchanged. Its keys are the field names, the same at every
moment of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from resumable_data.errors import StateError, StateMismatchError, StateVersionError

SCHEMA = "resumable_data.loader.v1"
ORDERS = ("shuffled.v1", "sequential", "distributed", "generator", "sampler", "batch_sampler", "stream")
SEEDINGS = ("batch.v1", "sample.v1", "none")
TAILS = ("pad", "drop", "uneven")
#: What must be equal for a state to mean the same thing here, unless ``override`` names it.
COMPARED = (
    "dataset_size",
    "dataset_id",
    "order",
    "seed",
    "drop_last",
    "tail",
    "batches_per_epoch",
    "seeding",
)
#: What ``override`` may name: the compared fields, and the digest of an order that comes from outside.
OVERRIDABLE = frozenset((*COMPARED, "order_digest"))
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class LoaderState:
    """One loader's position and what the position is a position in.

    Counts are of batches delivered to the caller (``batch_in_epoch``, this rank) and of positions of the
    epoch's global order (``samples_in_epoch``, ``consumed_samples``, all replicas; repeats that only pad the
    last batches are not counted). ``None`` in a count means it cannot be known.
    """

    schema: str
    epoch: int
    batch_in_epoch: int
    samples_in_epoch: int | None
    consumed_samples: int | None
    segment: tuple[int, ...]
    skipped: tuple[int, ...]
    order: str
    order_digest: str
    torch_version: str
    seed: int
    dataset_size: int | None
    dataset_id: str | None
    batch_size: int | None
    num_replicas: int
    drop_last: bool
    tail: str
    batches_per_epoch: int | None
    seeding: str
    delivered_ahead: tuple[int, ...]
    generator: str | None
    sampler: str | None
    stream: str | None

    def to_dict(self) -> dict[str, Any]:
        """A new flat dict of leaves; tuples become lists."""
        state = dict(zip(KEYS, _VALUES(self), strict=True))
        for name in _LISTS:
            state[name] = list(state[name])
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderState:
        """Read a dict that ``to_dict`` made, possibly in another process or another version.

        Raises:
            StateVersionError: The schema is one this version does not know.
            StateError: Not a mapping; keys missing or unknown; a value of a wrong type or an impossible one.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"a loader state is a dict, found {type(state).__name__}: pass what state_dict() returned",
                expected="dict",
                found=type(state).__name__,
            )
        _check_schema(state)
        _check_keys(state)
        values = {name: _read(name, state[name]) for name in KEYS}
        read = cls(**values)
        _check_possible(read)
        return read


KEYS: tuple[str, ...] = tuple(field.name for field in fields(LoaderState))
_VALUES = attrgetter(*KEYS)
_LISTS = ("segment", "skipped", "delivered_ahead")


def _check_schema(state: Mapping[str, Any]) -> None:
    found = state.get("schema")
    if found == SCHEMA:
        return
    if isinstance(found, str) and found.startswith("resumable_data.loader."):
        raise StateVersionError(
            f"this state has schema {found!r}, this version reads {SCHEMA!r}: upgrade resumable_data",
            expected=SCHEMA,
            found=found,
        )
    raise StateError(
        f"not a state of a ResumableLoader: its schema is {found!r}, expected {SCHEMA!r}; "
        "pass what loader.state_dict() returned (in a checkpoint it is usually under 'data')",
        expected=SCHEMA,
        found=found,
    )


def _check_keys(state: Mapping[str, Any]) -> None:
    missing = [name for name in KEYS if name not in state]
    unknown = sorted(repr(name) for name in state if name not in KEYS)
    if missing or unknown:
        raise StateError(
            f"this state has the wrong keys: missing {missing}, unknown {unknown}; it was edited or damaged, "
            "load another checkpoint",
            expected=list(KEYS),
            found=sorted(map(str, state)),
        )


def _is_int(value: Any, low: int, high: int | None = None) -> bool:
    return type(value) is int and value >= low and (high is None or value < high)


def _is_ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(item, 0) for item in value)


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _count(value: Any) -> bool:
    return _is_int(value, 0)


def _positive(value: Any) -> bool:
    return _is_int(value, 1)


def _text(value: Any) -> bool:
    return type(value) is str


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (_text, "a string"),
    "epoch": (lambda v: _is_int(v, 0, _WORD), "an int in [0, 2**64)"),
    "batch_in_epoch": (_count, "an int >= 0"),
    "samples_in_epoch": (_optional(_count), "an int >= 0 or None"),
    "consumed_samples": (_optional(_count), "an int >= 0 or None"),
    "segment": (lambda v: _is_ints(v) and len(v) == 2, "a list of two ints >= 0"),
    "skipped": (lambda v: _is_ints(v) and len(v) % 3 == 0, "a list of ints >= 0, three for each seek"),
    "order": (lambda v: v in ORDERS, f"one of {ORDERS}"),
    "order_digest": (_text, "a string"),
    "torch_version": (_text, "a string"),
    "seed": (lambda v: _is_int(v, 0, _WORD), "an int in [0, 2**64)"),
    "dataset_size": (_optional(_count), "an int >= 0 or None"),
    "dataset_id": (_optional(_text), "a string or None"),
    "batch_size": (_optional(_positive), "an int >= 1 or None"),
    "num_replicas": (_positive, "an int >= 1"),
    "drop_last": (lambda v: type(v) is bool, "a bool"),
    "tail": (lambda v: v in TAILS, f"one of {TAILS}"),
    "batches_per_epoch": (_optional(_positive), "an int >= 1 or None"),
    "seeding": (lambda v: v in SEEDINGS, f"one of {SEEDINGS}"),
    "delivered_ahead": (_is_ints, "a list of ints >= 0"),
    "generator": (_optional(_text), "a string or None"),
    "sampler": (_optional(_text), "a string or None"),
    "stream": (_optional(_text), "a string or None"),
}


def _read(name: str, value: Any) -> Any:
    check, expected = _CHECKS[name]
    # an unhashable or odd value must fail the check, not crash in it
    if isinstance(value, (dict, set, bytes)) or not check(value):
        shown = repr(value)
        raise StateError(
            f"state[{name!r}] is {shown[:80]}, expected {expected}; it was edited or damaged, "
            "load another checkpoint",
            expected=expected,
            found=value,
        )
    return tuple(value) if name in _LISTS else value


def _check_possible(state: LoaderState) -> None:
    """Refuse values that no run could have produced, whatever the dataset."""
    samples = state.samples_in_epoch
    builtin = state.order in ("shuffled.v1", "sequential", "distributed")
    bounded = state.order in ("shuffled.v1", "sequential")
    if bounded and (samples is None or state.dataset_size is None or samples > state.dataset_size):
        _impossible("samples_in_epoch", samples, f"an int in [0, dataset_size = {state.dataset_size}]")
    if state.segment[1] > state.batch_in_epoch or (samples is not None and state.segment[0] > samples):
        _impossible("segment", list(state.segment), "not beyond the position")
    ahead = state.delivered_ahead
    prefix = state.batch_in_epoch - len(ahead)
    if prefix < 0 or any(low >= high for low, high in zip((prefix, *ahead), ahead, strict=False)):
        _impossible("delivered_ahead", list(ahead), f"ascending numbers above {prefix}")
    if builtin and samples is not None:
        most = state.segment[0] + (prefix - state.segment[1]) * (state.batch_size or 1) * state.num_replicas
        if samples > most:
            _impossible("samples_in_epoch", samples, f"at most {most} after batch {prefix}")


def _impossible(name: str, found: Any, expected: str) -> None:
    raise StateError(
        f"state[{name!r}] is {found!r}, which no run can reach, expected {expected}; "
        "it was edited or damaged, load another checkpoint",
        expected=expected,
        found=found,
    )


def check_override(override: Iterable[str]) -> frozenset[str]:
    """The names as a set.

    Raises:
        TypeError: A single string, or something that is not an iterable of strings.
        ValueError: A name that cannot be overridden.
    """
    if isinstance(override, str) or not isinstance(override, Iterable):
        raise TypeError(
            f"override must be a set of field names such as {{'dataset_size'}}, found {override!r}"
        )
    names = frozenset(override)
    unknown = sorted(str(name) for name in names if name not in OVERRIDABLE)
    if unknown:
        raise ValueError(f"override names {unknown}, expected names out of {sorted(OVERRIDABLE)}")
    return names


def differences(
    saved: LoaderState, current: Mapping[str, Any], names: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    """Every named field in which the two differ: name -> (saved, current)."""
    return {
        name: (getattr(saved, name), current[name]) for name in names if getattr(saved, name) != current[name]
    }


def mismatch(different: Mapping[str, tuple[Any, Any]]) -> StateMismatchError:
    """The error that lists every differing field, both values and the ways out."""
    lines = [
        f"  {name}: saved {saved!r}, current {current!r}" for name, (saved, current) in different.items()
    ]
    advice = "build the loader as it was when the state was saved"
    if OVERRIDABLE.issuperset(different):
        names = ", ".join(repr(name) for name in sorted(different))
        advice += f", or accept the present value by name: load_state_dict(state, override={{{names}}})"
    return StateMismatchError(
        "this state belongs to another run; what differs:\n" + "\n".join([*lines, advice]), fields=different
    )
