"""Turns operations that were noted one by one into a graph that can run again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph

from fxguard.graph.random_state import RandomState
from fxguard.records import Source
from fxguard.source.lines import Place, source_at
from fxguard.torch_names import set_grad_enabled

__all__ = ["Given", "Made", "Noted", "filled", "graph_of", "replaced"]

NESTED = (tuple, list)


@dataclass(eq=False)
class Given:
    """What a tensor held that no noted call has made."""

    number: int
    tensor: Tensor
    version: int | None


@dataclass(eq=False)
class Made:
    """What a tensor holds that a call has made or written."""

    number: int
    call: Noted
    before: Given | Made | None = None  # what it held before the call wrote it


@dataclass(slots=True)
class Noted:
    """One operation that is about to run, or has run; then it has values in place of tensors.

    C makes such objects, too, and `Made`, by the names of their attributes.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restore_settings: Callable[[], None]  # restores torch's settings of that time
    module: str = ""  # the module in which it runs
    with_grad: bool = True  # False under no_grad
    random_state: RandomState | None = None  # before it ran, if it draws random numbers
    # Of the tensors among its arguments, by identity; empty once it has run.
    versions: dict[int, int | None] = field(default_factory=dict)
    # What it is about to write, if nothing on the tape has made that, and a copy.
    overwrites: tuple[Tensor, Tensor] | None = None
    read: tuple[Given | Made, ...] = ()  # once it has run, what its tensors held then
    order: int = 0  # among all calls
    place: Place | None = None  # the user's line
    # Paths in the result to numbers of tensors.
    made: tuple[tuple[tuple[int, ...], int], ...] = ()
    written: tuple[tuple[int, int], ...] = ()  # numbers before and after it wrote a tensor
    is_gone: bool = False  # what it read was let go

    def let_go(self) -> None:
        """Keep nothing of what it read: it cannot run again."""
        self.args, self.kwargs, self.read, self.is_gone = (), {}, (), True
        self.overwrites = None


def graph_of(
    calls: Iterable[Noted], inputs: Iterable[int], roots: Iterable[int], ended: Collection[int]
) -> Graph:
    """Build a graph from some calls.

    Args:
        calls: the calls, in order.
        inputs: the numbers of tensors that they read but do not make.
        roots: the numbers of the tensors to return.
        ended: the numbers of tensors that get no gradient.
    """
    graph = Graph()
    nodes = {number: graph.placeholder(f"input_{number}") for number in inputs}
    with_grad = True
    for call in calls:
        if call.with_grad != with_grad:
            with_grad = call.with_grad
            graph.call_function(set_grad_enabled, (with_grad,))
        args, kwargs = replaced((call.args, call.kwargs), lambda value: nodes[value.number])
        if getattr(call.func, "__name__", "") == "__get__":  # of an attribute
            node = graph.call_function(getattr, (args[0], call.func.__self__.__name__))
        else:
            node = graph.call_function(call.func, args, kwargs)
        if call.place is not None:
            node.meta["stack_trace"] = _trace_of(source_at(call.place))
        if call.module:
            node.meta["nn_module_stack"] = {call.module: (call.module, "")}
        for path, number in call.made:
            part = node
            for index in path:
                part = graph.call_function(operator.getitem, (part, index))
            if number in ended:
                leaf = graph.call_method("detach", (part,))
                part = graph.call_method("requires_grad_", (leaf,))
            nodes[number] = part
        for before, after in call.written:
            if before in nodes:
                nodes[after] = nodes[before]
    graph.output(tuple(nodes[root] for root in roots))
    return graph


def replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """The same arguments with each tensor, or what one held, replaced."""
    if isinstance(value, (Tensor, Given, Made)):
        return replace(value)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, replace) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: replaced(item, replace) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(replaced(x, replace) for x in (value.start, value.stop, value.step)))
    return value


def filled(value: Any, found: Mapping[int, Any]) -> Any:
    """The same arguments of a call with other objects in the place of some, by their identity."""
    if type(value) in NESTED:
        return type(value)(
            [
                found[id(item)]
                if id(item) in found
                else (filled(item, found) if type(item) in NESTED else item)
                for item in value
            ]
        )
    if type(value) is dict:
        return {name: filled(item, found) for name, item in value.items()}
    return found.get(id(value), value)


def _trace_of(source: Source) -> str:
    return f'File "{source.file}", line {source.line}, in script\n    {source.code}'
