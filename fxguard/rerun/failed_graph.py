"""Reruns a graph that raised, up to the raising operation, to see what that had read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fxguard.batch.events import GraphRun
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.measure import traceable
from fxguard.plan.plan import FramePlan, RowPlan
from fxguard.records import Role
from fxguard.rerun.at_checks import AtChecks
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk
from fxguard.source.lines import source_of_trace

__all__ = ["run_until_it_raises"]


def run_until_it_raises(run: GraphRun) -> GraphRun:
    """The statistics of a graph up to where it raised, and the operation where it stopped."""
    checks = run.plan.checks
    statistics = torch.full((len(checks), 2), traceable.NOT_RUN, dtype=torch.float64)

    def visit(walk: Walk, slot: int, value: Any) -> None:
        if not (walk.repeats and not bool(torch.isfinite(statistics[slot, 1]))):
            statistics[slot] = torch.tensor([float(x) for x in traceable.abs_min_max(value)])

    look = _UntilItRaises(list(enumerate(checks)), visit)
    try:
        Start(run, to_the_end=False, draws_itself=True).again(look)
    except theirs():  # raised like the first run; where it stopped is the question
        walk, look.walk = look.walk, None  # or each would keep the other alive
        if walk is not None:
            run = replace(run, stopped_at=tuple(_read_by(walk, run)[0]))
            run = replace(run, raised=_frame_of(walk.innermost, run))
    # These are the numbers of a run that drew for itself, and so do all that follow.
    return replace(run, measured=statistics, draws=None)


class _UntilItRaises(AtChecks):
    """Shows the values at all checks, and remembers where the run is."""

    walk: Walk | None = None  # the graph that runs, not a body

    def begins(self, walk: Walk) -> None:
        self.walk = self.walk or walk


def _frame_of(second: Walk, run: GraphRun) -> FramePlan | None:
    """The frame of the operation that raised: what it had read."""
    node, plan = second.node, run.plan
    if node is None:
        return None
    rows = []
    for index, value in enumerate(run.stopped_at):
        known = plan.values[value]
        is_weight = known.role is Role.WEIGHT
        label = known.name.rpartition(".")[2] if is_weight else f"input[{index}]"
        rows.append(RowPlan(label, value))
    stack = list(nodes.stack_of(node).items())
    return FramePlan(
        name=nodes.path_of(*stack[-1], {}) if stack else run.names[0],
        kind=second.call_of(node).kind,
        is_op=True,
        rows=(*rows, RowPlan("output", note="raised")),
        source=source_of_trace(node.meta.get("stack_trace")),
    )


def _read_by(second: Walk, run: GraphRun) -> tuple[list[int], bool]:
    """Values that the raising operation had read, also through integers computed from them.

    Returns:
        The values, and whether the operation had read anything else from outside.
    """
    read: list[int] = []
    from_outside = True
    if second.body is not None:
        read, from_outside = _read_by(second.body, run)
    holders = _holders(second, run)
    todo = list(second.node.all_input_nodes) if second.node is not None and from_outside else []
    seen: set[Node] = set()
    from_outside = False
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        read += holders.get(node.name, ())
        if node.name not in holders:
            todo += node.all_input_nodes
            from_outside |= node.op == "placeholder"
    return list(dict.fromkeys(read)), from_outside


def _holders(second: Walk, run: GraphRun) -> dict[str, list[int]]:
    """The results of a graph or a body to the values that they hold."""
    graph: Graph = second.module.graph  # type: ignore[assignment]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    attributes = {str(node.target): node.name for node in graph.nodes if node.op == "get_attr"}
    holders: dict[str, list[int]] = {}
    for index, value in enumerate(run.plan.values):
        name: str | None = None
        if value.slot is not None:
            check = run.plan.checks[value.slot]
            name = check.node if check.inside == second.inside else None
        elif value.argument is not None:
            name = None if second.inside else inputs[value.argument]
        elif value.role.is_given:
            name = attributes.get(value.name)
        if name is not None and value.can_be_bad:
            holders.setdefault(name, []).append(index)
    return holders
