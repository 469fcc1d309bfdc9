"""Which operations of a model to keep in float32, and what that gains."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.report.display import Display, Displayed
from fxguard.report.plain_page import code, paragraph, plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["PrecisionPlan"]

HOW_TO_READ = (
    "Errors are relative to the largest magnitude of each output in float64, and not finite where "
    "an element is wrongly not finite."
)


@dataclass(frozen=True, slots=True, repr=False)
class PrecisionPlan(Displayed):
    """The operations to keep in float32, for :func:`fxguard.keep_float32`.

    Errors are those of the model's outputs, relative to the largest magnitude of each output in
    float64; infinite if an element is wrongly not finite, NaN if not known. The error of the
    gradients of weights is relative to the gradients of the model in its own dtype.
    """

    dtype: str  # of all other operations: "float16"
    mix: str  # how the model runs in the dtype: "model.to(torch.float16)"
    operations: tuple[str, ...]  # globs
    kept: int  # how many operations they name
    of: int  # how many operations the graphs have
    # Whether a run of this mix was finite, with outputs within the tolerance, outputs and gradients
    # about as good as they can be, and no gradient lost.
    verified: bool
    error: float  # of this mix
    gradient_error: float  # the same for gradients; NaN without a loss
    error_rounding: float  # of the dtype's roundings alone, with all failures repaired
    error_low: float  # of the model in the dtype alone
    error_wide: float  # of the model in its own dtype
    runs: int  # runs of the model that the search took
    draws: bool = False  # whether it draws random numbers, which may differ in another dtype
    # What still fails: inputs, weights and outputs that the dtype cannot hold.
    remains: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # what it lacks to be verified, besides these

    def __bool__(self) -> bool:
        return self.verified

    def __str__(self) -> str:
        what = f"keep {self.kept} of {self.of} operations in float32, the rest in {self.dtype}"
        if not self.operations:
            what = f"nothing has to be kept in float32: {self.dtype} suffices"
            if not self.verified:
                what = f"nothing kept in float32 makes {self.dtype} suffice"
        lines = [
            what,
            *(f"  {glob}" for glob in self.operations),
            f"{'verified' if self.verified else 'NOT verified'} with {self.mix}, {self.runs} runs",
            f"  error of the outputs: {_worded(self.error)}; {self.dtype} alone: "
            f"{_worded(self.error_low)}; its roundings alone: {_worded(self.error_rounding)}; "
            f"the model as it is: {_worded(self.error_wide)}",
        ]
        if not math.isnan(self.gradient_error):
            lines.append(f"  error of the gradients of weights: {_worded(self.gradient_error)}")
        if self.draws:
            lines.append("  it draws random numbers, and perhaps others in each dtype")
        lines += [f"  {self.dtype} does not hold: {each}" for each in self.remains]
        lines += [f"  missing: {each}" for each in self.missing]
        return "\n".join(lines)

    __repr__ = __str__  # what an interactive session shows

    @property
    def advice(self) -> str:
        """The change of the user's code."""
        if not self.operations:
            return self.mix
        globs = "".join(f'\n    "{glob}",' for glob in self.operations)
        return f"{self.mix}\nfxguard.keep_float32(model, [{globs}\n])"

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.verified,
            table=lambda: code(self.advice),
            page=self._page,
            framed=False,
        )

    @property
    def verdict(self) -> list[str]:
        """What to keep, and what that gains, in lines."""
        return str(self).splitlines()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings and numbers, with the advice."""
        data = plain_data(self)
        return recorded("plan", {**data, "advice": self.advice, "verdict": self.verdict})

    def to_json(self, indent: int | None = None) -> str:
        """The plan as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the change of the code, and the error of each form.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        return plain_page(f"Plan: {self.dtype}", self.verdict, self._parts(), healthy=self.verified)

    def _parts(self) -> Iterator[str]:
        yield section("The change of the code", code(self.advice))
        rows = [(name, _worded(error)) for name, error in self._errors()]
        yield section("Errors of the outputs", table(("", "error"), rows), paragraph(HOW_TO_READ))

    def _errors(self) -> Iterator[tuple[str, float]]:
        """Each form of the model, and the error of its outputs."""
        yield "this plan", self.error
        yield f"{self.dtype} alone", self.error_low
        yield f"the roundings of {self.dtype} alone", self.error_rounding
        yield "the model as it is", self.error_wide


def _worded(error: float) -> str:
    if math.isnan(error):
        return "not known"
    return f"{error:.2g}" if error < math.inf else "not finite"
