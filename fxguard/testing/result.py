"""The result of comparing a model in two precisions: a record that prints and exports itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxguard.comparison.elements import Deviation
from fxguard.measure.at_hand import name_of_dtype
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.error_chart import Point, chart, number
from fxguard.report.plain_page import paragraph, plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["Deviation", "Stability"]

ROWS = 3  # of an error budget
HEADERS = ("operation", "error", "error of its operands", "line")
HOW_TO_READ = (
    "The error of an operation is the largest difference of an element of its result from the same "
    "element in the reference, relative to the largest magnitude there."
)


@dataclass(frozen=True, slots=True, repr=False)
class Stability(Displayed):
    """The result of comparing two precisions. True if no error was over ``tolerance``."""

    dtype: torch.dtype
    reference: torch.dtype
    tolerance: float
    deviations: tuple[Deviation, ...]  # one for each operation, in order of execution
    between: int = 0  # operations that ran between graphs and were not compared
    taken_over: int = 0  # operations that draw random numbers or have no kernel for the reference
    # Differentiable operations whose backward was not compared: no gradient reached them, or they
    # run inside torch.func.
    without_gradient: int = 0
    budget: ErrorBudget | None = None  # of the output, where it is not stable

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Deviation | None:
        """The first operation whose error is over ``tolerance``."""
        return next(filter(self._is_over, self.deviations), None)

    @property
    def worst(self) -> Deviation | None:
        """The operation with the largest error."""
        return max(self.deviations, key=lambda d: d.error, default=None)

    def _is_over(self, deviation: Deviation) -> bool:
        return not deviation.error <= self.tolerance  # a NaN is

    def __str__(self) -> str:
        names = [name_of_dtype(dtype) for dtype in (self.dtype, self.reference)]
        backward = sum(each.phase == "backward" for each in self.deviations)
        counted = f"{len(self.deviations) - backward} operations"
        if backward or self.without_gradient:
            counted += f" and the backward of {backward}"
        counted += " compared"
        if self.between:
            counted += f", {self.between} between graphs not"
        if self.taken_over:
            counted += f", {self.taken_over} random ones or without a kernel for {names[1]} not"
        if self.without_gradient:
            counted += f", the backward of {self.without_gradient} not"
        if self.first is not None:
            text = f"not stable in {names[0]}: {self.first}, against {names[1]}"
            if self.first.source is not None and self.first.source.code:
                text += f"\n  {self.first.source}"
        else:
            text = f"stable in {names[0]}, against {names[1]}: the worst is {self.worst}"
        if self.budget is not None and math.isfinite(self.budget.error):
            # "  float16 changes the output by 3 %: ..."
            text += "".join(f"\n  {line}" for line in self.budget.verdict[: 1 + ROWS])
        return f"{text}\n  tolerance {self.tolerance:.2g}; {counted}"

    __repr__ = __str__  # what pytest shows of `assert numerically_stable(...)`

    @property
    def verdict(self) -> list[str]:
        """Which operation is not stable, and what was compared, in lines."""
        return str(self).splitlines()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists, strings and numbers; ``stable`` is its truth."""
        data = {
            **plain_data(self),
            "dtype": name_of_dtype(self.dtype),
            "reference": name_of_dtype(self.reference),
            "budget": None if self.budget is None else self.budget.to_dict(),
            "stable": bool(self),
            "first": None if self.first is None else plain_data(self.first),
            "verdict": self.verdict,
        }
        return recorded("stability", data)

    def to_json(self, indent: int | None = None) -> str:
        """The result as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the error of each operation against its depth.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        names = [name_of_dtype(dtype) for dtype in (self.dtype, self.reference)]
        title = f"{names[0]} against {names[1]}"
        return plain_page(title, self.verdict, self._parts(), healthy=bool(self))

    def _parts(self) -> Iterator[str]:
        for phase, name in (("forward", "Operations"), ("backward", "Backward of operations")):
            found = [each for each in self.deviations if each.phase == phase]
            if found:
                points = [Point(x.heading, x.error, marked=self._is_over(x)) for x in found]
                drawing = chart(points, "first over the tolerance", apart=False)
                yield section(name, drawing, paragraph(HOW_TO_READ), self._table(found))

    def _table(self, deviations: Sequence[Deviation]) -> str:
        return table(
            HEADERS,
            map(_cells, deviations),
            marked=frozenset(i for i, each in enumerate(deviations) if self._is_over(each)),
        )

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=bool(self),
            table=lambda: self._table(self.deviations[:SHOWN]),
            of_table="The operations as a table",
            page=self._page,
            rows=len(self.deviations),
            name="result",
        )


def _cells(each: Deviation) -> tuple[str, ...]:
    where = "" if each.source is None else each.source.place
    return each.heading, number(each.error), number(each.error_before), where
