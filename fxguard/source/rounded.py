"""Where a program rounds numbers to a dtype of few digits, and whether they were next to 1 before.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from fxguard.records import Source
from fxguard.source.assigned import source_of
from fxguard.source.flows import flows_of
from fxguard.source.syntax import tree_of_file

__all__ = ["is_distinct_before", "is_near_one_before", "rounding_behind"]

# Methods that round to these dtypes.
_METHODS = {"bfloat16": "bfloat16", "half": "float16"}
_CASTS = frozenset(["astype", "to", "type"])
_NAMES = {"bfloat16": "bfloat16", "half": "float16", "float16": "float16"}

# Their results are next to 1 where their operands are small, and 1 by rounding alone.
_NEAR_ONE = frozenset(["cumprod", "erf", "exp", "sigmoid", "softmax", "tanh"])
# Their results are distinct numbers.
_DISTINCT = frozenset(["arange", "cumprod", "cumsum", "geomspace", "linspace", "logspace", "sort"])


def rounding_behind(source: Source, name: str, dtype: str) -> Source | None:
    """The statement that rounded to a dtype what a line reads; None if that is not certain.

    Args:
        source: the line.
        name: what it reads, ``self.table``; "" where that is not known.
        dtype: bfloat16 or float16.
    """
    tree, flows = tree_of_file(source.file), flows_of(source.file)
    if tree is None or flows is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            at = source_of(node, source.file)
            if any(each == dtype for each in _rounds(node, tree)) and flows.reaches(
                at, source, name
            ):
                return at
    return None


def is_near_one_before(source: Source, name: str, eps: float) -> bool:
    """Whether what a line reads was next to 1, as products of ``1 - beta`` are, and never 1.

    Args:
        source: the line.
        name: what it reads; "" where that is not known.
        eps: the distance from 1 within which a dtype holds nothing else.
    """
    calls = list(_calls_behind(source, name))
    if any(_begins_at_zero(each) for each in calls):
        return False  # exp(-t) is 1 at t = 0
    return any(_called(each) in _NEAR_ONE or _ends_near_one(each, eps) for each in calls)


def is_distinct_before(source: Source, name: str) -> bool:
    """Whether what a line reads are positions or times, each of which is another number."""
    return any(_called(each) in _DISTINCT for each in _calls_behind(source, name))


def _calls_behind(source: Source, name: str) -> Iterator[ast.Call]:
    flows = flows_of(source.file)
    for value in () if flows is None else flows.behind(source, name):
        yield from (each for each in ast.walk(value) if isinstance(each, ast.Call))


def _rounds(statement: ast.stmt, tree: ast.Module) -> Iterator[str]:
    """The dtypes of few digits that a statement rounds to."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if isinstance(node.func, ast.Attribute) and not node.args and name in _METHODS:
            yield _METHODS[name]
        given = [each.value for each in node.keywords if each.arg == "dtype"]
        given += node.args if name in _CASTS else []
        yield from (found for each in given if (found := _dtype(each, tree)))


def _dtype(node: ast.expr, tree: ast.Module) -> str:
    """``bfloat16`` of ``torch.bfloat16``, and of a variable that is it; "" of others."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return _NAMES.get(node.attr, "")
    found = {
        _dtype(each.value, tree)
        for each in (ast.walk(tree) if isinstance(node, ast.Name) else ())
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == ast.unparse(node)
        if not isinstance(each.value, ast.Name)
    }
    return found.pop() if len(found) == 1 else ""


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))


def _numbers(nodes: Sequence[ast.expr]) -> list[float | None]:
    numbers = []
    for each in nodes:
        value = getattr(each, "value", None) if isinstance(each, ast.Constant) else None
        numbers.append(float(value) if isinstance(value, (int, float)) else None)
    return numbers


def _begins_at_zero(node: ast.Call) -> bool:
    """Whether numbers in a row begin at 0: ``arange(9)``, ``linspace(0, 1, 9)``."""
    numbers = _numbers(node.args)
    if _called(node) == "arange":
        return len(numbers) < 2 or numbers[0] == 0
    return _called(node) in ("linspace", "logspace", "zeros") and numbers[:1] in ([0], [])


def _ends_near_one(node: ast.Call, eps: float) -> bool:
    """Whether one end of ``linspace`` is next to 1, and none is 1."""
    numbers = [each for each in _numbers(node.args)[:2] if each is not None]
    is_row = _called(node) in ("linspace", "full") and bool(numbers)
    return is_row and 1 not in numbers and any(abs(1 - each) < eps for each in numbers)
