"""The range of numbers that an expression runs over: ``n`` of ``n = torch.arange(most + 1)``.

By the program's text. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.records import Source
from fxguard.source.assigned import assignment_of, source_of, statement_node
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["range_behind"]

MOST_STEPS = 6  # from a statement to the one that makes the range
_RANGES = frozenset(["arange", "linspace"])


def range_behind(source: Source) -> tuple[str, Source] | None:
    """The variable that holds the only range of which a statement is computed, and its statement.

    Args:
        source: the line that computes something of it.

    Returns:
        None if there is none, or several.
    """
    found = dict[str, tuple[str, Source]]()
    seen, todo = set[str](), [source]
    for _ in range(MOST_STEPS):
        later = []
        for at in todo:
            for name in _names(at):
                made = None if name in seen else _made(name, at)
                seen.add(name)
                if made is None or made.position == at.position:
                    continue
                if _is_range(made):
                    found[made.place] = (name, made)
                else:
                    later.append(made)
        todo = later
    return next(iter(found.values())) if len(found) == 1 else None


def _names(at: Source) -> list[str]:
    """The variables and attributes that a statement reads: ``n``, ``self.n``."""
    statement = statement_node(at)
    value = None if statement is None else getattr(statement, "value", None)
    return [] if value is None else list(_read(value))


def _read(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            yield ast.unparse(each)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield each.id


def _made(name: str, at: Source) -> Source | None:
    """The statement that made a variable, or an attribute of ``self``."""
    if "." not in name:
        return assignment_of(name, at)
    tree = tree_of_file(at.file)
    made = [] if tree is None else [x for x in ast.walk(tree) if _writes(x, name)]
    return source_of(made[0], at.file) if len(made) == 1 and isinstance(made[0], ast.stmt) else None


def _writes(node: ast.AST, name: str) -> bool:
    """Whether a statement assigns an attribute, or registers a buffer of that name."""
    if isinstance(node, ast.Assign):
        return any(ast.unparse(each) == name for each in node.targets)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or called_name(call) != "register_buffer" or not call.args:
        return False
    first, owner = call.args[0], call.func
    if not isinstance(first, ast.Constant) or not isinstance(owner, ast.Attribute):
        return False
    return f"{ast.unparse(owner.value)}.{first.value!s}" == name


def _is_range(source: Source) -> bool:
    statement = statement_node(source)
    nodes = () if statement is None else ast.walk(statement)
    return any(isinstance(each, ast.Call) and called_name(each) in _RANGES for each in nodes)
