"""Syntax trees of the user's program."""

from __future__ import annotations

import ast
import linecache
import threading

__all__ = ["ONE_AT_A_TIME", "tree_of", "tree_of_file"]

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


def tree_of_file(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    return tree_of("".join(linecache.getlines(file)))
