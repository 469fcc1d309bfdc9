"""The exceptions that fxguard raises, but those that carry a report."""

from __future__ import annotations

__all__ = ["BatchLimitReached", "FxguardError", "InternalError", "UsageError"]


class FxguardError(Exception):
    """Base class of everything that fxguard raises on purpose."""


class UsageError(FxguardError, ValueError):
    """An argument or a call that cannot work; nothing was changed."""


class InternalError(FxguardError):
    """fxguard's own books do not agree. No model causes this: please report it.

    Raised where going on would show the number of another tensor. Where the model's forward has
    raised, its error goes out instead, without a report.
    """


class BatchLimitReached(FxguardError, ValueError):  # noqa: N818 - a public name
    """The batch given as ``abort_after_batch_num`` has finished."""
