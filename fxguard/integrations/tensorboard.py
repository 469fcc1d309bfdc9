"""TensorBoard: ranges of chosen outputs, and verdicts, from a live loop or from a trace.

The user makes the writer; nothing of TensorBoard is imported here, and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from fxguard.history.history import History
from fxguard.integrations._ranges import write_batch, write_trace
from fxguard.records import Frame
from fxguard.report.report import Report
from fxguard.trace.trace import Trace

__all__ = [
    "ScalarWriter",
    "TextWriter",
    "log_history",
    "log_ranges",
    "log_report",
    "log_trace",
]


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
    return write_batch(partial(_write, writer), frames, step, select)


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
    write_verdict = partial(_write_verdict, writer) if isinstance(writer, TextWriter) else None
    return write_trace(partial(_write, writer), write_verdict, trace, select)


def log_history(writer: TextWriter, history: History) -> int:
    """Write the events of a training run as texts, each at the step of its cause.

    Args:
        writer: anything with ``add_text(tag, text, step)``.
        history: what :func:`fxguard.load_history` read, also while the training runs.

    Returns:
        How many events were written.

    Example:
        >>> log_history(writer, fxguard.load_history("history"))
    """
    for event in history.events:
        _write_verdict(writer, event.verdict, event.step)
    return len(history.events)


def _write(writer: ScalarWriter, numbers: Mapping[str, float], step: int) -> None:
    for tag, value in numbers.items():
        writer.add_scalar(tag, value, step)
