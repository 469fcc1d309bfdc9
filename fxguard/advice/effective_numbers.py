"""Weights by effective numbers of samples, ``(1 - beta) / (1 - beta ** n)``, where a count is 0.

Source: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, 2019. Knows nothing of
torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice._patterns import made_by, one_minus_of
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.source.differences import from_one_at
from fxguard.source.named import called_name

__all__ = ["words_of_count"]


def words_of_count(case: Case) -> Mapping[str, str]:
    """``{"count": "n", "rest": "1 - beta ** n"}``; {} where the divisor is something else."""
    around = case.around
    rest = made_by(around, around.culprit)
    power = made_by(around, one_minus_of(rest))
    is_power = power is not None and plain(power.kind) in ("float_power", "pow")
    if rest is None or power is None or not is_power or not power.number_first:
        return {}
    counts = {ast.unparse(x): _exponent_of(x.right) for x in from_one_at(rest.source)}
    found = [(text, count) for text, count in counts.items() if count is not None]
    if len(found) != 1 or not isinstance(found[0][1], (ast.Name, ast.Attribute)):
        return {}
    return {"count": ast.unparse(found[0][1]), "rest": found[0][0]}


def _exponent_of(power: ast.expr) -> ast.expr | None:
    """The n of ``beta ** n``."""
    if isinstance(power, ast.BinOp) and isinstance(power.op, ast.Pow):
        return power.right
    is_call = isinstance(power, ast.Call) and called_name(power) == "pow"
    return power.args[1] if is_call and len(power.args) == 2 else None  # type: ignore[attr-defined]
