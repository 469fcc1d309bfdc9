"""Hooks of autograd that TorchDynamo comes across.

It traces them as a part of the backward that it compiles (compiled autograd): what they call has to
be an operation there. Where a backward begins inside a compiled function, it would compile them as
functions of their own.

Underscored names that it uses (present in torch 2.11 to 2.13):

- ``torch._C._dynamo.eval_frame.set_code_exec_strategy``: ``torch._dynamo.eval_frame.skip_code`` is
  the same without what a function calls. Without it no backward inside of a compiled function is
  seen.
- ``torch._dynamo.compiled_autograd.in_compiled_autograd_region``: tells backwards that are compiled
  from others. Without it those are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction as Action
from torch._C._dynamo.eval_frame import _FrameExecStrategy as Strategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import compiled_autograd

from fxguard.batch import kept_function, kept_run

__all__ = ["Looks", "hand_over", "in_compiled_autograd", "never_compiled", "number_of"]

Hook = TypeVar("Hook", bound=Callable[..., object])

NEVER = Strategy(Action.SKIP, Action.SKIP)  # neither a function nor what it calls


def never_compiled(hook: Hook) -> Hook:
    """Keep TorchDynamo from compiling a hook, or what that calls; compiled autograd traces it."""
    set_code_exec_strategy(hook.__code__, NEVER)  # type: ignore[attr-defined]
    return hook


never_compiled(kept_run.Listener.__call__)
never_compiled(kept_function.FunctionHook.__call__)


class Looks(Protocol):
    """Whoever looks at gradients of leaves."""

    def reached(self, name: str, gradient: Tensor) -> None:
        """A gradient is about to be accumulated into a leaf."""


def in_compiled_autograd() -> bool:
    """Whether this backward is a compiled one; also while hooks are traced for it."""
    return compiled_autograd.in_compiled_autograd_region


def number_of(listener: Looks) -> int:
    """What :func:`hand_over` knows a listener by, as long as that is alive."""
    number = id(listener)
    _listeners[number] = listener
    return number


def hand_over(gradient: Tensor, number: int, name: str) -> None:
    """Let a listener look at a gradient, when the graph runs that this call is traced into."""
    torch.ops.fxguard.gradient_reached(gradient, _order, number, name)


_listeners: weakref.WeakValueDictionary[int, Looks] = weakref.WeakValueDictionary()

# The operation says that it writes this: so no compiler deletes it, moves it, or runs it twice.
_order = torch.zeros(())


@torch.library.custom_op("fxguard::gradient_reached", mutates_args=("order",))
def _gradient_reached(gradient: Tensor, order: Tensor, number: int, name: str) -> None:
    listener = _listeners.get(number)
    if listener is not None:
        listener.reached(name, gradient)


@_gradient_reached.register_fake
def _(gradient: Tensor, order: Tensor, number: int, name: str) -> None:
    pass
