"""Runs a captured graph again, node by node, to look at values that only the graph has seen."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxguard.graph import higher_order, operations
from fxguard.graph.collectives import expect_none
from fxguard.measure.func_levels import without_levels
from fxguard.plan.plan import Check
from fxguard.rerun._regions import Regions

__all__ = ["NodeByNode", "Visit"]

# Called with the check's number, the value, and whether a loop may measure it many times.
Visit = Callable[[int, Any, bool], None]


class NodeByNode(Interpreter):
    """Runs a graph and the bodies of its higher-order operations, and shows measured values.

    Args:
        module: the graph.
        checks: the checks of this graph and of its bodies, with their numbers.
        visit: called for each check when its value exists.
        inside: the higher-order operations around this graph, see :class:`Check`.
        repeats: whether one of these operations is a loop.
    """

    def __init__(
        self,
        module: GraphModule,
        checks: Sequence[tuple[int, Check]],
        visit: Visit,
        inside: tuple[tuple[str, int], ...] = (),
        repeats: bool = False,
    ) -> None:
        super().__init__(module)
        self.visit = visit
        self.inside = inside
        self.repeats = repeats
        self.loop, self.iteration = "", 0  # the innermost loop around this graph
        self.carried = 0  # see :class:`~fxguard.graph.higher_order.Body`, if this is its body
        self.by_name = {node.name: node for node in module.graph.nodes}
        self.after: dict[str, list[tuple[int, Check]]] = {}
        self.bodies: dict[tuple[str, int], list[tuple[int, Check]]] = {}
        for slot, check in checks:
            if len(check.inside) > len(inside):
                self.bodies.setdefault(check.inside[len(inside)], []).append((slot, check))
            else:
                self.after.setdefault(check.after, []).append((slot, check))
        self.pending: dict[str, list[tuple[int, Any]]] = {}  # until their torch.func region ends
        self.regions = Regions()
        self.node: Node | None = None  # the running node
        self.last_body: NodeByNode | None = None  # a body that has not returned

    @property
    def last(self) -> NodeByNode:
        """The innermost graph that has not returned."""
        return self if self.last_body is None else self.last_body.last

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, and leave every region that it entered, even if it raises."""
        try:
            return super().run(*args, **kwargs)
        finally:
            self.regions.leave()

    def run_node(self, n: Node) -> Any:
        self.node = n
        expect_none(n, self.module, enters=self.enters(n))  # type: ignore[arg-type]
        result = super().run_node(n)
        self.regions.passed(n.target, result)
        for slot, check in self.after.get(n.name, ()):
            value = result if check.node == n.name else self.env.get(self.by_name[check.node])
            if value is None:
                continue  # freed already, because nobody reads it
            for index in check.path:
                value = value[index]
            if check.region_end is not None:
                self.pending.setdefault(check.region_end, []).append((slot, _bare(value)))
            else:
                self.visit(slot, _bare(value), self.repeats)
        for slot, value in self.pending.pop(n.name, ()):
            self.visit(slot, value, self.repeats)
        return result

    def carried_by(self, kind: higher_order.HigherOrder, node: Node, position: int) -> int:
        """How many values a loop passes from one run of a body to the next."""
        with contextlib.suppress(LookupError, TypeError, ValueError):
            bodies = kind.bodies(node, self.module)  # type: ignore[arg-type]
            return next((body.carried for body in bodies if body.position == position), 0)
        return 0

    def is_recurrence(self, name: str) -> bool:
        """Whether a value of this body leads to the same value in the next iteration."""
        node = self.by_name[name]
        inputs = [each for each in self.by_name.values() if each.op == "placeholder"]
        output = next(each for each in self.by_name.values() if each.op == "output")
        results: Any = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
        passed = [*zip(results[: self.carried], inputs, strict=False)]
        todo, seen = [node], set[Node]()
        while todo:
            at = todo.pop()
            following = [*at.users, *(taken for result, taken in passed if result is at)]
            if node in following:
                return True
            todo += [each for each in following if each not in seen]
            seen.update(following)
        return False

    def enters(self, node: Node) -> bool:
        """Whether the bodies of an operation run node by node."""
        is_looked_at = any(name == node.name for name, _ in self.bodies)
        return is_looked_at and higher_order.kind_of(node) is not None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.node
        assert node is not None
        kind = higher_order.kind_of(node)
        if kind is None or not self.enters(node):
            return super().call_function(target, args, kwargs)
        repeats = self.repeats or kind.runs_many_times
        iterations: Counter[int] = Counter()  # for each body, by position

        def body(position: int, *operands: Any) -> Any:
            module: Any = args[position]
            place = (node.name, position)
            checks = self.bodies.get(place, [])
            inside = (*self.inside, place)
            inner = NodeByNode(module, checks, self.visit, inside, repeats)
            inner.loop, inner.iteration = self.loop, self.iteration
            if kind.runs_many_times:
                name = operations.name_of(target)
                inner.loop, inner.iteration = name.removesuffix("_impl"), iterations[position]
                iterations[position] += 1
                inner.carried = self.carried_by(kind, node, position)
            self.last_body = inner
            result = inner.run(*operands)
            self.last_body = None
            return result

        return kind.run(args, kwargs, higher_order.RunBody(body))


def _bare(value: Any) -> Any:
    return without_levels(value) if isinstance(value, Tensor) else value
