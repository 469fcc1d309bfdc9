"""The findings of one batch: a record that prints, lists and exports itself.

Knows nothing of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxguard.errors import UsageError
from fxguard.findings import Fix, Growth, Origin
from fxguard.records import Frame
from fxguard.report import text
from fxguard.report.display import Display, Displayed
from fxguard.report.groups import by_cause, group_headline
from fxguard.report.page import page
from fxguard.report.quiet_fault import QuietFault
from fxguard.report.sheet import Sheet
from fxguard.report.strict_json import plain_data, recorded, strict_json

__all__ = ["Report"]

MOST_FRAMES = 50  # in the table of a notebook


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The findings of one batch: the frames that led to a bad value, and its origins.

    ``str(report)`` is the printed text: the verdict, then the frames.

    Example:
        >>> try:
        ...     model(**batch)
        ... except fxguard.NonFiniteError as error:
        ...     print(error.report.origins[0].message)
        mul in encoder.block.0.layer.1.DenseReluDense made inf (modeling_t5.py:109)
    """

    batch_number: int  # counted from 0
    frames: tuple[Frame, ...]  # the last is the first bad one
    origins: tuple[Origin, ...]  # in order of execution
    rank: int | None = None  # rank of this process in the default process group; None without one
    absorbed: tuple[Origin, ...] = ()  # origins whose bad values reached no output
    error: str = ""  # what the forward then raised, "RuntimeError: …"; "" if it returned
    optimizer_step: int | None = None  # steps made before; None if unknown
    weights: int = 0  # how many the model has; 0 without a model
    buffers: int = 0
    grown: tuple[Growth, ...] = ()  # weights that are far larger than they were, the worst first
    repeated: bool = True  # False: with replay=True, a second run gave other results
    stage: int | None = None  # of a pipeline, counted from 0; None outside of one
    micro_batch: int | None = None  # of the pipeline's step, likewise
    # The first origin computed in other ways, a line each: in a larger dtype, in eager mode,
    # without the loss scale, on other samples. Ways that could not run, or would not fit, have no
    # line. Example: "in float32 it is finite (at most 2.63e+05): precision".
    why: tuple[str, ...] = ()
    quiet_faults: tuple[QuietFault, ...] = ()  # of the training so far, which made no NaN
    # Writes the first origin as a test; None if the report was read from a file.
    kept: Callable[..., Path] | None = field(default=None, compare=False, repr=False)
    # Makes a patch of the user's file; None likewise.
    patcher: Callable[[Report], str] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "\n".join([*self.verdict, "", self._frames_text])

    @property
    def _frames_text(self) -> str:
        where = [
            ("batch_number", self.batch_number),
            ("optimizer_step", self.optimizer_step),
            ("stage", self.stage),
            ("micro_batch", self.micro_batch),
            ("rank", self.rank),
        ]
        known = " ".join(f"{name}={number}" for name, number in where if number is not None)
        lines = [
            f"Detected {self._problem} during {known}",
            f"Last {len(self.frames)} {self._kind_of_frames}frames:",
            text.HEADER,
            *map(text.frame_text, self.frames),
        ]
        return "\n".join(lines)

    @property
    def verdict(self) -> list[str]:
        """What happened, in lines: each origin, what led to it, and its consequences."""
        lines: list[str] = []
        if self.grown:
            lines = [text.growth_line(self.grown)]
            lines += [f"  {line}" for line in text.fix_lines(self._fixes)]
        why = text.why_lines(self.why, self.origins, self.grown)
        for group in by_cause(self.origins):
            lines += text.group_lines(group, self._totals, with_fixes=not self.grown)
            lines, why = lines + why, []  # these answers are about the first origin
        if not self.repeated:
            lines.append(text.NOT_REPEATED)
        if self.error:
            lines.append(f"forward then raised {self.error}")
        lines += [text.absorbed_line(group) for group in by_cause(self.absorbed)]
        return lines + [f"note: {fault.line}" for fault in self.quiet_faults]

    @property
    def summary(self) -> str:
        """The text of the exception: the message, then the rest of the verdict.

        Example:
            >>> print(report.summary)
            batch 0: mul made inf (gated.py:11): overflow
              gated.py:11: hidden = torch.nn.functional.gelu(self.gate(x)) * self.up(x)
              at [0, 1]: 512.5 * 514.0 is 263425 in float64 (likewise in 35 more elements)
              fix: keep this operation in float32, or the model in bfloat16 (advice)
        """
        if not (self.grown or self.origins):
            return "\n".join([self.message, *self.verdict])
        return self._where + "\n".join(self.verdict)

    @property
    def message(self) -> str:
        """One line: rank, batch, optimizer step, operation, problem and the user's line.

        Blown-up weights come before the operation, because its overflow is only their effect.
        """
        growth = f"{text.growth_line(self.grown)}; " if self.grown else ""
        return f"{self._where}{growth}{self._headline}"

    @property
    def phase(self) -> str:
        """The phase of the first origin, see :attr:`Origin.phase`; ``""`` without an origin."""
        return self.origins[0].phase if self.origins else ""

    @property
    def fix(self) -> str:
        """What to do about the first origin: one or two lines, or ``""`` if unknown.

        Example:
            >>> report.fix
            'scale q before the product (exact)'
        """
        return "\n".join(map(str, self._fixes[: text.MOST_FIXES]))

    @property
    def one_line(self) -> str:
        """The message, the cause and the best fix: for logs, warnings and the end of a run."""
        first = self.origins[0] if self.origins else None
        if first is not None and first.is_lost_gradient:  # its message says what to do
            return self.message
        cause = "" if first is None else text.cause_text(first)
        return "; ".join([self.message + cause, *text.fix_lines(self._fixes[:1])])

    @property
    def _where(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}: "
        step = "" if self.optimizer_step is None else f", optimizer step {self.optimizer_step}"
        if self.micro_batch is not None:
            step += f", stage {self.stage}, micro-batch {self.micro_batch}"
        return f"{rank}batch {self.batch_number}{step}: "

    @property
    def _headline(self) -> str:
        if not self.origins:
            return "inf/nan detected"
        return group_headline(by_cause(self.origins)[0], self._totals)

    @property
    def _problem(self) -> str:
        is_underflow = {origin.problem for origin in self.origins} == {"underflow"}
        return "underflow" if is_underflow else "inf/nan"

    @property
    def _kind_of_frames(self) -> str:
        return "forward " if all(frame.phase == "forward" for frame in self.frames) else ""

    @property
    def _fixes(self) -> tuple[Fix, ...]:
        """The fixes for what the report begins with."""
        found = next((origin.fixes for origin in self.origins if not origin.follows), ())
        if not self.grown:
            return found
        of_form = (
            each
            for each in found[:1]
            if each.text.startswith(text.OF_FORM) or text.OF_INPUTS in each.text
        )
        rate = self.grown[0].rate
        return (*of_form, text.bounded_rate(rate) if rate else text.BLOWN_UP)

    def _note(self, origin: Origin) -> str:
        return text.because(replace(origin, fixes=()) if self.grown else origin)

    @property
    def _totals(self) -> dict[str, int]:
        return {"weight": self.weights, "buffer": self.buffers}

    @property
    def advice(self) -> str:
        """One line: where to look, or what was bad before any line ran, and the best fix."""
        origin = self.origins[0]
        source = origin.frame.source
        if self.grown or source is None or not origin.is_operation:  # that line only read the value
            return self.one_line
        why = f"({origin.message}{text.cause_text(origin)})"
        line = f"look at {source.file}:{source.line}: {source.code}  {why}"
        return "; ".join([line, *text.fix_lines(self._fixes[:1])])

    def to_table(self, tablefmt: str = "github") -> str:
        """The frames as one table with a row for each value.

        Args:
            tablefmt: any table format that tabulate knows, such as ``"github"``,
                ``"simple"``, ``"html"`` or ``"latex"``.
        """
        from tabulate import tabulate

        def escaped(cell: str) -> str:
            return cell.replace("|", r"\|") if tablefmt in ("github", "pipe") else cell

        rows = [
            tuple(map(escaped, (frame.name, kind, row.label, *text.cells(row), source)))
            for frame in self.frames
            for kind, source in [(frame.kind_and_phase, str(frame.source or ""))]
            for row in frame.rows
        ]
        headers = ("module", "kind", "value", "abs min", "abs max", "source")
        return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers; with phase, fix and verdict."""
        data = plain_data(replace(self, kept=None, patcher=None))
        del data["kept"], data["patcher"]
        more = {"phase": self.phase, "fix": self.fix, "verdict": self.verdict}
        return recorded("report", {**data, **more})

    def to_json(self, indent: int | None = None) -> str:
        """The report as strict JSON: NaN and infinities are the strings "nan", "inf", "-inf"."""
        return strict_json(self.to_dict(), indent)

    def reproduce(self, folder: str | os.PathLike[str], *, ranges_only: bool = False) -> Path:
        """Write the operation that the report blames as a failing test, and run it once.

        The test is ``test_<operation>.py``. Next to it is a file of operands, which ``torch.load``
        reads with ``weights_only=True``: the slice of the original operands with which the
        operation fails in the same way, with the simplest numbers that were found. Both need torch
        and pytest, but not fxguard.

        Args:
            folder: where to write; created if needed. Existing tests are kept.
            ranges_only: write random numbers of the same ranges instead of the model's own.

        Returns:
            The path of the test.

        Raises:
            FxguardError: when no operation is to blame, its operands are gone, it cannot be
                written as a call, or it does not fail by itself.
            OSError: when the folder cannot be written.

        Example:
            >>> try:
            ...     model(**batch)
            ... except fxguard.NonFiniteError as error:
            ...     error.report.reproduce("reproducers")
            PosixPath('reproducers/test_mul.py')
        """
        if self.kept is None:
            raise UsageError(
                "this report holds no operands; neither does any that was read from a file, nor "
                "one of an underflow, or of an optimizer's step"
            )
        # The rest of a summary contains single numbers of the model.
        story = self.one_line.split("; ") if ranges_only else self.summary.splitlines()
        return self.kept(folder, story, ranges_only=ranges_only)

    def patch(self) -> str:
        """The first fix that can be written into your own file, as a unified diff.

        Only a fix that is exact, or that was tried, becomes a patch. It changes one expression and
        keeps comments and layout. The lines above the diff name the fix, and say on what it was
        tried. ``patch -p1`` and ``git apply`` skip them. Nothing is written.

        Returns:
            The text of the diff.

        Raises:
            FxguardError: why there is none: no fix of the report rewrites one expression; the line
                is not in a file of yours, or was changed since it ran; or it is not certain which
                expression failed, or what it means.

        Example:
            >>> try:
            ...     model(**batch)
            ... except fxguard.NonFiniteError as error:
            ...     print(error.report.patch())
            fix: take logsigmoid(-x) instead of log(1 - sigmoid(x)) (exact)
            the same function and gradient in exact arithmetic; it was not run
            --- a/train.py
            +++ b/train.py
            @@ -9,3 +9,3 @@
             def loss(x, y):
                 p = torch.sigmoid(x)
            -    return -torch.log(1 - p).mean()  # of the others
            +    return -F.logsigmoid(-x).mean()  # of the others
        """
        if self.patcher is None:
            raise UsageError(
                "no patch: this report does not know the program; neither does any that was read "
                "from a file, nor one of an underflow"
            )
        return self.patcher(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the verdict, a chart, the modules, the frames.

        Args:
            path: path of the file; overwritten if it exists.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        where = [
            ("rank", self.rank),
            ("optimizer step", self.optimizer_step),
            ("stage", self.stage),
            ("micro-batch", self.micro_batch),
        ]
        known = [f"{name} {number}" for name, number in where if number is not None]
        blamed = {_place_of(origin.frame): origin for origin in self.origins}
        marked = {
            i: blamed[key]
            for i, frame in enumerate(self.frames)
            if (key := _place_of(frame)) in blamed
        }
        sheet = Sheet(
            str(self.batch_number),
            self.frames,
            verdict=self.verdict,
            marked=frozenset(marked),
            cause=next((i for i, origin in marked.items() if origin is self.origins[0]), None),
            notes={i: note for i, origin in marked.items() if (note := self._note(origin))},
        )
        meta = ", ".join([*known, f"the last {len(self.frames)} frames"])
        title = f"Detected {self._problem} in batch {self.batch_number}"
        return page(title, self.verdict, [sheet], meta=meta)

    def _display(self) -> Display:
        last = replace(self, frames=self.frames[-MOST_FRAMES:])
        return Display(
            self.verdict,
            healthy=False,
            below=self._frames_text,
            table=lambda: last.to_table("html"),
            of_table=f"The last {len(last.frames)} frames as a table",
            page=self._page,
            rows=sum(len(frame.rows) for frame in self.frames),
            name="report",
        )


def _place_of(frame: Frame) -> tuple[int, str, int, str]:
    """The position of a frame among those of a report."""
    return frame.batch_number, frame.phase, frame.index, frame.title
