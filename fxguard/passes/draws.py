"""Lets a graph return what its random operations draw.

A dropout is computed as a product with what it makes of ones, which draws the same numbers; what is
returned is which of the ones are kept. Of any other random operation the result is returned.
"""

from __future__ import annotations

import copy
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard.graph import higher_order, marks, nodes, tables
from fxguard.graph.operations import Call, read_node
from fxguard.measure.func_levels import levels_opened_by
from fxguard.passes.unmark import copy_of, erase_marks
from fxguard.plan.plan import Place

__all__ = ["Drawn", "WithDraws", "draws_from", "with_draws"]


class Drawn(NamedTuple):
    """One tensor that a graph returns in addition."""

    place: Place  # of the random operation
    item: int | None  # which item of its result; None if the result is no tuple
    items: int  # how many there are
    example: Tensor  # of the capture: as large as the tensor, or larger


class WithDraws(NamedTuple):
    """The result of the pass."""

    graph_module: GraphModule  # it returns a tuple, with what was drawn at its end
    drawn: tuple[Drawn, ...]  # in the order in which it is returned


def with_draws(graph_module: GraphModule) -> WithDraws:
    """A copy of a graph that also returns what its random operations draw.

    Left out is what is drawn in a loop, in a branch, in the forward of an autograd function, and in
    a ``torch.func`` region.

    Args:
        graph_module: from TorchDynamo; it returns a tuple, and so do its bodies.
    """
    recording = _Recording(graph_module)
    return WithDraws(recording.finished(), tuple(recording.drawn))


def draws_from(graph_module: GraphModule) -> str | None:
    """The first node of a graph that may draw random numbers, also in a body; None if none may."""
    return next(
        (node.name for node in graph_module.graph.nodes if _may_draw(node, graph_module)), None
    )


def _may_draw(node: Node, module: GraphModule) -> bool:
    if not node.op.startswith("call") or node.target in marks.MARKS:
        return False
    if not higher_order.is_higher_order(node):
        return read_node(node, module).random
    bodies = (body.graph_module for body in higher_order.bodies_of(node, module))
    return any(draws_from(body) is not None for body in bodies)


class _Recording:
    """A graph, or a body, whose random operations are recorded."""

    def __init__(self, original: GraphModule, inside: tuple[tuple[str, int], ...] = ()) -> None:
        self.original = original
        self.inside = inside
        self.drawn: list[Drawn] = []
        self.returned: list[Node] = []
        self.bodies: dict[str, GraphModule] = {}  # new ones, by name
        self.graph, self.result, copies = copy_of(original.graph)
        levels = 0
        for node, copied in copies.items():
            levels += levels_opened_by(node.target)
            if levels or not _may_draw(node, original):
                continue
            if higher_order.is_higher_order(node):
                self.enter(node, copied)
            else:
                self.record(node, copied, read_node(copied, original))

    def record(self, node: Node, copied: Node, call: Call) -> None:
        """Record one random operation."""
        example, place = nodes.example_of(node), (self.inside, node.name)
        if node.kwargs.get("out") is not None:
            return
        if call.kind in tables.DROPOUTS:
            is_plain = node.op == "call_function" and isinstance(call.first, Node)
            if is_plain and isinstance(example, Tensor):
                self.note(self.rewritten(copied, call), Drawn(place, None, 1, example))
        elif isinstance(example, Tensor):
            self.note(self.copy_of(copied), Drawn(place, None, 1, example))
        elif isinstance(example, tuple) and all(isinstance(x, Tensor | None) for x in example):
            for item, part in enumerate(example):
                if isinstance(part, Tensor):
                    with self.graph.inserting_after(copied):
                        taken = self.graph.call_function(operator.getitem, (copied, item))
                    self.note(self.copy_of(taken), Drawn(place, item, len(example), part))

    def note(self, returned: Node, drawn: Drawn) -> None:
        """Return one more tensor."""
        self.returned.append(returned)
        self.drawn.append(drawn)

    def copy_of(self, made: Node) -> Node:
        """A copy of a result, which may be written later."""
        with self.graph.inserting_after(made):
            return self.graph.call_function(torch.clone, (made,))

    def rewritten(self, dropout: Node, call: Call) -> Node:
        """Make a product of a dropout; returns which elements are kept."""
        target: Any = dropout.target
        with self.graph.inserting_before(dropout):
            ones = self.graph.call_function(torch.ones_like, (call.first,))
            kwargs = {**dropout.kwargs}
            if dropout.args:
                args = (ones, *dropout.args[1:])
            else:
                args, kwargs["input"] = (), ones
            scale = self.graph.call_function(target, args, kwargs)
            kept = self.graph.call_function(torch.ne, (scale, 0))
        if call.in_place:
            dropout.op, dropout.target = "call_method", "mul_"
        else:
            dropout.target = torch.mul
        dropout.args, dropout.kwargs = (call.first, scale), {}
        return kept

    def enter(self, node: Node, copied: Node) -> None:
        """Record what is drawn in the body of an operation that runs it once."""
        kind = higher_order.kind_of(node)
        if not isinstance(kind, higher_order.RunsOnce):
            return
        try:
            [body] = kind.bodies(node, self.original)
        except (LookupError, TypeError, ValueError):  # arguments of another version
            return
        inner = _Recording(body.graph_module, (*self.inside, (node.name, body.position)))
        if not isinstance(inner.result, (tuple, list)):
            return
        name = f"{body.name}_drawing"
        if name not in self.bodies:  # several operations may run one body
            self.bodies[name] = inner.finished()
        with self.graph.inserting_before(copied):
            copied.update_arg(body.position, self.graph.get_attr(name))
        last = copied
        for index, drawn in enumerate(inner.drawn, len(body.results)):
            with self.graph.inserting_after(last):
                last = self.graph.call_function(operator.getitem, (copied, index))
            self.note(last, drawn)

    def finished(self) -> GraphModule:
        """The copy, which also returns what was drawn."""
        self.graph.output((*self.result, *self.returned))
        erase_marks(self.graph)
        root = copy.copy(self.original)
        for name, body in self.bodies.items():
            root.add_module(name, body)
        made = GraphModule(root, self.graph)
        made.meta.update(self.original.meta)
        self.graph.lint()
        return made
