"""The first origin of a report, while what led to it is still there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.keys import Key
from fxguard.findings import Origin
from fxguard.forgiving import or_else
from fxguard.graph.evidence import Evidence
from fxguard.graph.one_operation import OneOperation
from fxguard.plan.blame import Blame
from fxguard.report.report import Report
from fxguard.rerun.other_ways import Outcome

__all__ = ["FirstOrigin", "OnReport", "with_additions"]


@dataclass(frozen=True, kw_only=True)
class FirstOrigin:
    """The first origin of a report on a batch that is still open."""

    batch: Batch
    flow: DataFlow
    blame: Blame
    origin: Origin  # its description
    evidence: Evidence | None = None  # of its operation, in float64 throughout its graph
    operation: OneOperation | None = None  # with its operands, if a second run has shown them
    eager: Outcome | None = None  # its value in eager mode, likewise

    @property
    def key(self) -> Key:
        """The key of the bad value."""
        return self.flow.keys[self.blame.value]


# Adds to a report what a tool knows of its first origin.
OnReport = Callable[[Report, FirstOrigin], Report]
First = TypeVar("First")


def with_additions(
    report: Report, first: First, additions: Iterable[Callable[[Report, First], Report]]
) -> Report:
    """The report with what each tool adds. A tool that fails adds nothing."""
    for add in additions:
        report = or_else(report, add, report, first)
    return report
