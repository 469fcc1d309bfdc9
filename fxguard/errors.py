"""The exceptions that fxguard raises, except those that carry a report."""

from __future__ import annotations

__all__ = ["BatchLimitReached", "FxguardError", "InternalError", "UsageError"]


class FxguardError(Exception):
    """Base class of everything that fxguard raises on purpose."""


class UsageError(FxguardError, ValueError):
    """An argument or a call cannot work; nothing was changed."""


class InternalError(FxguardError):
    """fxguard's internal records are inconsistent. No model should cause this: please report it.

    Raised where continuing would show the numbers of another tensor. If the model's forward has
    raised, its error is raised instead, without a report.
    """


class BatchLimitReached(FxguardError, ValueError):  # noqa: N818 - a public name
    """The batch given as ``abort_after_batch_num`` has finished."""
