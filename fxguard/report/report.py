"""Records to text, tables and JSON. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxguard.records import Frame, Growth, Origin, Row
from fxguard.report.page import Sheet, page

__all__ = ["Report", "frame_text", "row_text", "strict_json"]

HEADER = f"{'abs min':8} {'abs max':8} metadata"
MOST_NAMES = 3  # of weights that hold the same
INDENT = " " * 18  # the width of two numbers and the blanks around them


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in one batch: the frames that led to it, and where it came from.

    ``str(report)`` is the text that is printed: the verdict, then the frames.

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
    rank: int | None = None  # of this process in the default process group; None without one
    absorbed: tuple[Origin, ...] = ()  # origins whose bad values reached no output
    error: str = ""  # what forward raised after that, "RuntimeError: …"; "" when it returned
    optimizer_step: int | None = None  # steps made before; None where nobody said
    weights: int = 0  # how many the model has; 0 where there is no model
    buffers: int = 0
    grown: tuple[Growth, ...] = ()  # weights that are far larger than they were, the worst first
    repeated: bool = True  # False: replay=True ran a graph again and could not repeat what it made

    def __str__(self) -> str:
        where = [("batch_number", self.batch_number), ("optimizer_step", self.optimizer_step)]
        said = [f"{name}={n}" for name, n in [*where, ("rank", self.rank)] if n is not None]
        lines = [
            *self.verdict,
            "",
            f"Detected inf/nan during {' '.join(said)}",
            f"Last {len(self.frames)} forward frames:",
            HEADER,
        ]
        lines += [frame_text(frame) for frame in self.frames]
        return "\n".join(lines)

    @property
    def verdict(self) -> list[str]:
        """What happened, in lines: each origin, what led to it, and what came of it."""
        lines = [*self._growth(), *self._told()]
        if not self.repeated:
            lines.append(
                "a second run of the graph did not repeat this: the bad values were seen where "
                "they left the graph, and where they came from is not known; instrument without "
                "replay=True to find out"
            )
        if self.error:
            lines.append(f"forward then raised {self.error}")
        return lines + [f"note: {o.message}, but it reached no output" for o in self.absorbed]

    @property
    def summary(self) -> str:
        """The message, and the rest of the verdict below it: what the exception says.

        Example:
            >>> print(report.summary)
            batch 0: mul made inf (gated.py:11)
              gated.py:11: hidden = torch.nn.functional.gelu(self.gate(x)) * self.up(x)
              it read input[0] up to 7.07e+02, input[1] up to 7.69e+02
              it needs 2.634e+05, 4.02 times what float16 holds (65504)
        """
        said = list(self._growth())
        rest = self.verdict[len(said) + bool(self.origins) :]
        return "\n".join([self.message, *said, *rest])

    def _growth(self) -> Iterable[str]:
        """Of weights that a learning rate has blown up: what overflowed is what came of it."""
        if self.grown:
            worst, more = self.grown[0], len(self.grown) - 1
            others = f"; {more} more weight{'s' if more > 1 else ''} grew like it" if more else ""
            yield (
                f"{worst.name} up to {worst.now:.2g}, it was {worst.before:.2g} in batch "
                f"{worst.batch_number}{others}"
            )

    def _told(self) -> Iterable[str]:
        for origins in self._told_together():
            yield from self._lines(origins)

    def _told_together(self) -> list[list[Origin]]:
        """The origins in order, weights that hold the same together; buffers likewise."""
        groups: dict[object, list[Origin]] = {}
        for origin in self.origins:
            held = None if origin.follows else origin.standing
            key = (held, origin.problem) if held else origin
            groups.setdefault(key, []).append(origin)
        return list(groups.values())

    def _lines(self, origins: list[Origin]) -> Iterable[str]:
        if len(origins) == 1:
            yield from _origin_lines(origins[0])
            return
        yield self._headline(origins)
        first = origins[0]
        name = first.what.removeprefix(f"{first.standing} ")
        yield from list(_origin_lines(dataclasses.replace(first, row=name)))[1:]

    def _headline(self, origins: list[Origin]) -> str:
        """``40 of 80 weights hold NaN: 0.weight, 0.bias, 1.weight and 37 more``."""
        first = origins[0]
        if len(origins) == 1:
            return first.message
        held = first.standing
        count = f"{len(origins)}"
        if total := self.weights if held == "weight" else self.buffers:
            count = f"all {total}" if total == len(origins) else f"{count} of {total}"
        names = [origin.what.removeprefix(f"{held} ") for origin in origins]
        more = len(names) - MOST_NAMES
        listed = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        problem = "NaN" if first.problem == "nan" else "inf"
        return f"{count} {held}s hold {problem}: {listed}"

    @property
    def message(self) -> str:
        """One line: rank, batch, optimizer step, operation, problem and the user's line."""
        rank = "" if self.rank is None else f"rank {self.rank}: "
        told = self._told_together()
        what = self._headline(told[0]) if told else "inf/nan detected"
        step = "" if self.optimizer_step is None else f", optimizer step {self.optimizer_step}"
        return f"{rank}batch {self.batch_number}{step}: {what}"

    @property
    def advice(self) -> str:
        """One line that says where to look: the user's line, or what was bad before any ran."""
        origin = self.origins[0]
        source = origin.frame.source
        if source is None or not origin.is_operation:  # that line only read it
            return self.message
        return f"look at {source.file}:{source.line}: {source.code}  ({origin.message})"

    def to_table(self, tablefmt: str = "github") -> str:
        """The frames as one table, a row for each value.

        Args:
            tablefmt: any table format that tabulate knows, such as ``"github"``,
                ``"simple"``, ``"html"`` or ``"latex"``.
        """
        from tabulate import tabulate

        def escaped(text: str) -> str:
            return text.replace("|", r"\|") if tablefmt in ("github", "pipe") else text

        rows = [
            tuple(map(escaped, (frame.name, frame.kind, row.label, *_cells(row), source)))
            for frame in self.frames
            for source in [str(frame.source or "")]
            for row in frame.rows
        ]
        headers = ("module", "kind", "value", "abs min", "abs max", "source")
        return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers."""
        data: dict[str, Any] = _plain(dataclasses.asdict(self))
        return data

    def to_json(self, indent: int | None = None) -> str:
        """The report as strict JSON: NaN and infinities are the strings "nan", "inf", "-inf"."""
        return strict_json(self.to_dict(), indent)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: the verdict, a chart, the modules, the frames.

        Args:
            path: of the file; written over.
        """
        where = [("rank", self.rank), ("optimizer step", self.optimizer_step)]
        said = [f"{name} {number}" for name, number in where if number is not None]
        blamed = {(o.frame.batch_number, o.frame.index, o.frame.title) for o in self.origins}
        marked = (
            i
            for i, frame in enumerate(self.frames)
            if (frame.batch_number, frame.index, frame.title) in blamed
        )
        sheet = Sheet(str(self.batch_number), self.frames, self.verdict, frozenset(marked))
        meta = ", ".join([*said, f"the last {len(self.frames)} frames"])
        text = page(
            f"Detected inf/nan in batch {self.batch_number}", self.verdict, [sheet], meta=meta
        )
        Path(path).write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        text = html.escape("\n".join(self.verdict))
        return f"<pre>{text}</pre>{self.to_table('html')}"


def frame_text(frame: Frame) -> str:
    """One frame in the classic format: a title line, then a line for each row."""
    title = f"{INDENT}{frame.name} {frame.kind}"
    if frame.is_op and frame.source is not None:
        title += f"  # {frame.source}"
    return "\n".join([title, *map(row_text, frame.rows)])


def row_text(row: Row) -> str:
    """One row in the classic format.

    Example:
        >>> row_text(Row("output", 5.53e-05, 4.85e+02))
        '5.53e-05 4.85e+02 output'
    """
    if row.abs_min is None or row.abs_max is None:
        return f"{row.note or 'None':>17} {row.label}"
    return f"{row.abs_min:8.2e} {row.abs_max:8.2e} {row.label}"


def _cells(row: Row) -> tuple[str, str]:
    if row.abs_min is None or row.abs_max is None:
        return (row.note, row.note)
    return (f"{row.abs_min:.2e}", f"{row.abs_max:.2e}")


def _origin_lines(origin: Origin) -> Iterable[str]:
    if origin.follows:
        yield f"then {origin.message} of it"
        return
    yield origin.message
    if origin.is_operation:
        if origin.frame.source is not None:
            yield f"  {origin.frame.source}"
        yield from _what_it_read(origin)
    if origin.nan_count is not None:
        largest = "none" if origin.largest_finite is None else f"{origin.largest_finite:.4g}"
        yield (
            f"  {origin.row}: {origin.nan_count} NaN, {origin.posinf_count} +inf, "
            f"{origin.neginf_count} -inf of {origin.numel} elements; "
            f"largest finite magnitude {largest}; first at {list(origin.first_index or ())}"
        )
    if origin.climb:
        yield "  where the magnitude grew most on the way:"
        for climb in origin.climb:
            place = f"  ({climb.source.place})" if climb.source is not None else ""
            yield f"    {climb.before:.2e} -> {climb.after:.2e}  {climb.title}{place}"
    if origin.spread_count:
        more = origin.spread_count - len(origin.spread)
        names = ", ".join(origin.spread) + (f" and {more} more" if more > 0 else "")
        end = "; the model returned it" if origin.reached_output else ""
        yield f"  it spread to {names}{end}"


def _what_it_read(origin: Origin) -> Iterable[str]:
    ranges = [
        f"{row.label} up to {row.abs_max:.2e}"
        for row in origin.frame.rows
        if row.label.startswith("input") and row.abs_max is not None and not row.is_bad
    ]
    if ranges:
        yield f"  it read {', '.join(ranges)}"
    for row in origin.autocast:
        limit = "" if origin.limit is None else f", which holds {_number(origin.limit)}"
        yield f"  autocast casts {row.label} up to {row.abs_max:.2e} to {origin.dtype}{limit}"
    if origin.masked_row:
        yield "  row fully masked: it read a row in which every element is -inf"
    if origin.problem != "inf" or origin.limit is None:
        return
    limit = f"{origin.dtype} holds {_number(origin.limit)}"
    if origin.needed is None:
        yield f"  {limit}"
    elif math.isinf(origin.needed):
        yield "  it is infinite in float64 too"
    elif origin.needed > origin.limit:
        ratio = f"{origin.needed / origin.limit:.3g}"
        times = f"{'just over' if ratio == '1' else ratio + ' times'} what {origin.dtype} holds"
        yield f"  it needs {origin.needed:.4g}, {times} ({_number(origin.limit)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value < 1e6 else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def strict_json(data: Any, indent: int | None) -> str:
    """Plain data as JSON that every reader takes: NaN and infinities as strings."""
    return json.dumps(_strict(data), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return list(map(_strict, value)) if isinstance(value, list) else value
