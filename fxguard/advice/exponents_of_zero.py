"""Logarithms of 0 that come back as 0 by an exponential: ``2.0 ** round(log2(scale))``.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.vanished import vanished_in
from fxguard.advice.written_operands import titled, written_operand
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step

__all__ = ["log_of_zero", "words_of_log"]

MOST_STEPS = 16  # from an exponential back to a logarithm
EPS = 1e-8  # a bound that float16 does not hold

_LOGS = names_in("log log10 log2")
_EXPS = names_in("exp exp2")
# They are -inf where one of what they read is.
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in(
    "add ceil div floor mean mul round sub sum trunc"
)


def log_of_zero(case: Case) -> Step | None:
    """The logarithm of 0 because of which a divisor, or what a logarithm reads, is 0.

    None if there is none.
    """
    exponential = _exponential(case)
    return None if exponential is None else _log_behind(case.around, exponential.inputs[0])


def _exponential(case: Case) -> Step | None:
    culprit = case.around.culprit
    return None if culprit is None else vanished_in(case.around, culprit, _is_of_infinity)


def _is_of_infinity(around: Surroundings, step: Step) -> bool | None:
    """Whether an exponential made 0 of -inf; None if it is no exponential."""
    is_power = plain(step.kind) == "pow" and step.number_first and len(step.inputs) == 1
    if plain(step.kind) not in _EXPS and not is_power:
        return None
    return _log_behind(around, step.inputs[0]) is not None


def _log_behind(around: Surroundings, value: int) -> Step | None:
    """The logarithm that an exponent is, but for factors and terms that are numbers.

    One that is added to a tensor is a mask.
    """
    for _ in range(MOST_STEPS):
        step, found = around.maker_of(value), around.range_of(value)
        if step is None or found is None or found.abs_max != math.inf:
            return None
        if plain(step.kind) in _LOGS:
            read = around.range_of(step.inputs[0])
            return step if read is not None and read.abs_min == 0 else None
        if len(step.inputs) != 1 or (step.counts and plain(step.kind) not in _PASSED):
            return None
        (value,) = step.inputs
    return None


def words_of_log(case: Case) -> Mapping[str, str]:
    """The logarithm, what it reads, a bound for that, and the exponential."""
    step, exponential = log_of_zero(case), _exponential(case)
    if step is None or exponential is None:
        return dict.fromkeys(("log", "read", "eps", "exp"), "it")
    form = FORMATS.get(case.around.values[step.inputs[0]].dtype)
    return {
        "log": titled(step),
        "read": written_operand(step) or "x",
        "eps": "1e-4" if form is not None and form.smallest_normal > EPS else f"{EPS:.0e}",
        "exp": titled(exponential),
    }
