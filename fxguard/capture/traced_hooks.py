"""Autograd hooks that TorchDynamo encounters.

TorchDynamo traces them as part of a backward that it compiles (compiled autograd), where everything
that they call has to be an operation. If a backward begins inside a compiled function, it would
compile them as separate functions.

Underscored names in use (present in torch 2.11 to 2.13):

- ``torch._C._dynamo.eval_frame.set_code_exec_strategy``: like
  ``torch._dynamo.eval_frame.skip_code``, but also for functions that a function calls. Without it,
  no backward inside a compiled function is seen.
- ``torch._dynamo.compiled_autograd.compiled_autograd_enabled``: without it, rechecked backwards run
  as they are where autograd is compiled.
- ``torch._dynamo.compiled_autograd.in_compiled_autograd_region``: tells compiled backwards from
  others. Without it, compiled ones are not seen.
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

__all__ = [
    "Looks",
    "compiles_backwards",
    "hand_over",
    "hook_of_leaf",
    "in_compiled_autograd",
    "never_compiled",
    "number_of",
]

Hook = TypeVar("Hook", bound=Callable[..., object])

NEVER = Strategy(Action.SKIP, Action.SKIP)  # skip both a function and what it calls


def never_compiled(hook: Hook) -> Hook:
    """Keep TorchDynamo from compiling a hook and what it calls; compiled autograd traces it."""
    set_code_exec_strategy(hook.__code__, NEVER)  # type: ignore[attr-defined]
    return hook


never_compiled(kept_run.Listener.__call__)
never_compiled(kept_function.FunctionHook.__call__)


class Looks(Protocol):
    """An object that looks at gradients of leaves."""

    def reached(self, name: str, gradient: Tensor) -> None:
        """Called when a gradient is about to be accumulated into a leaf."""


def hook_of_leaf(
    needs_nothing: Callable[[Tensor | None], bool],
    hear: Callable[[Tensor | None], object],
    number: int,
    name: str,
) -> Callable[[Tensor | None], None]:
    """An autograd hook for a leaf.

    Args:
        needs_nothing: whether nobody has to hear of a gradient. Most are of this kind.
        hear: hears of any other; not in a backward that is compiled as a graph.
        number: of who listens there: see :func:`number_of`.
        name: of the leaf.
    """

    @never_compiled
    def listen(gradient: Tensor | None) -> None:
        if compiled_autograd.in_compiled_autograd_region:
            if gradient is None:  # the backward of a function of the script gives none
                return
            if torch.compiler.is_compiling():
                hand_over(gradient, number, name)
            elif (listener := _listeners.get(number)) is not None:
                listener.reached(name, gradient)
        elif not needs_nothing(gradient):
            hear(gradient)

    return listen


def compiles_backwards() -> bool:
    """Whether a backward that begins now would be compiled: not under a mode."""
    return bool(compiled_autograd.compiled_autograd_enabled)


def in_compiled_autograd() -> bool:
    """Whether this backward is a compiled one, also while its hooks are traced."""
    return compiled_autograd.in_compiled_autograd_region


def number_of(listener: Looks) -> int:
    """The number by which :func:`hand_over` finds a listener as long as it is alive."""
    number = id(listener)
    _listeners[number] = listener
    return number


def hand_over(gradient: Tensor, number: int, name: str) -> None:
    """Let a listener look at a gradient when the graph that contains this call runs."""
    torch.ops.fxguard.gradient_reached(gradient, _order, number, name)


_listeners: weakref.WeakValueDictionary[int, Looks] = weakref.WeakValueDictionary()

# The operation claims to write this, so that no compiler deletes, moves or repeats it.
_order = torch.zeros(())


@torch.library.custom_op("fxguard::gradient_reached", mutates_args=("order",))
def _gradient_reached(gradient: Tensor, order: Tensor, number: int, name: str) -> None:
    listener = _listeners.get(number)
    if listener is not None:
        listener.reached(name, gradient)


@_gradient_reached.register_fake
def _(gradient: Tensor, order: Tensor, number: int, name: str) -> None:
    pass
