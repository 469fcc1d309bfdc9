"""Hooks on the steps of all optimizers: they are removed while no step goes through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from fxguard.graph.running_code import running_code

__all__ = ["AROUND_STEP", "remove_hooks"]

# Of the function that torch puts around each optimizer's step, to call these hooks.
AROUND_STEP = Optimizer.profile_hook_step(lambda self: None).__code__  # type: ignore[arg-type]

_over: list[RemovableHandle] = []  # of hooks that are still to be removed


@torch.compiler.disable
def remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks on steps: now, or with the next ones if a step is running.

    Torch goes through a dictionary of hooks, and a step fails if that changes meanwhile. The
    garbage collector may come at any time, and a callback in one step may remove a guard.

    Args:
        handles: of hooks that do nothing any more.
    """
    _over.extend(handles)
    if id(AROUND_STEP) not in running_code():
        while _over:
            _over.pop().remove()
