"""Spares TorchDynamo the texts for its logs in captures that nobody asked for: nobody reads them.

They take a fifth of the first call of a small model that breaks the graph. Who has asked for one of
these logs (``TORCH_LOGS``) still gets it.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15, but for the second; where one is
missing, its text is written):

- ``guards.profile_guard_manager``: times the guards of each graph, behind a flush of the cache.
- ``exc._extract_stack_with_positions``: lists the calls that lead to a capture, hundreds of them
  its own, for the message on a graph break.
- ``symbolic_convert.get_funcname``: finds the function of a line, by the tokens of its whole file.
- ``utils._get_dynamo_config_for_logging`` and the like: all settings as JSON, for each function
  that it looks at.
- ``convert_frame.CapturedTraceback``: the calls that lead to a capture, for two more messages.
- ``torch._logging._internal.trace_log``: what is written under ``TORCH_TRACE``. Without that, its
  handler goes when the first message comes.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch._dynamo import convert_frame, exc, guards, symbolic_convert, utils
from torch._logging._internal import trace_log

__all__ = ["leave_unwritten"]


# Each is a part of what is noted of every capture.
SETTINGS = (
    "_get_dynamo_config_for_logging",
    "_scrubbed_inductor_config_for_logging",
    "_compiler_config_for_logging",
    "_functorch_config_for_logging",
)


def leave_unwritten(is_quiet: Callable[[], bool]) -> None:
    """Let these texts be empty where nobody asked for a capture.

    Args:
        is_quiet: tells whether nobody asked for the capture of this thread.
    """
    logs: Any = symbolic_convert
    frames: Any = convert_frame

    def unless(*loggers: logging.Logger) -> Callable[[], bool]:
        return lambda: is_quiet() and not any(map(_is_read, loggers))

    _replace(guards, "profile_guard_manager", lambda: 0.0, unless(guards.guards_log))
    _replace(
        *(exc, "_extract_stack_with_positions", traceback.StackSummary),
        unless(logs.graph_break_log),
    )
    _replace(logs, "get_funcname", lambda: None, unless(logs.trace_call_log))
    for name in SETTINGS:
        _replace(utils, name, lambda: None, unless(trace_log))
    if hasattr(frames, "CapturedTraceback"):
        frames.CapturedTraceback = SimpleNamespace(extract=frames.CapturedTraceback.extract)
        _replace(
            *(frames.CapturedTraceback, "extract", _NoTraceback), unless(frames.log, trace_log)
        )


def _is_read(log: logging.Logger) -> bool:
    """Whether anybody gets the messages of a logger."""
    if log is trace_log:  # its level says nothing
        return any(handler.level <= logging.DEBUG for handler in log.handlers)
    return log.isEnabledFor(logging.DEBUG)


def _replace(
    owner: Any, name: str, nothing: Callable[[], Any], is_unread: Callable[[], bool]
) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def only_if_read(*args: Any, **kwargs: Any) -> Any:
        return nothing() if is_unread() else original(*args, **kwargs)

    setattr(owner, name, only_if_read)


class _NoTraceback:
    """In place of a ``CapturedTraceback``."""

    def format(self) -> list[str]:
        """No text."""
        return []

    def summary(self) -> traceback.StackSummary:
        """No calls."""
        return traceback.StackSummary()
