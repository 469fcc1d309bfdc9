"""Functions of a program in which several operations exceed float16, one beside the other.

The repair of one of them would leave the next. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import function_around, holds
from fxguard.source.syntax import tree_of_file

__all__ = ["words_of_function"]

# Squares, products and sums: others have repairs of their own.
_GROWING = names_in(
    "add addcmul bmm cumsum dot einsum matmul mean mm mul pow prod rsub square sub sum var"
)


def words_of_function(case: Case) -> Mapping[str, str]:
    """``{"name": "`ssim`", "others": "mul (ssim.py:61)", ...}``; {} of one overflow alone."""
    source = case.around.step.source
    if source is None or case.dtype != "float16" or case.name not in _GROWING:
        return {}
    function = function_around(source)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    others = [each for each in case.around.steps if _overflows_beside(case, each)]
    places = {
        (plain(each.kind), each.source)
        for each in others
        if each.source is not None
        and each.source.file == source.file
        and holds(function, each.source.line)
    }
    titles = sorted({f"{name} ({at.place})" for name, at in places if at is not None})
    if not titles:
        return {}
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    is_cast = _is_under_autocast(source)
    outside = ", under torch.autocast(..., enabled=False)" if is_cast else ""
    return {
        "name": f"`{function.name}`",
        "others": f"{titles[0]}{more}",
        "outside": outside,
    }


def _overflows_beside(case: Case, step: Step) -> bool:
    """Whether another operation overflows, of finite numbers."""
    around = case.around
    if step is around.step or plain(step.kind) not in _GROWING or not step.outputs:
        return False
    is_same = (step.kind, step.source) == (around.step.kind, around.step.source)
    made = around.range_of(step.outputs[0])
    read = [around.range_of(value) for value in step.inputs]
    is_half = around.values[step.outputs[0]].dtype == "float16"
    are_finite = all(each is not None and each.abs_max <= FORMATS["float16"].max for each in read)
    overflows = made is not None and made.abs_max == math.inf
    return is_half and overflows and are_finite and bool(read) and not is_same


def _is_under_autocast(source: Source) -> bool:
    tree = tree_of_file(source.file)
    nodes = () if tree is None else ast.walk(tree)
    return any(isinstance(x, ast.Attribute) and x.attr == "autocast" for x in nodes)
