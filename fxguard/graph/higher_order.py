"""Higher-order operations: operations that run other graphs, called bodies.

For each kind that fxguard enters, this module knows where the bodies are among the arguments, what
a body's inputs and results are outside, how statistics get out of it, and how to run it in Python.
A new operation that only calls its body is one line in ``ENTERED``.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from fxguard.graph import nodes, operations
from fxguard.measure import branches_and_loops
from fxguard.torch_names import HigherOrderOperator, flex_attention

__all__ = [
    "ENTERED",
    "Body",
    "BodyGraph",
    "HigherOrder",
    "RunBody",
    "bodies_of",
    "is_higher_order",
    "kind_of",
]


@dataclass(frozen=True, slots=True)
class RunBody:
    """How bodies are run in Python."""

    run: Callable[..., Any]  # runs the body at a position with inputs, returns all of its results
    stack: Callable[..., Any] = torch.stack  # joins the results of iterations

    def __call__(self, position: int, *operands: Any) -> Any:
        return self.run(position, *operands)


@dataclass(frozen=True, slots=True)
class Body:
    """One graph that a higher-order operation runs."""

    position: int  # among the operation's arguments
    name: str  # attribute of the outer graph module
    graph_module: GraphModule
    operands: tuple[Any, ...]  # arguments of the operation, one for each input of the body
    results: tuple[Any, ...]  # nodes of the body, one for each result of the operation
    carried: int = 0  # this many first inputs and results pass from iteration to iteration


@dataclass(slots=True)
class BodyGraph:
    """A body that is being changed: its new graph, still without an output node."""

    graph: Graph
    result: Any  # what the output node returned before
    statistics: Node | None = None  # shape [count, 2]
    count: int = 0
    wide: bool = False  # whether the statistics are float64
    # Slices of the rows whose inf would be unintended.
    unintended: tuple[tuple[int, int], ...] = ()


class HigherOrder(abc.ABC):
    """How fxguard enters one kind of higher-order operation."""

    # Whether a call may skip a body: a branch that is not taken, a loop over nothing.
    may_not_run: ClassVar[bool] = False
    # Whether a call may run its body more than once.
    runs_many_times: ClassVar[bool] = False
    # Whether the body is computed inside a single kernel, from which no statistics get out. A
    # second run examines it when the results are bad.
    only_a_second_run_sees: ClassVar[bool] = False
    # Whether the body runs as Python runs it, with tensors that are in memory.
    is_plain: bool = False
    # Whether its backward was written by hand, and is not that of the operations in its body.
    has_own_backward: ClassVar[bool] = False
    # Positions of the bodies that must be changed for the statistics to get out.
    rewritten: tuple[int, ...] = ()

    @abc.abstractmethod
    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        """The bodies to enter.

        Raises:
            LookupError, TypeError, ValueError: when the arguments are not the expected ones.
        """

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        """Finish the bodies and return a node of the outer graph that holds their statistics."""
        raise NotImplementedError

    @abc.abstractmethod
    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        """Run the operation in Python."""


def is_higher_order(node: Node) -> bool:
    """Whether a node runs other graphs."""
    return isinstance(node.target, HigherOrderOperator)


def kind_of(node: Node) -> HigherOrder | None:
    """How to enter a node; None if it is not a higher-order operation, or not entered."""
    return ENTERED.get(operations.name_of(node.target)) if is_higher_order(node) else None


def bodies_of(node: Node, module: GraphModule) -> list[Body]:
    """Every graph among the arguments of a node, entered or not, without operands."""
    found = []
    for position, argument in enumerate(nodes.leaves(node.args)):
        if isinstance(argument, Node) and argument.op == "get_attr":
            body = nodes.attribute_of(module, str(argument.target))
            if isinstance(body, GraphModule):
                found.append(Body(position, str(argument.target), body, (), ()))
    return found


def _body(
    node: Node, module: GraphModule, position: int, operands: Sequence[Any], carried: int = 0
) -> Body:
    argument = node.args[position]
    if not isinstance(argument, Node) or argument.op != "get_attr":
        raise LookupError(f"no body at position {position}")
    name = str(argument.target)
    body = nodes.attribute_of(module, name)
    if not isinstance(body, GraphModule):
        raise LookupError(f"no graph at position {position}")
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    if len(inputs) != len(operands):
        raise LookupError(f"{len(operands)} operands for {len(inputs)} inputs")
    output = next(n for n in body.graph.nodes if n.op == "output")
    result = output.args[0]
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return Body(position, name, body, tuple(operands), results, carried)


def _result_at(graph: Graph, node: Node, index: int) -> Node:
    """``node[index]``."""
    with graph.inserting_after(node):
        return graph.call_function(operator.getitem, (node, index))


class RunsOnce(HigherOrder):
    """Runs its body once: activation checkpointing, nested compile regions and the like."""

    def __init__(self, position: int = 0, operands: int = 1, is_plain: bool = True) -> None:
        self.position = position
        self.is_plain = is_plain
        self.rewritten = (position,)
        self.operands = operands  # position of the first operand

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        if any(isinstance(leaf, Node) for leaf in nodes.leaves(node.kwargs)):
            raise LookupError("tensors among the keyword arguments")
        return [_body(node, module, self.position, node.args[self.operands :])]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        body = bodies[self.position]
        body.graph.output((*body.result, body.statistics))
        return _result_at(graph, node, len(body.result))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        return body(self.position, *args[self.operands :])


class AutogradFunction(HigherOrder):
    """A ``torch.autograd.Function``: one body for forward and one for backward."""

    has_own_backward = True
    rewritten = (0, 1)

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        forward = _body(node, module, 0, node.args[2:])
        if "non_differentiable_idx" not in node.kwargs:
            raise LookupError("no indices of what cannot be differentiated")
        results = forward.results[0]  # the other result is saved for the backward
        if not isinstance(results, (tuple, list)):
            raise LookupError("returns no tuple")
        return [replace(forward, results=tuple(results))]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        body = bodies[0]
        results, saved = body.result
        body.graph.output(((*results, body.statistics), saved))
        count = len(results)
        backward = bodies[1]
        insert_input(backward.graph, count, "gradient_of_statistics")
        backward.graph.output(backward.result)
        indices = [*node.kwargs["non_differentiable_idx"], count]  # type: ignore[misc,arg-type]
        node.kwargs = {**node.kwargs, "non_differentiable_idx": indices}
        return _result_at(graph, node, count)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        return body(0, *args[2:])[0]


class Cond(HigherOrder):
    """Runs one of two bodies."""

    may_not_run = True
    rewritten = (1, 2)

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        operands: Any = node.args[3]
        return [_body(node, module, position, operands) for position in (1, 2)]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        first, second = bodies[1], bodies[2]
        wide = first.wide or second.wide
        for body, before, after in ((first, 0, second.count), (second, first.count, 0)):
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            tensors = [n for n in inputs if isinstance(nodes.example_of(n), torch.Tensor)]
            like = tensors[0] if tensors else None
            rows = body.graph.call_function(
                branches_and_loops.among_others, (body.statistics, before, after, wide, like)
            )
            body.graph.output((*body.result, rows))
        return _result_at(graph, node, len(first.result))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        return body(1 if args[0] else 2, *args[3])


class WhileLoop(HigherOrder):
    """Runs its second body while its first one returns True; the results are the next inputs."""

    may_not_run = True
    runs_many_times = True
    rewritten = (0, 1)

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        carried, additional = node.args[2:4]
        operands = (*carried, *additional)  # type: ignore[misc]
        return [_body(node, module, 1, operands, len(carried))]  # type: ignore[arg-type]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        body = bodies[1]
        carried: Any = node.args[2]
        condition = bodies[0]
        insert_input(condition.graph, len(carried), "statistics")
        condition.graph.output(condition.result)
        before = insert_input(body.graph, len(carried), "statistics")
        numbers = (before, body.statistics, body.unintended)
        after = body.graph.call_function(branches_and_loops.next_iteration, numbers)
        body.graph.output((*body.result, after))
        like = next((n for n in carried if isinstance(n, Node)), None)
        with graph.inserting_before(node):
            start = graph.call_function(
                branches_and_loops.no_iteration, (body.count, body.wide, like)
            )
        node.update_arg(2, (*carried, start))
        result = _result_at(graph, node, len(carried))
        with graph.inserting_after(result):
            return graph.call_function(branches_and_loops.iterations, (result,))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        _, _, carried, additional = args
        while body(0, *carried, *additional):
            carried = body(1, *carried, *additional)
        return tuple(carried)


class Scan(HigherOrder):
    """Runs its body for each slice of some tensors, and carries other values along."""

    may_not_run = True
    runs_many_times = True
    rewritten = (0,)

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        init, slices, additional = node.args[1:4]
        operands = (*init, *slices, *additional)  # type: ignore[misc]
        return [_body(node, module, 0, operands, len(init))]  # type: ignore[arg-type]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        body = bodies[0]
        body.graph.output([*body.result, body.statistics])
        result = _result_at(graph, node, len(body.result))
        with graph.inserting_after(result):
            return graph.call_function(
                branches_and_loops.worst_iteration, (result, body.unintended)
            )

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        _, init, slices, additional = args
        carried, made = list(init), []
        for index in range(slices[0].shape[0]):
            result = body(0, *carried, *(x[index] for x in slices), *additional)
            carried = list(result[: len(init)])
            made.append(result[len(init) :])
        return (*carried, *(body.stack(rows) for rows in zip(*made, strict=True)))


class Map(HigherOrder):
    """Runs its body for each slice of some tensors."""

    may_not_run = True
    runs_many_times = True
    rewritten = (0,)

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        slices, additional = node.args[1:3]
        return [_body(node, module, 0, (*slices, *additional))]  # type: ignore[misc]

    def let_out(self, graph: Graph, node: Node, bodies: dict[int, BodyGraph]) -> Node:
        body = bodies[0]
        body.graph.output((*body.result, body.statistics))
        result = _result_at(graph, node, len(body.result))
        with graph.inserting_after(result):
            return graph.call_function(
                branches_and_loops.worst_iteration, (result, body.unintended)
            )

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:
        _, slices, additional = args
        made = [
            body(0, *(x[index] for x in slices), *additional) for index in range(len(slices[0]))
        ]
        return tuple(body.stack(rows) for rows in zip(*made, strict=True))


class FlexAttention(HigherOrder):
    """Runs its body for every score, inside one kernel."""

    has_own_backward = True
    only_a_second_run_sees = True

    def bodies(self, node: Node, module: GraphModule) -> list[Body]:
        others: Any = node.args[7] if len(node.args) > 7 else ()
        # The score, and its batch, head, query and key.
        return [_body(node, module, 3, (None, None, None, None, None, *others))]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], body: RunBody) -> Any:

        def score(*operands: Any) -> Any:
            return body(3, *operands)

        given: Any = (*args[:3], score, *args[4:])
        return flex_attention(*given, **kwargs)


def insert_input(graph: Graph, position: int, name: str) -> Node:
    """Add a placeholder at a position among the others."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if position < len(inputs):
        place = graph.inserting_before(inputs[position])
    elif inputs:
        place = graph.inserting_after(inputs[-1])
    else:
        place = graph.inserting_before(next(iter(graph.nodes)))
    with place:
        return graph.placeholder(name)


ENTERED: dict[str, HigherOrder] = {
    "tag_activation_checkpoint": RunsOnce(),
    "wrap_activation_checkpoint": RunsOnce(),
    "wrap": RunsOnce(),
    "invoke_subgraph": RunsOnce(operands=2, is_plain=False),
    "wrap_with_set_grad_enabled": RunsOnce(position=1, operands=2),
    "wrap_with_autocast": RunsOnce(position=4, operands=5),
    "autograd_function_apply": AutogradFunction(),
    "cond": Cond(),
    "while_loop": WhileLoop(),
    "scan": Scan(),
    "map_impl": Map(),
    "flex_attention": FlexAttention(),
}
