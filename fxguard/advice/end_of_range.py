"""Numbers that have to stay inside (0, 1) or (-1, 1), and were made as large as its end.

A distribution's samples and dequantized pixels are such: rounded, they are 1. Knows nothing of
torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxguard.advice._patterns import one_plus_of, readers_of
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import operand_in, titled
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.differences import from_one_at
from fxguard.source.named import called_name, operand_texts
from fxguard.source.syntax import tree_of

__all__ = ["is_at_both_ends", "is_at_end", "maker_at_end", "words_of_end"]

MOST_STEPS = 16  # in one walk
NOWHERE = (None, 0, None)

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
    if _is_at_minus_one(case.around):
        return step if _lost_low(case, step) is not None else None
    makes_it = plain(step.kind) in _ROUNDS or _lost_bound(case, step) is not None
    return step if makes_it else None


def is_at_both_ends(case: Case) -> bool:
    """Whether the number may not be -1 either: both bounds of a clamp are lost, or were no eps."""
    step, value = (maker_at_end(case), _at_end(case.around)) if is_at_end(case) else (None, None)
    if step is None or value is None or case.name in _BOTH_ENDS:
        return False
    is_lost = _lost_bound(case, step) is not None and _lost_low(case, step) is not None
    is_read = _is_at_minus_one(case.around) or _has_pole_at_minus_one(case.around, value)
    return is_lost and is_read


def _lost_bound(case: Case, step: Step) -> float | None:
    """The upper bound of a clamp that is 1 in the dtype, such as 1 - 1e-8 in float32."""
    form, bounds = FORMATS.get(case.dtype), step.literals[-1:]
    is_clamp = plain(step.kind) in _CLAMPS and form is not None and bool(bounds)
    return bounds[0] if is_clamp and form and abs(1 - bounds[0]) < form.eps / 2 else None


def _lost_low(case: Case, step: Step) -> float | None:
    """The lower bound of a clamp that is -1 in the dtype."""
    form, bounds = FORMATS.get(case.dtype), step.literals[:1]
    is_clamp = plain(step.kind) in _CLAMPS | {"clamp_min"} and form is not None and bool(bounds)
    return bounds[0] if is_clamp and form and abs(1 + bounds[0]) < form.eps / 2 else None


def words_of_end(case: Case) -> Mapping[str, str]:
    """``{"inside": "inside (0, 1)", "bounds": "5e-07, 1 - 5e-07", ...}``."""
    step, value, eps = maker_at_end(case), _at_end(case.around), case.near_one
    assert step is not None
    assert value is not None
    inside, bounds = "below 1", f"max=1 - {eps}"
    if case.name in _BOTH_ENDS or is_at_both_ends(case):
        inside, bounds = "inside (-1, 1)", f"-1 + {eps}, 1 - {eps}"
    elif _is_at_minus_one(case.around):
        inside, bounds = "above -1", f"min=-1 + {eps}"
    elif case.name == "logit" or _has_logarithm(case.around, value):
        inside, bounds = "inside (0, 1)", f"{eps}, 1 - {eps}"
    bound, low, lost = _lost_bound(case, step), _lost_low(case, step), ""
    if bound is not None and bound != 1:
        lost = f": 1 - {1 - bound:.0e} is 1 in {case.dtype}"
    elif low is not None and low != -1:
        lost = f": -1 + {1 + low:.0e} is -1 in {case.dtype}"
    margin = _margin(step) if bound is not None and bound != 1 else ""
    return {
        "number": _name_in(case.around),
        "inside": inside,
        "bounds": bounds,
        "made": titled(step),
        "lost": lost,
        "how": f"by clamp({bounds})" if not margin else f"with a larger `{margin}`, such as {eps}",
    }


def _margin(step: Step) -> str:
    """The variable of a bound, ``self.margin`` of ``clamp(max=1 - self.margin)``; else ""."""
    tree = None if step.source is None else tree_of(step.source.code)
    found = set[str]()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in _CLAMPS:
            bounds = [*node.args, *(each.value for each in node.keywords)]
            for each in (x for bound in bounds for x in ast.walk(bound)):
                if isinstance(each, ast.BinOp) and isinstance(each.left, ast.Constant):
                    is_named = isinstance(each.right, (ast.Name, ast.Attribute))
                    found |= {ast.unparse(each.right)} if is_named else set()
    return found.pop() if len(found) == 1 else ""


def _has_logarithm(around: Surroundings, value: int) -> bool:
    """Whether something else has no value where the number is 0."""
    return any(
        plain(step.kind) in _AT_ZERO and step.inputs[:1] == (read,)
        for step, read in readers_of(around, value)
    )


def _has_pole_at_minus_one(around: Surroundings, value: int) -> bool:
    """Whether something else has no value where the number is -1: ``log(1 + x)``, ``log1p(x)``."""
    for step, _ in readers_of(around, value):
        if plain(step.kind) == "log1p":
            return True
        if one_plus_of(step) is not None:
            readers = around.ahead(step.outputs, lambda each: plain(each.kind) == "div")
            if any(plain(each.kind) in _AT_ZERO | {"div"} for each in readers):
                return True
    return False


def _is_at_minus_one(around: Surroundings) -> bool:
    """Whether it is ``log1p(x)``, or ``log(1 + x)``, of which the number is at the lower end."""
    return _found_end(around)[1] == -1


def _at_end(around: Surroundings) -> int | None:
    """The number behind ``1 - x``, ``-x`` and powers of it; None if this line has made it."""
    return _found_end(around)[0]


def _found_end(around: Surroundings) -> tuple[int | None, int, Step | None]:
    """The same, the end, 1 or -1 (0 where it is at none), and a ``1 - x`` on a line of its own."""
    value, name, line = around.culprit, plain(around.step.kind), _line_of(around.step)
    end, rest = 1 if name in _BOTH_ENDS | {"logit"} else 0, None
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or not step.inputs:
            break
        kind = plain(step.kind)
        is_passed = not step.counts or step.kind in _PASSED
        is_rest = kind in ("rsub", "sub") and step.number_first and step.literals[:1] == (1.0,)
        if is_rest and not end and _line_of(step) != line:
            rest, line = step, _line_of(step)
        if not is_passed and _line_of(step) != line:
            end = -1 if not end and name == "log1p" else end
            return (value, end, rest) if end else NOWHERE
        if is_rest or (kind == "neg" and name == "log1p"):
            end = 1
        elif not end and one_plus_of(step) is not None:
            end = -1
        elif not end and kind == "div" and len(step.inputs) == 2 and name != "log1p":
            pass  # the dividend, which is 0
        elif not (is_passed or (end == 1 and kind == "pow" and not step.number_first)):
            break
        value = step.inputs[0]
    return NOWHERE


def _line_of(step: Step) -> tuple[str, int] | None:
    return None if step.source is None else step.source.position


def _name_in(around: Surroundings) -> str:
    """The variable behind the operand as the line has it; "" if that is not certain."""
    rest = _found_end(around)[2]
    if rest is not None:
        ones = from_one_at(rest.source)
        return _name_of(ast.unparse(ones[0])) if len(ones) == 1 else ""
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
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            node = node.left if isinstance(node.right, ast.Constant) else node.right
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Pow)):
            node = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return ""
    return node.id
