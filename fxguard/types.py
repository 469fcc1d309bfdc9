"""The types of what fxguard gives and takes, for annotations and for ``isinstance``.

    def told(report: fxguard.types.Report) -> None: ...

Of a guarded model:
    Guard                                 what guard_of returns; watch gives it to its block
    Report, Origin, Climb, Growth, Fix    what was found in a batch, where it came from, what to do
    Frame, Row, Source                    one operation or module, one value of it, one line of code
    SelfTest                              of Guard.selftest
    CompilerBackend                       what backend returns
    Plan                                  what insert_checks returns, beside the graph

Of a trace file, and of two things that were compared:
    Trace, TracedBatch, Fingerprint       of load_trace
    Diff, BatchDiff, Match, RowPair       of diff
    UsualChange                           of diff with a history
    Comparison, Compared, Apart           of compare
    RunComparison, RunDivergence          of compare with folders of record
    OneSide, OutputsApart, RoundingShare  an operation of one run, outputs, and what rounds

Of a training run:
    History, Track, Series, Event         of load_history, and of its get()
    QuietFault                            of Guard.quiet_faults

Of what outputs depend on:
    Dependencies, Dependence, PathStep    of dependencies

Of a model in another dtype:
    Forecast, ForecastRow, PrecisionPlan  of forecast, and of its plan()
    ErrorBudget, ErrorShare, Choice       of error_budget

Of options:
    InstrumentOptions                     for a function that passes them on: Unpack[...]
    OnDetect, Granularity                 what on_detect and granularity take

Only Guard and CompilerBackend import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxguard.given_out import give_out

if TYPE_CHECKING:
    from fxguard.api.backend import CompilerBackend as CompilerBackend
    from fxguard.comparison.elements import Apart as Apart
    from fxguard.comparison.elements import Compared as Compared
    from fxguard.comparison.result import Comparison as Comparison
    from fxguard.findings import Climb as Climb
    from fxguard.findings import Fix as Fix
    from fxguard.findings import Growth as Growth
    from fxguard.findings import Origin as Origin
    from fxguard.guard.for_users import Guard as Guard
    from fxguard.history.history import History as History
    from fxguard.history.history import Series as Series
    from fxguard.history.track import Track as Track
    from fxguard.options import Granularity as Granularity
    from fxguard.options import InstrumentOptions as InstrumentOptions
    from fxguard.options import OnDetect as OnDetect
    from fxguard.plan.plan import Plan as Plan
    from fxguard.records import Fingerprint as Fingerprint
    from fxguard.records import Frame as Frame
    from fxguard.records import Row as Row
    from fxguard.records import Source as Source
    from fxguard.report.dependencies import Dependence as Dependence
    from fxguard.report.dependencies import Dependencies as Dependencies
    from fxguard.report.dependencies import PathStep as PathStep
    from fxguard.report.error_budget import Choice as Choice
    from fxguard.report.error_budget import ErrorBudget as ErrorBudget
    from fxguard.report.error_budget import ErrorShare as ErrorShare
    from fxguard.report.event import Event as Event
    from fxguard.report.forecast import Forecast as Forecast
    from fxguard.report.forecast import ForecastRow as ForecastRow
    from fxguard.report.precision_plan import PrecisionPlan as PrecisionPlan
    from fxguard.report.quiet_fault import QuietFault as QuietFault
    from fxguard.report.report import Report as Report
    from fxguard.report.run_comparison import OneSide as OneSide
    from fxguard.report.run_comparison import OutputsApart as OutputsApart
    from fxguard.report.run_comparison import RoundingShare as RoundingShare
    from fxguard.report.run_comparison import RunComparison as RunComparison
    from fxguard.report.run_comparison import RunDivergence as RunDivergence
    from fxguard.report.self_test import SelfTest as SelfTest
    from fxguard.trace.batch_diff import BatchDiff as BatchDiff
    from fxguard.trace.batch_diff import Match as Match
    from fxguard.trace.batch_diff import RowPair as RowPair
    from fxguard.trace.diff import Diff as Diff
    from fxguard.trace.trace import Trace as Trace
    from fxguard.trace.trace import TracedBatch as TracedBatch
    from fxguard.trace.usual_change import UsualChange as UsualChange

_HOME = {
    "Apart": "comparison.elements",
    "BatchDiff": "trace.batch_diff",
    "Choice": "report.error_budget",
    "Climb": "findings",
    "Compared": "comparison.elements",
    "Comparison": "comparison.result",
    "CompilerBackend": "api.backend",
    "Dependence": "report.dependencies",
    "Dependencies": "report.dependencies",
    "Diff": "trace.diff",
    "ErrorBudget": "report.error_budget",
    "ErrorShare": "report.error_budget",
    "Event": "report.event",
    "Fingerprint": "records",
    "Fix": "findings",
    "Forecast": "report.forecast",
    "ForecastRow": "report.forecast",
    "Frame": "records",
    "Granularity": "options",
    "Growth": "findings",
    "Guard": "guard.for_users",
    "History": "history.history",
    "InstrumentOptions": "options",
    "Match": "trace.batch_diff",
    "OnDetect": "options",
    "Origin": "findings",
    "PathStep": "report.dependencies",
    "Plan": "plan.plan",
    "PrecisionPlan": "report.precision_plan",
    "QuietFault": "report.quiet_fault",
    "Report": "report.report",
    "Row": "records",
    "RowPair": "trace.batch_diff",
    "RunDivergence": "report.run_comparison",
    "OneSide": "report.run_comparison",
    "OutputsApart": "report.run_comparison",
    "RoundingShare": "report.run_comparison",
    "RunComparison": "report.run_comparison",
    "SelfTest": "report.self_test",
    "Series": "history.history",
    "Source": "records",
    "Trace": "trace.trace",
    "TracedBatch": "trace.trace",
    "Track": "history.track",
    "UsualChange": "trace.usual_change",
}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker would take every name for one of ours
    __getattr__, __dir__ = give_out(__name__, _HOME)
