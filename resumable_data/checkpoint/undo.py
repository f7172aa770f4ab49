"""How objects are put back: by reference where loading replaces things, from copies where it writes into them.

A plain module is set by `torch.nn.Module.load_state_dict` alone, which a checked state cannot fail; it has no
copy, for that would double the memory of a model. Modules with load hooks or methods of their own may fail
half-way, and are copied first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
# torch offers no public way to ask for hooks
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")

Undo = Callable[[], None]


def is_torchs(method: Any) -> bool:
    """Whether a method, however bound, is torch's own and not one of the caller's."""
    return str(getattr(method, "__module__", "")).split(".")[0] == "torch"


def loads_plainly(module: torch.nn.Module) -> bool:
    """Whether nothing but torch's own code on plain tensors runs when a state is set."""
    for sub in module.modules():
        if any(getattr(sub, hooks, None) for hooks in _HOOKS):
            return False
        if not all(is_torchs(getattr(sub, method)) for method in _LOADING):
            return False
        if any(type(tensor) not in _PLAIN_TENSORS for _, tensor in _own_tensors(sub)):
            return False
    return True


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers that hang on this very module, the buffers that are not saved too."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def snapshot(state: Any) -> Any:
    """A deep copy, also of tensors that hang on a graph, such as a loss that was not detached."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            if not value.is_leaf:  # torch refuses to copy it
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(value.values() if isinstance(value, dict) else value)
    return copy.deepcopy(state, memo)


def module_undo(module: torch.nn.Module) -> Undo:
    """Put a module's tensors back: the same objects, holding the values they hold now; extra state as well."""
    held = [(sub, name, tensor) for sub in module.modules() for name, tensor in _own_tensors(sub)]
    refill = _refill(tensor for _, _, tensor in held)
    extra = [(sub, snapshot(sub.get_extra_state())) for sub in module.modules() if _has_extra(sub)]

    def undo() -> None:
        for sub, name, tensor in held:
            if getattr(sub, name, None) is not tensor:
                setattr(sub, name, tensor)
        refill()
        for sub, state in extra:
            sub.set_extra_state(state)

    return undo


def _has_extra(module: torch.nn.Module) -> bool:
    return not is_torchs(module.get_extra_state) and not is_torchs(module.set_extra_state)


def _refill(tensors: Iterable[torch.Tensor]) -> Undo:
    """Write the present values back into each tensor, tied ones once."""
    copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}

    def refill() -> None:
        with torch.no_grad():
            for tensor, values in copies.values():
                tensor.copy_(values)

    return refill


def grads_undo(module: torch.nn.Module, written: Iterable[torch.Tensor]) -> Undo:
    """Put a module's gradients back; only those that will be `written` into are copied."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    refill = _refill(written)

    def undo() -> None:
        for parameter, grad in before:
            parameter.grad = grad
        refill()

    return undo


def optimizer_undo(optimizer: torch.optim.Optimizer) -> Undo:
    """Put an optimizer's state and groups back: the same objects, holding what they hold now.

    torch's own loading replaces these objects and writes into no tensor, so references are enough. The
    tensors of an optimizer that loads in a way of its own are copied.
    """
    state, groups = optimizer.state, optimizer.param_groups
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
    items = [(group, dict(group)) for group in groups]
    hooked = any(getattr(optimizer, hooks, None) for hooks in _OPTIMIZER_HOOKS)
    own = hooked or not is_torchs(optimizer.load_state_dict)
    refill = _refill(_tensors_in([fields, [item for _, item in items]]) if own else ())
    whole = list(groups)

    def undo() -> None:
        if optimizer.state is not state:
            optimizer.state = state
        if optimizer.param_groups is not groups:
            optimizer.param_groups = groups
        groups[:] = whole
        for group, before in items:
            group.clear()
            group.update(before)
        _put_fields(state, fields)
        refill()

    return undo


def _put_fields(state: Any, fields: dict[Any, Any]) -> None:
    held = {key: state[key] for key in state.keys() & fields.keys()}
    state.clear()
    for key, before in fields.items():
        there = held.get(key)
        if isinstance(before, dict) and isinstance(there, dict):
            there.clear()
            there.update(before)
            state[key] = there
        else:
            state[key] = before


def _tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.nn.Parameter):
            continue  # the model's, set by nobody here
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
