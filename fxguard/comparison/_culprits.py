"""Which operation that only one of two models has makes another one read other values."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch.fx import Node

from fxguard.comparison._aligned import Aligned
from fxguard.comparison._sides import Key, Named, Side
from fxguard.comparison._writers import writers_of
from fxguard.rerun.walk import Walk

__all__ = ["Culprits", "first_alone"]


class Culprits:
    """Finds the first operation that only one model has and that an operation depends on.

    What an operation reads in both models is the same if its results are. So what made that is
    cleared, also where only one model has it in a graph.

    Args:
        aligned: which operation of A corresponds to which operation of B.
    """

    def __init__(self, aligned: Aligned) -> None:
        self.aligned = aligned
        self._cleared: tuple[set[Hashable], set[Hashable]] = set(), set()  # of A, of B

    def clear(self, graph: int, walk: Walk, node: Node, partner: Node) -> None:
        """An operation makes the same in both models.

        Args:
            graph: the number of the graph of B.
            step: that graph, which runs.
            node: the operation in B.
            partner: the operation in A.
        """
        both = self.aligned
        graph_a, (inside, _) = both.of_b[graph, walk.place(node)]
        self._cleared[0].update(both.a.origin(graph_a, inside, x) for x in partner.all_input_nodes)
        self._cleared[1].update(both.b.origin(graph, walk.inside, x) for x in node.all_input_nodes)

    def behind(self, graph: int, walk: Walk, node: Node, partner: Node) -> tuple[Named, Any] | None:
        """The first operation of one model alone behind an operation, and "A" or "B".

        The arguments are those of :meth:`clear`.
        """
        both = self.aligned
        graph_a, (inside, _) = both.of_b[graph, walk.place(node)]
        for of_a, of_b in self._cleared, (set(), set()):
            alone = first_alone(node, graph, walk.inside, both.b, both.of_b, of_b)
            if alone is not None:
                return alone, "B"
            alone = first_alone(partner, graph_a, inside, both.a, both.of_a, of_a)
            if alone is not None:
                return alone, "A"
        return None


def first_alone(
    reader: Node,
    graph: int,
    inside: Any,
    side: Side,
    paired: Mapping[Key, Key],
    cleared: Collection[Hashable] = (),
) -> Named | None:
    """The first operation without a partner that reaches a reader, by data or by a write.

    Args:
        reader: an operation, or the output of a graph.
        graph: the number of its graph.
        inside: the bodies around it.
        side: the operations of its model.
        paired: the operations that have a partner.
        cleared: the operations that make the same in both models.
    """
    todo, seen = list(reader.all_input_nodes), set()
    found: list[Named] = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        key: Any = side.origin(graph, inside, node)
        alone = side.named.get(key)
        # What TorchDynamo passes as a number is no operation of the model.
        is_new = alone is not None and key not in paired and key not in cleared
        if alone is not None and is_new and alone.kind != "item":
            found.append(alone)
            todo += node.all_input_nodes
        todo += [
            writer
            for writer in writers_of(node)
            if (graph, (inside, writer.name)) not in paired
            and writer.name != reader.name
            and (graph, (inside, writer.name)) in side.named
            and (reader.op == "output" or _comes_before(writer, reader))
        ]
    order = list(side.named)
    return min(found, key=lambda each: order.index(each.key), default=None)


def _comes_before(node: Node, reader: Node) -> bool:
    return node.graph is reader.graph and node < reader
