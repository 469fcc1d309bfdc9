"""Numbers that have to stay inside (0, 1) or (-1, 1), and were made as large as its end.

A distribution's samples and dequantized pixels are such: rounded, they are 1. Knows nothing of
torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice._patterns import readers_of
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import operand_in, titled
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.named import operand_texts

__all__ = ["is_at_end", "maker_at_end", "words_of_end"]

MOST_STEPS = 16  # in one walk

_LOGS = frozenset(["log", "log10", "log1p", "log2"])
_BOTH_ENDS = frozenset(["atanh", "erfinv"])  # functions of (-1, 1)
_AT_ZERO = _LOGS - {"log1p"} | {"logit", "reciprocal", "rsqrt"}
# What rounds a number to 1; others, such as a sigmoid, have better repairs.
_ROUNDS = frozenset(["add", "div", "mul", "pow", "rsub", "sub"])
_CLAMPS = frozenset(["clamp", "clamp_max", "clip"])
_PASSED = MOVES | SELECTS | CASTS


def is_at_end(case: Case) -> bool:
    """Whether such a number was made by another line, and has a name on this one."""
    return bool(_name_in(case.around)) and maker_at_end(case) is not None


def maker_at_end(case: Case) -> Step | None:
    """The operation that made the number."""
    found = _at_end(case.around)
    step = None if found is None else case.around.maker_of(found)
    if step is None or step.source is None:
        return None
    makes_it = plain(step.kind) in _ROUNDS or _lost_bound(case, step) is not None
    return step if makes_it else None


def _lost_bound(case: Case, step: Step) -> float | None:
    """The upper bound of a clamp that is 1 in the dtype, such as 1 - 1e-8 in float32."""
    form, bounds = FORMATS.get(case.dtype), step.literals[-1:]
    is_clamp = plain(step.kind) in _CLAMPS and form is not None and bool(bounds)
    return bounds[0] if is_clamp and form and abs(1 - bounds[0]) < form.eps / 2 else None


def words_of_end(case: Case) -> Mapping[str, str]:
    """``{"inside": "inside (0, 1)", "bounds": "5e-07, 1 - 5e-07", ...}``."""
    step, value, eps = maker_at_end(case), _at_end(case.around), case.near_one
    assert step is not None
    assert value is not None
    inside, bounds = "below 1", f"max=1 - {eps}"
    if case.name in _BOTH_ENDS:
        inside, bounds = "inside (-1, 1)", f"-1 + {eps}, 1 - {eps}"
    elif case.name == "logit" or _has_logarithm(case.around, value):
        inside, bounds = "inside (0, 1)", f"{eps}, 1 - {eps}"
    bound, lost = _lost_bound(case, step), ""
    if bound is not None and bound != 1:
        lost = f": 1 - {1 - bound:.0e} is 1 in {case.dtype}"
    return {
        "number": _name_in(case.around),
        "inside": inside,
        "bounds": bounds,
        "made": titled(step),
        "lost": lost,
    }


def _has_logarithm(around: Surroundings, value: int) -> bool:
    """Whether something else has no value where the number is 0."""
    return any(
        plain(step.kind) in _AT_ZERO and step.inputs[:1] == (read,)
        for step, read in readers_of(around, value)
    )


def _at_end(around: Surroundings) -> int | None:
    """The number behind ``1 - x``, ``-x`` and powers of it; None if this line has made it."""
    value = around.culprit
    is_there = plain(around.step.kind) in _BOTH_ENDS | {"logit"}
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or not step.inputs:
            return None
        is_passed = not step.counts or step.kind in _PASSED
        if not is_passed and _line_of(step) != _line_of(around.step):
            return value if is_there else None
        name = plain(step.kind)
        is_rest = name in ("rsub", "sub") and step.number_first and step.literals[:1] == (1.0,)
        if is_rest or (name == "neg" and plain(around.step.kind) == "log1p"):
            is_there = True
        elif not (is_passed or (is_there and name == "pow" and not step.number_first)):
            return None
        value = step.inputs[0]
    return None


def _line_of(step: Step) -> tuple[str, int] | None:
    return None if step.source is None else step.source.position


def _name_in(around: Surroundings) -> str:
    """The variable behind the operand as the line has it; "" if that is not certain."""
    if name := _name_of(operand_in(around)):
        return name
    source, kind = around.step.source, plain(around.step.kind)
    texts = () if source is None else operand_texts(source.code, kind)
    names = {_name_of(text) for text in texts if "-" in text}  # the other end is no difference
    return names.pop() if len(names) == 1 else ""


def _name_of(text: str) -> str:
    """The variable behind ``1 - x``, ``-x`` and powers of it; "" if it is another expression."""
    try:
        node: ast.expr = ast.parse(text, mode="eval").body
    except SyntaxError:
        return ""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            node = node.right
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            node = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return ""
    return node.id
