"""Finds the expression of a rule in a captured graph: ``log(1 - sigmoid(x))``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from fxguard.graph.operations import read_node
from fxguard.graph.poles import plain
from fxguard.passes.unmark import without_marks
from fxguard.patch._matching import without_rest
from fxguard.patch._operations import OF_RULES, PARAMETERS, number_in, plain_name
from fxguard.patch._rewriting import sides_of
from fxguard.patch._trial import evaluated
from fxguard.records import Source
from fxguard.rerun.rest import Instead, Made
from fxguard.source.lines import source_of_trace
from fxguard.source.times import is_at_one_place

__all__ = ["instead_in"]

MOST_AROUND = 32  # nodes behind or before the failing one that are looked at
SILENT = ("dtype", "_stacklevel", "inplace")  # keywords that may be None or without effect
COMMUTES = ("add", "mul")


@dataclass(frozen=True)
class _Found:
    letters: dict[str, Any] = field(default_factory=dict)  # nodes, numbers, or None if left out
    nodes: tuple[Node, ...] = ()


def instead_in(
    rule: str, graph_module: GraphModule, name: str, *, of: str = "", at: Source | None = None
) -> Instead | None:
    """What a rule computes in the place of an operation of a graph; None if it does not fit.

    Whoever changes a line changes each of its runs: it takes the place of them all.

    Args:
        rule: ``log(1 - sigmoid(x)) -> logsigmoid(-x)``.
        graph_module: the graph.
        name: name of the node that failed, which is part of the old expression.
        of: plain name of an operation that led to it and is rewritten, if it is that one.
        at: its line.
    """
    module = without_marks(graph_module)
    start = next((node for node in module.graph.nodes if node.name == name), None)
    if start is None:
        return None
    old, new = sides_of(rule)
    ways = [_behind(start)] if of else [[start], _after(start)]
    for node in (node for way in ways for node in way):
        if of and not _is_it(node, module, of, at):
            continue
        for found in _each(old, node, _Found(), module):
            if of or start in found.nodes:
                others = _other_runs(old, node, module)
                founds = {node: found, **{each: found for each, found in others if found}}
                return _instead(old, new, founds)
    return None


def _other_runs(
    old: ast.expr, root: Node, module: GraphModule
) -> Iterator[tuple[Node, _Found | None]]:
    """The other nodes that the same expression of the same line has made."""
    source, kind = (
        source_of_trace(root.meta.get("stack_trace")),
        plain(read_node(root, module).kind),
    )
    if source is None or not is_at_one_place(source.code, kind):
        return
    for node in module.graph.nodes:
        if node is not root and _is_it(node, module, kind, source):
            yield node, next(_each(old, node, _Found(), module), None)


def _instead(old: ast.expr, new: ast.expr, founds: Mapping[Node, _Found]) -> Instead:
    nodes = (x for found in founds.values() for x in found.letters.values())
    return Instead(
        {((), root.name): _made(old, new, found) for root, found in founds.items()},
        frozenset(x.name for x in nodes if isinstance(x, Node)),
    )


def _made(old: ast.expr, new: ast.expr, found: _Found) -> Made:
    """What computes the new expression in the place of one node."""

    def with_values(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            letter: values[x.name] if isinstance(x, Node) else x
            for letter, x in found.letters.items()
        }

    def made(run: Callable[..., Any], args: Any, kwargs: Any, values: Mapping[str, Any]) -> Any:
        letters = with_values(values)
        if not _is_same_call(old, new):
            return evaluated(new, letters)
        assert isinstance(old, ast.Call)
        assert isinstance(new, ast.Call)
        given = list(args)
        for position, (before, after) in enumerate(zip(old.args, new.args, strict=True)):
            if ast.dump(before) != ast.dump(after):
                given[position] = evaluated(after, letters)
        more = {each.arg: ast.literal_eval(each.value) for each in new.keywords if each.arg}
        return run(*given, **{**kwargs, **more})

    return made


def _is_same_call(old: ast.expr, new: ast.expr) -> bool:
    """Whether both sides call one function, with other operands or keywords."""
    if not (isinstance(old, ast.Call) and isinstance(new, ast.Call)):
        return False
    return ast.dump(old.func) == ast.dump(new.func) and len(old.args) == len(new.args)


def _after(start: Node) -> list[Node]:
    """The nodes that read a node, directly or through others, the nearest first."""
    todo = [start]
    for node in todo:
        todo += [user for user in node.users if user not in todo]
        if len(todo) > MOST_AROUND:
            break
    return todo[1:]


def _behind(start: Node) -> list[Node]:
    """The nodes that a node was computed from, the nearest first."""
    todo = [start]
    for node in todo:
        todo += [read for read in node.all_input_nodes if read not in todo]
        if len(todo) > MOST_AROUND:
            break
    return todo


def _is_it(node: Node, module: GraphModule, of: str, at: Source | None) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    is_there = at is None or source_of_trace(node.meta.get("stack_trace")) == at
    return is_there and plain(read_node(node, module).kind) == of


def _each(rule: ast.expr, value: Any, so_far: _Found, module: GraphModule) -> Iterator[_Found]:
    if isinstance(rule, ast.Name) and len(rule.id) == 1:
        yield from _letter(rule.id, value, so_far)
    elif isinstance(rule, ast.Constant) and rule.value in (True, False, None):
        if value is rule.value:
            yield so_far
    elif (wanted := number_in(rule, OF_RULES)) is not None:
        if isinstance(value, (int, float)) and value == wanted:
            yield so_far
    elif isinstance(value, Node):
        yield from _operation(rule, value, so_far, module)


def _letter(letter: str, value: Any, so_far: _Found) -> Iterator[_Found]:
    if letter in so_far.letters:
        if so_far.letters[letter] is value or so_far.letters[letter] == value:
            yield so_far
        return
    is_number = isinstance(value, (int, float))
    if (letter == "d" and value is None) or (letter in "ne" and not is_number):
        return
    if letter == "k" and value is None:
        value = False
    yield _Found({**so_far.letters, letter: value}, so_far.nodes)


def _operation(rule: ast.expr, node: Node, so_far: _Found, module: GraphModule) -> Iterator[_Found]:
    wanted = OF_RULES.operation(rule)
    if wanted is None or node.op in ("placeholder", "get_attr", "output"):
        return
    has_rest, wanted = without_rest(wanted)
    name, operands, keywords = _read(node, module)
    if plain_name(wanted.name) != name or len(operands) < len(wanted.operands):
        return
    if not has_rest and (len(operands) != len(wanted.operands) or keywords):
        return
    known = _Found(so_far.letters, (*so_far.nodes, node))
    orders = [operands, operands[::-1]] if name in COMMUTES else [operands]
    for order in orders:
        yield from _operands([*zip(wanted.operands, order, strict=False)], known, module)


def _operands(
    pairs: list[tuple[ast.expr | None, Any]], so_far: _Found, module: GraphModule
) -> Iterator[_Found]:
    if not pairs:
        yield so_far
        return
    (rule, value), *others = pairs
    if rule is None:
        if value is None:
            yield from _operands(others, so_far, module)
        return
    for found in _each(rule, value, so_far, module):
        yield from _operands(others, found, module)


def _read(node: Node, module: GraphModule) -> tuple[str, list[Any], dict[str, Any]]:
    """The name of an operation, its operands in the order of rules, and other keywords."""
    call = read_node(node, module)
    kind = plain(call.kind)
    operands, keywords = list(node.args), dict(node.kwargs)
    if "input" in keywords:
        operands.insert(0, keywords.pop("input"))
    named = PARAMETERS.get(kind, ())
    for each in named[max(len(operands) - 1, 0) :]:
        operands.append(keywords.pop(each, None))
    for each in SILENT:
        if keywords.get(each) in (None, False) or each == "_stacklevel":
            keywords.pop(each, None)
    if kind == "clamp_max":
        operands.insert(1, None)
    elif kind == "clamp_min":
        operands.append(None)
    elif kind == "reciprocal":
        operands.insert(0, 1)
    elif kind in ("rsub",) or call.reflected:
        operands = operands[::-1]
    return plain_name(kind), operands, keywords
