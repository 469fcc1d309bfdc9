"""Texts that differ only in digits that depend on the CPU: on its kernels and the order of sums."""

from __future__ import annotations

import math
import re

__all__ = ["same_text"]

# Measured numbers. Counts, indices and line numbers have no point, no exponent, and few digits.
MEASURED = re.compile(r"-?\b\d+(?:\.\d+)?e[+-]?\d+|-?\b\d+\.\d+|-?\b\d{5,}\b")
SLACK = 0.02  # relative
ROUGH = 0.25  # of numbers that are shown with one digit or two


def same_text(one: str, other: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by no more than 2 %.

    A number that is shown with one digit or two, such as an error, may differ by a quarter.

    A document shows what a program printed on one machine. On another CPU a sum is added up in
    another order, and the last digits of what it leads to are others.
    """
    if MEASURED.sub("#", one) != MEASURED.sub("#", other):
        return False
    pairs = zip(MEASURED.findall(one), MEASURED.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=_slack(a, b)) for a, b in pairs)


def _slack(*numbers: str) -> float:
    digits = (len(re.sub(r"e.*|[-.]", "", number).lstrip("0")) for number in numbers)
    return ROUGH if min(digits) < 3 else SLACK
