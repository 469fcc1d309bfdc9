"""The line that gives an object an attribute: ``self.norm = nn.GroupNorm(1, hidden)``."""

from __future__ import annotations

import ast
import inspect

from fxguard.records import Source
from fxguard.source.lines import is_internal, source_at
from fxguard.source.syntax import tree_of_file

__all__ = ["attribute_line"]


def attribute_line(kind: type, name: str) -> Source | None:
    """The line that gives objects of a class an attribute, or a module its buffer.

    A buffer may be made on an earlier line, ``mask = torch.ones(n, n).triu(1)``: then that line.

    Args:
        kind: the class.
        name: of the attribute.

    Returns:
        The first such line in the class, or in those that it inherits from; None if there is none
        outside torch.
    """
    for each in inspect.getmro(kind):
        try:
            file = inspect.getsourcefile(each)
        except TypeError:  # built in
            continue
        if file is None or is_internal(file) or (tree := tree_of_file(file)) is None:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == each.__name__:
                found = _line_in(node, name)
                if found is not None:
                    return source_at((file, found))
    return None


def _line_in(kind: ast.ClassDef, name: str) -> int | None:
    for function in kind.body:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(_is_of_self(x, name) for x in node.targets):
                return _made_at(function, node.value) or node.lineno
            if isinstance(node, ast.Call) and _gives(node, name):
                value = node.args[1] if len(node.args) > 1 else None
                return _made_at(function, value) or (value or node).lineno
    return None


def _is_of_self(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == name


def _gives(call: ast.Call, name: str) -> bool:
    """Whether a call is ``self.register_buffer(name, ...)`` or ``self.add_module(name, ...)``."""
    is_method = isinstance(call.func, ast.Attribute)
    first = call.args[0] if call.args else None
    return is_method and isinstance(first, ast.Constant) and first.value == name


def _made_at(function: ast.AST, value: ast.expr | None) -> int | None:
    """The only line that computes a variable from which a value is read, before it is given."""
    names = [x.id for x in ast.walk(value) if isinstance(x, ast.Name)] if value is not None else []
    if value is None or not isinstance(value, (ast.Name, ast.Call, ast.Subscript)):
        return None
    base: ast.expr = value
    while isinstance(base, (ast.Call, ast.Attribute, ast.Subscript)):  # mask.view(1, 1, n, n)
        base = base.func if isinstance(base, ast.Call) else base.value
    if not isinstance(base, ast.Name) or base.id not in names:
        return None
    lines = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and node.lineno < value.lineno
        and any(isinstance(x, ast.Name) and x.id == base.id for x in node.targets)
    ]
    return lines[0] if len(lines) == 1 else None
