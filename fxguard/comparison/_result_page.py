"""Two models on one HTML page: the verdict, error against depth, a table. Knows nothing of torch.

The page has no script: the chart is drawn here and shows numbers as tooltips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.comparison._result_text import Parts, cosine_text, verdict_lines
from fxguard.comparison.elements import Apart, Compared
from fxguard.report.error_chart import Point, chart, number
from fxguard.report.plain_page import paragraph, plain_page, section, table

__all__ = ["page_of"]

HEADERS = (
    *("operation", "own error", "own cosine", "inherited error", "total error"),
    *("A from float64", "B from float64", "nearer", "line"),
)
HOW_TO_READ = (
    "The own error is what an operation of B makes of the operands that A's operation had, against "
    "what A's made of them. The inherited error is the rest of the difference: it came with the "
    "operands. Both are the largest difference of an element, relative to the largest magnitude in "
    "A."
)


def page_of(found: Parts) -> str:
    """The text of the page."""
    return plain_page(
        "Where two models part" if found.significant else "Two models, by elements",
        verdict_lines(found),
        _parts(found),
        healthy=found.outcome == "agree",
        meta=[f"A: {found.a}", f"B: {found.b}"],
    )


def _parts(found: Parts) -> Iterator[str]:
    if found.operations:
        drawing = chart([_point(each) for each in found.operations], "first significant")
        yield section("Error against depth", drawing, paragraph(HOW_TO_READ))
    for name, parts in (
        ("Operations", found.operations),
        ("What compiled graphs returned", found.graphs),
        ("Outputs", found.outputs),
        ("Gradients", found.gradients),
    ):
        if parts:
            yield section(name, _table(parts))


def _point(each: Compared) -> Point:
    return Point(each.heading, _error(each.own), _error(each.inherited), each.is_significant)


def _error(apart: Apart | None) -> float | None:
    return None if apart is None else apart.relative


def _table(parts: Sequence[Compared]) -> str:
    return table(
        HEADERS,
        map(_cells, parts),
        marked=frozenset(i for i, each in enumerate(parts) if each.is_significant),
        reasons=[each.reason for each in parts],
    )


def _cells(each: Compared) -> list[str]:
    own = each.own
    return [
        each.heading,
        _relative(own),
        "-" if own is None or own.cosine is None else cosine_text(own.cosine),
        _relative(each.inherited),
        _relative(each.total),
        *(["-", "-"] if each.errors is None else [number(error) for error in each.errors]),
        each.nearer or "-",
        "" if each.source is None else each.source.place,
    ]


def _relative(apart: Apart | None) -> str:
    return "-" if apart is None else number(apart.relative)
