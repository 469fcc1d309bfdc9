"""fxguard names the operation that first overflowed or turned into NaN.

    model = fxguard.instrument(model)     # in place; then torch.compile it, if you like
    model(**batch)                        # raises fxguard.NonFiniteError, with the report
    fxguard.remove(model)                 # back to exactly what it was

Watching a model:
    instrument, remove                    every operation of its forward; undo it
    guard_of(model)                       its Guard: frames(), coverage(), selftest(), last_report
    backend, insert_checks, frames_of     for torch.compile(backend=...), and for graphs of your own
    compare, diff, load_trace             two models, two batches, a file that trace_to wrote
    DebugUnderflowOverflow                the class of transformers, as a drop-in
    detect_overflow, get_abs_min_max      one tensor

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

    from fxguard.compare_models import compare as compare
    from fxguard.compiler_backend import backend as backend
    from fxguard.debug_utils import DebugUnderflowOverflow as DebugUnderflowOverflow
    from fxguard.debug_utils import detect_overflow as detect_overflow
    from fxguard.debug_utils import get_abs_min_max as get_abs_min_max
    from fxguard.errors import BatchLimitReached as BatchLimitReached
    from fxguard.errors import FxguardError as FxguardError
    from fxguard.errors import NonFiniteError as NonFiniteError
    from fxguard.frames import frames_of as frames_of
    from fxguard.guard import Guard as Guard
    from fxguard.guard import guard_of as guard_of
    from fxguard.guard import instrument as instrument
    from fxguard.guard import remove as remove
    from fxguard.insert import insert_checks as insert_checks
    from fxguard.plan import Plan as Plan
    from fxguard.records import Climb as Climb
    from fxguard.records import Frame as Frame
    from fxguard.records import Origin as Origin
    from fxguard.records import Row as Row
    from fxguard.records import SelfTest as SelfTest
    from fxguard.records import Source as Source
    from fxguard.report import Report as Report
    from fxguard.trace_diff import Diff as Diff
    from fxguard.trace_diff import diff as diff
    from fxguard.trace_file import load_trace as load_trace
    from fxguard.traces import Trace as Trace
    from fxguard.traces import TracedBatch as TracedBatch

__version__ = "0.1.0"

# What goes there is printed as well: where nobody has set up logging it is said once, not twice.
logging.getLogger("fxguard").addHandler(logging.NullHandler())

_HOME = {
    "BatchLimitReached": "errors",
    "Climb": "records",
    "Diff": "trace_diff",
    "DebugUnderflowOverflow": "debug_utils",
    "Frame": "records",
    "FxguardError": "errors",
    "Guard": "guard",
    "NonFiniteError": "errors",
    "Origin": "records",
    "Plan": "plan",
    "Report": "report",
    "Row": "records",
    "SelfTest": "records",
    "Source": "records",
    "Trace": "traces",
    "TracedBatch": "traces",
    "backend": "compiler_backend",
    "compare": "compare_models",
    "detect_overflow": "debug_utils",
    "diff": "trace_diff",
    "frames_of": "frames",
    "get_abs_min_max": "debug_utils",
    "guard_of": "guard",
    "insert_checks": "insert",
    "instrument": "guard",
    "load_trace": "trace_file",
    "remove": "guard",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxguard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fxguard.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # `help(fxguard)` would print the whole of every class, over a thousand lines.
    asks: FrameType | None = sys._getframe(1)
    while asks is not None and asks.f_globals.get("__name__") == "inspect":
        asks = asks.f_back
    if asks is not None and asks.f_globals.get("__name__") == "pydoc":
        return []
    return list(__all__)
