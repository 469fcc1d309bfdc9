"""Gives each report what :meth:`Report.patch` needs: numbers, and the code that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fxguard.findings import Fix
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.evidence import Evidence
from fxguard.guard.listeners import Listener
from fxguard.patch._in_graph import instead_in
from fxguard.patch.fix_trials import RunRest, tried_first
from fxguard.patch.made import Patcher
from fxguard.report.report import Report
from fxguard.rerun.rest import Instead, Rest, backward_with, rest_with
from fxguard.source.running_code import codes_of
from fxguard.verdict.first_gradient import FirstGradient
from fxguard.verdict.first_origin import FirstOrigin

__all__ = ["Patches"]


class Patches(Listener):
    """Keeps the numbers at the first bad element. They are few, and no tensors."""

    def reports(self, report: Report, first: FirstOrigin) -> Report:
        """The report, which can be asked for a patch."""
        report = _with(report, [first.evidence])
        rest = None if report.error else _rest_of(first)  # there is no output
        return tried_first(report, first.evidence, first.operation, rest)

    def reports_backward(self, report: Report, first: FirstGradient) -> Report:
        """The same of a backward."""
        seen = None if first.began is None else first.began.seen
        report = _with(report, [] if seen is None else [seen.forward, seen.gradient])
        if seen is None:
            return report
        rest = _rest_of_backward(first) if seen.forward is None else None
        return tried_first(report, seen.forward or seen.gradient, rest=rest)

    def reports_rest(self, report: Report) -> Report:
        """The same of an optimizer's step, whose numbers at one element are not kept."""
        return _with(report, [])


def _rest_of(first: FirstOrigin) -> RunRest | None:
    """Runs the rest of a batch with a fix."""
    if first.key.is_between_graphs or first.blame.step is None:
        return None
    step = first.flow.steps[first.blame.step]
    run = first.batch.run_of(first.key)
    if run is None or step.inside or not step.node:
        return None

    def rest(fix: Fix) -> Rest | None:
        instead = _instead(fix, run.graph_module, step.node)
        if instead is None:
            return None
        with where_theirs_may_raise():  # then it was not run, and nothing is said
            return rest_with(first.batch, first.flow, first.key.event, instead)
        return None

    return rest


def _rest_of_backward(first: FirstGradient) -> RunRest | None:
    """Runs the backward of a graph with a fix."""
    began = first.began
    edge = None if began is None else began.backward.edge_of(began.blame)
    if began is None or edge is None or edge[0].place[0]:
        return None
    kept, name = began.kept, edge[0].place[1]

    def rest(fix: Fix) -> Rest | None:
        instead = _instead(fix, kept.event.graph_module, name)
        if instead is None:
            return None
        with where_theirs_may_raise():  # likewise
            found = backward_with(kept, instead, began.scale)
            return replace(found, is_whole=len(first.kept) == 1)
        return None

    return rest


def _instead(fix: Fix, graph_module: GraphModule, name: str) -> Instead | None:
    """What a fix computes in the place of an operation of a graph."""
    if fix.kind == "tried":
        return None
    for rule in (*fix.rewrites, *fix.tries):
        with where_theirs_may_raise():  # a rule that cannot be read so
            if found := instead_in(rule, graph_module, name, of=fix.of, at=fix.at):
                return found
    return None


def _with(report: Report, seen: Sequence[Evidence | None]) -> Report:
    evidence = next((each for each in seen if each is not None), None)
    origin = report.origins[0]
    lines = {origin.frame.source, *(fix.at for fix in origin.fixes)} - {None}
    codes = tuple(code for line in lines if line is not None for code in codes_of(line))
    return replace(report, patcher=Patcher(evidence, codes))
