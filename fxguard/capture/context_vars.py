"""Lets a graph go on where a model sets a ``ContextVar`` and sets it back.

TorchDynamo knows none of their methods. Models of transformers set one around each forward, to tell
hooks what to collect, and would be several graphs instead of one. What is set in a stretch of code
and set back there has no effect behind it. A function that leaves it set is left to Python. So is
one with an operation that is not torch's, which may ask for the variable when it runs.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- ``UserDefinedObjectVariable.call_method``: traces the call of a method of an object. Torch 2.15
  has ``ContextVarVariable`` for variables, which follows ``get`` alone.
- ``CallFunctionNoArgsSource``: where a value comes from that a function without arguments returns.
- ``OutputGraph.compile_subgraph``: ends a graph, at a break or behind the function.
- ``exc.SkipFrame``: leaves a function to Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch._dynamo.exc import SkipFrame
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables import misc
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx import Node

from fxguard.capture.plain_python import follows_python
from fxguard.graph import marks
from fxguard.graph.operations import is_custom

__all__ = ["follow_context_vars"]

# How TorchDynamo traces a variable, in this version of torch or another.
TRACED_AS: tuple[Any, ...] = tuple(
    filter(None, (UserDefinedObjectVariable, getattr(misc, "ContextVarVariable", None)))
)

STILL_SET = "a ContextVar that is set and not set back"
ASKED_FOR = "a ContextVar that is set, and an operation that may ask for it"


class TracedToken(VariableTracker):
    """What ``ContextVar.set`` returns, while it is traced.

    Attributes:
        context_var: the variable that was set.
        previous: what was set before, in the same stretch of code; None if nothing was.
    """

    def __init__(
        self, context_var: ContextVar[Any], previous: VariableTracker | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.context_var = context_var
        self.previous = previous


@functools.cache
def follow_context_vars() -> None:
    """Teach TorchDynamo the methods of a ``ContextVar``; done once."""
    for kind in TRACED_AS:
        kind.call_method = _followed(kind.call_method)
    compile_subgraph = OutputGraph.compile_subgraph

    @functools.wraps(compile_subgraph)
    def compile_unless_set(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _set_in(self):
            raise SkipFrame(STILL_SET)
        if hasattr(self, "_fxguard_sets") and any(map(_may_ask, self.graph.nodes)):
            raise SkipFrame(ASKED_FOR)
        return compile_subgraph(self, *args, **kwargs)

    OutputGraph.compile_subgraph = compile_unless_set  # type: ignore[method-assign]


def _followed(call_method: Callable[..., VariableTracker]) -> Callable[..., VariableTracker]:
    """What traces the call of a method, also of a variable."""

    @functools.wraps(call_method)
    def call(
        self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> VariableTracker:
        context_var = getattr(self, "cv_obj", None) or getattr(self, "value", None)
        if type(context_var) is ContextVar and follows_python(tx):
            result = _called(context_var, self.source, tx, name, args, kwargs)
            if result is not None:
                return result
        return call_method(self, tx, name, args, kwargs)

    return call


def _may_ask(node: Node) -> bool:
    """Whether a node calls Python that may ask for a variable when the graph runs."""
    return node.op == "call_module" or (
        node.op == "call_function" and is_custom(node.target) and node.target not in marks.MARKS
    )


def _set_in(output: Any) -> dict[ContextVar[Any], VariableTracker]:
    """What is set now, of what was set in the stretch of code that is traced."""
    if not hasattr(output, "_fxguard_context"):
        output._fxguard_context = {}
    found: dict[ContextVar[Any], VariableTracker] = output._fxguard_context
    return found


def _called(
    context_var: ContextVar[Any],
    source: Any,
    tx: Any,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> VariableTracker | None:
    """What a method returns; None if it cannot be followed."""
    values = _set_in(tx.output)
    match name, [each.realize() for each in args], kwargs:
        case "set", [value], {} if not kwargs:
            token = TracedToken(context_var, values.get(context_var))
            values[context_var] = value
            tx.output._fxguard_sets = True
            return token
        case "reset", [TracedToken() as token], {} if not kwargs:
            if token.context_var is not context_var or context_var not in values:
                return None
            del values[context_var]
            if token.previous is not None:
                values[context_var] = token.previous
            return ConstantVariable.create(None)
        case "get", _, {} if not kwargs:
            if context_var in values:
                return values[context_var]
            return None if args else _value_outside(context_var, source, tx)
    return None


def _value_outside(context_var: ContextVar[Any], source: Any, tx: Any) -> VariableTracker | None:
    """What was set before the stretch of code began."""
    if source is None:
        return None
    try:
        value = context_var.get()
    except LookupError:
        return None
    asked = CallFunctionNoArgsSource(AttrSource(source, "get"))
    built: VariableTracker = VariableTracker.build(tx, value, asked)
    return built
