"""Adds to each report what its first origin is under other conditions."""

from __future__ import annotations

from dataclasses import replace

from fxguard.guard.listeners import Listener
from fxguard.report.report import Report
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin
from fxguard.why._backward import why_of_backward, why_of_compiled
from fxguard.why._forward import why_of

__all__ = ["Reasons"]


class Reasons(Listener):
    """Computes the first origin of a report in other ways."""

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report, with :attr:`~fxguard.report.report.Report.why`."""
        return replace(report, why=why_of(first, report.grown))

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """The same of a backward."""
        began = first.began
        if began is not None:
            with first.gather(began.kept.freed_weights()):
                return replace(report, why=why_of_backward(began, first.origin, first.loss_scale))
        if first.was_healthy:
            return replace(report, why=why_of_compiled(first.kept, first.most))
        return report
