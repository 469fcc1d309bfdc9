"""Hides TorchDynamo's messages from users who did not ask for a compiler.

Code that it fails to capture runs in Python, as it would without fxguard, and
:meth:`Guard.coverage` says so in one line. TorchDynamo itself would raise, or write a traceback of
a hundred lines for each function.

The parts of TorchDynamo in use (present in torch 2.11 to 2.15):

- the loggers of its modules, and ``utils.warn_once``.
- ``config.suppress_errors``: whether what it fails to capture runs in Python. Where its value is
  a ``ContextVar`` it is set there: ``config.patch`` takes some µs more, at each forward.
- ``utils.counters["graph_break"]``: how often it broke a graph, and why.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch._dynamo.utils as dynamo_utils
from torch._dynamo import config

__all__ = ["quietly"]

# The first reports what could not be captured, the second that a number was taken from a tensor.
LOGGERS = ("torch._dynamo.convert_frame", "torch._dynamo.variables.tensor")

_here = threading.local()  # `quiet`: whether a capture may begin that nobody asked for


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in which TorchDynamo gives no advice, and leaves failing code to Python."""
    _keep_quiet()
    setting = config._config["suppress_errors"]  # type: ignore[attr-defined] # added at import
    override = getattr(setting, "user_override", None)
    if not isinstance(override, ContextVar):  # another version
        function = config.patch(suppress_errors=True)(function)
        override = ContextVar("unused")

    def call(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_here, "quiet", False)
        _here.quiet, suppressed = True, override.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            override.reset(suppressed)
            _here.quiet = before

    return call


@functools.cache
def _keep_quiet() -> None:
    """Teach TorchDynamo, once, when to give no advice."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_asked_for)
    warn_once = dynamo_utils.warn_once

    @functools.wraps(warn_once)
    def warn(*args: Any, **kwargs: Any) -> None:
        if not getattr(_here, "quiet", False):
            warn_once(*args, **kwargs)

    dynamo_utils.warn_once = warn


def _is_asked_for(record: logging.LogRecord) -> bool:
    logger = logging.getLogger(record.name)
    if not getattr(_here, "quiet", False) or logger.isEnabledFor(logging.INFO):
        return True
    if record.exc_info and record.exc_info[0] is not None:
        dynamo_utils.counters["graph_break"][f"{record.exc_info[0].__name__} in TorchDynamo"] += 1
        return False
    return record.name != LOGGERS[1]
