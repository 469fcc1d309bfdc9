"""What the outputs of a model depend on: a record that prints and exports itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fxguard.records import Source
from fxguard.report.display import Display, Displayed
from fxguard.report.plain_page import paragraph, plain_page, section, table
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["Dependence", "Dependencies", "PathStep", "Question"]

Question = Literal["samples", "positions", "padding"]

AT_ENDS = 3  # steps of a long path that are printed at each end, and around the leak
INDENT = " " * 11

HOW_TO_READ = (
    "Inputs were replaced by other ones, and the output was compared with what it was. A path "
    "leads from what was replaced to the output that changed: all values on it changed. The leak "
    "is the first of its operations behind which they are not where they belong."
)


@dataclass(frozen=True, slots=True)
class PathStep:
    """One operation on a path."""

    title: str  # "blocks.0.attn softmax"
    source: Source | None = None

    def __str__(self) -> str:
        return f"{self.title} ({self.source.place})" if self.source else self.title


@dataclass(frozen=True, slots=True)
class Dependence:
    """The answer to one question: do outputs depend on other samples, later positions, padding?"""

    question: Question
    depends: bool | None  # None if it was not asked, or could not be answered: see `evidence`
    evidence: str  # what was replaced, and what changed; or why there is no answer
    leak: PathStep | None = None  # the operation that lets it through
    because: str = ""  # what about it: "its mask is made at gpt.py:12: ..."
    path: tuple[PathStep, ...] = ()  # from what was replaced to what changed; the shortest
    others: tuple[PathStep, ...] = ()  # more operations that let it through, of other lines
    why_no_path: str = ""

    def lines(self) -> Iterator[str]:
        """The answer, the operation that leaks, and the path to it."""
        yield f"{self.question + ':':<11}{self.evidence}"
        if self.leak is not None:
            code = f": {self.leak.source.code}" if self.leak.source else ""
            yield f"{INDENT}leak: {self.leak}{code}"
        if self.because:
            yield f"{INDENT}{self.because}"
        for each in self.others:
            yield f"{INDENT}and: {each}"
        if self.path:
            yield f"{INDENT}path: {' > '.join(_shortened(self.path, self.leak))}"
        if self.why_no_path:
            yield f"{INDENT}no path: {self.why_no_path}"


@dataclass(frozen=True, slots=True, repr=False)
class Dependencies(Displayed):
    """What the outputs of a model depend on, by replacing its inputs."""

    model: str  # the name of its class
    dtype: str  # that it ran in: "float64"
    training: bool  # its mode
    samples: Dependence  # whether the output of a sample depends on other samples
    positions: Dependence  # whether the output at a position depends on later positions
    padding: Dependence  # whether outputs of real positions depend on padding
    runs: int  # of the model

    @property
    def all(self) -> tuple[Dependence, Dependence, Dependence]:
        """The three answers."""
        return self.samples, self.positions, self.padding

    @property
    def found(self) -> tuple[Dependence, ...]:
        """The answers that are yes."""
        return tuple(each for each in self.all if each.depends)

    def __str__(self) -> str:
        return "\n".join(self.verdict)

    __repr__ = __str__  # what an interactive session shows

    @property
    def verdict(self) -> list[str]:
        """The answers, in lines."""
        mode = "training" if self.training else "evaluation"
        first = f"what outputs of {self.model} depend on ({mode} mode, {self.dtype})"
        return [first, *(line for each in self.all for line in each.lines())]

    def to_dict(self) -> dict[str, Any]:
        """The answers as plain dicts, lists, strings and numbers."""
        return recorded("dependencies", {**plain_data(self), "verdict": self.verdict})

    def to_json(self, indent: int | None = None) -> str:
        """The answers as strict JSON."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the answers, and their paths.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        title = f"Dependencies: {self.model}"
        return plain_page(title, self.verdict, self._parts(), healthy=not self.found)

    def _parts(self) -> Iterator[str]:
        paths = [each for each in self.all if each.path]
        if paths:
            yield section("How to read a path", paragraph(HOW_TO_READ))
        for each in paths:
            marked = frozenset(i for i, step in enumerate(each.path) if step == each.leak)
            yield section(f"The path: {each.question}", _as_table(each.path, marked))

    def _display(self) -> Display:
        return Display(
            self.verdict,
            healthy=not self.found,
            page=self._page,
            framed=False,
            name="dependencies",
        )


def _shortened(path: Sequence[PathStep], leak: PathStep | None) -> Iterator[str]:
    """The steps of a path; of a long one those at its ends, and those around the leak."""
    at = path.index(leak) if leak in path else 0
    shown = {*range(AT_ENDS), *range(len(path) - AT_ENDS, len(path)), at - 1, at, at + 1}
    left_out = 0
    for i, step in enumerate(path):
        if i not in shown and len(path) > 3 * AT_ENDS:
            left_out += 1
            continue
        if left_out:
            yield f"{left_out} more"
        left_out = 0
        yield str(step)


def _as_table(path: Sequence[PathStep], marked: frozenset[int]) -> str:
    cells = [(step.title, step.source.place if step.source else "") for step in path]
    codes = [step.source.code if step.source else "" for step in path]
    return table(("operation", "line"), cells, marked=marked, reasons=codes)
