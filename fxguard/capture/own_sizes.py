"""Keeps the sizes apart that TorchDynamo has seen in modules of different weights.

Where a function is captured again with an input of another size, TorchDynamo takes that size for
one that changes, and captures with a symbol in its place. That takes two to three times as long. It
remembers sizes by function. But two convolutions share their function, and each has a size of its
own. They can share no graph either, because of the shapes of their weights.

The parts of TorchDynamo in use (seen in torch 2.13):

- ``builder.record_automatic_dynamic``: remembers the sizes of an input, by its name. Where it is
  missing, captures are as TorchDynamo makes them.
- ``tx.output.root_tx``: the tracer of the captured function; its ``f_locals`` are the arguments.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.variables import builder
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fxguard.capture.plain_python import follows_python

__all__ = ["keep_sizes_apart"]


@functools.cache
def keep_sizes_apart() -> None:
    """Let TorchDynamo remember sizes by function and weights, where nobody asked; done once."""
    record = getattr(builder, "record_automatic_dynamic", None)
    if record is None:
        return

    @functools.wraps(record)
    def record_apart(tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if follows_python(tx):
            name += _beside_weights(tx.output.root_tx)
        return record(tx, name, *args, **kwargs)

    builder.record_automatic_dynamic = record_apart


def _beside_weights(root: Any) -> str:
    """The shapes of the weights of the module that a captured function is a method of, as text."""
    known: str | None = getattr(root, "_fxguard_weights", None)
    if known is None:
        module = _owner(root)
        weights = () if module is None else module.parameters()
        shapes = [tuple(weight.shape) for weight in weights if not is_lazy(weight)]
        known = root._fxguard_weights = f" beside {shapes}" if shapes else ""
    return known


def _owner(root: Any) -> Module | None:
    """The module that is the first argument of a captured function."""
    arguments = root.f_code.co_varnames[: root.f_code.co_argcount]
    first = root.f_locals.get(arguments[0]) if arguments else None
    return first if isinstance(first, Module) else None
