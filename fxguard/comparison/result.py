"""The comparison of two models, element by element. Knows nothing of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fxguard.comparison._result_page import page_of
from fxguard.comparison._result_text import table, verdict_lines
from fxguard.comparison.elements import Compared
from fxguard.report.display import SHOWN, Display, Displayed
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.strict_json import recorded, strict_json
from fxguard.trace.batch_diff import BatchDiff
from fxguard.trace.diff import Diff

__all__ = ["Comparison", "Outcome"]

Outcome = Literal["agree", "operation", "precision", "not compared"]


@dataclass(frozen=True, slots=True)
class Comparison(Displayed):
    """How far apart the elements of each operation are, for two models on the same inputs.

    Example:
        >>> found = fxguard.compare(model, other, x)
        >>> if found.first is not None:
        ...     print(found.first.title, found.first.reason)
    """

    a: str  # class and dtype of the first model, and whether it is compiled
    b: str
    operations: tuple[Compared, ...]  # those in both models, in order of execution
    # What graphs returned, if their operations return something else in eager mode.
    graphs: tuple[Compared, ...]
    outputs: tuple[Compared, ...]  # what the models returned
    gradients: tuple[Compared, ...]  # of each weight and input, and of blamed operations
    ranges: Diff  # smallest and largest magnitudes of all measured values, also in compiled graphs
    not_compared: tuple[tuple[str, str], ...] = ()  # what, and why
    weights: tuple[Compared, ...] = ()  # those that differ and that no compared operation reads
    only_in_a: tuple[str, ...] = ()  # operations, by title
    only_in_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())  # on which runs the elements come from
    returned: bool = True  # whether both models returned: a bad value may lead to an exception
    # Where the digits went in the model with fewer of them, if the two differ in precision.
    budget: ErrorBudget | None = None

    @property
    def everything(self) -> tuple[Compared, ...]:
        """Everything that was compared, in reading order."""
        return (*self.operations, *self.weights, *self.graphs, *self.outputs, *self.gradients)

    @property
    def significant(self) -> tuple[Compared, ...]:
        """The items that differ by more than the dtypes explain."""
        return tuple(each for each in self.everything if each.is_significant)

    @property
    def first(self) -> Compared | None:
        """The first significant divergence; None if there is none."""
        return next(iter(self.significant), None)

    @property
    def largest(self) -> Compared | None:
        """The operation with the largest own error, relative to the largest magnitude."""
        own = [each for each in self.operations if each.own is not None]
        return max(own, key=lambda each: each.own.relative if each.own else 0.0, default=None)

    @property
    def compared(self) -> int:
        """How many operations, graphs, outputs and gradients were compared by elements."""
        return len(self.everything) - len(self.weights)

    @property
    def differs(self) -> bool:
        """Whether there is a significant divergence."""
        return self.first is not None

    @property
    def outcome(self) -> Outcome:
        """What the comparison found.

        ``"agree"``: outputs and gradients differ by no more than roundings explain, and each output
        is within its tolerance. ``"operation"``: an operation, a weight, an output or a gradient
        differs by more; it is :attr:`first`. ``"precision"``: every operation is within its
        roundings, and they add up to more than the tolerance of an output. ``"not compared"``: an
        output, or everything, could not be judged.
        """
        if self.differs:
            return "operation"
        judged = self.returned and all(each.is_judged for each in self.outputs)
        if not self.compared or not judged:
            return "not compared"
        return "agree" if all(each.is_within for each in self.outputs) else "precision"

    @property
    def agrees(self) -> bool:
        """Whether :attr:`outcome` is ``"agree"``."""
        return self.outcome == "agree"

    @property
    def batches(self) -> tuple[BatchDiff, ...]:
        """The ranges of both batches, frame by frame."""
        return self.ranges.batches

    @property
    def verdict(self) -> list[str]:
        """Where the models diverge, and why, in lines."""
        return verdict_lines(self)

    def __str__(self) -> str:
        return "\n".join([*self._sides, "", *self.verdict])

    def to_table(self, tablefmt: str = "github", most: int | None = None) -> str:
        """Everything that was compared as one table.

        Args:
            tablefmt: any table format that tabulate knows.
            most: the number of rows to show, from the first one on.
        """
        return table(self.everything, tablefmt, most)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain dicts, lists, strings and numbers."""
        data = {
            "a": self.a,
            "b": self.b,
            "outcome": self.outcome,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "first": None if self.first is None else self.first.to_dict(),
            **{name: [each.to_dict() for each in parts] for name, parts in self._parts()},
            "not_compared": dict(self.not_compared),
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "notes": list(self.notes),
            "ranges": self.ranges.to_dict(),
            "budget": None if self.budget is None else self.budget.to_dict(),
        }
        return recorded("comparison", data)

    def _parts(self) -> Iterator[tuple[str, tuple[Compared, ...]]]:
        yield "operations", self.operations
        yield "weights", self.weights
        yield "graphs", self.graphs
        yield "outputs", self.outputs
        yield "gradients", self.gradients

    def to_json(self, indent: int | None = None) -> str:
        """The comparison as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: error against depth, own and inherited.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(page_of(self), encoding="utf-8")

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.agrees,
            above=self._sides,
            table=lambda: self.to_table("html", SHOWN),
            of_table="What was compared, as a table",
            page=lambda: page_of(self),
            rows=len(self.everything),
            name="comparison",
        )

    @property
    def _sides(self) -> list[str]:
        return [f"A: {self.a}", f"B: {self.b}"]
