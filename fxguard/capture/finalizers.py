"""Finalizers that TorchDynamo does not compile.

Where it compiles what is running, it looks at every frame that is called, those of finalizers
among them, and compiles one that mentions a module of torch. Such a frame need not survive that: a
list of weak references that are called raises a ``TypeError``, and the finalizer has done nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch._dynamo

__all__ = ["when_gone"]


def when_gone(
    thing: Any, function: Callable[..., object], *args: Any
) -> weakref.finalize[Any, Any]:
    """Call a function, unseen by TorchDynamo, when an object is gone.

    Args:
        thing: the object.
        function: what to call; it must not refer to the object.
        args: its arguments, of which the same is true.
    """
    unseen: Callable[..., object] = torch._dynamo.disable(function)
    return weakref.finalize(thing, unseen, *args)
