"""Divisors ``1 - x`` that are 0 because x was rounded to 1, as 0.999 is in bfloat16.

Averages of weights and of gradients divide by such numbers. Knows nothing of torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.formats import FORMATS, HALVES
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.assigned import statement_node

__all__ = ["words_of_rounded"]

MOST_STEPS = 16  # in one walk

# What makes numbers near 1, and no mask.
_MAKERS = frozenset(
    ["as_tensor", "exp", "full", "mul", "pow", "scalar_tensor", "sigmoid", "tanh", "tensor"]
)
_PASSED = MOVES | SELECTS | CASTS | frozenset(["clone", "sqrt"])


def words_of_rounded(case: Case) -> Mapping[str, str]:
    """``{"number": "`decay`", "dtype": "bfloat16", "below": "0.9961", ...}``; {} of others."""
    found = _difference(case.around)
    if found is None:
        return {}
    step, dtype = found
    name = _name_at(step)
    return {
        "number": f"`{name}`" if name else f"what {titled(step)} reads",
        "made": titled(step),
        "half": dtype,
        "below": f"{1 - FORMATS[dtype].eps / 2:.4f}",
    }


def _difference(around: Surroundings) -> tuple[Step, str] | None:
    """The operation that subtracted 1 from 1 in a dtype of few digits, and that dtype."""
    value = around.culprit
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or not step.inputs:
            return None
        if plain(step.kind) in ("rsub", "sub") and step.literals[:1] == (1.0,):
            read, dtype = around.range_of(step.inputs[0]), around.values[step.inputs[0]].dtype
            is_one = read is not None and read.abs_min == read.abs_max == 1
            is_rounded = is_one and dtype in HALVES and _is_near_one(around, step.inputs[0])
            return (step, dtype) if is_rounded else None
        if step.counts and plain(step.kind) not in _PASSED:
            return None
        value = step.inputs[0]
    return None


def _is_near_one(around: Surroundings, value: int) -> bool:
    """Whether a number was rounded to 1, as far as what made it tells."""
    for _ in range(MOST_STEPS):
        step = around.maker_of(value)
        if step is None or (step.counts and step.kind not in _PASSED) or not step.inputs:
            return step is not None and plain(step.kind) in _MAKERS
        value = step.inputs[0]
    return False


def _name_at(step: Step) -> str:
    """``self.decay`` of ``1 - self.decay ** steps``; "" where the line does not tell."""
    statement = None if step.source is None else statement_node(step.source)
    found = set()
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            rest = node.right
            while isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Pow):
                rest = rest.left
            found.add(ast.unparse(rest))
    name = found.pop() if len(found) == 1 else ""
    return name if name.replace(".", "_").isidentifier() else ""
