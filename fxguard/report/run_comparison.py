"""Two recorded runs that should agree: a record that prints and exports itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fxguard.records import Source
from fxguard.report.display import Display, Displayed
from fxguard.report.in_words import percent
from fxguard.report.plain_page import paragraph, plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["OneSide", "OutputsApart", "RoundingShare", "RunComparison", "RunDivergence"]

SHOWN = 3  # divergences that are printed

HOW_TO_READ = (
    "Both programs ran again in float64, B on the values of A: whatever B computes was looked for "
    "among A's values, in any order of their elements. A divergence is where that ends: behind it, "
    "B went on with A's values. Its share is what remains of the difference of the outputs when "
    "this one alone stays."
)


@dataclass(frozen=True, slots=True)
class OneSide:
    """An operation of one of the two programs."""

    title: str  # "layers.0.mlp silu"
    source: Source | None = None

    def __str__(self) -> str:
        if self.source is None:
            return self.title
        code = f": {self.source.code}" if self.source.code else ""
        return f"{self.title} ({self.source.place}){code}"


@dataclass(frozen=True, slots=True)
class RunDivergence:
    """Where two programs compute something else from the same values."""

    a: OneSide | None  # None if A has nothing in its place
    b: OneSide | None
    because: str  # what about it: "1e-06 in A, 1e-05 in B"; "" if that is not known
    difference: float  # of what follows, on A's values, relative to the largest magnitude
    share: float | None  # of the difference of the outputs; None if that was not measured
    places: int = 1  # where the same two lines part
    tried: str = ""  # a change behind which both compute the same there: it was run

    def lines(self) -> Iterator[str]:
        """Both sides, and what is known of it."""
        yield f"  A  {self.a or 'nothing in its place'}"
        yield f"  B  {self.b or 'nothing in its place'}"
        if self.because:
            yield f"     {self.because}"
        if self.tried:
            yield f"     tried: {self.tried}"
        where = f" in {self.places} places" if self.places > 1 else ""
        said = f"{percent(self.difference)} apart on the same values{where}"
        if self.share is not None:
            said += f"; alone it makes {percent(self.share)} of the difference of the outputs"
        yield f"     {said}"


@dataclass(frozen=True, slots=True)
class OutputsApart:
    """One output of both runs."""

    a: str  # "output['logits']"
    b: str
    recorded: float | None  # the difference as it ran, root mean square, relative to A
    exact: float  # likewise in float64


@dataclass(frozen=True, slots=True)
class RoundingShare:
    """What the roundings of one line add to the difference of the outputs."""

    side: Literal["A", "B"]
    operation: OneSide
    share: float  # of the squares of what all operations of both sides add
    own_error: float  # of its result, relative to the largest magnitude
    dtype: str


@dataclass(frozen=True, slots=True, repr=False)
class RunComparison(Displayed):
    """Two recorded runs: which values are the same, where the programs part, what rounds.

    Attributes:
        outcome: "agree"; "operation", if the programs differ; "precision", if only roundings do,
            and more than is usual; "not compared", if no output is in both.
    """

    a: str
    b: str
    outcome: Literal["agree", "operation", "precision", "not compared"]
    outputs: tuple[OutputsApart, ...]
    divergences: tuple[RunDivergence, ...] = ()
    roundings: tuple[RoundingShare, ...] = ()  # the largest share first
    same: int = 0  # values of B that are values of A
    values: int = 0  # of B
    not_compared: tuple[tuple[str, str], ...] = ()  # what, and why
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing was found."""
        return self.outcome == "agree"

    @property
    def first(self) -> RunDivergence | None:
        """The first divergence, in order of execution."""
        return next(iter(self.divergences), None)

    @property
    def verdict(self) -> list[str]:
        """What was found, in lines."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        found = f"{self.same} of {self.values} values of B are values of A"
        sizes = [each.recorded for each in self.outputs if each.recorded is not None]
        apart = max(sizes, default=max((each.exact for each in self.outputs), default=0.0))
        if self.outcome == "not compared":
            yield f"not compared: no output of B corresponds to one of A; {found}"
        elif self.outcome == "agree":
            yield f"A and B agree: outputs are {percent(apart)} apart; {found}"
        elif self.outcome == "precision":
            yield (
                f"A and B compute the same, and roundings make outputs differ by {percent(apart)}; "
                f"{found}"
            )
        else:
            yield f"A and B differ: outputs are {percent(apart)} apart; {found}"
        for number, each in enumerate(self.divergences[:SHOWN]):
            yield "they part first at" if number == 0 else "and at"
            yield from each.lines()
        more = len(self.divergences) - SHOWN
        if more > 0:
            yield f"and {more} more"
        for share in self.roundings[:SHOWN]:
            yield (
                f"  {percent(share.share):>6} from {share.side}: {share.operation}  "
                f"own error {percent(share.own_error)}, {share.dtype}"
            )
        for what, why in self.not_compared:
            yield f"not compared: {what}: {why}"
        yield from self.notes

    def __str__(self) -> str:
        return "\n".join([f"A: {self.a}", f"B: {self.b}", *self.verdict])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data: dicts, lists, strings and numbers."""
        data = {**plain_data(self), "agrees": self.agrees, "verdict": self.verdict}
        data["not_compared"] = dict(self.not_compared)
        return recorded("run_comparison", data)

    def to_json(self, indent: int | None = None) -> str:
        """The comparison as strict JSON: NaN and infinities are the strings "nan" and "inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        title = f"{self.a} and {self.b}"
        sides = [f"A: {self.a}", f"B: {self.b}"]
        return plain_page(title, self.verdict, self._parts(), healthy=self.agrees, meta=sides)

    def _parts(self) -> Iterator[str]:
        if self.divergences:
            titles = ("A", "B", "difference", "places", "share of the outputs'")
            cells = [
                (
                    str(each.a or ""),
                    str(each.b or ""),
                    percent(each.difference),
                    str(each.places),
                    "" if each.share is None else percent(each.share),
                )
                for each in self.divergences
            ]
            reasons = [each.because for each in self.divergences]
            yield section(
                "Where they part",
                paragraph(HOW_TO_READ),
                table(titles, cells, marked=frozenset([0]), reasons=reasons),
            )
        if self.roundings:
            titles = ("side", "operation", "share", "own error", "dtype")
            yield section(
                "Roundings",
                table(
                    titles,
                    [
                        (
                            each.side,
                            str(each.operation),
                            percent(each.share),
                            percent(each.own_error),
                            each.dtype,
                        )
                        for each in self.roundings
                    ],
                ),
            )
        if self.outputs:
            yield section(
                "Outputs",
                table(
                    ("A", "B", "as they ran", "in float64"),
                    [
                        (
                            each.a,
                            each.b,
                            "" if each.recorded is None else percent(each.recorded),
                            percent(each.exact),
                        )
                        for each in self.outputs
                    ],
                ),
            )

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=self.agrees,
            above=[f"A: {self.a}", f"B: {self.b}"],
            page=self._page,
            framed=False,
            name="run_comparison",
        )
