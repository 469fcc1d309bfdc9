"""fxguard names the operation that first overflowed or turned into NaN.

    model = fxguard.instrument(model)     # in place; then torch.compile it, if you like
    model(**batch)                        # raises fxguard.NonFiniteError, with the report
    fxguard.remove(model)                 # back to exactly what it was

Watching a model:
    instrument, remove                    every operation, forward and backward; undo it
    watch                                 the same for whole steps: loss, backward, optimizer
    guard_of(model)                       its Guard: frames(), coverage(), selftest(), last_report
    backend, insert_checks, frames_of     for torch.compile(backend=...), and for graphs of your own
    dependencies                          whether outputs depend on other samples, later positions,
                                          padding, and which operation leaks
    compare, diff, load_trace             two models, two batches, a file that trace_to wrote
    record                                one batch as a folder, which compare takes, too
    DebugUnderflowOverflow                the class of transformers, as a drop-in
    detect_overflow, get_abs_min_max      one tensor

Before a switch to float16 or bfloat16:
    forecast                              what would fail there; its plan(): what to keep in float32
    error_budget                          how wrong the output is there, and because of which lines
    keep_float32                          keeps it in float32, without an edit of the model

After a training run:
    load_history                          what was measured in each step, and why the loss jumped

What it says:
    NonFiniteError                        str(error) is the verdict, error.report the Report, which
                                          has to_table(), to_json(), to_html()
    types                                 of everything above: Report, Frame, Row, Guard, ...
    logging.getLogger("fxguard")          one line for each report

More: fxguard.testing, fxguard.integrations, `fxguard --help`, and help(fxguard.instrument).
Importing this package does not import torch: a name does, when it is first used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fxguard.given_out import give_out

if TYPE_CHECKING:
    from fxguard import types as types
    from fxguard.api.backend import backend as backend
    from fxguard.api.compare import compare as compare
    from fxguard.api.diff import diff as diff
    from fxguard.api.instrument import guard_of as guard_of
    from fxguard.api.instrument import instrument as instrument
    from fxguard.api.keep_float32 import keep_float32 as keep_float32
    from fxguard.api.watch import watch as watch
    from fxguard.batch.frames import frames_of as frames_of
    from fxguard.budget.budget import error_budget as error_budget
    from fxguard.debug_utils import DebugUnderflowOverflow as DebugUnderflowOverflow
    from fxguard.debug_utils import detect_overflow as detect_overflow
    from fxguard.debug_utils import get_abs_min_max as get_abs_min_max
    from fxguard.dependence.dependencies import dependencies as dependencies
    from fxguard.errors import BatchLimitReached as BatchLimitReached
    from fxguard.errors import FxguardError as FxguardError
    from fxguard.forecasting.forecast import forecast as forecast
    from fxguard.history.history import load_history as load_history
    from fxguard.install.remove import remove as remove
    from fxguard.passes.checks import insert_checks as insert_checks
    from fxguard.recording.record import record as record
    from fxguard.report.errors import HistoryEvent as HistoryEvent
    from fxguard.report.errors import NonFiniteError as NonFiniteError
    from fxguard.trace.file import load_trace as load_trace

__version__ = "0.2.0.dev0"

# Reports are printed as well: without a handler of the user's, logging must not print them twice.
logging.getLogger("fxguard").addHandler(logging.NullHandler())

_HOME = {
    "BatchLimitReached": "errors",
    "DebugUnderflowOverflow": "debug_utils",
    "FxguardError": "errors",
    "HistoryEvent": "report.errors",
    "NonFiniteError": "report.errors",
    "backend": "api.backend",
    "compare": "api.compare",
    "dependencies": "dependence.dependencies",
    "detect_overflow": "debug_utils",
    "diff": "api.diff",
    "error_budget": "budget.budget",
    "forecast": "forecasting.forecast",
    "frames_of": "batch.frames",
    "get_abs_min_max": "debug_utils",
    "guard_of": "api.instrument",
    "insert_checks": "passes.checks",
    "instrument": "api.instrument",
    "keep_float32": "api.keep_float32",
    "load_history": "history.history",
    "load_trace": "trace.file",
    "record": "recording.record",
    "remove": "install.remove",
    "types": "types",
    "watch": "api.watch",
}

__all__ = [*sorted(_HOME), "__version__"]


if not TYPE_CHECKING:  # a type checker would take every name for one of ours
    __getattr__, __dir__ = give_out(__name__, _HOME)
