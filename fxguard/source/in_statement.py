"""What reads the result of each operation of a statement: it tells operations of one name apart.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fxguard.source.named import SIGNS, called_name, first_argument, operand_text
from fxguard.source.syntax import tree_of

__all__ = ["Path", "operands_with_paths"]

# The operations that read a result, the next one first, each with the place of it: 1 of ``a - x``.
Path = tuple[tuple[str, int], ...]

_NAMES = {sign: name for name, sign in SIGNS.items()}
# What they hold may run never, or many times.
_BRANCHES = (
    *(ast.BoolOp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.Lambda, ast.ListComp),
    *(ast.NamedExpr, ast.SetComp),
)


def operands_with_paths(code: str, name: str) -> list[tuple[str, Path]]:
    """The operand in question of each operation of a name, and what reads its result.

    Returns:
        [] where an operation may run never, or many times.

    Example:
        >>> operands_with_paths("w = died / g[:, None] - alive / h", "div")
        [('g[:, None]', (('sub', 0),)), ('h', (('sub', 1),))]
    """
    tree = tree_of(code)
    if tree is None or any(isinstance(node, _BRANCHES) for node in ast.walk(tree)):
        return []
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    here = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and _name(node) == name]
    return [(_own_operand(node, name), tuple(_path(node, above))) for node in here]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.BinOp):
        return _NAMES.get(type(node.op), "")
    return called_name(node) if isinstance(node, ast.Call) else ""


def _own_operand(node: ast.expr, name: str) -> str:
    """The operand of the outermost operation alone: those inside have the same name."""
    if isinstance(node, ast.BinOp):
        bare = ast.BinOp(ast.Name("left"), node.op, node.right)
        return operand_text(ast.unparse(bare), name)
    inner = first_argument(node) if isinstance(node, ast.Call) else None
    is_named = inner is not None and not any(_name(each) == name for each in ast.walk(inner))
    return operand_text(ast.unparse(node), name) if is_named else ""


def _path(node: ast.AST, above: dict[ast.AST, ast.AST]) -> Iterator[tuple[str, int]]:
    while (outer := above.get(node)) is not None and isinstance(outer, (ast.expr, ast.keyword)):
        if isinstance(outer, ast.BinOp):
            yield _name(outer), int(outer.right is node)
        elif isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.USub):
            yield "neg", 0
        elif isinstance(outer, ast.Call):
            is_method = isinstance(outer.func, ast.Attribute) and outer.func is node
            yield _name(outer), 0 if is_method else _place(outer, node)
        node = outer


def _place(call: ast.Call, node: ast.AST) -> int:
    return next((i for i, each in enumerate(call.args) if each is node), 0)
