"""Weights & Biases: ranges of chosen outputs, verdicts and pages, from a live loop or from a trace.

The user makes the run. wandb is imported when a page is logged, and nothing of torch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from fxguard.forgiving import theirs
from fxguard.history.history import History
from fxguard.integrations._ranges import RANGES, text_of, write_batch, write_trace
from fxguard.records import Frame
from fxguard.report.display import page_of
from fxguard.report.report import Report
from fxguard.trace.trace import Trace

__all__ = ["Run", "log_history", "log_ranges", "log_report", "log_trace"]

STEP = "fxguard/step"  # the x axis of the charts

_with_axis: WeakSet[Any] = WeakSet()  # runs that have been told so


class Run(Protocol):
    """The part of the run from ``wandb.init()`` that is used here."""

    @property
    def step(self) -> int:
        """The step of the next row."""

    def log(self, data: dict[str, Any], step: int | None = None) -> Any:
        """Write a row."""

    def define_metric(
        self, name: str, step_metric: str | None = None, *, hidden: bool | None = None
    ) -> Any:
        """Choose the x axis of a chart."""


def log_report(run: Run, report: Report, step: int) -> None:
    """Log the verdict of a report, with cause and fix, and its page.

    ``fxguard/verdict`` is a text. W&B shows it in the run's summary and as a column of the table of
    runs. ``fxguard/page`` is the page that ``report.to_html`` writes, as a ``wandb.Html``.

    Args:
        run: what ``wandb.init()`` returned.
        report: what was found, such as ``error.report``.
        step: the position on the x axis.

    Example:
        >>> except fxguard.NonFiniteError as error:
        ...     log_report(run, error.report, step)
        ...     raise
    """
    _write(run, {"fxguard/verdict": text_of(report.verdict), **_page(report)}, step)


def log_ranges(
    run: Run, frames: Sequence[Frame], step: int, select: str | Iterable[str] = "*"
) -> int:
    """Log the smallest and the largest magnitude of the outputs of chosen frames.

    Names are those of :func:`fxguard.integrations.tensorboard.log_ranges`, such as ``abs
    max/encoder.block.0.layer.1.DenseReluDense:mul``. The x axis of their charts is
    ``fxguard/step``. They are logged in the row of ``step``, or in a row of their own once the
    run's own step is beyond it.

    Args:
        run: what ``wandb.init()`` returned.
        frames: of one batch, such as ``guard_of(model).frames()``. Without any, nothing is logged.
        step: the position on the x axis.
        select: a glob, or several, in the form of ``ignore``. The default logs two numbers for each
            output in the model.

    Returns:
        How many numbers were logged.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs; nothing is logged then.

    Warns:
        RuntimeWarning: when a glob selects nothing.

    Example:
        >>> for step, batch in enumerate(batches):
        ...     model(**batch)
        ...     frames = fxguard.guard_of(model).frames()
        ...     log_ranges(run, frames, step, "*.DenseReluDense:mul")
        ...     run.log({"loss": loss}, step=step)
    """
    return write_batch(partial(_write, run), frames, step, select)


def log_trace(run: Run, trace: Trace, select: str | Iterable[str] = "*") -> int:
    """Log every batch of a trace, as :func:`log_ranges` does, its verdicts, and its page.

    The step is the batch number. A trace may be logged at any time after its training.

    Args:
        run: what ``wandb.init()`` returned.
        trace: what :func:`fxguard.load_trace` read.
        select: as for :func:`log_ranges`.

    Returns:
        How many numbers were logged.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs, or one of them selects nothing
            in any batch; nothing is logged then.

    Example:
        >>> log_trace(run, fxguard.load_trace("traces/T5-0.jsonl"), "decoder.*")
    """

    def write_verdict(verdict: Sequence[str], step: int) -> None:
        _write(run, {"fxguard/verdict": text_of(verdict)}, step)

    count = write_trace(partial(_write, run), write_verdict, trace, select)
    if trace.batches:
        _write(run, _page(trace), trace.batches[-1].number)
    return count


def log_history(run: Run, history: History) -> int:
    """Log the events of a training run, each at the step of its cause, and the page of the run.

    ``fxguard/event`` is a text, ``fxguard/page`` the page that ``history.to_html`` writes.

    Args:
        run: what ``wandb.init()`` returned.
        history: what :func:`fxguard.load_history` read, also while the training runs.

    Returns:
        How many events were logged.

    Example:
        >>> log_history(run, fxguard.load_history("history"))
    """
    for event in history.events:
        _write(run, {"fxguard/event": text_of(event.verdict)}, event.step)
    if history.steps:
        _write(run, _page(history), history.steps[-1])
    return len(history.events)


def _page(result: Report | Trace | History) -> dict[str, Any]:
    import wandb

    return {"fxguard/page": wandb.Html(page_of(result), inject=False)}  # it has a style of its own


def _write(run: Run, data: Mapping[str, Any], step: int) -> None:
    if run not in _with_axis:
        run.define_metric(STEP, hidden=True)
        for kind in RANGES:
            run.define_metric(f"{kind}/*", step_metric=STEP)
        _with_axis.add(run)
    row = {**data, STEP: step}
    if _takes(run, step):
        run.log(row, step=step)
    else:
        run.log(row)  # at the end


def _takes(run: Run, step: int) -> bool:
    """Whether W&B still takes a row of that step; of one that lies behind it drops it."""
    try:
        return step >= run.step
    except theirs():  # a run that several processes share has none; one that is busy says none
        return False
