"""Texts that differ only in digits that depend on the CPU: on its kernels and the order of sums."""

from __future__ import annotations

import math
import re

__all__ = ["same_text"]

# Measured numbers, and counts of elements. Indices and line numbers have no point, no exponent, and
# few digits.
MEASURED = re.compile(
    r"-?\b\d+(?:\.\d+)?e[+-]?\d+|-?\b\d+\.\d+|-?\b\d{5,}\b"
    r"|(?<=likewise in )\d+(?= more)|\b\d+(?= (?:NaN|[+-]inf)\b)"
)
COUNT = re.compile(r"\d{1,4}")
SLACK = 0.05  # relative
ROUGH = 0.25  # of numbers that are shown with one digit or two


def same_text(one: str, other: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by no more than 5 %.

    A number that is shown with one digit or two, such as an error, may differ by a quarter, and a
    count of elements by one or a tenth: one of them may be just beyond a limit.

    A document shows what a program printed on one machine. On another CPU a sum is added up in
    another order, and the last digits of what it leads to are others.
    """
    if MEASURED.sub("#", one) != MEASURED.sub("#", other):
        return False
    pairs = zip(MEASURED.findall(one), MEASURED.findall(other), strict=True)
    return all(_are_close(a, b) for a, b in pairs)


def _are_close(one: str, other: str) -> bool:
    if COUNT.fullmatch(one) and COUNT.fullmatch(other):
        return abs(int(one) - int(other)) <= max(1, max(int(one), int(other)) // 10)
    digits = (len(re.sub(r"e.*|[-.]", "", number).lstrip("0")) for number in (one, other))
    slack = ROUGH if min(digits) < 3 else SLACK
    return math.isclose(float(one), float(other), rel_tol=slack)
