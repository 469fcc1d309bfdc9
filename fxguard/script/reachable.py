"""Tensors that a model reads without being given them: of objects, attributes, globals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from fxguard.graph import nodes

__all__ = ["tensors_within_reach"]

MOST_TENSORS = 256
NO_OBJECTS = (Tensor, Module, str, bytes, int, float, complex, bool, type(None))


def tensors_within_reach(model: Module, given: Iterable[Any]) -> list[Tensor]:
    """Tensors that the objects among some arguments hold, and those that a model's code names.

    Args:
        model: the model that is about to be called.
        given: its arguments, without containers.
    """
    found: list[Tensor] = []
    for each in _within_reach(model, given):
        if len(found) >= MOST_TENSORS:
            break
        if isinstance(each, Tensor):
            found.append(each)
    return found


def _within_reach(model: Module, given: Iterable[Any]) -> Iterator[Any]:
    for each in given:
        if not isinstance(each, NO_OBJECTS):
            yield from nodes.leaves(list(getattr(each, "__dict__", {}).values()))
    for module in model.modules():
        yield from nodes.leaves([x for key, x in vars(module).items() if not key.startswith("_")])
        forward = getattr(type(module).forward, "__code__", None)
        names = () if forward is None else forward.co_names
        known = getattr(type(module).forward, "__globals__", {})
        yield from (known[name] for name in names if isinstance(known.get(name), Tensor))
