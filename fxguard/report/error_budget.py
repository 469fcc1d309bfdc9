"""Where the digits of a model's output went: a record that prints, lists and exports itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxguard.records import Source, title_of
from fxguard.report.budget_chart import Bar, budget_chart
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.in_words import digits_of, percent, times
from fxguard.report.plain_page import paragraph, plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["LEAST", "Choice", "ErrorBudget", "ErrorShare", "percent"]

MOST_LINES = 5  # of rows that are printed; all are in `rows`
LEAST = 0.01  # the share of a row that is printed
AMPLIFIED = 10.0  # times: less is not worth a word
WITHIN = 4.0  # units of roundoff: an error that is no larger is that of any output in the dtype
ADD_UP = (0.5, 2.0)  # of `explained`: outside, shares rank and do not add up

HOW_TO_READ = (
    "The own error of an operation is that of its roundings: its result minus that of the same "
    "operation in float64 on the operands that it had. Its share is the part of the output's "
    "error that comes from it, by the gradient of the output in float64."
)


@dataclass(frozen=True, slots=True)
class ErrorShare:
    """One line of the user's in one module, or a weight or an input that was rounded."""

    name: str  # "encoder.block.0"; the name of a weight or an input
    kind: str  # "mul"; "weight" or "input" for one that was rounded
    source: Source | None
    share: float  # of the error of the output, between 0 and 1
    own: float  # root mean square of its own error, relative to that of its result
    amplification: float  # how many times larger, relative to the output, its effect there is
    count: int  # how often its operations ran
    by: str = ""  # what amplifies it: "cos rope.py:15"
    order: int = 0  # the smaller, the earlier its first operation ran; weights stand before these

    @property
    def title(self) -> str:
        """``encoder.block.0 mul``, ``weight q.weight``, ``input 0``."""
        if self.kind == "input":
            return self.name
        return f"weight {self.name}" if self.is_given else title_of(self.name, self.kind)

    @property
    def label(self) -> str:
        """``encoder.block.0 mul t5.py:14``."""
        return f"{self.title} {self.source.place}" if self.source else self.title

    @property
    def is_given(self) -> bool:
        """Whether it is a weight or an input."""
        return self.kind in ("weight", "input")

    def __str__(self) -> str:
        where = f" {self.source}" if self.source else ""
        line = f"{percent(self.share)}  {self.title}{where}  own error {percent(self.own)}"
        if self.amplification >= AMPLIFIED:
            line += f", amplified {times(self.amplification)} times"
            line += f", by {self.by}" if self.by else ""
        return line


@dataclass(frozen=True, slots=True)
class Choice:
    """A comparison, an ``argmax``, a router: what it chose in the dtype, and in float64."""

    name: str  # of the module
    kind: str  # "gt", "topk"
    source: Source | None
    otherwise: int  # how many elements it chose otherwise
    of: int  # how many there are
    # The largest distance, in float64, of the numbers that were compared where it chose otherwise,
    # relative to the largest of them; NaN where that is not known.
    margin: float = math.nan

    @property
    def title(self) -> str:
        """``layers.0.router topk``."""
        return title_of(self.name, self.kind)

    def __str__(self) -> str:
        where = f" {self.source.place}" if self.source else ""
        line = f"{self.title}{where} chose otherwise for {self.otherwise} of {self.of}"
        return line if math.isnan(self.margin) else f"{line}, by margins up to {self.margin:.1g}"


@dataclass(frozen=True, slots=True, repr=False)
class ErrorBudget(Displayed):
    """How wrong a number is in a dtype, and which lines that comes from."""

    dtype: str  # that the model ran in: "bfloat16"
    of: str  # the number: "the output", "the loss", "of(output)"
    # Root mean square of the distance from a float64 run that chooses for itself, relative to that
    # of its result; inf where the model is not finite in the dtype alone.
    error: float
    unit: float  # of roundoff of the dtype
    rows: tuple[ErrorShare, ...]  # the largest share first
    # Root mean square of the predicted errors of the projections, divided by that of the true ones.
    explained: float
    operations: int  # how many ran in graphs
    choices: tuple[Choice, ...] = ()
    not_judged: tuple[tuple[str, str], ...] = ()  # operations without a float64 form, and why
    fix: str = ""  # what was tried, and the error then
    # Of each weight, the error of its gradient: root mean square, relative to that in float64.
    gradients: tuple[tuple[str, float], ...] = ()
    gradient_rows: tuple[ErrorShare, ...] = ()  # of the error of all gradients together
    notes: tuple[str, ...] = ()

    @property
    def digits(self) -> float:
        """How many correct decimal digits are left; 0 at least."""
        return digits_of(self.error)

    @property
    def adds_up(self) -> bool:
        """Whether the shares add up to the error that was measured."""
        return ADD_UP[0] <= self.explained <= ADD_UP[1]

    @property
    def is_rounding(self) -> bool:
        """Whether the error is that of any output in the dtype: 4 units of roundoff at most."""
        return self.error <= WITHIN * self.unit

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__  # what an interactive session shows

    def _lines(self) -> Iterator[str]:
        yield self._headline()
        printed = [row for row in self.rows if row.share >= LEAST][:MOST_LINES]
        yield from (f"  {row}" for row in printed)
        more = self.rows[len(printed) :]
        rest = sum(row.share for row in more)
        if rest >= LEAST:
            yield f"  {percent(rest)}  in {len(more)} more"
        if self.fix:
            yield f"fix: {self.fix}"
        if self.rows and self.error and not self.adds_up and math.isfinite(self.error):
            yield (
                f"the shares rank and do not add up: the error is beyond first order "
                f"({self.explained:.2g} of it is predicted)"
            )
        yield from map(str, self.choices[:MOST_LINES])
        if len(self.choices) > MOST_LINES:
            yield f"and {len(self.choices) - MOST_LINES} more chose otherwise"
        yield from self._of_gradients()
        for what, why in self.not_judged[:MOST_LINES]:
            yield f"not judged: {what}: {why}"
        if len(self.not_judged) > MOST_LINES:
            yield f"not judged: {len(self.not_judged) - MOST_LINES} more"
        yield from self.notes

    def _headline(self) -> str:
        if math.isnan(self.error):
            return f"{self.dtype}: the error of {self.of} is not known"
        if self.error == math.inf:
            return f"in {self.dtype} {self.of} is not finite"
        if not self.error:
            return f"{self.dtype} does not change {self.of}"
        all_digits = digits_of(self.unit)
        left = f"{self.digits:.1f} of {all_digits:.1f} digits are left"
        if self.digits >= all_digits:  # as of a mean, in which errors cancel
            left = f"all {all_digits:.1f} digits are left"
        return f"{self.dtype} changes {self.of} by {percent(self.error)}: {left}"

    def _of_gradients(self) -> Iterator[str]:
        if not self.gradients:
            return
        worst = sorted(self.gradients, key=lambda each: -each[1])
        name, error = worst[0]
        size = percent(error) if math.isfinite(error) else "not finite"
        yield f"gradients: the worst of {len(worst)} is that of {name}, {size} off"
        for row in self.gradient_rows[:3]:
            yield f"  {row}"

    @property
    def verdict(self) -> list[str]:
        """What is left, where the rest went, and what to do, in lines."""
        return list(self._lines())

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """All rows as a table.

        Args:
            tablefmt: a format of ``tabulate``.
            most: the number of rows to show, from the first one on.
        """
        headers, cells = table_of(self.rows[:most])
        return tabulate(cells, headers=headers, tablefmt=tablefmt, disable_numparse=True)

    def to_dict(self) -> dict[str, Any]:
        """The budget as plain dicts, lists, strings and numbers."""
        more = {"digits": self.digits, "verdict": self.verdict}
        return recorded("error_budget", {**plain_data(self), **more})

    def to_json(self, indent: int | None = None) -> str:
        """The budget as strict JSON: NaN and infinities are the strings "nan", "inf", "-inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the rows, and what they come from.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        return plain_page(
            f"Error budget: {self.dtype}", self.verdict, self._parts(), healthy=self.is_rounding
        )

    def _parts(self) -> Iterator[str]:
        if self.rows:
            yield section("Where the digits went", paragraph(HOW_TO_READ), _drawn(self.rows))
            yield _as_table(self.rows)
        if self.gradient_rows:
            yield section("Gradients", _drawn(self.gradient_rows), _as_table(self.gradient_rows))
        if self.gradients:
            cells = [(name, percent(error)) for name, error in self.gradients]
            yield section("The error of each gradient", table(("weight", "error"), cells))
        if self.choices:
            yield section("What chose otherwise", *(paragraph(str(each)) for each in self.choices))

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.is_rounding,
            table=(lambda: self.to_table("html", SHOWN)) if self.rows else None,
            page=self._page,
            framed=False,
            name="budget",
        )


def table_of(rows: Sequence[ErrorShare]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The head and the cells of a table of rows."""
    head = ("share", "operation", "line", "own error", "amplified", "by", "runs")
    cells: list[Sequence[str]] = [
        (
            percent(row.share),
            row.title,
            "" if row.source is None else str(row.source),
            percent(row.own),
            times(row.amplification),
            row.by,
            str(row.count),
        )
        for row in rows
    ]
    return head, cells


def _drawn(rows: Sequence[ErrorShare]) -> str:
    """Rows in order of execution."""
    ordered = sorted(rows, key=lambda row: row.order)
    return budget_chart([Bar(row.label, str(row), row.share, row.own) for row in ordered])


def _as_table(rows: Sequence[ErrorShare]) -> str:
    """Rows, each with the user's line below it."""
    head, cells = table_of(rows)
    places = ["" if row.source is None else row.source.place for row in rows]
    codes = ["" if row.source is None else row.source.code for row in rows]
    at = head.index("line")
    cells = [
        [*each[:at], place, *each[at + 1 :]] for each, place in zip(cells, places, strict=True)
    ]
    return table(head, cells, reasons=codes)
