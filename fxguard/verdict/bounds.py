"""Bounds on the finite elements next to intended infinities. Knows nothing of torch.

A tensor with an intended infinity has no largest magnitude. Whether another element overflowed can
be told from a bound on its finite elements, computed from the operands: while the bound is within
the limit of the dtype, no element can have turned infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fxguard.formats import limit_of
from fxguard.graph.tables import CASTS, FILLS, KEEPS
from fxguard.plan.plan import Step, Value
from fxguard.records import Range

__all__ = ["RULES", "Bounds"]

# Rounding to bfloat16, which has the fewest digits, enlarges a result by less than half of this
# share; some kernels round what they compute on the way as well. Rounding to the smallest number of
# float16 adds less than the other.
ROUNDING = 2.0**-6
SMALLEST = 2.0**-24

FACTORS = tuple(2.0**bits for bits in (20, 10, 6, 3, 1, 0))

Rule = Callable[[Step, Sequence[Range]], float]


class _Link(NamedTuple):
    step: Step
    value: int  # the value that it made
    is_excused: bool = False  # whether it may exceed the limit of its dtype


class Bounds:
    """Upper bounds on the finite elements of values with intended infinities.

    Args:
        values: the values of the batch.
        finite_part: gives the range of the finite elements of a value, if it was measured.

    Attributes:
        numbers: the ranges from which bounds were computed.
    """

    def __init__(self, values: Sequence[Value], finite_part: Callable[[int], Range]) -> None:
        self.values = values
        self.finite_part = finite_part
        self.numbers: dict[int, Range] = {}
        self._highs: dict[int, float] = {}  # of values computed from intended infinities
        self._links: list[_Link] = []

    def follow(self, step: Step, value: int) -> bool:
        """Compute the bound for a result of an operation.

        Args:
            step: an operation that read or made intended infinities.
            value: one of its results, which holds intended infinities.

        Returns:
            Whether no element made from finite ones can be infinite.
        """
        is_known = step.kind in RULES or step.kind in KEEPS or step.kind in FILLS
        for operand in step.inputs if is_known else ():
            if operand not in self.numbers:
                self.numbers[operand] = self.finite_part(operand)
        self._links.append(_Link(step, value))
        return self._add(self._links[-1], self._highs, self.numbers)

    def excuse(self) -> None:
        """Let the last followed value exceed the limit, because its elements do not matter."""
        self._links[-1] = self._links[-1]._replace(is_excused=True)

    def of(self, value: int) -> float:
        """The bound of a value that was followed."""
        return self._highs[value]

    def limits(self) -> dict[int, Range] | None:
        """The ranges that the numbers may have in another batch without too large a bound.

        Returns:
            Wider ranges for :attr:`numbers`; None if a bound is already too large.
        """
        for factor in FACTORS:
            for divisor in (math.inf, factor):  # without a division, the smallest may be anything
                wider = {
                    value: Range(_over(each.abs_min, divisor), each.abs_max * factor)
                    for value, each in self.numbers.items()
                }
                if self._hold(wider):
                    return wider
        return None

    def _hold(self, numbers: Mapping[int, Range]) -> bool:
        highs: dict[int, float] = {}
        return all(self._add(x, highs, numbers) or x.is_excused for x in self._links)

    def _add(self, link: _Link, highs: dict[int, float], numbers: Mapping[int, Range]) -> bool:
        step, limit = link.step, limit_of(self.values[link.value].dtype)
        known = [(i, numbers[i]) for i in step.inputs if i in numbers]
        read = [Range(each.abs_min, highs.get(i, each.abs_max)) for i, each in known]
        # A write to a part of a larger tensor also reads and makes that tensor: last, and together.
        count = len(step.inputs) - len(step.outputs) + 1
        rule = RULES.get(step.kind)
        fits = True
        if rule is not None:
            high = rule(step, read[:count]) * (1 + ROUNDING) + SMALLEST
            high = math.inf if math.isnan(high) else high  # 0 times an unknown number
            fits = not high > limit or link.value != step.outputs[0]
            high = max([high, *(each.abs_max for each in read[count:])])
        elif step.kind in KEEPS or step.kind in FILLS:
            literals = map(abs, step.literals) if step.kind in FILLS else ()
            given = (literal for literal in literals if math.isfinite(literal))
            high = max((*(each.abs_max for each in read), *given), default=0.0)
        else:
            high = math.inf
        highs[link.value] = min(high, limit)  # if no element turned infinite
        return fits


# The largest magnitude that an operation makes from finite elements.


def _sum(step: Step, read: Sequence[Range]) -> float:
    terms = [*(each.abs_max for each in read), *map(abs, step.literals)]
    if len(terms) < 2:
        return math.inf  # an operand is unknown
    return (terms[0] + terms[1]) * max((1.0, *terms[2:]))  # the third is alpha


def _product(step: Step, read: Sequence[Range]) -> float:
    factors = [*(each.abs_max for each in read), *map(abs, step.literals)]
    return math.prod(factors) if len(factors) > 1 else math.inf


def _quotient(step: Step, read: Sequence[Range]) -> float:
    operands = [*read, *(Range(abs(number), abs(number)) for number in step.literals)]
    if len(operands) < 2:
        return math.inf
    dividend, divisor = reversed(operands) if step.number_first else operands
    # Torch computes 2 / x as the reciprocal of x, in its dtype, times 2.
    least = 1.0 if step.number_first else 0.0
    return max(dividend.abs_max, least) * _inverse(divisor)


def _power(step: Step, read: Sequence[Range]) -> float:
    if len(read) != 1 or len(step.literals) != 1:
        return math.inf
    (operand,), (number,) = read, step.literals
    # The kernel rounds the number to the dtype, and the power enlarges what that is wrong by.
    rounding = 1.0 if math.frexp(number)[0] * 2.0**8 % 1 == 0 else 1 + 2.0**-8
    if step.number_first:
        base = abs(number)
        return _raised(max(base, 1 / base) * rounding, operand.abs_max) if base else math.inf
    base = operand.abs_max if number >= 0 else _inverse(operand)
    return _raised(base, abs(number) * rounding)


def _product_added(step: Step, read: Sequence[Range]) -> float:
    if len(read) < 3:
        return math.inf
    factor = math.prod(map(abs, step.literals))
    return read[0].abs_max + read[1].abs_max * read[2].abs_max * factor


def _logarithm(operand: Range) -> float:
    ends = (operand.abs_min, operand.abs_max)
    return max(abs(math.log2(end)) if end > 0 else math.inf for end in ends)


def _near(step: Step, read: Sequence[Range]) -> float:
    """Less than twice as large, plus the logarithm of the number of elements."""
    return 2 * max((each.abs_max for each in read), default=math.inf) + 64


def _over(number: float, divisor: float) -> float:
    return 0.0 if divisor == math.inf else number / divisor


def _inverse(divisor: Range) -> float:
    return 1 / divisor.abs_min if divisor.abs_min else math.inf


def _raised(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _of_one(names: str, function: Callable[[Range], float]) -> dict[str, Rule]:
    return _all(names, lambda step, read: function(read[0]) if read else math.inf)


# Rules for operations that are elementwise, as far as it matters for turned infinities.
RULES: Mapping[str, Rule] = {
    **_all("add add_ sub sub_ subtract subtract_", _sum),
    **_all("mul mul_ multiply multiply_", _product),
    **_all("div div_ divide divide_ true_divide true_divide_", _quotient),
    **_all("pow pow_ float_power", _power),
    **_all("addcmul addcmul_", _product_added),
    **_of_one(" ".join((*CASTS, "_to_copy")), lambda x: x.abs_max),
    **_of_one("exp exp_ expm1 cosh sinh", lambda x: _raised(math.e, x.abs_max)),
    **_of_one("exp2 exp2_", lambda x: _raised(2.0, x.abs_max)),
    **_of_one("square square_", lambda x: x.abs_max * x.abs_max),
    **_of_one("reciprocal reciprocal_", _inverse),
    **_of_one("rsqrt rsqrt_", lambda x: math.sqrt(_inverse(x))),
    **_of_one("log log_ log2 log2_ log10 log10_", _logarithm),
    # A magnitude does not tell how near an argument is to a pole.
    **_of_one("addcdiv atanh digamma erfinv lgamma log1p logit tan", lambda x: math.inf),
    **_all(
        """
        _log_softmax ceil floor log_softmax logaddexp logaddexp2 logcumsumexp logsigmoid logsumexp
        round special_log_softmax special_logsumexp sqrt sqrt_ trunc
        """,
        _near,
    ),
}
