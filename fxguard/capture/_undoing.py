"""Whether a ``finally`` block only sets back what was set before its ``try`` block."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence

__all__ = ["lines_set_back", "undoes"]

# What a condition may consist of that changes nothing.
READS = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.expr_context),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop),
)


def undoes(block: ast.Try, before: Sequence[ast.stmt]) -> bool:
    """Whether a ``try`` block handles nothing, and only sets back what was set before it.

    These pairs are known, each with or without a condition:

    - ``token = variable.set(...)`` and ``variable.reset(token)``, as of a ``ContextVar``;
    - ``old = self.mode`` and ``self.mode = old``;
    - ``self.mode = ...`` and ``del self.mode``;
    - ``self.depth += 1`` and ``self.depth -= 1``.

    Args:
        block: the ``try`` block.
        before: the statements before it, in the same block of statements.
    """
    if block.handlers or not block.finalbody:
        return False
    done = set(_done_by(before, [*block.body, *block.orelse]))
    return all(ast.unparse(each) in done for each in _unconditional(block.finalbody))


def lines_set_back(block: ast.Try, before: Sequence[ast.stmt]) -> frozenset[int]:
    """The lines, before a ``try`` block or in it, that set attributes which it sets back.

    The arguments are those of :func:`undoes`.
    """
    kept = {ast.unparse(each) for each in _attributes_set(block.finalbody)}
    return frozenset(
        line
        for each in (_attributes_set([*before, *block.body]) if kept else ())
        if ast.unparse(each) in kept
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    )


def _attributes_set(block: Sequence[ast.stmt]) -> Iterator[ast.Attribute]:
    for node in (node for statement in block for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def _set_in(block: Sequence[ast.stmt]) -> Counter[str]:
    """The names and attributes that statements give a value to, with the number of times."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    targets = (each for each in nodes if isinstance(each, (ast.Name, ast.Attribute)))
    return Counter(ast.unparse(each) for each in targets if not isinstance(each.ctx, ast.Load))


def _unconditional(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, and those that stand under its conditions."""
    for statement in block:
        if isinstance(statement, ast.If):
            if all(isinstance(each, READS) for each in ast.walk(statement.test)):
                yield from _unconditional([*statement.body, *statement.orelse])
                continue
        elif isinstance(statement, ast.Pass):
            continue
        yield statement


def _done_by(before: Sequence[ast.stmt], tried: Sequence[ast.stmt]) -> Iterator[str]:
    """For each statement that can be set back, the one that does it.

    Args:
        before: the statements before a ``try`` block.
        tried: those of the block.
    """
    times, so_far = _set_in([*before, *tried]), Counter[str]()
    for statement in _unconditional(before):
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(variable, "set"))):
                if times[name] == 1:
                    yield f"{ast.unparse(variable)}.reset({name})"
            case ast.Assign([ast.Name(name)], ast.Attribute() as kept):
                if times[name] == 1 and not so_far[ast.unparse(kept)]:
                    yield f"{ast.unparse(kept)} = {name}"
            case ast.Assign([ast.Attribute() as changed]):
                yield f"del {ast.unparse(changed)}"
            case ast.AugAssign(ast.Attribute() as changed, ast.Add(), value):
                if times[ast.unparse(changed)] == 1:
                    yield f"{ast.unparse(changed)} -= {ast.unparse(value)}"
        so_far += _set_in([statement])
