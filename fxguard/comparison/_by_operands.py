"""Pairs the operations of two models by what they read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxguard.comparison._sides import Key, Named, Side, Twin

__all__ = ["by_operands"]

# Operations whose two operands may change places.
COMMUTE = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne"})


class _Unknown(Exception):  # noqa: N818 - an answer, not an error
    """An operand of B that A has no counterpart of."""


def by_operands(
    a: Side, b: Side, by_name: Mapping[Key, Key], twins: Mapping[str, Twin]
) -> tuple[dict[Key, Key], set[Key]]:
    """Pair operations of one kind that read the same; the rest by name.

    When an operation runs does not matter. First those are paired whose operands are the same
    inputs and weights, or results of paired operations, with the same other arguments. What remains
    is paired by name, and what reads that again by what it reads.

    Args:
        a: the operations of one model.
        b: those of the other one.
        by_name: pairs by module, name, line and order: an operation of B to one of A.
        twins: the weight of A that each weight of B is.

    Returns:
        Each operation of B with its partner in A, and the operations of B that read the same.
    """
    waiting: dict[Hashable, deque[Key]] = defaultdict(deque)
    for key, named in a.named.items():
        waiting[_signature(named, lambda node, n=named: _in_a(a, n, node))].append(key)  # type: ignore[misc]
    pairs: dict[Key, Key] = {}
    taken: set[Key] = set()
    alike: set[Key] = set()

    def take(named: Named) -> bool:
        try:
            signature = _signature(named, lambda node: _in_b(b, named, node, pairs, twins))
        except _Unknown:
            return False
        free = [key for key in waiting.get(signature, ()) if key not in taken]
        if not free:
            return False
        found = next((key for key in free if a.named[key].title == named.title), free[0])
        found = by_name[named.key] if by_name.get(named.key) in free else found
        pairs[named.key] = found
        taken.add(found)
        alike.add(named.key)
        return True

    left = [named for named in b.named.values() if not take(named)]
    for named in left:
        if take(named):
            continue
        partner = by_name.get(named.key)
        if named.kind == "item":  # another Python number: what reads it does not read the same
            continue
        if partner is not None and partner not in taken:
            pairs[named.key] = partner
            taken.add(partner)
    return pairs, alike


def _in_a(side: Side, named: Named, node: Node) -> Hashable:
    if node.op == "get_attr":
        return "constant"
    graph, (inside, _) = named.key
    if inside and node.op == "placeholder":
        return _of_body(graph, inside, node)
    return side.origin(graph, inside, node)


def _in_b(
    side: Side, named: Named, node: Node, pairs: Mapping[Key, Key], twins: Mapping[str, Twin]
) -> Hashable:
    """The same value in A."""
    if node.op == "get_attr":
        return "constant"
    graph, (inside, _) = named.key
    if inside and node.op == "placeholder":
        around, position, index = _of_body(graph, inside, node)
        if around not in pairs:
            raise _Unknown
        return pairs[around], position, index
    origin: Any = side.origin(graph, inside, node)
    if origin in side.named:
        if origin not in pairs:
            raise _Unknown
        return pairs[origin]
    if isinstance(origin, tuple) and origin[0] == "weight":
        twin = twins.get(origin[1])
        if twin is None:
            raise _Unknown
        return (origin[0], twin.name, "transposed") if twin.is_transposed else ("weight", twin.name)
    found: Hashable = origin
    return found


def _of_body(graph: int, inside: Any, node: Node) -> tuple[Key, int, int]:
    """An input of a body: the operation around it, which body it is, and which of its inputs."""
    name, position = inside[-1]
    inputs = [each for each in node.graph.nodes if each.op == "placeholder"]
    return (graph, (inside[:-1], name)), position, inputs.index(node)


def _signature(named: Named, token: Callable[[Node], Hashable]) -> Hashable:
    """What an operation is and reads; dtypes and devices apart."""
    args = [_text(each, token) for each in named.node.args]
    if named.kind in COMMUTE and len(args) == 2 and not named.node.kwargs:
        args.sort()
    return named.kind, tuple(args), _text(dict(named.node.kwargs), token), len(named.key[1][0])


def _text(value: Any, token: Callable[[Node], Hashable]) -> str:
    if isinstance(value, Node):
        return f"<{token(value)!r}>"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_text(each, token) for each in value) + ")"
    if isinstance(value, Mapping):
        return str({key: _text(each, token) for key, each in sorted(value.items())})
    if isinstance(value, slice):
        return _text(("slice", value.start, value.stop, value.step), token)
    if isinstance(value, (torch.dtype, torch.device)):
        return type(value).__name__
    return repr(value)
