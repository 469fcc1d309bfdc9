"""Syntax trees of the user's program."""

from __future__ import annotations

import ast
import linecache
import threading

__all__ = ["ONE_AT_A_TIME", "expression_of", "tree_of", "tree_of_file"]

# Python 3.11 counts the depth of a tree in one place for all threads, and raises a SystemError
# where two of them make trees.
ONE_AT_A_TIME = threading.RLock()


def tree_of(code: str) -> ast.Module | None:
    """The syntax tree of some code; None if it is no complete Python.

    Example:
        >>> tree_of("x = (1 +") is None
        True
    """
    try:
        with ONE_AT_A_TIME:
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, SystemError):
        return None


def expression_of(text: str) -> ast.expr | None:
    """The syntax tree of one expression; None if some code is none, or several.

    Example:
        >>> type(expression_of("a - b")).__name__, expression_of("a = b")
        ('BinOp', None)
    """
    tree = tree_of(text)
    first = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    return first.value if isinstance(first, ast.Expr) else None


def tree_of_file(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    return tree_of("".join(linecache.getlines(file)))
