"""Lines of a script that write parameters in a loop over them: averages, clipping of weights.

They are found in the source. Whether they ran is not known. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import source_of
from fxguard.source.syntax import tree_of_file

__all__ = ["writes_of_parameters"]

MOST = 2  # lines that are told

_LISTS = frozenset(
    ["buffers", "named_buffers", "named_parameters", "parameters", "state_dict", "values"]
)
_HARMLESS = frozenset(["detach_", "requires_grad_", "retain_grad_", "zero_"])


def writes_of_parameters(file: str) -> tuple[Source, ...]:
    """The statements in loops over parameters that write them; () if there are too many to help."""
    tree = tree_of_file(file)
    loops = () if tree is None else (x for x in ast.walk(tree) if isinstance(x, ast.For))
    found = {each.lineno: each for loop in loops for each in _writes_in(loop)}
    return tuple(source_of(each, file) for each in found.values()) if len(found) <= MOST else ()


def _writes_in(loop: ast.For) -> Iterator[ast.stmt]:
    called = (x.func for x in ast.walk(loop.iter) if isinstance(x, ast.Call))
    if not any(isinstance(x, ast.Attribute) and x.attr in _LISTS for x in called):
        return
    names = {x.id for x in ast.walk(loop.target) if isinstance(x, ast.Name)}
    for statement in (each for part in loop.body for each in ast.walk(part)):
        if isinstance(statement, ast.stmt) and _written_by(statement) in names:
            yield statement


def _written_by(statement: ast.stmt) -> str:
    """The name of the tensor that a statement writes in place; "" if none, or its grad."""
    if isinstance(statement, ast.AugAssign):
        return _owner(statement.target)
    if isinstance(statement, ast.Assign) and isinstance(
        statement.targets[0], (ast.Attribute, ast.Subscript)
    ):
        return _owner(statement.targets[0])
    call: ast.expr | None = statement.value if isinstance(statement, ast.Expr) else None
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        name = call.func.attr
        if name.endswith("_") and name not in _HARMLESS:
            owner = _owner(call.func.value)
            if owner or not isinstance(call.func.value, ast.Call):
                return owner
        call = call.func.value
    return ""


def _owner(target: ast.expr) -> str:
    """``p`` of ``p``, ``p.data`` and ``p[0]``; "" of ``p.grad``."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        if isinstance(target, ast.Attribute) and target.attr != "data":
            return ""
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
