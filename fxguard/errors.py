"""The exceptions that fxguard raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxguard.report import Report

__all__ = ["BatchLimitReached", "FxguardError", "NonFiniteError", "NumericsError"]


class FxguardError(Exception):
    """Base class of everything that fxguard raises on purpose."""


class UsageError(FxguardError, ValueError):
    """An argument or a call that cannot work; nothing was changed."""


class InternalError(FxguardError):
    """fxguard's own books do not agree. No model causes this: please report it.

    Raised where going on would show the number of another tensor. Where the model's forward has
    raised, its error goes out instead, without a report.
    """


class NonFiniteError(FxguardError, ValueError):
    """A batch held an inf or a NaN that reached an output.

    ``str(error)`` is :attr:`fxguard.Report.summary`: one line that says where, then the verdict.

    Attributes:
        report: the :class:`fxguard.Report` that was printed before this was raised.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, Report]]:
        return (type(self), (str(self), self.report))


class NumericsError(FxguardError, AssertionError):
    """A test of numerics has failed.

    Attributes:
        report: the :class:`fxguard.Report` of what was found, None where nothing was bad.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NumericsError], tuple[str, Report | None]]:
        return (type(self), (str(self), self.report))


class BatchLimitReached(FxguardError, ValueError):  # noqa: N818 - a public name
    """The batch given as ``abort_after_batch_num`` has finished."""
