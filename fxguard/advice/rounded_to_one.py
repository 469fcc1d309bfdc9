"""Divisors ``1 - x`` that are 0 because x was rounded to 1, as 0.999 is in bfloat16.

Averages of weights and of gradients divide by such numbers, and so do schedules of noise. Positions
that were rounded to the same number are such, too. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled, written_operand
from fxguard.formats import FORMATS, HALVES
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import statement_node
from fxguard.source.named import variable_in
from fxguard.source.rounded import is_distinct_before, is_near_one_before, rounding_behind

__all__ = ["words_of_equal", "words_of_rounded"]

MOST_STEPS = 16  # in one walk

# What makes numbers near 1, and no mask.
_MAKERS = frozenset(
    ["as_tensor", "exp", "full", "mul", "pow", "scalar_tensor", "sigmoid", "tanh", "tensor"]
)
_PASSED = MOVES | SELECTS | CASTS | frozenset(["clone", "sqrt"])
_OF_ONE = frozenset(["log", "log10", "log1p", "log2", "logit"])  # 0 or no value at 1


def words_of_rounded(case: Case) -> Mapping[str, str]:
    """``{"number": "`decay`", "dtype": "bfloat16", "below": "0.9961", ...}``; {} of others."""
    found = _difference(case.around)
    if found is None:
        return _words_by_text(case)
    step, dtype, rounding = found
    is_of_rest = plain(step.kind) not in ("log1p", "logit")
    return _in_words(_name_at(step), titled(step), dtype, rounding, "0" if is_of_rest else "inf")


def _in_words(
    name: str, made: str, dtype: str, rounding: Source | None, zero: str = "0"
) -> dict[str, str]:
    by = "" if rounding is None else f", which {rounding.place} rounds,"
    return {
        "number": f"`{name}`{by}" if name else f"what {made} reads{by}",
        "made": made,
        "half": dtype,
        "below": f"{1 - FORMATS[dtype].eps / 2:.4f}",
        "as_number": ", or as a number of Python" if rounding is None else "",
        "zero": zero,
    }


def _words_by_text(case: Case) -> dict[str, str]:
    """The same of an operand that is in no graph, such as one made in front of a model."""
    operand, culprit = case.operands[-1:], case.around.culprit
    is_made = culprit is not None and case.around.maker_of(culprit) is not None
    if is_made or not operand or operand[0].dtype not in HALVES or operand[0].low != 0:
        return {}
    dtype = operand[0].dtype
    for _, source in case.assignments:
        name = _name_in(source, of_one=True)
        rounding = _rounding_at(source, name, dtype) if name else None
        if rounding is not None:
            return _in_words(name, f"1 - {name} ({source.place})", dtype, rounding)
    return {}


def words_of_equal(case: Case) -> Mapping[str, str]:
    """The difference of neighbours that were rounded to one number; {} of others."""
    around, value = case.around, case.around.culprit
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or not step.inputs or step.source is None:
            return {}
        if plain(step.kind) in ("diff", "sub", "rsub") and not step.literals:
            dtype = around.values[step.inputs[0]].dtype
            name = _name_at(step)
            found, made = around.range_of(step.outputs[0]), around.range_of(step.inputs[0])
            rounding = rounding_behind(step.source, name, dtype) if dtype in HALVES else None
            is_equal = found is not None and found.abs_min == 0 and rounding is not None
            if not is_equal or made is None or rounding is None:
                return {}
            if not made.abs_max or not is_distinct_before(step.source, name):
                return {}
            steps = 2.0 ** math.floor(math.log2(made.abs_max)) * FORMATS[dtype].eps
            return {
                "made": titled(step),
                "rounding": rounding.place,
                "half": dtype,
                "largest": f"{made.abs_max:.3g}",
                "steps": f"{steps:.2g}",
            }
        if step.counts and plain(step.kind) not in _PASSED | {"mul", "abs"}:
            return {}
        value = step.inputs[0]
    return {}


def _difference(around: Surroundings) -> tuple[Step, str, Source | None] | None:
    """The operation that subtracted 1 from 1 in a dtype of few digits, and that dtype.

    And the statement that rounded to 1, where only the program's text tells of it.
    """
    value, step = around.culprit, around.step
    for _ in range(MOST_STEPS):
        is_end = plain(step.kind) in ("rsub", "sub") and step.literals[:1] == (1.0,)
        if (is_end or plain(step.kind) in _OF_ONE) and step.inputs:
            read, dtype = around.range_of(step.inputs[0]), around.values[step.inputs[0]].dtype
            if dtype in HALVES and read is not None and read.abs_max == 1:
                if is_end and read.abs_min == 1 and _is_near_one(around, step.inputs[0]):
                    return step, dtype, None
                at = step.source
                rounding = None if at is None else _rounding_at(at, _name_at(step), dtype)
                if rounding is not None:
                    return step, dtype, rounding
            if is_end:
                return None
        if step is not around.step and step.counts and plain(step.kind) not in _PASSED | {"neg"}:
            return None
        made = None if value is None else around.maker_of(value)
        if made is None or not made.inputs:
            return None
        step, value = made, made.inputs[0]
    return None


def _rounding_at(source: Source, name: str, dtype: str) -> Source | None:
    """The statement that rounded to 1 what was below it, by the program's text."""
    is_near = is_near_one_before(source, name, FORMATS[dtype].eps / 4)
    return rounding_behind(source, name, dtype) if is_near else None


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
    if plain(step.kind) in _OF_ONE:
        return variable_in(written_operand(step))
    return "" if step.source is None else _name_in(step.source)


def _name_in(source: Source, *, of_one: bool = False) -> str:
    """The only x of which a statement takes something less x; or ``1 - x``."""
    statement = statement_node(source)
    found = set()
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            if of_one and getattr(node.left, "value", None) != 1:
                continue
            rest = node.right
            while not isinstance(rest, (ast.Name, ast.Attribute)):
                if isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Pow):
                    rest = rest.left
                elif isinstance(rest, ast.Subscript):
                    rest = rest.value
                elif isinstance(rest, ast.Call) and isinstance(rest.func, ast.Attribute):
                    rest = rest.func.value
                else:
                    break
            found.add(ast.unparse(rest))
    name = found.pop() if len(found) == 1 else ""
    return name if name.replace(".", "_").isidentifier() else ""
