"""Exponentials that became 0, and what is 0 because of them.

Knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from fxguard.advice._patterns import readers_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.assigned import statement_at

__all__ = [
    "exponent_of",
    "forgotten_exp",
    "is_mean_by_kernel",
    "lowest_exponent",
    "vanished_exp",
    "vanished_in",
]

MOST_STEPS = 24  # from a divisor back to an exponential
MASK = 1e6  # magnitudes as large as this mask

_OF_EXP = re.compile(r"\b(exp|exp2)\(")
_BASES = {"exp": math.e, "exp2": 2.0}
_MAKES_ZEROS = names_in("diag diag_embed tril triu")
# They are 0 where their first operand is.
_PASSED = (
    frozenset(map(plain, MOVES | SELECTS | CASTS)) - _MAKES_ZEROS
    | names_in("div get mean nansum sqrt square sum")
)  # fmt: skip
_PRODUCTS = names_in("bmm dot einsum matmul mm mul mv outer")


def vanished_exp(case: Case) -> Step | None:
    """The exponential of negative numbers because of which the operand is 0; None if none is.

    The operand is made of it by products, sums and quotients, in which nothing else is 0.
    """
    culprit = case.around.culprit
    return None if culprit is None else vanished_in(case.around, culprit)


def vanished_in(
    around: Surroundings,
    value: int,
    makes: Callable[[Surroundings, Step], bool | None] | None = None,
) -> Step | None:
    """The same for any value.

    Args:
        around: the graph.
        value: what is 0.
        makes: whether an operation made 0; None if it is not of the kind that is looked for. It is
            that of exponentials unless it is given.
    """
    return _vanished(around, value, MOST_STEPS, makes or _exp_made_zeros)


def forgotten_exp(case: Case) -> Source | None:
    """The line of such an exponential, of which only the result was noted, a long time before."""
    culprit = case.around.culprit
    if culprit is None:
        return None
    step = _vanished(case.around, culprit, MOST_STEPS, lambda around, step: None, _is_exp_by_text)
    return None if step is None else step.source


def _is_exp_by_text(around: Surroundings, step: Step) -> bool:
    """Whether the statement of an operation without operands takes an exponential."""
    if step.source is None or not _has_zeros(around, step.outputs[0]):
        return False
    return bool(_OF_EXP.search(statement_at(step.source)))


def _exp_made_zeros(around: Surroundings, step: Step) -> bool | None:
    return _made_zeros(around, step) if plain(step.kind) in _BASES else None


def _vanished(
    around: Surroundings,
    value: int,
    depth: int,
    makes: Callable[[Surroundings, Step], bool | None],
    ends: Callable[[Surroundings, Step], bool] = lambda around, step: False,
) -> Step | None:
    step = around.maker_of(value)
    if step is None or not depth:
        return None
    if not step.inputs:
        return step if ends(around, step) else None
    name = plain(step.kind)
    if (has_made := makes(around, step)) is not None:
        return step if has_made else None
    is_handed_on = not step.counts or name in _PASSED or _is_power(step)
    if is_handed_on and not (name == "div" and step.number_first):
        return _vanished(around, step.inputs[0], depth - 1, makes, ends)
    if name in _PRODUCTS or (name == "add" and not step.literals):
        read = [each for each in dict.fromkeys(step.inputs) if _has_zeros(around, each)]
        found = [_vanished(around, each, depth - 1, makes, ends) for each in read]
        is_sum = name == "add"
        all_read = len(read) == len(set(step.inputs)) if is_sum else bool(read)
        return found[0] if all_read and all(found) else None
    return None


def _is_power(step: Step) -> bool:
    is_power = plain(step.kind) == "pow" and len(step.inputs) == 1 and not step.number_first
    return is_power and min(step.literals, default=0) > 0


def _has_zeros(around: Surroundings, value: int) -> bool:
    found = around.range_of(value)
    return found is not None and found.abs_min == 0


def _made_zeros(around: Surroundings, step: Step) -> bool:
    """It made 0 of finite numbers that are no mask."""
    made, read = around.range_of(step.outputs[0]), around.range_of(step.inputs[0])
    form = FORMATS.get(around.values[step.outputs[0]].dtype)
    if made is None or read is None or form is None or made.abs_min or not made.abs_max < math.inf:
        return False
    base = math.log(_BASES[plain(step.kind)])
    return -math.log(form.smallest_normal) < base * read.abs_max < MASK


def exponent_of(case: Case, step: Step) -> float:
    """The lowest number that an exponential made 0 of."""
    found = case.around.range_of(step.inputs[0])
    return -math.inf if found is None else -found.abs_max


def lowest_exponent(step: Step, dtype: str) -> int:
    """The lowest number of which a dtype holds the exponential: -103 for float32."""
    return math.ceil(math.log(FORMATS[dtype].smallest) / math.log(_BASES[plain(step.kind)]))


def is_mean_by_kernel(case: Case) -> bool:
    """It divides a product with an exponential by the sum of that: ``(K @ y) / K.sum(1)``."""
    step, exponential = case.around.step, vanished_exp(case)
    if case.name != "div" or len(step.inputs) != 2 or exponential is None:
        return False
    by_hand = [plain(each.kind) for each, _ in readers_of(case.around, exponential.outputs[0])]
    top = case.around.maker_of(step.inputs[0])
    is_product = top is not None and plain(top.kind) in _PRODUCTS | {"sum"}
    return "sum" in by_hand and is_product
