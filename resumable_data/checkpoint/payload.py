"""The shape that is saved (``ckpt.v1``), and setting it back: validate everything, then set everything."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from resumable_data.checkpoint import models, optimizers, undo
from resumable_data.checkpoint.config import check_config
from resumable_data.checkpoint.mismatch import label
from resumable_data.checkpoint.saveable import prepare
from resumable_data.checkpoint.schedulers import check_scheduler, is_scheduler
from resumable_data.checkpoint.schema import OWN_PLACES, SCHEMA, check_shape, refuse
from resumable_data.checkpoint.steps import Step, run_steps
from resumable_data.errors import CheckpointMismatchError
from resumable_data.rng import capture_rng_state, plan_rng_restore
from resumable_data.rng_streams import GENERATOR_TYPES

# What can be put back comes first, then the RNG, then plain models, which have no copy to be put back from.
_PHASES = ("extra", "scheduler", "data", "optimizer", "hooked", "grads", "flags", "rng", "model")
_RESERVED = ("step", "epoch", "batch_in_epoch")


def build_payload(
    objects: Mapping[str, Any],
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    config: Any = None,
    generators: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything a run needs to go on, as a copy of its own: training on does not change it.

    Every rank calls it for itself. `CheckpointManager.save` does the same without the copy.

    Args:
        objects: What the run is made of. ``model``, ``optimizer``, ``scheduler`` and ``data`` have a
            ``state_dict`` (or are None); further names hold such objects or plain values.
        step: Optimizer steps done, at least 0.
        state: The caller's own values. ``step``, and with a loader ``epoch`` and ``batch_in_epoch``, are
            added.
        config: What must be the same when the run resumes; plain values.
        generators: RNGs besides the global ones, as for `capture_rng_state`.

    Returns:
        A dict with the keys ``schema``, ``model``, ``optimizer``, ``scheduler``, ``data``, ``state``,
        ``rng``, ``modes``, ``grads``, ``wiring``, ``config``, ``extra`` and ``wall_saved_at``.

    Raises:
        TypeError: An object without ``state_dict`` in a place that needs one, or a value that could not be
            read back, by its key path.
        ValueError: A `step` out of range, or a `state` that holds a reserved key with another value.
    """
    return dict(prepare(collect(objects, step, state, config, generators), copy=True))


def collect(
    objects: Mapping[str, Any],
    step: int,
    state: Mapping[str, Any] | None,
    config: Any,
    generators: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The payload over the objects' own tensors, unchecked; the RNG is captured last."""
    if type(step) is not int:
        raise TypeError(f"step must be an int, found {step!r}")
    if step < 0:
        raise ValueError(f"step must be at least 0, found {step}")
    payload: dict[str, Any] = {"schema": SCHEMA}
    for name in OWN_PLACES:
        payload[name] = _state_of(name, objects.get(name), plain=False)
    payload["extra"] = {
        name: _state_of(name, value, plain=True) for name, value in objects.items() if name not in OWN_PLACES
    }
    payload["state"] = _with_reserved(state, step, payload["data"])
    modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
    payload["modes"] = {name: models.module_modes(module) for name, module in modules.items()}
    payload["grads"] = {}
    for name, module in modules.items():
        grads = models.module_grads(module)
        if name == "model":
            payload["grads"].update(grads)
        elif grads:
            payload["grads"][_others_grads(name)] = grads
    payload["wiring"] = _wiring(objects, modules)
    payload["config"] = config
    payload["wall_saved_at"] = time.time()
    payload["rng"] = capture_rng_state(generators)
    return payload


def _wiring(objects: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """What state dicts leave out: frozen parameters, whose is each place of an optimizer, classes."""
    own = {name: value for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
    return {
        "frozen": {name: models.frozen_names(module) for name, module in modules.items()},
        "places": {name: optimizers.place_names(optimizer, modules) for name, optimizer in own.items()},
        "classes": {
            name: type(value).__name__
            for name, value in objects.items()
            if isinstance(value, (torch.optim.Optimizer, LRScheduler))
        },
    }


def _state_of(name: str, value: Any, *, plain: bool) -> Any:
    if type(name) is not str:
        raise TypeError(f"objects has the name {name!r}; expected a str")
    if isinstance(value, torch.nn.Module):
        return models.module_state(value)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return value.state_dict()
    if not plain and value is not None:
        raise TypeError(
            f"objects[{name!r}] is a {type(value).__name__} without state_dict; give the object itself, and "
            "plain values under another name"
        )
    return value


def _with_reserved(state: Mapping[str, Any] | None, step: int, data: Any) -> dict[str, Any]:
    own = dict(state or {})
    place = data if isinstance(data, Mapping) else {}
    reserved = {"step": step} | {key: place[key] for key in _RESERVED[1:] if type(place.get(key)) is int}
    for key, value in reserved.items():
        if key in own and (type(own[key]) is not type(value) or own[key] != value):
            raise ValueError(
                f"state[{key!r}] is {own[key]!r}, but this key is reserved and stands for {value!r}; "
                "give yours another name"
            )
    return dict.fromkeys(_RESERVED) | own | reserved


def _others_grads(name: str) -> str:
    """Where the gradients of modules other than "model" are: no parameter's name begins with a dot."""
    return f".{name}"


def apply_payload(
    payload: Mapping[str, Any],
    objects: Mapping[str, Any],
    *,
    override: Iterable[str] = (),
    strict_rng: bool = True,
) -> None:
    """Set objects, training flags, gradients and RNGs to what a payload holds; all of it or nothing.

    Everything is validated before anything is set: keys, shapes and dtypes exactly, every other value by its
    type; rates and counts must be finite. NaN in weights, gradients and moments is kept bit by bit. Objects
    may be fewer than the payload holds. Every rank calls it with its own payload, before any worker processes
    start.

    Models whose classes or hooks load in a way of their own are copied first, to be put back if that fails;
    plain ones come last and have no copy, so only an interrupt in that very moment leaves them half set.

    Args:
        payload: From `build_payload`, or read back from a checkpoint.
        objects: As for `build_payload`; None and plain values are passed over. Generators that
            `build_payload` was given are given here among the objects, under their names.
        override: Names of differences to accept: ``"config"``, and names that the loader knows.
        strict_rng: Refuse other devices or generators than those at the save; see `restore_rng_state`.

    Raises:
        CheckpointMismatchError: The payload does not fit, by object and key; or an object failed while it
            was being set, in which case everything was put back, or what could not be is named.
        KeyboardInterrupt: Passes on, after the same; a model that could not be put back is named in its text.
        StateMismatchError, RNGRestoreError: From the loader and the RNG, unchanged.
        ValueError: An `override` that nobody knows.
    """
    generators = {name: value for name, value in objects.items() if isinstance(value, GENERATOR_TYPES)}
    others = {name: value for name, value in objects.items() if name not in generators}
    apply_all(payload, others, override, strict_rng, None, generators)


def apply_all(
    payload: Mapping[str, Any],
    objects: Mapping[str, Any],
    override: Iterable[str],
    strict_rng: bool,
    config: Any,
    generators: Mapping[str, Any] | None,
) -> None:
    """`apply_payload` with the generators apart and a `config` to compare, unless that is None."""
    names = _override_names(override, objects)
    check_shape(payload)
    if config is not None and "config" not in names:
        check_config(payload.get("config"), config)
    phases = _plan(payload, objects, names - {"config"})
    rng = plan_rng_restore(payload["rng"], generators=generators, strict=strict_rng)
    phases["rng"].append(Step("rng", rng.apply, rng.undo))
    # objects that draw while they are set, and then fail, must not move the streams either
    first = Step("rng", lambda: None, rng.undo)
    run_steps([first, *(step for key in _PHASES for step in phases[key])])


def _override_names(override: Iterable[str], objects: Mapping[str, Any]) -> set[str]:
    if isinstance(override, str):
        raise TypeError(f"override must be a collection of names, found the string {override!r}")
    names = set(override)
    takers = [name for name, value in objects.items() if _takes_override(value)]
    if names - {"config"} and not takers:
        raise ValueError(f"override names {sorted(names - {'config'})}, and no object given here knows them")
    return names


def _takes_override(value: Any) -> bool:
    check = getattr(value, "check_state_dict", None)
    return callable(check) and "override" in inspect.signature(check).parameters


# ── validate, then set ───────────────────────────────────────────────────────────────────────────────


_Phases = dict[str, list[Step]]


def _plan(payload: Mapping[str, Any], objects: Mapping[str, Any], override: set[str]) -> _Phases:
    """Check each object; the steps that set them, by phase."""
    phases: _Phases = {key: [] for key in _PHASES}
    held = {name: payload[name] for name in OWN_PLACES if payload[name] is not None} | payload["extra"]
    modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
    for name, value in objects.items():
        if value is None:
            continue
        if name not in held:
            raise CheckpointMismatchError(
                f"{name}: not in the file, which holds {sorted(map(label, held))}. Nothing was changed. Leave "
                "it out of the objects and set it up yourself, or start another directory.",
                expected=name,
                found=sorted(held),
            )
        saved = held[name]
        if "wiring" in payload:
            _check_class(name, value, _wired(payload, "classes").get(name))
        if isinstance(value, torch.nn.Module):
            _plan_module(name, value, saved, payload, phases)
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.check_optimizer(name, value, saved)
            if "wiring" in payload:
                optimizers.check_places(name, value, _wired(payload, "places").get(name), modules)
            phases["optimizer"].append(_optimizer_step(name, value, saved))
        elif callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type):
            scheduler = is_scheduler(name, value)
            if scheduler:
                check_scheduler(name, value, saved)
            phase = "data" if name == "data" else "scheduler" if scheduler else "extra"
            phases[phase].append(_object_step(name, value, saved, override))
        elif name in OWN_PLACES:
            raise TypeError(f"objects[{name!r}] is a {type(value).__name__} without load_state_dict")
    return phases


def _wired(payload: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found: Any = payload["wiring"].get(part)
    if not isinstance(found, Mapping):
        refuse("wiring", f"without {part!r}", "the parts classes, frozen and places")
    return dict(found)


def _check_class(name: str, value: Any, saved: Any) -> None:
    current = type(value).__name__
    if saved != current and isinstance(value, (torch.optim.Optimizer, LRScheduler)):
        raise CheckpointMismatchError(
            f"{name}: the file's is a {label(saved)}, this one a {current}. Nothing was changed. Use the class that "
            "was saved, or start another directory.",
            expected=current,
            found=saved,
        )


def _plan_module(
    name: str, module: torch.nn.Module, saved: Any, payload: Mapping[str, Any], phases: _Phases
) -> None:
    grads = payload.get("grads", {})
    if name == "model":
        own = {key: grad for key, grad in grads.items() if not key.startswith(".")}
    else:
        own = grads.get(_others_grads(name), {})
    modes = payload["modes"].get(name)
    models.check_module(name, module, saved)
    models.check_grads(name, module, own)
    models.check_modes(name, module, modes)
    modes_before, frozen_before = models.module_modes(module), models.frozen_names(module)
    frozen: Any = _wired(payload, "frozen").get(name) if "wiring" in payload else frozen_before
    models.check_frozen(name, module, frozen)

    def set_flags(modes: Mapping[str, bool], frozen: list[str]) -> None:
        models.load_modes(module, modes)
        models.load_frozen(module, set(frozen))

    def load() -> None:
        models.load_module(module, saved)

    if undo.loads_plainly(module):
        phases["model"].append(Step(name, load, None))
    else:
        phases["hooked"].append(Step(name, load, undo.module_undo(module)))
    back = undo.grads_undo(module, models.written_grads(module, own))
    phases["grads"].append(Step(f"{name}'s gradients", lambda: models.load_grads(module, own), back))
    phases["flags"].append(
        Step(
            f"{name}'s training flags",
            lambda: set_flags(modes, frozen),
            lambda: set_flags(modes_before, frozen_before),
        )
    )


def _optimizer_step(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> Step:
    return Step(
        name, lambda: optimizers.load_optimizer(name, optimizer, saved), undo.optimizer_undo(optimizer)
    )


def _object_step(name: str, value: Any, saved: Any, override: set[str]) -> Step:
    """Check by the object's own means, if it has any; it is put back from a snapshot."""
    options: dict[str, Any] = {"override": override} if override and _takes_override(value) else {}
    check = getattr(value, "check_state_dict", None)
    if callable(check):
        check(saved, **options)
    snapshot = undo.snapshot(value.state_dict())
    # a copy: an object may keep what it is given, and the payload must stay as it was
    own = copy.deepcopy(saved)
    unchanged_empty = saved == {} and snapshot == {} if isinstance(saved, dict) else False

    def load() -> None:
        if not unchanged_empty:  # a disabled GradScaler refuses its own empty state
            value.load_state_dict(own, **options)

    return Step(name, load, lambda: value.load_state_dict(snapshot))
