"""Spares TorchDynamo the texts for its logs in captures that nobody asked for: nobody reads them.

They take a fifth of the first call of a small model that breaks the graph. Who has asked for one of
these logs (``TORCH_LOGS``) still gets it.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15, but for the second; where one is
missing, its text is written):

- ``guards.profile_guard_manager``: times the guards of each graph, behind a flush of the cache.
- ``exc._extract_stack_with_positions``: lists the calls that lead to a capture, hundreds of them
  its own, for the message on a graph break.
- ``symbolic_convert.get_funcname``: finds the function of a line, by the tokens of its whole file.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch._dynamo import exc, guards, symbolic_convert

__all__ = ["leave_unwritten"]


def leave_unwritten(is_quiet: Callable[[], bool]) -> None:
    """Let these texts be empty where nobody asked for a capture.

    Args:
        is_quiet: tells whether nobody asked for the capture of this thread.
    """
    logs: Any = symbolic_convert
    guards_log: logging.Logger = guards.guards_log
    _replace(guards, "profile_guard_manager", lambda: 0.0, is_quiet, guards_log)
    _replace(
        exc, "_extract_stack_with_positions", traceback.StackSummary, is_quiet, logs.graph_break_log
    )
    _replace(logs, "get_funcname", lambda: None, is_quiet, logs.trace_call_log)


def _replace(
    module: ModuleType,
    name: str,
    nothing: Callable[[], Any],
    is_quiet: Callable[[], bool],
    log: logging.Logger,
) -> None:
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def only_if_read(*args: Any) -> Any:
        if is_quiet() and not log.isEnabledFor(logging.DEBUG):
            return nothing()
        return original(*args)

    setattr(module, name, only_if_read)
