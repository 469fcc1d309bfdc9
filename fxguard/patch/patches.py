"""Gives each report what :meth:`Report.patch` needs: numbers, and the code that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxguard.graph.evidence import Evidence
from fxguard.guard.listeners import Listener
from fxguard.patch.fix_trials import tried_first
from fxguard.patch.made import Patcher
from fxguard.report.report import Report
from fxguard.source.running_code import codes_of
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin

__all__ = ["Patches"]


class Patches(Listener):
    """Keeps the numbers at the first bad element. They are few, and no tensors."""

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report, which can be asked for a patch."""
        return tried_first(_with(report, [first.evidence]), first.evidence, first.operation)

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """The same of a backward."""
        seen = None if first.began is None else first.began.seen
        report = _with(report, [] if seen is None else [seen.forward, seen.gradient])
        return report if seen is None else tried_first(report, seen.forward or seen.gradient)

    def reports_rest(self, report: Report) -> Report:
        """The same of an optimizer's step, whose numbers at one element are not kept."""
        return _with(report, [])


def _with(report: Report, seen: Sequence[Evidence | None]) -> Report:
    evidence = next((each for each in seen if each is not None), None)
    origin = report.origins[0]
    lines = {origin.frame.source, *(fix.at for fix in origin.fixes)} - {None}
    codes = tuple(code for line in lines if line is not None for code in codes_of(line))
    return replace(report, patcher=Patcher(evidence, codes))
