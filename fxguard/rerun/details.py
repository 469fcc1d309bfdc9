"""The contents of a bad value and the numbers inside one operation, from a second run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxguard.batch.events import GraphRun
from fxguard.measure import traceable
from fxguard.measure.details import Detail, describe
from fxguard.records import Range, Role, Severity
from fxguard.rerun.node_by_node import NodeByNode
from fxguard.rerun.repeats import same_magnitude
from fxguard.rerun.start import Start

__all__ = ["detail_of", "numbers_inside"]


class _Ended(Exception):  # noqa: N818 - a signal, not an error
    def __init__(self, detail: Detail | None) -> None:
        self.detail = detail


def detail_of(run: GraphRun, value: int) -> Detail | None:
    """The non-finite elements of a value of a graph.

    Earlier numbers are compared with those of the first run.

    Returns:
        None if the second run did not repeat the numbers of the first, as under a compiler whose
        random numbers differ from eager ones, or after an input was overwritten. Also None if an
        earlier second run failed to repeat them, because a third one would see another tensor.
    """
    wanted, later = run.plan.values[value].slot, run.plan.values[value].later
    if wanted is None and later is None:
        return None
    expected = run.statistics.tolist()
    # Neither integers nor inputs: a cache that the graph wrote has changed.
    compared = {v.slot for v in run.plan.values if v.can_be_bad and v.role is Role.MADE}

    iterations: dict[str, Any] = {}
    magnitudes: list[float] = []

    def look_at_iteration(detail: Detail) -> None:
        last = walk.last
        if not last.iteration:
            magnitudes.clear()  # the loop around it has begun a new iteration
        if detail.severity is not Severity.FINITE:
            iterations.setdefault("loop", last.loop)
            iterations.setdefault("iteration", last.iteration)
            grows = name in last.by_name and last.is_recurrence(name)
            iterations.setdefault("magnitudes", tuple(magnitudes) if grows else ())
        magnitudes.append(detail.largest_finite or 0.0)

    def visit(slot: int, value: Any, repeats: bool) -> None:
        if slot == wanted:
            detail = describe(value)
            look_at_iteration(detail)
            same = slot < 0 or detail.severity == Severity.of(expected[slot][1])
            if same or not repeats:
                raise _Ended(detail if same else None)
        elif (
            slot in compared
            and not repeats
            and not same_magnitude(float(traceable.abs_min_max(value)[1]), expected[slot][1])
        ):
            raise _Ended(None)

    checks = list(enumerate(run.plan.checks))
    if later is not None:  # only a second run sees it, so there is nothing to compare
        wanted, checks = -1, [(-1, run.plan.later[later])]
    check = dict(checks).get(wanted)  # type: ignore[arg-type]
    if check is None:  # the graph did not run again: one step represents all its operations
        return None
    name = check.node
    try:
        with Start(run, to_the_end=False).begun() as given:
            walk = NodeByNode(run.graph_module, checks, visit)
            walk.run(*given)
    except _Ended as ended:
        detail = ended.detail
        return None if detail is None else replace(detail, **iterations)
    except Exception:  # whatever stops the second run, the report goes out, without counts
        return None
    return None


def numbers_inside(run: GraphRun) -> dict[int, Range | str]:
    """The ranges of values that only a second run can see, if the first run turned bad.

    Returns:
        Value of the plan to its range; empty if the run is healthy, or no second run is possible.
    """
    values = {value.later: i for i, value in enumerate(run.plan.values) if value.later is not None}
    if not values or bool(torch.isfinite(run.statistics).all()):
        return {}
    ranges: dict[int, Range | str] = {}

    def visit(later: int, value: Any, repeats: bool) -> None:
        low, high = traceable.abs_min_max(value)
        ranges[values[later]] = traceable.decode(float(low), float(high))

    try:
        with Start(run, to_the_end=False).begun() as given:
            checks = list(enumerate(run.plan.later))
            NodeByNode(run.graph_module, checks, visit).run(*given)
    except Exception:  # then the operation around them is blamed
        return {}
    return ranges
