"""``torch.autograd.Function`` in a graph: the name of its class.

TorchDynamo traces the two halves of a function into bodies without keeping the name. The source
lines of the bodies tell which class they come from.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.autograd import Function
from torch.fx import GraphModule, Node

from fxguard.source.lines import Place, lines_of_trace
from fxguard.torch_names import HigherOrderOperator

__all__ = ["BACKWARD", "FORWARD", "is_function", "name_of_function"]

FORWARD, BACKWARD = 0, 1  # positions of the bodies among the arguments
HALVES = ((FORWARD, "forward"), (BACKWARD, "backward"))


def is_function(target: Any) -> bool:
    """Whether a node's target represents such a function."""
    return isinstance(target, HigherOrderOperator) and target.name() == "autograd_function_apply"


def name_of_function(node: Node, module: GraphModule) -> str | None:
    """The name of the class; None if no line tells it.

    Args:
        node: a node that represents a function.
        module: the module of its graph.
    """
    halves = [(method, _places(node.args[half], module)) for half, method in HALVES]
    known = [(method, places) for method, places in halves if places]
    found = (
        each.__name__
        for each in _subclasses(Function)
        if all(any(_holds(each, method, place) for place in places) for method, places in known)
    )
    return next(found, None) if known else None


def _places(half: Any, module: GraphModule) -> set[Place]:
    """The source lines of one half, which is a body of the graph."""
    body = getattr(module, str(half.target), None) if isinstance(half, Node) else None
    nodes = body.graph.nodes if isinstance(body, GraphModule) else ()
    return {place for each in nodes for place in lines_of_trace(each.stack_trace)}


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in type.__subclasses__(kind):
        yield each
        yield from _subclasses(each)


def _holds(kind: type[Any], method: str, place: Place) -> bool:
    """Whether a line is inside a method of a class."""
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    if code is None or code.co_filename != place[0]:
        return False
    lines = [line for *_, line in code.co_lines() if line is not None]
    return bool(code.co_firstlineno <= place[1] <= max(lines, default=0))
