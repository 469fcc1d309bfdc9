"""TensorBoard: ranges of chosen outputs, and verdicts, from a live loop or from a trace.

The user makes the writer; nothing of TensorBoard is imported here, and nothing of torch.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from fxguard import globs
from fxguard.errors import UsageError
from fxguard.records import Frame, Row
from fxguard.report.report import Report
from fxguard.trace.trace import Trace

__all__ = ["ScalarWriter", "TextWriter", "log_ranges", "log_report", "log_trace"]

MOST_NAMES = 6  # that a message gives as examples


class ScalarWriter(Protocol):
    """The one method that a writer needs; ``torch.utils.tensorboard.SummaryWriter`` has it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Write one number."""


@runtime_checkable
class TextWriter(Protocol):
    """The method that a verdict needs; ``torch.utils.tensorboard.SummaryWriter`` has it, too."""

    def add_text(self, tag: str, text_string: str, global_step: int, /) -> Any:
        """Write a text, which is shown as Markdown."""


def log_report(writer: TextWriter, report: Report, step: int) -> None:
    """Write the verdict of a report, with cause and fix, as the text ``fxguard``.

    Args:
        writer: anything with ``add_text(tag, text, step)``.
        report: what was found, such as ``error.report``.
        step: the position on the x axis.

    Example:
        >>> except fxguard.NonFiniteError as error:
        ...     log_report(writer, error.report, step)
        ...     raise
    """
    _write_verdict(writer, report.verdict, step)


def _write_verdict(writer: TextWriter, verdict: Sequence[str], step: int) -> None:
    text = "".join(f"    {line}\n" for line in verdict)  # Markdown shows it as it is
    writer.add_text("fxguard", text, step)


def log_ranges(
    writer: ScalarWriter,
    frames: Sequence[Frame],
    step: int,
    select: str | Iterable[str] = "*",
) -> int:
    """Write the smallest and the largest magnitude of the outputs of chosen frames as scalars.

    A tag begins with ``abs max/`` or ``abs min/``, by which TensorBoard groups charts. Module and
    operation follow as in a glob: ``abs max/encoder.block.0.layer.1.DenseReluDense:mul``. Further
    outputs add their label, ``…:split output[1]``. Operations that run again in the same module
    are counted, ``…:mul 2``. So tags are unique in a batch, and equal in batches that run the same
    operations. Infinities and NaN are written as they are, and TensorBoard marks them. Outputs
    without a number are left out.

    Args:
        writer: anything with ``add_scalar(tag, value, step)``. TensorBoard's keeps float32:
            beyond its range it shows infinities and zeros.
        frames: of one batch, such as ``guard_of(model).frames()``. Without any, nothing is
            written.
        step: the position on the x axis.
        select: a glob, or several, in the form of ``ignore``: ``"decoder.*"`` for modules and all
            that runs in them, ``"*.SelfAttention:log"`` for one operation there. The default
            writes two scalars for each output in the model.

    Returns:
        How many scalars were written.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs; nothing is written then.

    Warns:
        RuntimeWarning: when a glob selects nothing. It is no error, since a batch may leave out a
            module, an expert or a dropped layer, and writing scalars should not end a training.

    Example:
        >>> for step, batch in enumerate(batches):
        ...     model(**batch)
        ...     frames = fxguard.guard_of(model).frames()
        ...     log_ranges(writer, frames, step, "*.DenseReluDense:mul")
    """
    globs = _globs(select)
    for glob in _idle(globs, frames):
        warnings.warn(_nothing_selected(glob, frames), RuntimeWarning, stacklevel=2)
    return _write(writer, frames, step, globs)


def log_trace(writer: ScalarWriter, trace: Trace, select: str | Iterable[str] = "*") -> int:
    """Write every batch of a trace, as :func:`log_ranges` does, and its verdict where it has one.

    The step is the batch number, which is always there and never twice; several batches share an
    optimizer step where gradients are accumulated.

    Args:
        writer: as for :func:`log_ranges`; verdicts need ``add_text``, and are left out without.
        trace: what :func:`fxguard.load_trace` read.
        select: as for :func:`log_ranges`.

    Returns:
        How many scalars were written.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs, or one of them selects nothing
            in any batch; nothing is written then.

    Example:
        >>> log_trace(writer, fxguard.load_trace("traces/T5-0.jsonl"), "decoder.*")
    """
    globs = _globs(select)
    frames = [frame for batch in trace.batches for frame in batch.frames]
    for glob in _idle(globs, frames):
        raise UsageError(_nothing_selected(glob, frames))
    for batch in trace.batches:
        if batch.verdict and isinstance(writer, TextWriter):
            _write_verdict(writer, batch.verdict, batch.number)
    return sum(_write(writer, batch.frames, batch.number, globs) for batch in trace.batches)


def _globs(select: Any) -> list[str]:
    globs = [select] if isinstance(select, str) else select
    if isinstance(globs, Iterable):
        globs = list(globs)
        if globs and all(isinstance(glob, str) for glob in globs):
            return globs
    raise UsageError(f"select has to be a glob or a list of globs, got {select!r}")


def _names(glob: str, frame: Frame) -> bool:
    return globs.matches(glob, frame.name, frame.kind)


def _idle(globs: list[str], frames: Sequence[Frame]) -> Iterator[str]:
    """The globs that select nothing, where there is something to select."""
    for glob in globs:
        if frames and not any(_names(glob, frame) for frame in frames):
            yield glob


def _write(writer: ScalarWriter, frames: Sequence[Frame], step: int, globs: list[str]) -> int:
    written = 0
    for frame, name, row in _outputs(frames):
        if row.abs_min is None or row.abs_max is None:
            continue
        if any(_names(glob, frame) for glob in globs):
            writer.add_scalar(f"abs max/{name}", row.abs_max, step)
            writer.add_scalar(f"abs min/{name}", row.abs_min, step)
            written += 2
    return written


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
