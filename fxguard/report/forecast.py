"""The forecast for a model in another dtype: a record that prints, lists and exports itself."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxguard.errors import UsageError
from fxguard.formats import FORMATS
from fxguard.records import Frame, Source, title_of
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.error_budget import LEAST, ErrorBudget
from fxguard.report.page import page
from fxguard.report.precision_plan import PrecisionPlan
from fxguard.report.sheet import Sheet
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["Forecast", "ForecastRow"]

MOST_SHARES = 3  # of the error of the output
MOST_LINES = 20  # that are printed; all rows are in `rows`


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """An operation, a weight or an input that a dtype cannot hold."""

    operation: str  # "encoder.block.0 linear"; a weight's or an input's name
    problem: str  # "overflow", "underflow", "rounding" or "nan"
    dtype: str  # of the result: "float16"
    needed: float  # its largest magnitude; for an underflow, the largest one that is lost
    share: float  # of its elements: wrongly not finite, or wrongly 0
    error: float  # the largest, relative to the largest magnitude; inf if one is not finite
    # What is lost: an operand, named as in frames, "input[1]", or a number. "": the result.
    operand: str = ""
    source: Source | None = None
    backward: bool = False  # True for the gradient that this operation returns to its operands
    is_operation: bool = True  # False for a weight, an input, and the gradient of an output

    def __str__(self) -> str:
        where = f" ({self.source.place})" if self.source else ""
        return f"{self.title}{where}: {self.problem}, {self.why}"

    @property
    def title(self) -> str:
        """``encoder.block.0 linear``, ``backward of encoder.block.0 linear``."""
        return f"backward of {self.operation}" if self.backward else self.operation

    @property
    def why(self) -> str:
        """What is needed, and what the dtype offers.

        Example:
            >>> row.why
            'needs 131072, float16 holds 65504'
        """
        limits = FORMATS.get(self.dtype)
        if self.problem == "rounding" and self.error == math.inf:
            return "not finite, and finite without the roundings before it"
        if self.problem == "overflow" and limits is not None and self.needed > limits.max:
            return f"needs {self.needed:.6g}, {self.dtype} holds {limits.max:.6g}"
        if self.problem in ("overflow", "nan"):
            return f"inside the operation: the result, {self.needed:.6g}, would fit"
        if self.problem == "underflow":
            whose = f"the elements of {self.operand}" if self.operand else "its elements"
            return f"{self.share:.0%} of {whose} become 0, the largest is {self.needed:.2g}"
        if self.operand:
            return f"all of {self.operand}, up to {self.needed:.2g}, is lost in the other operand"
        return f"an error of {self.error:.2g} of its largest element"


@dataclass(frozen=True, slots=True, repr=False)
class Forecast(Displayed):
    """The operations of a model that fail in a dtype, the worst first. True if there are none."""

    dtype: str
    rows: tuple[ForecastRow, ...]
    operations: int  # that ran in graphs; in float8 the matrix products among them
    between: int = 0  # that ran between graphs and were not examined
    not_judged: tuple[tuple[str, str], ...] = ()  # operations without a float64 form, and why
    # For each operation, in order of execution: what it reads and makes in float64, or in the
    # backward the gradients that it received and returned.
    frames: tuple[Frame, ...] = field(default=(), compare=False)
    planner: Callable[[bool, float | None], PrecisionPlan] | None = field(
        default=None, compare=False
    )
    # How wrong the output is, and because of which lines; None in float8, and where nothing of the
    # output was captured.
    budget: ErrorBudget | None = field(default=None, compare=False)

    def plan(
        self, *, autocast: bool = False, output_tolerance: float | None = None
    ) -> PrecisionPlan:
        """Find out, by trial runs, the fewest operations to keep in float32.

        The model runs in the dtype some more times, once for each kind of operation that may have
        to be kept, on the inputs of the forecast. So these inputs and a copy of the model live as
        long as this object.

        Args:
            autocast: whether the model is to run under ``torch.autocast`` to the dtype, with
                unchanged weights; if not, it is to be converted.
            output_tolerance: how far off a verified plan may be: the root mean square of an
                output's error, relative to that of the output in float64. None for four units of
                roundoff of the dtype: 0.002 in float16, 0.016 in bfloat16.

        Raises:
            FxguardError: when this forecast was read from a file, or is for float8.

        Example:
            >>> plan = fxguard.forecast(model, x).plan()
            >>> model = fxguard.keep_float32(model.half(), plan)
        """
        if self.planner is None:
            raise UsageError("this forecast holds no model to plan for: fxguard.forecast makes one")
        return self.planner(autocast, output_tolerance)

    def __bool__(self) -> bool:
        return not self.rows

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  {row}" for row in self.rows[:MOST_LINES]]
        if len(self.rows) > MOST_LINES:
            lines.append(f"  and {len(self.rows) - MOST_LINES} more")
        return "\n".join([*lines, *self._digits()])

    def _digits(self) -> Iterator[str]:
        """What is left of the output's digits, and the first shares where they are lost."""
        budget = self.budget
        if budget is None or not math.isfinite(budget.error):
            return
        yield budget.verdict[0]
        if not budget.is_rounding:
            yield from (f"  {row}" for row in budget.rows[:MOST_SHARES] if row.share >= LEAST)

    __repr__ = __str__  # what an interactive session shows

    def _headline(self) -> str:
        count = Counter((row.backward, row.is_operation) for row in self.rows)
        forward, backward = count[False, True], count[True, True]
        found = f"{forward or 'none'} of {self._counted} fail{'' if forward > 1 else 's'}"
        line = f"in {self.dtype} {found}"
        if backward:
            line += f", and the backward of {backward}"
        for number, one, many in (
            (count[False, False], "weight or input", "weights or inputs"),
            (count[True, False], "gradient of an output", "gradients of outputs"),
        ):
            if number:
                line += f"; {number} {f'{one} fails' if number == 1 else f'{many} fail'}"
        if self.between:
            line += f"; not looked at: {self.between} between graphs"
        if self.not_judged:
            line += f"; not judged: {len(self.not_judged)} without a float64 form"
        return line

    @property
    def _counted(self) -> str:
        what = "matrix product" if self.dtype.startswith("float8") else "operation"
        return f"{self.operations} {what}{'' if self.operations == 1 else 's'}"

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """All rows as a table.

        Args:
            tablefmt: a format of ``tabulate``.
            most: the number of rows to show, from the first one on.
        """
        headers = ("operation", "problem", "needed", "share", "error", "line")
        cells = [
            (
                row.title,
                row.problem,
                f"{row.needed:.3g}",
                f"{row.share:.2g}",
                f"{row.error:.2g}",
                "" if row.source is None else row.source.place,
            )
            for row in self.rows[:most]
        ]
        return tabulate(cells, headers=headers, tablefmt=tablefmt, disable_numparse=True)

    @property
    def verdict(self) -> list[str]:
        """What fails, in lines."""
        return str(self).splitlines()

    def to_dict(self) -> dict[str, Any]:
        """The forecast as plain dicts, lists, strings and numbers, without its frames."""
        data = plain_data(replace(self, frames=(), planner=None, budget=None))
        del data["planner"], data["frames"]
        data["budget"] = None if self.budget is None else self.budget.to_dict()
        return recorded("forecast", {**data, "verdict": self.verdict})

    def to_json(self, indent: int | None = None) -> str:
        """The forecast as strict JSON: NaN and infinities are the strings "nan", "inf", "-inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: what fails, and the model against the dtype's limits.

        The ranges are those of float64: magnitudes above the largest number of the dtype, or below
        its smallest, stick out of the band between the two lines.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        rows = {(row.operation, row.backward): row for row in self.rows}
        failing = {
            index: row
            for index, frame in enumerate(self.frames)
            for row in [rows.get((title_of(frame.name, frame.kind), frame.phase == "backward"))]
            if row is not None
        }
        notes = {index: f"{row.problem}: {row.why}" for index, row in failing.items()}
        sheet = Sheet("0", self.frames, marked=frozenset(failing), notes=notes)
        return page(
            f"Forecast: {self.dtype}",
            self.verdict,
            [sheet],
            meta=f"{self._counted}; all ranges are those of float64",
            healthy=not self.rows,
        )

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=bool(self),
            table=(lambda: self.to_table("html", SHOWN)) if self.rows else None,
            of_table="What fails, as a table",
            page=self._page if self.frames else None,
            rows=sum(len(frame.rows) for frame in self.frames),
            name="forecast",
        )
