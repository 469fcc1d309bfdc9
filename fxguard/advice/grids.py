"""Points of a grid that begins at 0, by which an equation divides: ``u_r / r`` on an axis.

Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.source.assigned import assignment_of, handed_on_by, statement_node
from fxguard.source.named import called_name, variable_in

__all__ = ["words_of_grid"]

MOST_STEPS = 16  # from a divisor back to its grid

_GRIDS = ("arange", "linspace")
_SAME = frozenset(map(plain, MOVES | SELECTS | CASTS)) | {"clone", "detach", "requires_grad"}


def words_of_grid(case: Case) -> Mapping[str, str]:
    """``{"grid": "linspace (pde.py:8)", "point": "r"}``; {} if the divisor is no point of one."""
    grid = _made_by(case) or _written(case)
    return {"grid": grid, "point": variable_in(case.bare) or case.bare} if grid else {}


def _made_by(case: Case) -> str:
    """The operation that made the points, with its line; "" if none did."""
    value = case.around.culprit
    for _ in range(MOST_STEPS):
        step = made_by(case.around, value)
        if step is None:
            return ""
        if plain(step.kind) in _GRIDS:
            return titled(step)
        if plain(step.kind).rstrip("_") not in _SAME or not step.inputs:
            return ""
        value = step.inputs[0]
    return ""


def _written(case: Case) -> str:
    """The same by the text: of whole numbers, and of what the script has made before."""
    name, source = variable_in(case.bare), case.around.step.source
    for _ in range(MOST_STEPS):
        source = assignment_of(name, source) if name and source is not None else None
        statement = None if source is None else statement_node(source)
        if source is None or not isinstance(statement, ast.Assign):
            return ""
        made = _bare(statement.value)
        if isinstance(made, ast.Call) and called_name(made) in _GRIDS:
            return f"{called_name(made)} ({source.place})"
        name = made.id if isinstance(made, ast.Name) else ""
    return ""


def _bare(node: ast.expr) -> ast.expr:
    """What an expression gives another form: ``x`` of ``x[:, None].float()``."""
    inner: ast.expr | None = node
    while inner is not None:
        node, inner = inner, handed_on_by(inner)
        if inner is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = node.func.value if node.func.attr == "requires_grad_" else None
    return node
