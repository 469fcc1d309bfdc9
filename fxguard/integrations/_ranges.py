"""The ranges of chosen outputs as numbers with names, for whatever draws them over steps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fxguard.errors import UsageError
from fxguard.globs import matches
from fxguard.records import Frame, Row
from fxguard.trace.trace import Trace

__all__ = ["RANGES", "text_of", "write_batch", "write_trace"]

MOST_NAMES = 6  # that a message gives as examples

# How the names begin, by which charts are grouped: ``abs max/encoder.block.0:mul``.
RANGES = ("abs max", "abs min")

Write = Callable[[Mapping[str, float], int], None]  # numbers by name, and the step


def text_of(verdict: Sequence[str]) -> str:
    """The lines of a verdict as a text that can be encoded, whatever names a trace may hold."""
    return "\n".join(verdict).encode("utf-8", "backslashreplace").decode("utf-8")


def write_batch(
    write: Write, frames: Sequence[Frame], step: int, select: str | Iterable[str]
) -> int:
    """What the ``log_ranges`` of each integration does; a glob that selects nothing is a warning.

    Args:
        write: is called once with all numbers, or not at all where there are none.
        frames: of one batch.
        step: the position on the x axis.
        select: a glob, or several.

    Returns:
        How many numbers were written.
    """
    globs = _globs(select)
    for glob in _idle(globs, frames):
        # At the line that called the integration.
        warnings.warn(_nothing_selected(glob, frames), RuntimeWarning, stacklevel=3)
    return _write(write, frames, step, globs)


def write_trace(
    write: Write,
    write_verdict: Callable[[Sequence[str], int], None] | None,
    trace: Trace,
    select: str | Iterable[str],
) -> int:
    """What the ``log_trace`` of each integration does; a glob that selects nothing is an error.

    Args:
        write: as for :func:`write_batch`, called once for each batch.
        write_verdict: is called for each batch with a verdict, before its numbers are written;
            None where there is no place for a text.
        trace: whose batch numbers are the steps.
        select: a glob, or several.

    Returns:
        How many numbers were written.
    """
    globs = _globs(select)
    frames = [frame for batch in trace.batches for frame in batch.frames]
    for glob in _idle(globs, frames):
        raise UsageError(_nothing_selected(glob, frames))
    count = 0
    for batch in trace.batches:
        if batch.verdict and write_verdict is not None:
            write_verdict(batch.verdict, batch.number)
        count += _write(write, batch.frames, batch.number, globs)
    return count


def _globs(select: Any) -> list[str]:
    globs = [select] if isinstance(select, str) else select
    if isinstance(globs, Iterable):
        globs = list(globs)
        if globs and all(isinstance(glob, str) for glob in globs):
            return globs
    raise UsageError(f"select has to be a glob or a list of globs, got {select!r}")


def _names(glob: str, frame: Frame) -> bool:
    return matches(glob, frame.name, frame.kind)


def _idle(globs: list[str], frames: Sequence[Frame]) -> Iterator[str]:
    """The globs that select nothing, where there is something to select."""
    for glob in globs:
        if frames and not any(_names(glob, frame) for frame in frames):
            yield glob


def _write(write: Write, frames: Sequence[Frame], step: int, globs: list[str]) -> int:
    numbers: dict[str, float] = {}
    for frame, name, row in _outputs(frames):
        if row.abs_min is None or row.abs_max is None:
            continue
        if any(_names(glob, frame) for glob in globs):
            for kind, value in zip(RANGES, (row.abs_max, row.abs_min), strict=True):
                numbers[f"{kind}/{name}"] = value
    if numbers:
        write(numbers, step)
    return len(numbers)


def _outputs(frames: Sequence[Frame]) -> Iterator[tuple[Frame, str, Row]]:
    # Counted before anything is left out: a name does not depend on what else is selected, nor on
    # which outputs had a number in this batch.
    calls: Counter[str] = Counter()
    for frame in frames:
        title = _title(frame)
        calls[title] += 1
        if calls[title] > 1:
            title += f" {calls[title]}"
        for row in frame.outputs:
            is_only = row.label in ("output", "output[0]")
            yield frame, title if is_only else f"{title} {row.label}", row


def _title(frame: Frame) -> str:
    kind = frame.kind_and_phase
    return f"{frame.name}:{kind}" if frame.name else kind


def _nothing_selected(glob: str, frames: Sequence[Frame]) -> str:
    module = glob.partition(":")[0]
    near = [frame for frame in frames if fnmatchcase(frame.name, module)]
    titles = list(dict.fromkeys(map(_title, near or frames)))
    more = len(titles) - MOST_NAMES
    end = f" and {more} more" if more > 0 else ""
    where = "in these modules " if near else ""
    return f"{glob!r} selects nothing here: {where}there is {', '.join(titles[:MOST_NAMES])}{end}"
