"""Parameters that an expression reads, by the program's text: ``v`` that was ``self.var[lab]``.

Knows nothing of torch.
"""

from __future__ import annotations

import ast

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, statement_node
from fxguard.source.named import called_name, first_argument, last_name
from fxguard.source.syntax import expression_of, tree_of_file

__all__ = ["parameter_read"]

MOST_STEPS = 4  # from a variable to the parameter

# Methods and functions of the elements as they are.
MOVES = frozenset(
    [
        *("clone", "expand", "expand_as", "flatten", "gather", "index_select", "repeat"),
        *("reshape", "select", "squeeze", "take", "transpose", "unsqueeze", "view"),
    ]
)


def parameter_read(text: str, source: Source) -> str:
    """The parameter of which an expression has some elements; "" if that is not certain.

    Args:
        text: the expression, ``v``.
        source: the line that has it.

    Returns:
        As the program has it: ``self.var``; ``omega`` where that is unpacked of a parameter.
    """
    tree = tree_of_file(source.file)
    node = expression_of(text)
    for _ in range(MOST_STEPS):
        node = None if node is None else _moved(node)
        if node is None or tree is None:
            return ""
        if _is_parameter(tree, node):
            return ast.unparse(node)
        if not isinstance(node, ast.Name):
            return ""
        found = assignment_of(node.id, source)
        statement = None if found is None else statement_node(found)
        if found is None or not isinstance(statement, ast.Assign) or found.line == source.line:
            return ""
        if isinstance(statement.targets[0], ast.Tuple):
            return node.id if parameter_read(ast.unparse(statement.value), found) else ""
        node, source = statement.value, found
    return ""


def _moved(node: ast.expr) -> ast.expr | None:
    """What an expression selects its elements from."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and called_name(node) in MOVES:
            inner = first_argument(node)
            if inner is None:
                return None
            node = inner
        else:
            return node


def _is_parameter(tree: ast.Module, node: ast.expr) -> bool:
    """Whether all that the file assigns to a name or an attribute are parameters."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    values = [
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign)
        and any(type(x) is type(node) and last_name(x) == last_name(node) for x in each.targets)
    ]
    return bool(values) and all(map(_makes_parameter, values))


def _makes_parameter(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    if called_name(value) in ("Parameter", "requires_grad"):
        return True
    return any(
        each.arg == "requires_grad" and getattr(each.value, "value", False) is True
        for each in value.keywords
    )
