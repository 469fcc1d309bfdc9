"""Which statement gave a variable of the user's file its value, and whether it still has it.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import assignment_of

__all__ = ["Definitions"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


class Definitions:
    """The statements of one file.

    Args:
        file: its path.
        tree: its syntax tree.
    """

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file, self.tree = file, tree
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What holds a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement that holds an expression."""
        if isinstance(node, ast.stmt):
            return node
        return next(each for each in self.around(node) if isinstance(each, ast.stmt))

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function that holds a node, or the module."""
        return next((x for x in self.around(node) if isinstance(x, _FUNCTIONS)), self.tree)

    def scope_at(self, line: int) -> ast.AST:
        """The innermost function around a line, or the module."""
        found: ast.AST = self.tree
        for node in ast.walk(self.tree):  # outer functions come before inner ones
            if isinstance(node, _FUNCTIONS) and _holds(node, line) and node.body[0].lineno <= line:
                found = node
        return found

    def expressions_in(self, scope: ast.AST) -> Iterator[ast.expr]:
        """All expressions of a function or a module, without those of functions in it."""
        for node in self._nodes_in(scope):
            if isinstance(node, ast.expr):
                yield node

    def _nodes_in(self, scope: ast.AST) -> Iterator[ast.AST]:
        todo = [*ast.iter_child_nodes(scope)]
        while todo:
            node = todo.pop(0)
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                continue
            yield node
            todo += ast.iter_child_nodes(node)

    def is_in_own_scope(self, node: ast.AST) -> bool:
        """Whether a lambda or a comprehension holds it, which may run at another time."""
        statement = self.statement_of(node)
        for each in self.around(node):
            if each is statement:
                return False
            if isinstance(each, _OWN_SCOPE):
                return True
        return False

    def definition(self, name: ast.Name) -> ast.Assign | None:
        """The statement that gave a variable its value where an expression reads it.

        None if that is not certain, or if the value now is another: it was written in place, or
        one of the variables that it was computed from was.
        """
        if self.is_in_own_scope(name):
            return None
        reader = self.statement_of(name)
        found = assignment_of(name.id, Source(self.file, name.lineno, ""))
        scope = self.scope_of(name)
        given = [
            each
            for each in self._nodes_in(scope)
            if isinstance(each, ast.Assign)
            and found is not None
            and each.lineno == found.line
            and len(each.targets) == 1
            and isinstance(each.targets[0], ast.Name)
            and each.targets[0].id == name.id
        ]
        if len(given) != 1 or given[0] is reader:
            return None
        [assigned] = given
        return assigned if self.is_same_at(assigned, reader) else None

    def is_same_at(self, assigned: ast.Assign, reader: ast.stmt) -> bool:
        """Whether a variable, and what it was computed from, still hold the same there."""
        [target] = assigned.targets
        assert isinstance(target, ast.Name)
        names = {x.id for x in ast.walk(assigned.value) if isinstance(x, ast.Name)}
        if target.id in names:  # x = f(x): the x in it was another
            return False
        return not self.are_written_between(names | {target.id}, assigned, reader)

    def are_written_between(self, names: set[str], begin: ast.stmt, end: ast.stmt) -> bool:
        """Whether one of some variables may have changed from one statement to another."""
        given = begin.targets[0] if isinstance(begin, ast.Assign) else None
        outside = set(self.around(begin))
        loops = {x for x in self.around(end) if isinstance(x, _LOOPS)} - outside
        for node in self._nodes_in(self.scope_of(end)):
            if written_by(node) not in names or node is given:
                continue
            statement = self.statement_of(node)
            if begin.lineno < statement.lineno < end.lineno or statement is begin:
                return True
            if statement is end and not isinstance(node, ast.Name):
                return True  # a name is written after the statement has read it
            if loops & set(self.around(node)):
                return True  # in the turn before
        return False

    def loads_of(self, assigned: ast.Assign) -> list[ast.Name]:
        """Where the value of a statement may be read, by the variable's name."""
        [target] = assigned.targets
        assert isinstance(target, ast.Name)
        scope = self.scope_of(assigned)
        return [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Name)
            and node.id == target.id
            and isinstance(node.ctx, ast.Load)
            and self._may_read(node, assigned)
        ]

    def _may_read(self, name: ast.Name, assigned: ast.Assign) -> bool:
        if self.is_in_own_scope(name) or self.scope_of(name) is not self.scope_of(assigned):
            return True
        found = assignment_of(name.id, Source(self.file, name.lineno, ""))
        return found is None or found.line == assigned.lineno


def written_by(node: ast.AST) -> str:
    """The variable that a node writes, or whose tensor it writes in place; "" if none."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        return _owner(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name.endswith("_") and not name.endswith("__"):
            return _owner(node.func.value)
    return ""


def _owner(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _holds(node: ast.AST, line: int) -> bool:
    begin, end = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return begin is not None and end is not None and begin <= line <= end
