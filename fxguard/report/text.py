"""Records as words: frames, rows, origins, and the verdict on a batch. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from fxguard.findings import Fix, Growth, Origin
from fxguard.records import Frame, Role, Row, RowRole
from fxguard.report.groups import group_headline, more_text
from fxguard.report.limits import limit_text, needs_text

__all__ = [
    "BLOWN_UP",
    "HEADER",
    "INDENT",
    "NOT_REPEATED",
    "OF_FORM",
    "OF_INPUTS",
    "absorbed_line",
    "because",
    "bounded_rate",
    "cause_text",
    "cells",
    "fix_lines",
    "frame_text",
    "group_lines",
    "growth_line",
    "is_fix",
    "is_why",
    "row_text",
    "why_lines",
]

HEADER = f"{'abs min':8} {'abs max':8} metadata"
INDENT = " " * 18  # the width of two numbers and the blanks around them
MOST_FIXES = 2  # shown
# How a fix begins that keeps weights, however large their steps are, where something has a value.
OF_FORM = ("keep the learned ", "keep the poles ")
OF_INPUTS = " reads numbers up to "  # what a fix says of data that are far larger than weights

# Prefix of an answer that repeats the number at the end of the operands.
IN_FLOAT64 = "in float64 it is "

# What to do if weights have grown beyond reason: the overflow is only the effect.
BLOWN_UP = Fix("advice", "a smaller learning rate, a warm-up, or clipped gradients")

# Causes whose names alone say too little.
CAUSES = {
    "domain": "outside its domain",
    "empty": "too few elements to compute it from",
    "masked row": "masked row, all of the row is -inf",
    "singular gradient": "its derivative is infinite there",
    "memory": "uninitialised memory",
    "no alignment": "no alignment, a target needs more frames than its input has",
    "zero divisor": "at a pole",
}

NOT_REPEATED = (
    "no second run of the graph has measured its operations: the bad values were seen where they "
    "left the graph, and where they came from is not known; instrument without replay=True, or "
    "full_every, to find out"
)


def frame_text(frame: Frame) -> str:
    """One frame in the classic format: a title line, then one line per row."""
    title = f"{INDENT}{frame.name} {frame.kind_and_phase}"
    if frame.is_op and frame.source is not None:
        title += f"  # {frame.source}"
    return "\n".join([title, *map(row_text, frame.rows)])


def row_text(row: Row) -> str:
    """One row in the classic format.

    Example:
        >>> row_text(Row("output", 5.53e-05, 4.85e+02))
        '5.53e-05 4.85e+02 output'
    """
    if row.abs_min is None or row.abs_max is None:
        return f"{row.note or 'None':>17} {row.label}"
    return f"{row.abs_min:8.2e} {row.abs_max:8.2e} {row.label}"


def cells(row: Row) -> tuple[str, str]:
    """Smallest and largest magnitude as two cells of a table; without them, the note twice."""
    if row.abs_min is None or row.abs_max is None:
        return (row.note, row.note)
    return (f"{row.abs_min:.2e}", f"{row.abs_max:.2e}")


def bounded_rate(rate: str) -> Fix:
    """What to do if the learning rate has grown: see :attr:`Growth.rate`."""
    return Fix("advice", f"bound the learning rate: {rate}")


def growth_line(grown: Sequence[Growth]) -> str:
    """One line on weights blown up by the learning rate, whose effect is an overflow.

    Args:
        grown: at least one, the worst first.
    """
    worst, more = grown[0], len(grown) - 1
    others = f"; {more} more weight{'s' if more > 1 else ''} grew like it" if more else ""
    return (
        f"{worst.name} up to {worst.now:.2g}, it was {worst.before:.2g} in batch "
        f"{worst.batch_number}{others}"
    )


def cause_text(origin: Origin) -> str:
    """Why an operation made a bad value, ``: overflow``; "" if that adds nothing.

    Example:
        >>> origin.message + cause_text(origin)
        'mul in encoder.block.0 made inf (modeling_t5.py:109): overflow'
    """
    cause = origin.cause
    if not origin.is_operation or cause in ("data", "unknown"):
        return ""
    if origin.phase == "optimizer" and cause == "zero divisor" and not origin.cause_in_words:
        return ": division by zero"
    return f": {origin.cause_in_words or CAUSES.get(cause, cause)}"


def because(origin: Origin) -> str:
    """Why it happened and what to do, in one line, to go next to the operation's name.

    Example:
        >>> because(origin)
        'overflow; at [0, 1]: 512.5 * 514; fix: scale q before the product (exact)'
    """
    parts = (cause_text(origin).removeprefix(": "), origin.operands, origin.harm, origin.turn)
    return "; ".join([*filter(None, parts), *fix_lines(origin.fixes[:1])])


def fix_lines(fixes: Sequence[Fix], *, with_runs: bool = False) -> list[str]:
    """The best fixes, a line each: ``fix: scale q before the product (exact)``.

    Args:
        fixes: the fixes.
        with_runs: whether to say what the rest of the graph did with each.
    """
    heads = ("fix", *["or"] * MOST_FIXES)
    ends = [f"; {fix.then}" if with_runs and fix.then else "" for fix in fixes]
    told = zip(heads, fixes[:MOST_FIXES], ends, strict=False)
    return [f"{head}: {fix}{end}" for head, fix, end in told]


def is_fix(line: str) -> bool:
    """Whether a line of a verdict says what to do."""
    return line.startswith(("  fix: ", "  or: "))


def is_why(line: str) -> bool:
    """Whether a line of a verdict is an answer of :attr:`Report.why`."""
    return line.startswith("  why: ")


def why_lines(why: Sequence[str], origins: Sequence[Origin], grown: Sequence[Growth]) -> list[str]:
    """The answers of :attr:`Report.why`, except those that repeat what is printed anyway.

    Args:
        why: the answers.
        origins: origins of the report; the answers are about the first.
        grown: weights that have grown, which the verdict names.
    """
    told = [each.name for each in grown]
    for origin in origins[:1]:
        told.append(origin.what)  # its counts are printed anyway
        if " in float64" in origin.operands:
            told.append(IN_FLOAT64)
    return [f"  why: {line}" for line in why if not line.startswith(tuple(told))]


def absorbed_line(group: Sequence[Origin]) -> str:
    """A note on whether bad values that reached no output do harm.

    Args:
        group: one of :func:`~fxguard.report.groups.by_cause`.
    """
    origin, more = group[0], more_text(group)
    line = _absorbed(origin)
    return f"{line}; {more}" if more else line


def _absorbed(origin: Origin) -> str:
    start = f"note: {origin.message}{cause_text(origin)}"
    if origin.harm:
        return f"{start}; {origin.harm}"
    if origin.not_judged:
        return f"{start}; it reached no output; not judged: {origin.not_judged}"
    if origin.cause == "unknown":
        return f"{start}, but it reached no output"
    return f"{start}; it reached no output, and does no harm"


def group_lines(
    group: Sequence[Origin], totals: Mapping[str, int], *, with_fixes: bool = True
) -> Iterator[str]:
    """The headline of a group, why it happened, what to do, what led to it, and its effects.

    Args:
        group: one of :func:`by_cause`.
        totals: as for :func:`group_headline`.
        with_fixes: whether to show the fixes.
    """
    first = group[0]
    if not with_fixes:
        first = dataclasses.replace(first, fixes=())
    if len(group) == 1 or not first.standing or first.follows:
        yield from _origin_lines(first, more_text(group))
        return
    yield group_headline(group, totals)
    name = first.what.removeprefix(f"{first.standing} ")
    yield from list(_origin_lines(dataclasses.replace(first, row=name)))[1:]


def _origin_lines(origin: Origin, more: str = "") -> Iterator[str]:
    """What happened and what to do about it; then everything else that is known."""
    if origin.follows:
        yield f"then {origin.message} of it" + (f", {more}" if more else "")
        return
    yield origin.message + cause_text(origin)
    needs = ""
    if origin.frame.source is not None and (origin.is_operation or origin.is_lost_gradient):
        yield f"  {origin.frame.source}"
    elif origin.frame.source is not None and origin.role is Role.INPUT:
        yield f"  read at {origin.frame.source}"
    if origin.is_lost_gradient:  # its message has the rest
        return
    if origin.is_operation:
        needs = needs_text(origin)
    # The fix has to be among the first five lines.
    told = (origin.operands or needs, *fix_lines(origin.fixes, with_runs=True))
    first = (told[0], origin.harm, *told[1:], origin.comes_from)
    if not origin.harm:
        first = (origin.comes_from, *told)
    for line in (*first, origin.turn, more, needs if origin.operands else ""):
        if line:
            yield f"  {line}"
    if origin.is_operation:
        yield from _autocast_lines(origin)
    if origin.climb and origin.cause in ("overflow", "unknown"):  # at a pole it is no reason
        yield "  where the magnitude grew most on the way:"
        for climb in origin.climb:
            place = f"  ({climb.source.place})" if climb.source is not None else ""
            yield f"    {climb.before:.2e} -> {climb.after:.2e}  {climb.title}{place}"
    if origin.nan_count is not None:
        yield f"  {origin.row}: {_counts(origin)}"
    if origin.not_judged:
        yield f"  not judged: {origin.not_judged}"
    if origin.spread_count:
        more_names = origin.spread_count - len(origin.spread)
        names = ", ".join(origin.spread) + (f" and {more_names} more" if more_names > 0 else "")
        end = f"; {origin.returned_by or 'the model'} returned it" if origin.reached_output else ""
        # A step makes each weight by itself.
        how = "likewise bad:" if origin.phase == "optimizer" else "it spread to"
        yield f"  {how} {names}{end}"
    if origin.is_operation:
        yield from _read_lines(origin)


def _read_lines(origin: Origin) -> Iterator[str]:
    """What the operation read, after all that says why."""
    ranges = [
        f"{row.label} up to {row.abs_max:.2e}"
        for row in origin.frame.rows
        if row.role is RowRole.INPUT and row.abs_max is not None and math.isfinite(row.abs_max)
    ]
    if ranges:
        yield f"  it read {', '.join(ranges)}"


def _autocast_lines(origin: Origin) -> Iterator[str]:
    """The operands that autocast turned into infinities."""
    for row in origin.autocast:
        limit = "" if origin.limit is None else f", which holds {limit_text(origin.limit)}"
        yield f"  autocast casts {row.label} up to {row.abs_max:.2e} to {origin.dtype}{limit}"


def _counts(origin: Origin) -> str:
    """What the bad tensor holds, and from which index on unless the operands name it."""
    elements = "element" if origin.numel == 1 else "elements"
    text = (
        f"{origin.nan_count} NaN, {origin.posinf_count} +inf, {origin.neginf_count} -inf "
        f"of {origin.numel} {elements}"
    )
    if origin.largest_finite is not None:
        text += f"; largest finite magnitude {origin.largest_finite:.4g}"
    first = f"at {list(origin.first_index or ())}"
    is_told = not origin.first_index or origin.operands.startswith(first)
    return text if is_told else f"{text}; first {first}"
