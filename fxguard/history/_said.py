"""What left its band, as a plain sentence with numbers."""

from __future__ import annotations

import math

from torch import Tensor

from fxguard.history._first import Exit
from fxguard.history._lines import number
from fxguard.history._out_of_band import BACK
from fxguard.history._series import SUMMED, Series
from fxguard.history._watch import octaves
from fxguard.report.in_words import percent, times

__all__ = ["NUMBER", "in_words", "said"]

NUMBER = "the number that "  # how sentences begin of one that an operation reads
PART = 0.25  # of the octaves by which a number is off: by less it is about that of the step before


def said(series: list[Series], steps: list[int], table: Tensor, one: Exit) -> str:
    """The sentence.

    Args:
        series: the columns.
        steps: of the lines.
        table: the numbers.
        one: what left its band, and in which line.
    """
    known, step = series[one.place], steps[one.line]
    now = float(table[one.line, one.place])
    if known.kind == "drift":
        return _written(series, table, one, step)
    if known.detail == SUMMED:
        return (
            f"the gradients that {known.what} reads are the sum of {_backwards(now)} in step "
            f"{step}, and of {_backwards(_before(table, one)[0])} in the step before"
        )
    if known.kind == "gradient" and known.detail:
        return (
            f"the gradient of {known.what} points elsewhere in step {step} than the backward made "
            f"it: their cosine is {1 - now:.2g}"
        )
    before, usual = _before(table, one)
    if math.isnan(now):  # in this line: it may run in another one
        what = in_words(known) + known.where
        return f"{what} has run in each step, and runs no more in step {step}"
    if math.isnan(before) and known.kind == "setting":
        return f"{known.what} is {number(now)}, and is there for the first time in step {step}"
    if math.isnan(before):
        return f"{in_words(known)} runs for the first time in step {step}: it makes {number(now)}"
    if known.kind != "setting" and _is_nearer(now, before, usual):
        return (
            f"{in_words(known)} is {number(now)} in step {step}: the median of the "
            f"{BACK} steps before is {number(usual)}"
        )
    return f"{in_words(known)} goes from {number(before)} to {number(now)} in step {step}"


def _backwards(count: float) -> str:
    return f"{count:.0f} backward{'s' * (count != 1)}"


def _before(table: Tensor, one: Exit) -> tuple[float, float]:
    """The number that was measured last, and the median of the last ones; NaN without any."""
    column = table[: one.line, one.place]
    measured = column[column == column]
    if not len(measured):
        return math.nan, math.nan
    return float(measured[-1]), float(measured[-BACK:].median())


def _is_nearer(now: float, before: float, usual: float) -> bool:
    """Whether a number is much nearer to the one before than both are to what is usual."""
    apart = abs(octaves(now) - octaves(before))
    return now != usual and apart < PART * abs(octaves(now) - octaves(usual))


def in_words(known: Series) -> str:
    """Which number a series is, in a sentence."""
    if known.kind in ("input", "target"):
        detail = {"": "largest magnitude", "typical": "typical magnitude"}
        return f"the {detail.get(known.detail, known.detail)} of {known.what}"
    if known.kind == "gradient":
        return f"the norm of the gradient of {known.what}"
    if known.kind == "step":
        return f"the step of {known.what}, relative to its norm,"
    if known.kind == "number":
        return f"{NUMBER}{known.what} reads"
    if known.kind == "loss":
        return "the loss"
    if known.kind == "state":
        return f"the largest of {known.what}"
    return " ".join(filter(None, (known.what, known.detail)))


def _written(series: list[Series], table: Tensor, one: Exit, step: int) -> str:
    what, now = series[one.place].what, float(table[one.line, one.place])
    for place, known in enumerate(series):
        if known.kind == "weight" and known.what == what and one.line:
            norm, before = float(table[one.line, place]), float(table[one.line - 1, place])
            if before > 0 and not 0.8 < norm / before < 1.25:
                return (
                    f"{what} is {times(norm / before)} times as large in step {step} as in the "
                    "step before; no step of the optimizer wrote it"
                )
    return (
        f"{what} is changed by {percent(now)} of its norm before step {step}; no step of the "
        "optimizer wrote it"
    )
