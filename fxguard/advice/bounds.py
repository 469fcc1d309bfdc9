"""Numbers that bound an operand of one origin, as the texts of fixes have them.

Knows nothing of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxguard.advice.numbers import Numbers
from fxguard.formats import FORMATS

__all__ = ["Bounds"]

LOGARITHMS = ("log", "log10", "log2")
FAR = 1e3  # times an eps, from which a number is no eps


@dataclass(frozen=True, slots=True)
class Bounds(Numbers):
    """One origin, and the numbers that keep its operand where the operation has a value."""

    @property
    def largest_root(self) -> float:
        """The largest number whose square fits the dtype."""
        return math.sqrt(self.limit)

    @property
    def largest_exponent(self) -> int:
        """The largest integer whose exp fits the dtype."""
        return math.floor(math.log(self.limit))

    @property
    def exponent_with_room(self) -> int:
        """An integer whose exp fits the dtype and leaves room for a sum of many."""
        return math.floor(0.75 * math.log(self.limit))

    @property
    def above_zero(self) -> str:
        """A number to add to what is positive: its reciprocal is an ordinary number."""
        return "1e-2" if self.dtype == "float16" else "1e-3"

    @property
    def near_zero(self) -> str:
        """An eps that the dtype can hold, with its square root and its reciprocal."""
        return "1e-4" if self.dtype == "float16" else "1e-12"

    @property
    def near_one(self) -> str:
        """An eps that the dtype can subtract from 1."""
        return f"{4 * FORMATS[self.dtype].eps:.0e}" if self.dtype in FORMATS else "eps"

    @property
    def safe(self) -> str:
        """A number at which the operation has a value and a finite derivative."""
        return "0" if self.name in ("acos", "asin", "atanh", "erfinv", "log1p") else "1"

    @property
    def apart(self) -> str:
        """The largest of distinct numbers for the diagonal of a matrix: a part of its own."""
        ends = (abs(end) for x in self.operands if x.dtype for end in (x.low, x.high))
        return f"{1e-3 * (max(filter(math.isfinite, ends), default=0.0) or 1.0):.0e}"

    @property
    def least_above_zero(self) -> float | None:
        """The smallest number of the whole operand that is not 0, if it is known."""
        return next((each.least for each in self.operands if each.dtype), None)

    @property
    def floor(self) -> str:
        """A bound for the operand of a logarithm: of given probabilities the smallest other one."""
        least = self._least_probability()
        return self.near_zero if least is None else f"{least:.3g}"

    @property
    def why_floor(self) -> str:
        """What a smaller bound would do to probabilities; "" of other numbers."""
        least = self._least_probability()
        if least is None:
            return ""
        eps, lowest = self.log_of(float(self.near_zero)), self.log_of(least)
        return (
            f", the smallest other number: of an eps such as {self.near_zero} the logarithm is "
            f"{eps:.0f}, and of the others none is below {math.floor(10 * lowest) / 10}"
        )

    def _least_probability(self) -> float | None:
        """The smallest of numbers from 0 to 1 that no gradient reaches, without 0."""
        culprit, least = self.around.culprit, self.least_above_zero
        found = None if culprit is None else self.around.range_of(culprit)
        if culprit is None or least is None or found is None or found.abs_max > 1:
            return None
        is_far = self.name in LOGARITHMS and self.cause == "zero divisor"
        is_far = is_far and FAR * float(self.near_zero) < least < 1  # 1 alone: what is certain
        return least if is_far and not self.around.is_learned(culprit) else None

    def log_of(self, number: float) -> float:
        """The logarithm of a number to the operation's base."""
        return math.log(number) / {"log2": math.log(2), "log10": math.log(10)}.get(self.name, 1)
