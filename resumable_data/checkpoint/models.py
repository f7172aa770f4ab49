"""Modules: parameters and buffers under the bare model's names, training flags, gradients.

The wrappers of DDP and ``torch.compile`` put ``module.`` and ``_orig_mod.`` into names; saved names do not
have them, so that a run may be wrapped otherwise when it resumes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from resumable_data.checkpoint.mismatch import label, raise_differences, same_bits

_ADVICE = "Build the model that was saved, or start another directory."
_EXTRA_STATE = "_extra_state"  # what get_extra_state gave; the module's own affair, its size may change


def _wrapped_as(module: torch.nn.Module) -> str | None:
    """The attribute under which a wrapper keeps the module it wraps; None for a module of the user's."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    # torch.compile's class is in torch._dynamo, whose import is slow; the attribute is in every state dict
    if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        return "_orig_mod"
    return None


def bare_names(root: torch.nn.Module) -> Callable[[str], str]:
    """A function from dotted names as torch gives them to those of the bare model."""
    if all(_wrapped_as(module) is None for module in root.modules()):
        return lambda name: name

    def bare(name: str) -> str:
        module: torch.nn.Module | None = root
        kept = []
        for part in name.split(".") if name else []:
            if module is None or _wrapped_as(module) != part:
                kept.append(part)
            below = getattr(module, part, None)
            module = below if isinstance(below, torch.nn.Module) else None
        return ".".join(kept)

    return bare


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` under bare names; the tensors are the module's own."""
    bare = bare_names(module)
    return {bare(name): value for name, value in module.state_dict().items()}


def module_modes(module: torch.nn.Module) -> dict[str, bool]:
    """Training flag of every submodule by bare name, ``""`` for the module itself."""
    bare = bare_names(module)
    return {bare(name): sub.training for name, sub in module.named_modules()}


def module_grads(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that exist, by bare parameter name; the tensors are the parameters' own."""
    bare = bare_names(module)
    return {bare(name): p.grad for name, p in module.named_parameters() if p.grad is not None}


def frozen_names(module: torch.nn.Module) -> list[str]:
    """The bare names of the parameters that do not ask for gradients."""
    bare = bare_names(module)
    return [bare(name) for name, p in module.named_parameters() if not p.requires_grad]


def check_module(name: str, module: torch.nn.Module, saved: Any) -> None:
    """Compare keys, shapes, dtypes and layouts exactly; CheckpointMismatchError lists what differs."""
    if not isinstance(saved, Mapping):
        raise_differences(name, [f"the file holds a {type(saved).__name__}, not a module's state"], _ADVICE)
    current = module_state(module)
    differences = [f"{key} is missing in the file" for key in current.keys() - saved.keys()]
    differences += [f"{label(key)} is only in the file" for key in saved.keys() - current.keys()]
    for key in current.keys() & saved.keys():
        if key.rpartition(".")[2] == _EXTRA_STATE:
            differences += _extra_differences(key, saved[key], current[key])
        else:
            differences += _tensor_differences(key, saved[key], current[key])
    raise_differences(name, differences, _ADVICE)
    raise_differences(name, _tie_differences(saved, current), "Untie them as at the save.")


def _tie_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Names of one tensor here must hold one value in the file: torch would keep the last it meets."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for key, tensor in current.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        other = first.setdefault(place, key)
        if other != key and not same_bits(saved[other], saved[key]):
            found.append(f"{other} and {key} differ in the file and are one tensor here")
    return found


def _extra_differences(key: str, saved: Any, current: Any) -> list[str]:
    if saved is None or current is None or type(saved) is type(current):
        return []
    return [f"{key} is a {type(saved).__name__} in the file, a {type(current).__name__} in the model"]


def _tensor_differences(key: str, saved: Any, current: Any) -> list[str]:
    if not isinstance(current, torch.Tensor):
        same = isinstance(saved, torch.Tensor) is False
        return [] if same else [f"{key} is a tensor in the file, a {type(current).__name__} in the model"]
    if not isinstance(saved, torch.Tensor):
        return [f"{key} is a {type(saved).__name__} in the file, a tensor in the model"]
    unfit = _unfit(key, current)
    if unfit:
        return [unfit]
    if torch.nn.parameter.is_lazy(saved) or saved.device.type == "meta":
        return [f"{key} has no values in the file"]
    found = (tuple(saved.shape), saved.dtype, saved.layout)
    wanted = (tuple(current.shape), current.dtype, current.layout)
    return [] if found == wanted else [f"{key} is {_shown(found)} in the file, {_shown(wanted)} in the model"]


def _unfit(key: str, current: torch.Tensor) -> str:
    """Why a tensor of the model cannot take values, "" if it can."""
    if torch.nn.parameter.is_lazy(current):
        return f"{key} has no shape yet: run a batch through the model first"
    if current.device.type == "meta":
        return f"{key} is on the meta device, which keeps no values"
    if current.layout is not torch.strided:
        return f"{key} is {current.layout} here, and only dense strided tensors are saved"
    if any(size > 1 and step == 0 for size, step in zip(current.shape, current.stride(), strict=True)):
        return f"{key} is expanded, elements share memory: torch cannot copy into it, clone() it"
    if current.is_inference() and not torch.is_inference_mode_enabled():
        return f"{key} was made under torch.inference_mode, and cannot be set outside it"
    return ""


def _shown(what: tuple[Any, ...]) -> str:
    shape, dtype, layout = what
    return f"{list(shape)} {dtype}" + ("" if layout is torch.strided else f" {layout}")


def check_modes(name: str, module: torch.nn.Module, saved: Any) -> None:
    """The saved training flags must be of the very same submodules."""
    if not isinstance(saved, Mapping) or any(type(flag) is not bool for flag in saved.values()):
        raise_differences(name, ["the file holds no training flags for it"], _ADVICE)
    current = module_modes(module)
    differences = [
        f"submodule {key or '(itself)'} is missing in the file" for key in current.keys() - saved.keys()
    ]
    differences += [f"submodule {label(key)} is only in the file" for key in saved.keys() - current.keys()]
    raise_differences(name, differences, _ADVICE)


def check_frozen(name: str, module: torch.nn.Module, saved: Any) -> None:
    """The saved list must name parameters of the module; DDP settled its own when it was built."""
    if type(saved) is not list or any(type(key) is not str for key in saved):
        raise_differences(name, ["the file does not say which of its parameters are frozen"], _ADVICE)
    bare = bare_names(module)
    names = {bare(key) for key, _ in module.named_parameters()}
    differences = [f"frozen parameter {label(key)} is not here" for key in set(saved) - names]
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        moved = set(saved) ^ set(frozen_names(module))
        differences += [f"parameter {label(key)} was frozen in only one of file and model" for key in moved]
    raise_differences(name, differences, "Set requires_grad as at the save before DDP wraps the model.")


def check_grads(name: str, module: torch.nn.Module, saved: Any) -> None:
    """Each saved gradient must fit a parameter: name, shape and dtype."""
    if not isinstance(saved, Mapping):
        raise_differences(name, [f"its gradients are a {type(saved).__name__}, not a dict"], _ADVICE)
    bare = bare_names(module)
    parameters = {bare(key): p for key, p in module.named_parameters()}
    differences = [
        f"gradient {label(key)} is of no parameter here" for key in saved.keys() - parameters.keys()
    ]
    for key in saved.keys() & parameters.keys():
        differences += _tensor_differences(f"gradient {key}", saved[key], parameters[key])
    raise_differences(name, differences, _ADVICE)


def load_module(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy a checked state into the module."""
    bare = bare_names(module)
    current = module.state_dict()
    ready = OrderedDict((name, saved[bare(name)]) for name in current)
    # the version numbers by which modules migrate old states: this one was just found to be of this version
    metadata = getattr(current, "_metadata", None)
    if metadata is not None:
        ready._metadata = metadata  # type: ignore[attr-defined]  # where torch looks for it
    module.load_state_dict(ready, strict=True)


def load_grads(module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Set every gradient, to None where the file has none."""
    bare = bare_names(module)
    for name, parameter in module.named_parameters():
        value = saved.get(bare(name))
        if value is None:
            parameter.grad = None
        elif parameter.grad is not None and _same_form(parameter.grad, value):
            # it may be a view into a bucket of DDP's, or the static input of a CUDA graph
            parameter.grad.detach().copy_(value)
        else:
            parameter.grad = value.detach().to(parameter.device, copy=True)


def written_grads(module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The present gradients that `load_grads` writes into; it leaves the others alone."""
    bare = bare_names(module)
    pairs = [(p.grad, saved.get(bare(name))) for name, p in module.named_parameters()]
    return [
        grad for grad, value in pairs if grad is not None and value is not None and _same_form(grad, value)
    ]


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    strided = one.layout is torch.strided
    return strided and one.stride() == other.stride() and one.dtype == other.dtype


def load_frozen(module: torch.nn.Module, saved: Collection[str]) -> None:
    """Set every parameter's `requires_grad`."""
    bare = bare_names(module)
    for name, parameter in module.named_parameters():
        frozen = bare(name) in saved
        if parameter.requires_grad is frozen:
            parameter.requires_grad_(not frozen)


def load_modes(module: torch.nn.Module, saved: Mapping[str, bool]) -> None:
    """Set every training flag, wrappers included, without calling `train`, which users override."""
    bare = bare_names(module)
    for name, sub in module.named_modules():
        sub.training = saved[bare(name)]
