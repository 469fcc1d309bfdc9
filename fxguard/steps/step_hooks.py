"""Hooks on the steps of all optimizers; they keep no object alive."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fxguard.batch.step_hooks import AROUND_STEP, remove_hooks
from fxguard.capture import dynamo

__all__ = ["StepHooks", "is_step_compiled", "step_that_runs"]

OnStep = Callable[[Optimizer, Any, Any], Any]


def step_that_runs() -> Optimizer | None:
    """The optimizer whose step this thread is making, such as LBFGS calling its closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is AROUND_STEP:
            optimizer = frame.f_locals.get("self")
            return optimizer if isinstance(optimizer, Optimizer) else None
        frame = frame.f_back
    return None


class StepHooks:
    """Calls methods before and after each step of an optimizer, while their object is alive.

    If TorchDynamo compiles a step, the hooks break its graph; if it may not break, no hook is
    called.

    Args:
        before: a bound method, called with the optimizer and the arguments of its step; None for
            none. Arguments that it returns take their place.
        after: likewise.
    """

    def __init__(self, before: OnStep | None = None, after: OnStep | None = None) -> None:
        remove_hooks(())  # those that were left
        handles: list[RemovableHandle] = []
        if before is not None:
            handles.append(register_optimizer_step_pre_hook(_hook(before)))
        if after is not None:
            handles.append(register_optimizer_step_post_hook(_hook(after)))
        self._close = weakref.finalize(self, remove_hooks, handles)

    def close(self) -> None:
        """Remove the hooks, as the garbage collector does too."""
        self._close()


def _hook(method: OnStep) -> Callable[[Optimizer, Any, Any], Any]:
    reference = weakref.WeakMethod(method)  # type: ignore[arg-type] # it is one

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if dynamo.may_not_break():
                return None
            return _call(reference, optimizer, args, kwargs)
        if dynamo.eval_frame_callback() is None:  # nobody compiles what runs now
            return _call_undisturbed(reference, optimizer, args, kwargs)
        return _call(reference, optimizer, args, kwargs)

    return hook


def _call_undisturbed(
    reference: weakref.WeakMethod[Any], optimizer: Optimizer, args: Any, kwargs: Any
) -> Any:
    call = reference()
    return None if call is None else call(optimizer, args, kwargs)


class _Here(threading.local):
    is_compiled = False


_here = _Here()


@torch.compiler.disable
def _call(reference: weakref.WeakMethod[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    before, _here.is_compiled = _here.is_compiled, True
    try:
        return _call_undisturbed(reference, optimizer, args, kwargs)
    finally:
        _here.is_compiled = before


def is_step_compiled() -> bool:
    """Whether TorchDynamo compiles the step around the hook that runs now."""
    return _here.is_compiled
