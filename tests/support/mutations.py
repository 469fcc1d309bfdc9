"""Small faults that a program can have: a comparison turned, a boundary moved, a result lost.

A mutant is one expression of one file, replaced by another one. All other lines stay where they
are. Annotations, decorators, and what runs for type checkers alone are left as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of"]

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
EMPTY = {"str": "''", "list": "[]", "tuple": "()", "dict": "{}", "set": "set()"}


@dataclass(frozen=True)
class Mutant:
    """One expression, and what stands there instead."""

    file: str
    line: int  # where the expression begins
    last_line: int
    in_function: bool  # not what runs when the file is imported
    kind: str  # comparison, boundary, and/or, condition, return, number
    before: str
    after: str
    span: tuple[int, int]  # the bytes of the source that are replaced

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"

    def applied_to(self, source: bytes) -> bytes:
        """The source of the file with this fault."""
        start, end = self.span
        lines = b"\n" * (self.last_line - self.line)  # inside of the parentheses
        return source[:start] + b"(" + self.after.encode() + lines + b")" + source[end:]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for node, kind, after, in_function in changes(ast.parse(source), False, ""):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )
        places = (node.lineno, node.end_lineno, in_function)
        mutant = Mutant(file, *places, kind, ast.unparse(node), after, span)
        found.setdefault((span, after), mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.span, mutant.after))


Change = tuple[ast.expr, str, str, bool]  # what is replaced, the kind, by what, in a function


def changes(node: ast.AST, in_function: bool, returns: str) -> Iterator[Change]:
    """Everything that can be changed at a node and below it."""
    if isinstance(node, ast.JoinedStr):  # before Python 3.12 its parts have no places
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.expr):
        for kind, after in of_expression(node):
            yield node, kind, after, in_function
    for condition in conditions_of(node):
        if not isinstance(condition, (ast.Compare, ast.UnaryOp)):  # these have their own
            yield condition, "condition", negated(condition), in_function
    if isinstance(node, ast.Return) and node.value is not None:
        for after in instead_of(node.value, returns):
            if after != ast.unparse(node.value):
                yield node.value, "return", after, in_function
    for name, below in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        inside, wanted = in_function, returns
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside, wanted = True, ast.unparse(node.returns) if node.returns else ""
        elif name == "body" and isinstance(node, ast.Lambda):
            inside = True
        for each in below if isinstance(below, list) else [below]:
            if isinstance(each, ast.AST):
                yield from changes(each, inside, wanted)


def of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The kind and the text of each expression that can stand in place of one."""
    if isinstance(node, ast.Compare):
        for kind, table in (("comparison", NEGATED), ("boundary", BOUNDARY)):
            for place, op in enumerate(node.ops):
                if type(op) in table:
                    ops = [*node.ops[:place], table[type(op)](), *node.ops[place + 1 :]]
                    yield kind, ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        doubled = isinstance(node.value, float) and node.value != 0
        yield "number", repr(node.value * 2 if doubled else node.value + 1)


def negated(node: ast.expr) -> str:
    """The opposite of a condition."""
    return ast.unparse(ast.UnaryOp(ast.Not(), node))


def conditions_of(node: ast.AST) -> list[ast.expr]:
    """The conditions that decide what a node does."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def instead_of(value: ast.expr, returns: str) -> list[str]:
    """What a function can return in place of a value, by its annotation."""
    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
        return [repr(not value.value)]
    if isinstance(value, ast.Constant) and value.value is None:
        return []
    if returns == "bool":
        return [] if isinstance(value, (ast.Compare, ast.UnaryOp)) else [negated(value)]
    if returns in ("int", "float"):
        return [f"({ast.unparse(value)}) + 1"]
    kind = returns.partition("[")[0]
    return [EMPTY[kind] if kind in EMPTY and "|" not in returns else "None"]
