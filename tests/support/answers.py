"""What the answers of ``Report.why`` may say beside a cause."""

from __future__ import annotations

import re

import fxguard

__all__ = ["expect_no_contradiction"]

FAILURES = ("overflow", "underflow", "rounding", "loss scale")  # a wider dtype mends them
# What float64 computes no better; exp(800) is an overflow there, too.
MATHEMATICS = ("zero divisor", "domain", "masked row", "empty", "singular gradient")


def expect_no_contradiction(report: fxguard.types.Report) -> None:
    """Assert that no answer denies the cause of the first origin, and that each has its number."""
    cause = report.origins[0].cause
    ends = {line.rpartition(": ")[2] for line in report.why}
    if cause in MATHEMATICS:
        assert "precision" not in ends, report.why
    if cause in FAILURES and "not precision" in ends:
        [line] = [line for line in report.why if line.endswith(": not precision")]
        assert "float64 it is inf too" in line, line
        assert report.origins[0].needed in (None, float("inf")), report.origins[0].needed
    if cause in ("overflow", "underflow", "rounding"):
        assert ends & {"precision", "not precision"}, report.why
    assert ("the weights" in ends) is (cause == "weight"), report.why
    assert cause != "data" or "the data" in ends, report.why
    assert cause != "loss scale" or "the loss scale" in ends, report.why
    assert "the compiler" not in ends, report.why
    for line in report.why:
        assert re.search(r"\d|\binf\b|\bNaN\b|^both ", line), line
