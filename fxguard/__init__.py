"""fxguard names the operation that first overflowed or turned into NaN.

    model = fxguard.instrument(model)     # in place; then torch.compile it, if you like
    model(**batch)                        # raises fxguard.NonFiniteError, with the report
    fxguard.remove(model)                 # back to exactly what it was

Watching a model:
    instrument, remove                    every operation, forward and backward; undo it
    watch                                 the same for whole steps: loss, backward, optimizer
    guard_of(model)                       its Guard: frames(), coverage(), selftest(), last_report
    backend, insert_checks, frames_of     for torch.compile(backend=...), and for graphs of your own
    compare, diff, load_trace             two models, two batches, a file that trace_to wrote
    DebugUnderflowOverflow                the class of transformers, as a drop-in
    detect_overflow, get_abs_min_max      one tensor

Before a switch to float16 or bfloat16:
    forecast                              what would fail there; its plan(): what to keep in float32
    keep_float32                          keeps it in float32, without an edit of the model

What it says:
    NonFiniteError                        str(error) is the verdict, error.report the Report
    Report, Frame, Row, Origin, Source    plain data: to_table(), to_json(), to_html()
    logging.getLogger("fxguard")          one line for each report

More: fxguard.testing, fxguard.integrations, `fxguard --help`, and help(fxguard.instrument).
Importing this package does not import torch: a name does, when it is first used.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from fxguard.batch.frames import frames_of as frames_of
    from fxguard.comparison.compare import compare as compare
    from fxguard.comparison.elements import Compared as Compared
    from fxguard.comparison.result import Comparison as Comparison
    from fxguard.debug_utils import DebugUnderflowOverflow as DebugUnderflowOverflow
    from fxguard.debug_utils import detect_overflow as detect_overflow
    from fxguard.debug_utils import get_abs_min_max as get_abs_min_max
    from fxguard.errors import BatchLimitReached as BatchLimitReached
    from fxguard.errors import FxguardError as FxguardError
    from fxguard.findings import Climb as Climb
    from fxguard.findings import Origin as Origin
    from fxguard.findings import SelfTest as SelfTest
    from fxguard.forecasting.forecast import forecast as forecast
    from fxguard.forecasting.keep_float32 import keep_float32 as keep_float32
    from fxguard.guard.backend import backend as backend
    from fxguard.guard.guard import Guard as Guard
    from fxguard.guard.instrument import guard_of as guard_of
    from fxguard.guard.instrument import instrument as instrument
    from fxguard.guard.instrument import remove as remove
    from fxguard.guard.watch import watch as watch
    from fxguard.passes.checks import insert_checks as insert_checks
    from fxguard.plan.plan import Plan as Plan
    from fxguard.records import Frame as Frame
    from fxguard.records import Row as Row
    from fxguard.records import Source as Source
    from fxguard.report.errors import NonFiniteError as NonFiniteError
    from fxguard.report.forecast import Forecast as Forecast
    from fxguard.report.precision_plan import PrecisionPlan as PrecisionPlan
    from fxguard.report.report import Report as Report
    from fxguard.trace.diff import Diff as Diff
    from fxguard.trace.diff import diff as diff
    from fxguard.trace.file import load_trace as load_trace
    from fxguard.trace.trace import Trace as Trace
    from fxguard.trace.trace import TracedBatch as TracedBatch

__version__ = "0.2.0.dev0"

# Reports are printed as well: without a handler of the user's, logging must not print them twice.
logging.getLogger("fxguard").addHandler(logging.NullHandler())

_HOME = {
    "BatchLimitReached": "errors",
    "Climb": "findings",
    "Compared": "comparison.elements",
    "Comparison": "comparison.result",
    "Diff": "trace.diff",
    "DebugUnderflowOverflow": "debug_utils",
    "Forecast": "report.forecast",
    "Frame": "records",
    "FxguardError": "errors",
    "Guard": "guard.guard",
    "NonFiniteError": "report.errors",
    "Origin": "findings",
    "Plan": "plan.plan",
    "PrecisionPlan": "report.precision_plan",
    "Report": "report.report",
    "Row": "records",
    "SelfTest": "findings",
    "Source": "records",
    "Trace": "trace.trace",
    "TracedBatch": "trace.trace",
    "backend": "guard.backend",
    "compare": "comparison.compare",
    "detect_overflow": "debug_utils",
    "diff": "trace.diff",
    "forecast": "forecasting.forecast",
    "frames_of": "batch.frames",
    "get_abs_min_max": "debug_utils",
    "guard_of": "guard.instrument",
    "insert_checks": "passes.checks",
    "instrument": "guard.instrument",
    "keep_float32": "forecasting.keep_float32",
    "load_trace": "trace.file",
    "remove": "guard.instrument",
    "watch": "guard.watch",
}

__all__ = [*sorted(_HOME), "__version__"]


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'fxguard' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"fxguard.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    # Otherwise `help(fxguard)` would print every class in full: more than a thousand lines.
    asks: FrameType | None = sys._getframe(1)
    while asks is not None and asks.f_globals.get("__name__") == "inspect":
        asks = asks.f_back
    if asks is not None and asks.f_globals.get("__name__") == "pydoc":
        return []
    return list(__all__)
