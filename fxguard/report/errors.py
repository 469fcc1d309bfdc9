"""The exceptions that carry a record."""

from __future__ import annotations

from fxguard.errors import FxguardError
from fxguard.report.event import Event
from fxguard.report.report import Report

__all__ = ["HistoryEvent", "NonFiniteError", "NumericsError"]


class NonFiniteError(FxguardError, ValueError):
    """An inf or a NaN in a batch reached an output; with ``underflow=`` also an underflow.

    ``str(error)`` is :attr:`fxguard.types.Report.summary`: one line with the place, then
    the verdict.

    Attributes:
        report: the :class:`fxguard.types.Report` that was printed before this was raised.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, Report]]:
        return (type(self), (str(self), self.report))


class HistoryEvent(FxguardError):  # noqa: N818 - a name of the specification
    """The first event of a history, with ``stop_at_event=True``.

    Attributes:
        event: the :class:`fxguard.types.Event`, which was printed before this is raised.
    """

    def __init__(self, event: Event) -> None:
        super().__init__(event.headline)
        self.event = event

    def __reduce__(self) -> tuple[type[HistoryEvent], tuple[Event]]:
        return (type(self), (self.event,))


class NumericsError(FxguardError, AssertionError):
    """A numerical test failed.

    Attributes:
        report: the :class:`fxguard.types.Report` of the finding, None if nothing was bad.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NumericsError], tuple[str, Report | None]]:
        return (type(self), (str(self), self.report))
