"""Hides TorchDynamo's messages from users who did not ask for a compiler.

Code that it fails to capture runs in Python, as it would without fxguard, and
:meth:`Guard.coverage` says so in one line. TorchDynamo itself would raise, or write a traceback of
a hundred lines for each function.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- the loggers of its modules and of those that it captures with, and ``utils.warn_once``.
- ``CompileContext.current_compile_id()``: whether this thread captures now.
- ``callback_handler``: called before and after each capture.
- ``config.suppress_errors``: whether what it fails to capture runs in Python.
- ``guards.warnings``: with what it warns of Python 3.13.0, at each capture.
- ``utils.counters["graph_break"]``: how often it broke a graph, and why.
"""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch._dynamo import guards
from torch._dynamo.callback import callback_handler

from fxguard.capture.long_captures import capture_begins, capture_ends
from fxguard.capture.settings import known, with_settings
from fxguard.capture.unread import leave_unwritten
from fxguard.torch_names import CompileContext

__all__ = ["DROPPING", "captured", "captures_quietly"]

# The second spares it a text for a log on each object that a graph changes; torch 2.11 lacks it.
# The third has each graph tell a profiler when it begins, with twenty calls of Python's.
SETTINGS = known(
    {
        "suppress_errors": True,
        "side_effect_replay_policy": "silent",
        "record_runtime_overhead": False,
    }
)

# The first reports what could not be captured, the second that a number was taken from a tensor.
LOGGERS = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor")

# Loggers of these packages also tell of operations that fail on the tensors of a capture. Python
# runs such an operation again, and its own error is the one that counts.
CAPTURING = (
    *("torch._dynamo", "torch._subclasses", "torch._functorch", "torch._refs", "torch._decomp"),
    *("torch._prims", "torch._prims_common", "torch._library", "torch._meta_registrations"),
    *("torch._export", "torch._guards", "torch._higher_order_ops", "torch._inductor", "torch.fx"),
    "torch.utils",  # of what is imported meanwhile, such as torchao
)

DROPPING: set[object] = set()  # those who drop the warnings that are given in a capture

_before: list[bool] = []  # whether torch repeated its warnings, to restore after a capture
# Whether a capture may begin that is fxguard's, and whether it is one that nobody asked for.
_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)
_is_quiet: ContextVar[bool] = ContextVar("_is_quiet", default=False)


def captures_quietly() -> bool:
    """Whether this thread captures now, and nobody asked for it."""
    return _is_quiet.get() and CompileContext.current_compile_id() is not None


def captured(
    function: Callable[..., Any], settings: Mapping[str, Any], *, quietly: bool
) -> Callable[..., Any]:
    """A function that TorchDynamo captures for fxguard.

    Args:
        function: the function.
        settings: settings of TorchDynamo for it.
        quietly: whether TorchDynamo gives no advice, and leaves failing code to Python.
    """
    _keep_quiet()
    if not quietly:
        return with_settings(function, settings, {_is_ours: True})
    ours = {_is_ours: True, _is_quiet: True}
    return with_settings(function, {**settings, **SETTINGS}, ours, _hear_of_captures)


def _hear_of_captures() -> None:
    if _capture_begins not in callback_handler.start_callbacks:  # torch._dynamo.reset()
        callback_handler.register_start_callback(_capture_begins)
        callback_handler.register_end_callback(_capture_ends)


@functools.cache
def _keep_quiet() -> None:
    """Teach TorchDynamo, once, when to give no advice."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_asked_for)
    warn_once = dynamo_utils.warn_once

    @functools.wraps(warn_once)
    def warn(*args: Any, **kwargs: Any) -> None:
        if not _is_quiet.get():
            warn_once(*args, **kwargs)

    dynamo_utils.warn_once = warn
    leave_unwritten(_is_quiet.get)
    setattr(guards, "warnings", _WarningsOfGuards("warnings"))  # noqa: B010 - mypy knows no such name


class _WarningsOfGuards(types.ModuleType):
    """The module ``warnings`` for TorchDynamo's guards, which warn of Python 3.13.0.

    The setting ``issue_3_13_0_warning`` does more than its name says: without it the guards of that
    Python no longer see that an attribute of a module has changed.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, *args: Any, **kwargs: Any) -> None:
        """Warn as usual, but not in a capture of fxguard."""
        if not (_is_ours.get() and category is RuntimeWarning):
            warnings.warn(message, category, *args, **{"stacklevel": 2, **kwargs})


def _capture_begins(_: Any) -> None:
    """Called before a capture, in its thread; captures that overlap count as one."""
    if not _is_quiet.get():
        return
    capture_begins()
    _filter_loggers(len(logging.root.manager.loggerDict))
    if DROPPING:  # what torch warns of only once in a process is still due when it runs
        _before.append(torch.is_warn_always_enabled())
        torch.set_warn_always(True)


@functools.lru_cache(maxsize=1)
def _filter_loggers(number: int) -> None:
    """Let loggers that have been made tell nothing of captures; done once for their number."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(CAPTURING) and name not in LOGGERS:
            logging.getLogger(name).addFilter(_is_of_others)


def _capture_ends(_: Any) -> None:
    """Called after a capture, perhaps in another thread than before it."""
    capture_ends()
    if _before:
        torch.set_warn_always(_before.pop())


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a message is about something else than a capture that nobody asked for."""
    return not captures_quietly() or logging.getLogger(record.name).isEnabledFor(logging.INFO)


def _is_asked_for(record: logging.LogRecord) -> bool:
    logger = logging.getLogger(record.name)
    if not _is_quiet.get() or logger.isEnabledFor(logging.INFO):
        return True
    if record.exc_info and record.exc_info[0] is not None:
        dynamo_utils.counters["graph_break"][f"{record.exc_info[0].__name__} in TorchDynamo"] += 1
        return False
    return record.name != LOGGERS[1]
