"""MLflow: ranges of chosen outputs, verdicts and pages, from a live loop or from a trace.

The user makes the run. mlflow is imported when something is logged, and nothing of torch is.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fxguard.history.history import History
from fxguard.integrations._ranges import text_of, write_batch, write_trace
from fxguard.records import Frame
from fxguard.report.display import page_of
from fxguard.report.report import Report
from fxguard.trace.trace import Trace

__all__ = ["Run", "log_history", "log_ranges", "log_report", "log_trace"]

# Limits of MLflow: what a name may hold and how long it is, the metrics of one request, and the
# length of a tag that every store takes.
NOT_IN_NAMES = re.compile(r"[^\w.\- ]+")
LONGEST_NAME = 230  # 250, less "abs max/" and a number at the end
MOST_AT_ONCE = 1000
LONGEST_TAG = 5000


class Run(Protocol):
    """The part of the run from ``mlflow.start_run()`` that is used here."""

    @property
    def info(self) -> Any:
        """Which run it is: ``run.info.run_id``."""


def log_report(run: Run, report: Report, step: int) -> None:
    """Log the verdict of a report, with cause and fix, and its page.

    Both are artifacts, ``fxguard/<step>/verdict.txt`` and ``fxguard/<step>/page.html``. The latter
    is the page that ``report.to_html`` writes. The run's tag ``fxguard`` is ``report.one_line``, so
    that runs can be searched by it.

    Args:
        run: what ``mlflow.start_run()`` returned.
        report: what was found, such as ``error.report``.
        step: of the training.

    Example:
        >>> except fxguard.NonFiniteError as error:
        ...     log_report(run, error.report, step)
        ...     raise
    """
    _write_verdict(run, report.verdict, step)
    _client().log_text(run.info.run_id, page_of(report), f"fxguard/{step}/page.html")
    _client().set_tag(run.info.run_id, "fxguard", text_of([report.one_line])[:LONGEST_TAG])


def log_ranges(
    run: Run, frames: Sequence[Frame], step: int, select: str | Iterable[str] = "*"
) -> int:
    """Log the smallest and the largest magnitude of the outputs of chosen frames as metrics.

    Names are those of :func:`fxguard.integrations.tensorboard.log_ranges`, reduced to characters
    that every MLflow store accepts: ``abs max/encoder.block.0.layer.1.DenseReluDense mul``, and for
    further outputs ``abs max/decoder split output_1``. A database stores an infinity as the largest
    number of float64.

    Args:
        run: what ``mlflow.start_run()`` returned.
        frames: of one batch, such as ``guard_of(model).frames()``. Without any, nothing is logged.
        step: of the metrics.
        select: a glob, or several, in the form of ``ignore``. The default logs two metrics for each
            output in the model.

    Returns:
        How many metrics were logged.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs; nothing is logged then.

    Warns:
        RuntimeWarning: when a glob selects nothing.

    Example:
        >>> with mlflow.start_run() as run:
        ...     for step, batch in enumerate(batches):
        ...         model(**batch)
        ...         frames = fxguard.guard_of(model).frames()
        ...         log_ranges(run, frames, step, "*.DenseReluDense:mul")
    """
    return write_batch(partial(_write, run), frames, step, select)


def log_trace(run: Run, trace: Trace, select: str | Iterable[str] = "*") -> int:
    """Log every batch of a trace, as :func:`log_ranges` does, its verdicts, and its page.

    The step is the batch number. The page is the artifact ``fxguard/trace.html``, or
    ``fxguard/trace-<rank>.html`` where the trace has a rank.

    Args:
        run: what ``mlflow.start_run()`` returned.
        trace: what :func:`fxguard.load_trace` read.
        select: as for :func:`log_ranges`.

    Returns:
        How many metrics were logged.

    Raises:
        UsageError: when ``select`` is no glob and no list of globs, or one of them selects nothing
            in any batch; nothing is logged then.

    Example:
        >>> log_trace(run, fxguard.load_trace("traces/T5-0.jsonl"), "decoder.*")
    """
    count = write_trace(partial(_write, run), partial(_write_verdict, run), trace, select)
    if trace.batches:
        name = "trace" if trace.rank is None else f"trace-{trace.rank}"
        _client().log_text(run.info.run_id, page_of(trace), f"fxguard/{name}.html")
    return count


def log_history(run: Run, history: History) -> int:
    """Log the events of a training run, and its page.

    An event is the artifact ``fxguard/<step>/event.txt`` of the step of its cause. The page is
    ``fxguard/history.html``. The run's tag ``fxguard.event`` is the first event in one line.

    Args:
        run: what ``mlflow.start_run()`` returned.
        history: what :func:`fxguard.load_history` read, also while the training runs.

    Returns:
        How many events were logged.

    Example:
        >>> log_history(run, fxguard.load_history("history"))
    """
    for event in history.events:
        file = f"fxguard/{event.step}/event.txt"
        _client().log_text(run.info.run_id, text_of(event.verdict), file)
    if history.events:
        line = text_of([history.events[0].headline])[:LONGEST_TAG]
        _client().set_tag(run.info.run_id, "fxguard.event", line)
    if history.steps:
        _client().log_text(run.info.run_id, page_of(history), "fxguard/history.html")
    return len(history.events)


def _write_verdict(run: Run, verdict: Sequence[str], step: int) -> None:
    _client().log_text(run.info.run_id, text_of(verdict), f"fxguard/{step}/verdict.txt")


def _write(run: Run, numbers: Mapping[str, float], step: int) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [Metric(name, value, now, step) for name, value in _accepted(numbers)]
    for start in range(0, len(metrics), MOST_AT_ONCE):
        part = metrics[start : start + MOST_AT_ONCE]
        _client().log_batch(run.info.run_id, metrics=part)


def _accepted(numbers: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The numbers under names that MLflow takes, each of them once."""
    uses: Counter[str] = Counter()
    for tag, value in numbers.items():
        kind, _, name = tag.partition("/")
        name = name.replace(":", " ").replace("]", "")
        name = NOT_IN_NAMES.sub("_", name)[-LONGEST_NAME:]
        uses[f"{kind}/{name}"] += 1
        count = uses[f"{kind}/{name}"]
        yield f"{kind}/{name}" if count == 1 else f"{kind}/{name} {count}", value


def _client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()
