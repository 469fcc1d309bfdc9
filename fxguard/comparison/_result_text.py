"""The comparison of two models, element by element, as words and as a table.

Knows nothing of torch.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Protocol

from fxguard.comparison.elements import Apart, Compared
from fxguard.report.error_budget import LEAST, ErrorBudget
from fxguard.report.error_chart import number
from fxguard.report.in_words import names_text
from fxguard.trace.diff import Diff

__all__ = ["Parts", "cosine_text", "table", "verdict_lines"]

WIDTH = 100
MOST_ROWS = 3  # of a budget
NOT_ROUNDINGS = "not roundings"


class Parts(Protocol):
    """The input of these functions; see :class:`~fxguard.comparison.result.Comparison`."""

    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def operations(self) -> tuple[Compared, ...]: ...
    @property
    def graphs(self) -> tuple[Compared, ...]: ...
    @property
    def outputs(self) -> tuple[Compared, ...]: ...
    @property
    def gradients(self) -> tuple[Compared, ...]: ...
    @property
    def outcome(self) -> str: ...
    @property
    def significant(self) -> tuple[Compared, ...]: ...
    @property
    def everything(self) -> tuple[Compared, ...]: ...
    @property
    def not_compared(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def only_in_a(self) -> tuple[str, ...]: ...
    @property
    def only_in_b(self) -> tuple[str, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def ranges(self) -> Diff: ...
    @property
    def budget(self) -> ErrorBudget | None: ...


def verdict_lines(found: Parts) -> list[str]:
    """The first significant divergence with its reason and numbers, then what was compared."""
    lines: list[str] = []
    significant = found.significant
    if significant:
        first = significant[0]
        lines.append(f"A and B part at {first.heading}")
        if first.source is not None:
            lines.append(f"  {first.source}")
        lines += textwrap.wrap(first.reason, WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += _numbers(first)
        if len(significant) > 1:
            rest = names_text([each.heading for each in significant[1:]])
            lines.append(f"then also: {rest}")
        if first.part == "compiled" and found.ranges.first is not None:
            title = found.ranges.first.frame.title
            lines.append(f"the ranges that were measured while they ran part at {title}")
    elif not found.everything:
        lines.append("nothing could be compared by elements")
        lines += [f"  {line}" for line in found.ranges.verdict]
    else:
        lines += FIRST[found.outcome](found)
        lines += _largest(found)
    if significant:
        lines.append(f"compared by elements: {_counts(found)}")
    lines += _gradients(found)
    for note in found.notes:
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    lines += _not_compared(found)
    return lines


def _agree(found: Parts) -> list[str]:
    return [f"A and B agree: no difference beyond roundings in {_counts(found)}"]


def _precision(found: Parts) -> list[str]:
    """Outputs beyond their tolerance though every operation is within its roundings."""
    beyond = [each for each in found.outputs if not each.is_within]
    worst = max(beyond, key=lambda each: (each.distance or 0.0) / (each.tolerance or 1e-300))
    lines = [f"A and B differ in precision: {_distance(worst)}"]
    if len(beyond) > 1:
        lines.append(f"  {len(beyond)} of {len(found.outputs)} outputs are over their tolerance")
    lines.append(
        "  no operation is at fault: each is within its roundings, which add up on the way"
        if found.operations
        else "  no operation is at fault, as far as they were compared"
    )
    return [*lines, *_budget(found), f"compared by elements: {_counts(found)}"]


def _budget(found: Parts) -> Iterator[str]:
    """Where the digits went in one of the two."""
    budget = found.budget
    if budget is None or not budget.rows:
        return
    side = "A" if budget.of.endswith("of A") else "B"
    yield f"  where the digits of {side} went, in shares of its error of {percent(budget.error)}:"
    yield from (f"    {row}" for row in budget.rows[:MOST_ROWS] if row.share >= LEAST)
    if budget.fix:
        yield f"  fix: {budget.fix}"


def _not_compared_outcome(found: Parts) -> list[str]:
    """Outputs that nothing could judge."""
    open_ = [each for each in found.outputs if not each.is_judged]
    if not open_:
        return [
            "A and B were compared as far as they ran: a bad value led to an exception",
            f"no difference beyond roundings in {_counts(found)}",
        ]
    return [
        f"it is not known whether A and B agree: {_distance(open_[0])}",
        "  not everything that led there was compared, so roundings may explain that or not",
        f"compared by elements: {_counts(found)}",
    ]


def _distance(each: Compared) -> str:
    """How far apart an output is, and how far it may be."""
    if each.total is None:
        return f"{percent(each.distance)} of the elements of {each.heading} differ"
    if each.distance == math.inf:
        return f"some elements of {each.heading} are finite in one of the two only"
    said = f"{each.heading} is {percent(each.distance)} apart (root mean square)"
    return f"{said}, its tolerance is {percent(each.tolerance)}"


FIRST = {"agree": _agree, "precision": _precision, "not compared": _not_compared_outcome}


def percent(share: float | None) -> str:
    """A share as a percentage with two digits."""
    return "-" if share is None else f"{number(share)}" if share < 1e-4 else f"{100 * share:.2g} %"


def _numbers(first: Compared) -> Iterator[str]:
    for name, apart in (("own", first.own), ("inherited", first.inherited), ("total", first.total)):
        if apart is not None:
            yield f"  {name + ' error:':<17}{_apart_text(apart)}"
    if first.errors is not None:
        a, b = first.errors
        yield f"  from float64:    A {number(a)}, B {number(b)}: {_nearer(first)}"
    elif first.part == "weight":
        pass  # nothing was computed with it
    elif first.weights or first.only_in or first.reason.startswith(NOT_ROUNDINGS):
        yield "  from float64:    each agrees with it: A and B compute different things"


def _apart_text(apart: Apart) -> str:
    cosine = "" if apart.cosine is None else f", cosine {cosine_text(apart.cosine)}"
    return f"{number(apart.absolute)} at most, {number(apart.relative)} relative{cosine}"


def cosine_text(cosine: float) -> str:
    """A cosine with enough digits to tell it from 1."""
    away = 1 - cosine
    return f"1 - {away:.1e}" if 0 < away < 1e-4 else f"{cosine:.5g}"


def _nearer(first: Compared) -> str:
    return f"{first.nearer} is nearer" if first.nearer else "neither is nearer"


def _counts(found: Parts) -> str:
    gradients = sum(each.part == "gradient" for each in found.gradients)
    counted = {
        "operation": len(found.operations),
        "output": len(found.outputs),
        "gradient": gradients,
    }
    return ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counted.items() if n)


def _largest(found: Parts) -> Iterator[str]:
    """The largest own error, and how far the outputs are apart."""
    own = [(each.own.relative, each) for each in found.operations if each.own is not None]
    worst = max(own, key=lambda pair: pair[0], default=None)
    if worst is not None and worst[0]:
        yield f"  largest own error: {number(worst[0])} relative, at {worst[1].heading}"
    ends = [(each.total.relative, each) for each in found.outputs if each.total is not None]
    last = max(ends, key=lambda pair: pair[0], default=None)
    if last is not None:
        text = (
            f"  largest difference of an output: {number(last[0])} relative, at {last[1].heading}"
        )
        if last[1].nearer is not None:
            text += f"; {last[1].nearer} is nearer to float64"
        yield text


def _gradients(found: Parts) -> Iterator[str]:
    known = [each for each in found.gradients if each.errors is not None]
    if not known:
        return
    nearer = [each.nearer for each in known]
    worst = max(known, key=lambda each: max(each.errors or (0.0,)))
    a, b = worst.errors or (0.0, 0.0)
    counts = nearer.count("A"), nearer.count("B")
    said = (
        f"{counts[0]} nearer to float64 in A, {counts[1]} in B"
        if any(counts)
        else "as near to float64 in both"
    )
    yield f"gradients: {said}; furthest: {worst.title}, A {number(a)}, B {number(b)} from float64"


def _not_compared(found: Parts) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for what, why in found.not_compared:
        reasons.setdefault(why, []).append(what)
    for why, listed in reasons.items():
        yield f"not compared: {names_text(listed)}: {why}"
    for side, titles in (("A", found.only_in_a), ("B", found.only_in_b)):
        if titles:
            yield f"only in {side}: {names_text(titles)}"


def table(everything: Sequence[Compared], tablefmt: str, most: int | None) -> str:
    """One row for each item that was compared; see ``Comparison.to_table``."""
    from tabulate import tabulate

    rows = [_row(each) for each in everything][:most]
    if tablefmt in ("github", "pipe"):
        rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    headers = (
        *("operation", "own abs", "own rel", "own cosine", "inherited rel", "total rel"),
        *("A from float64", "B from float64", "nearer", "significant", "source"),
    )
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)


def _row(each: Compared) -> list[str]:
    own = each.own
    return [
        each.heading,
        "-" if own is None else number(own.absolute),
        "-" if own is None else number(own.relative),
        "-" if own is None or own.cosine is None else cosine_text(own.cosine),
        "-" if each.inherited is None else number(each.inherited.relative),
        "-" if each.total is None else number(each.total.relative),
        *(["-", "-"] if each.errors is None else [number(error) for error in each.errors]),
        each.nearer or "-",
        each.reason,
        str(each.source or ""),
    ]
