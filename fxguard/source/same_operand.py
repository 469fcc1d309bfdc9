"""Other statements of a function that apply an operation to the same expression."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import function_around, holds, source_of
from fxguard.source.named import operand_texts, variables_in

__all__ = ["same_operand_at"]


def same_operand_at(source: Source, name: str) -> list[Source]:
    """The other statements, in order, where the expression has the same value.

    No variable of it is assigned in between.

    Args:
        source: a line that has the operation.
        name: the plain name of the operation.
    """
    texts = operand_texts(source.code, name)
    if len(texts) != 1 or "" in texts:
        return []
    (text,) = texts
    statements = sorted(_simple_statements(function_around(source)), key=lambda each: each.lineno)
    here = next((i for i, each in enumerate(statements) if holds(each, source.line)), None)
    if here is None:
        return []
    names = variables_in(text)
    found = []
    for statement in reversed(statements[:here]):
        if _assigned_in(statement) & names:
            break
        found.append(statement)
    for before, statement in itertools.pairwise(statements[here:]):
        if _assigned_in(before) & names:
            break
        found.append(statement)
    same = [each for each in found if text in operand_texts(ast.unparse(each), name)]
    return [source_of(each, source.file) for each in sorted(same, key=lambda each: each.lineno)]


def _simple_statements(function: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function that hold no other statements, its own alone."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node
        else:
            yield from _simple_statements(node)


def _assigned_in(statement: ast.stmt) -> set[str]:
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if not isinstance(node.ctx, ast.Load)}
