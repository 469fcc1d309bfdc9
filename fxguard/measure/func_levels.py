"""``torch.func`` regions: stretches of a graph that run under ``vmap``, ``grad`` or the like.

Tensors computed in them are wrapped in levels of batching and differentiation, which must stay
inside. ``torch.func`` is built on ``torch._C._functorch`` and ``torch._C._autograd``; there is no
public way to ask about levels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "ENTERS",
    "LEAVES",
    "are_levels_open",
    "has_levels",
    "levels_opened_by",
    "levels_restored",
    "without_levels",
]

KINDS = ("vmap", "grad", "jvp", "func", "functionalize")
ENTERS = frozenset(f"_{kind}_increment_nesting" for kind in KINDS)
LEAVES = frozenset(f"_{kind}_decrement_nesting" for kind in KINDS)


def are_levels_open() -> bool:
    """Whether the current code runs inside a region."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def levels_opened_by(target: object) -> int:
    """How many levels a call opens: 1, 0, or -1 if it closes one."""
    name = getattr(target, "__name__", "")
    return (name in ENTERS) - (name in LEAVES)


def has_levels(value: Tensor) -> bool:
    """Whether a tensor was made inside an open region."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def without_levels(value: Tensor) -> Tensor:
    """The tensor inside all levels.

    A batched dimension is then an ordinary one, at any position: the range is the same.
    """
    while has_levels(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


@contextlib.contextmanager
def levels_restored() -> Iterator[None]:
    """Close the regions that are still open when an exception ends this block."""
    depth, dual = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    # grad regions forbid saved tensor hooks, such as those of activation checkpointing.
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if forbidden is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(forbidden)
        while forward_ad._current_level > dual:
            forward_ad.exit_dual_level()
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
