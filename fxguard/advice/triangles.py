"""Causal masks that hide the diagonal, too: their first row is empty.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from fxguard.advice.case import Case
from fxguard.records import Source
from fxguard.source.named import called_name
from fxguard.source.syntax import tree_of_file

__all__ = ["words_of_triangle"]

# The diagonal with which a triangle has no entry in its first row, or hides all of it; and the one
# that leaves the entry of the row itself.
_EMPTY = {"tril": (-1, 0), "triu": (0, 1)}


def words_of_triangle(case: Case) -> Mapping[str, str]:
    """``{"call": "tril", "place": "gpt.py:18", "diagonal": "0"}`` of a first row; {} elsewhere."""
    source, seen = case.around.step.source, case.evidence
    if source is None or seen is None or len(seen.index) < 2 or seen.index[-2] != 0:
        return {}
    found = list(_triangles(source.file))
    if len(found) != 1:
        return {}
    name, line = found[0]
    place = Source(source.file, line, "").place
    return {"call": name, "place": place, "diagonal": str(_EMPTY[name][1])}


def _triangles(file: str) -> Iterator[tuple[str, int]]:
    tree = tree_of_file(file)
    for node in () if tree is None else ast.walk(tree):
        name = called_name(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in _EMPTY and _diagonal(node) == _EMPTY[name][0]:
            yield name, node.lineno


def _diagonal(call: ast.Call) -> int | None:
    """The diagonal that it is given; 0 without one; None if it is no number of the program."""
    given = [each.value for each in call.keywords if each.arg == "diagonal"]
    is_function = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch"
    given += call.args[1:] if is_function or isinstance(call.func, ast.Name) else call.args
    try:
        return int(ast.literal_eval(given[0])) if given else 0
    except (TypeError, ValueError):
        return None
