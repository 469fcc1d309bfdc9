"""What calls give to functions, and what functions do with it, by the program's text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = [
    "FUNCTIONS",
    "Function",
    "assigned_in",
    "attributes_of",
    "bound_in",
    "given_to",
    "holds",
    "is_handed_on",
    "is_library",
    "is_method",
    "keeps_parameter",
    "lines_of",
    "matched",
    "methods_of",
    "name_of",
    "result_of",
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Calls that hand on tensors as they are: what is written into the result is written into them.
_HANDS_ON = frozenset(
    [
        *("children", "enumerate", "items", "iter", "list", "modules", "parameters", "reshape"),
        *("squeeze", "tuple", "unsqueeze", "values", "view", "zip"),
    ]
)


def result_of(function: Function) -> str:
    """What a function returns."""
    return f"{function.name}:{function.lineno}()"


def methods_of(node: ast.ClassDef, *names: str) -> list[Function]:
    return [each for each in node.body if isinstance(each, FUNCTIONS) and each.name in names]


def holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def assigned_in(
    node: ast.Assign | ast.AnnAssign | ast.AugAssign,
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement assigns, each with its value."""
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        elif value is not None:
            yield target, value


def given_to(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(each.value for each in node.keywords)]


def name_of(node: ast.Call | ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return str(getattr(called, "attr", None) or getattr(called, "id", ""))


def is_library(node: ast.expr) -> bool:
    """Whether something of torch or of Python's modules is called: ``torch.linalg.norm``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("F", "math", "nn", "np", "numpy", "torch")


def is_method(node: Function) -> bool:
    return bool(node.args.args) and node.args.args[0].arg == "self"


def matched(function: Function, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function, each with the argument of a call."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if is_method(function) else names
    yield from zip(names, node.args, strict=False)
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def keeps_parameter(function: Function, name: str) -> bool:
    """Whether a function keeps a parameter, or writes into it."""
    if function.name == "__init__":
        return True
    for node in ast.walk(function):
        target: ast.expr | None = node.target if isinstance(node, ast.AugAssign) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr.endswith("_") else None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name) and target.id == name:
            return True
        if isinstance(node, (ast.For, ast.comprehension)) and is_handed_on(node.iter):
            read = (x.id for x in ast.walk(node.iter) if isinstance(x, ast.Name))
            if name in read:
                return True
    return False


def is_handed_on(node: ast.expr) -> bool:
    """Whether an expression is a tensor that has another name already, or holds such tensors."""
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        inner = owner if owner is not None else next(iter(node.args), None)
        return name_of(node) in _HANDS_ON and inner is not None and is_handed_on(inner)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(is_handed_on, node.elts))
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return is_handed_on(node.value)
    return isinstance(node, ast.Name)


def bound_in(scope: Function) -> Iterator[str]:
    """The variables that are a function's own."""
    arguments = scope.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        yield each.arg
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that methods of a class give its instances."""
    found = set[str]()
    for each in ast.walk(node):
        is_written = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_written and isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            found.add(each.attr)
        if isinstance(each, ast.Call) and name_of(each) == "register_buffer" and each.args:
            key = each.args[0]
            found.update([str(key.value)] if isinstance(key, ast.Constant) else [])
    return found
