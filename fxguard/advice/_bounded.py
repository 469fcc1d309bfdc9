"""Arguments that are kept where an operation has a value: how that is written.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice._patterns import is_square_of, made_by
from fxguard.advice.case import Case
from fxguard.graph.poles import plain
from fxguard.source.same_operand import same_operand_at

__all__ = ["BOUNDED", "BOUNDED_RUN", "likewise"]

EQUAL_POINTS = "; or leave out pairs of equal points, such as of one and itself"
MOST_STEPS = 8  # from a distance back to the difference


def likewise(case: Case) -> Mapping[str, str]:
    """The other lines that apply the operation to the same expression; pairs of equal points."""
    source = case.around.step.source
    same = [] if source is None else same_operand_at(source, case.name)
    others = " and ".join(each.place for each in same)
    told = f", and likewise at {others}" if others else ""
    return {"likewise": told + (EQUAL_POINTS if _is_of_equal_points(case) else "")}


def _is_of_equal_points(case: Case) -> bool:
    """Whether it is a distance in hyperbolic space, ``acosh(1 + |u - v|² / ...)``, that is 0."""
    around, value = case.around, case.around.culprit
    if case.name != "acosh" or not case.operands or case.operands[0].low != 1:
        return False
    for _ in range(MOST_STEPS):
        step = made_by(around, value)
        if step is None or not step.inputs:
            return False
        if (square := is_square_of(step)) is not None:
            difference = made_by(around, square)
            return difference is not None and plain(difference.kind) in ("sub", "rsub")
        if plain(step.kind) not in ("add", "div", "mul", "sum"):
            return False
        value = step.inputs[0]
    return False


# How to keep an argument inside its domain or away from a pole.
BOUNDED = {
    "acos": "acos({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "acosh": "acosh({c.x}.clamp(min=1 + {c.near_one}))",
    "asin": "asin({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "atanh": "atanh({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "erfinv": "erfinv({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "log": "log({c.x}.clamp(min={c.floor}))",
    "log10": "log10({c.x}.clamp(min={c.floor}))",
    "log1p": "log1p({c.x}.clamp(min=-1 + {c.near_one}))",
    "log2": "log2({c.x}.clamp(min={c.floor}))",
    "logit": "logit({c.bare}, eps={c.near_one})",
    "pow": "{c.x}.clamp(min={c.near_zero}) ** {c.other}",
    "rsqrt": "rsqrt({c.bare} + {c.near_zero})",
    "sqrt": "sqrt({c.x}.clamp(min={c.near_zero}))",
    "xlogy": "xlogy({c.other}, {c.x}.clamp(min={c.near_zero}))",
}
# The same for a run, with letters for the operands.
BOUNDED_RUN = {
    name: f"{'a ** b' if name == 'pow' else 'xlogy(b, a)' if name == 'xlogy' else f'{name}(a)'} -> "
    + re.sub(r"\{c\.(x|unbounded|bare)\}", "a", text).replace("{c.other}", "b")
    for name, text in BOUNDED.items()
}
