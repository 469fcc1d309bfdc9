"""Keeps what fails from hiding a report or ending a healthy program: all broad handlers.

Second runs and looks at numbers call code that is not ours: operations of the user's and of
torch's, containers, streams. Such code may raise anything, for reasons of its own::

    try:
        result = ran.run(*args)
    except theirs() as error:  # no such kernel, or a fixed dtype
        raise NotJudged(...) from error

This also catches a mistake of our own, but not in our tests: there it is raised. So no other file
has ``except Exception``. Knows nothing of torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["or_else", "theirs", "where_theirs_may_raise"]

RAISES = False  # True in fxguard's own tests, which must see our mistakes

HERE = f"{Path(__file__).parent}{os.sep}"
MISTAKES = (AssertionError, AttributeError, KeyError, NameError)  # if a line of ours raises one

Answer = TypeVar("Answer")


def theirs() -> tuple[type[Exception], ...]:
    """What a handler catches, whose comment says what may raise, and why.

    Python asks when there is an exception: all of them, and in our tests all but our mistakes.
    """
    return _caught(sys.exc_info()[1])


class where_theirs_may_raise:  # noqa: N801 - it stands behind `with`
    """A block that just ends where ``except theirs()`` would catch the exception."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(error, _caught(error))


def or_else(default: Answer, rule: Callable[..., Answer], *args: Any) -> Answer:
    """The answer of a rule of ours. The default if the rule raises, but not in our tests."""
    try:
        return rule(*args)
    except Exception:
        if RAISES:
            raise
        return default


def _caught(error: BaseException | None) -> tuple[type[Exception], ...]:
    return () if RAISES and _is_mistake(error) else (Exception,)


def _is_mistake(error: BaseException | None) -> bool:
    """Whether a line of this package raised the error, and not what that line has called."""
    if not isinstance(error, MISTAKES) or error.__traceback__ is None:
        return False
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename.startswith(HERE)
