"""Which hooks the modules of a model have: TorchDynamo reads them only when it captures.

TorchDynamo's own guards on hooks (``skip_nnmodule_hook_guards=False``) cost some microseconds per
module and call, and miss a hook that was replaced by another one. Looking at four dictionaries of
each module costs a tenth of that.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.nn.modules.module as module_hooks
from torch.nn import Module

from fxguard.measure import native

__all__ = ["HookState", "hook_state", "hooked_parts"]

# A hook with keyword arguments, or one that is always called, is also in one of these.
KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The dictionaries of global hooks, with their positions.
GLOBAL = [(i - len(KINDS), getattr(module_hooks, f"_global{kind}")) for i, kind in enumerate(KINDS)]
OF_ALL = [of_all for _, of_all in GLOBAL]

# Position of a module, or of a dictionary of global hooks, and the keys of its hooks. Torch gives
# each hook its own key.
HookState = tuple[tuple[int, tuple[Any, ...]], ...]


def hooked_parts(model: Module) -> list[Module]:
    """The submodules that can have hooks. Hooks of the model itself run around its forward."""
    parts = [module for module in model.modules() if module is not model]
    return [module for module in parts if all(kind in vars(module) for kind in KINDS)]


def hook_state(modules: list[weakref.ref[Module]], ours: int) -> HookState:
    """The hooks that the modules have now; equal if nothing was added, replaced or removed.

    Args:
        modules: each of :func:`hooked_parts`; one that is gone counts as one without hooks.
        ours: the key of fxguard's own hooks on all modules.
    """
    state = []
    has_any = native.any_filled
    if has_any is not None and not any(OF_ALL) and not has_any(modules, KINDS):
        return ()  # for nearly all forwards
    for position, reference in enumerate(modules):
        # Written out: this runs at each forward.
        module = reference()
        if module is None:
            continue
        attributes = module.__dict__
        if (
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
        ):
            state.append((position, tuple(key for kind in KINDS for key in attributes[kind])))
    for position, of_all in GLOBAL:
        # Another thread may be adding ours, so a copy is made at once.
        if of_all and (keys := tuple(key for key in tuple(of_all) if key != ours)):
            state.append((position, keys))
    return tuple(state)
