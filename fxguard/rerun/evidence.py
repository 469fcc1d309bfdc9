"""A second run that examines operations with bad results, also in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.forgiving import where_theirs_may_raise
from fxguard.formats import limit_of
from fxguard.graph.closer_look import evidence_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.inside import evidence_inside
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.measure import traceable
from fxguard.measure.details import Detail
from fxguard.measure.func_levels import without_levels
from fxguard.plan.plan import Check, Place
from fxguard.rerun.details import Details
from fxguard.rerun.differences import comparable, same_magnitude
from fxguard.rerun.other_ways import Outcome, check_in, up_to
from fxguard.rerun.start import Start, look_through
from fxguard.rerun.walk import Ended, Walk
from fxguard.rerun.whole_graph import OTHER_NUMBERS
from fxguard.rerun.wide_run import WideForm
from fxguard.rerun.without_dropout import without_dropout

__all__ = ["Look", "Seen", "evidence_in", "samples_of"]


@dataclass(frozen=True, slots=True)
class Look:
    """The evidence on one operation."""

    # None if only the compiled form of the operation failed.
    evidence: Evidence | None
    # Its result on wide operands, if it fails on the model's operands.
    wide: Tensor | None = None
    # The operation with its operands, while the run is open; None if it cannot run alone.
    operation: OneOperation | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What one second run of a graph has shown of some of its values."""

    looks: Mapping[int, Look] = field(default_factory=dict)
    details: Mapping[int, Detail] = field(default_factory=dict)
    eager: Mapping[int, Outcome] = field(default_factory=dict)  # the values in eager mode
    stopped: str = ""  # why there is no more evidence, if that is known


def evidence_in(run: GraphRun, values: Collection[int], eager: Collection[int] = ()) -> Seen:
    """What the operations behind some values of a graph read and made.

    Args:
        run: the graph run, still open.
        values: values of its plan.
        eager: those of which the outcome in eager mode is wanted.

    Returns:
        What was seen, without values that the second run did not reach, or that are finite in it.
    """
    found = {value: check_in(run, value) for value in values}
    checks = {value: check for value, check in found.items() if check is not None}
    if reason := Start(run, to_the_end=False).why_not():
        return Seen(stopped=reason)
    if not checks:
        return Seen()
    looks = _Looks(checks, samples_of(run), _compared_in(run), is_compiled=run.is_compiled)
    details = Details(run, values)
    outcomes = {value: look for value in eager if (look := up_to(run, value)) is not None}
    stopped = look_through(run, looks, details, *outcomes.values())
    seen = {value: look.outcome for value, look in outcomes.items() if look.outcome is not None}
    return Seen(looks.found, details.found, seen, stopped.get(looks, ""))


def samples_of(run: GraphRun) -> int | None:
    """The number of samples in the batch of the graph's inputs; None if inputs disagree."""
    assert run.args is not None
    given = [run.args[position] for position, _ in run.plan.inputs]
    sizes = {x.shape[0] for x in given if isinstance(x, Tensor) and x.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def _compared_in(run: GraphRun) -> dict[Place, list[tuple[Check, float]]]:
    """The values that a second run must repeat, with their largest magnitudes."""
    compared: dict[Place, list[tuple[Check, float]]] = {}
    highs = run.statistics[:, 1].tolist()
    for slot in sorted(comparable(run.plan)):
        check = run.plan.checks[slot]
        if check.region_end is None and not check.inside:
            compared.setdefault(check.place, []).append((check, highs[slot]))
    return compared


@dataclass(slots=True)
class _Before:
    """The arguments of an operation in both forms, copied if it writes them."""

    args: Any
    kwargs: Any
    wide_args: Any
    wide_kwargs: Any


class _Looks(WideForm):
    """The wide form, with a look at some operations after they have run."""

    def __init__(
        self,
        checks: dict[int, Check],
        samples: int | None,
        compared: dict[Place, list[tuple[Check, float]]],
        *,
        is_compiled: bool,
    ) -> None:
        super().__init__()
        self.is_compiled = is_compiled
        self.samples = samples
        self.compared = compared
        self.wanted: dict[Place, dict[int, Check]] = {}
        for value, check in checks.items():
            self.wanted.setdefault(check.place, {})[value] = check
        self.found: dict[int, Look] = {}
        self.begun: dict[Place, _Before] = {}

    @property
    def last_places(self) -> Collection[Place]:
        return self.wanted

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return walk.place(node) in self.wanted or super().wants(walk, node, differs)

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if walk.place(node) not in self.wanted:
            return
        others = walk.other_of(node.args, node), walk.other_of(node.kwargs, node)
        copies = bool(walk.call_of(node).written)

        def kept(values: Any) -> Any:
            if not copies:
                return values
            return trees.tree_map_only(Tensor, lambda x: x.detach().clone(), values)

        self.begun[walk.place(node)] = _Before(*kept((args, kwargs)), *kept(others))

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        place = walk.place(node)
        nodes = {each.name: each for each in walk.env}
        begun = self.begun.pop(place, None)
        for check, high in self.compared.get(place, ()):
            if check.node in nodes and not _repeats(walk.env[nodes[check.node]], check, high):
                if begun is not None and self.is_compiled:
                    self.note_unlike(walk, node, nodes, begun)
                raise NotJudged(OTHER_NUMBERS)  # all later tensors differ
        if begun is None:
            return
        for value, check in self.wanted[place].items():
            made = nodes.get(check.node)
            if made is None or value in self.found:
                continue
            look = self.look(walk, node, made, check, begun)
            if look is not None:
                self.found[value] = look
        if len(self.found) == sum(map(len, self.wanted.values())):
            raise Ended

    def note_unlike(
        self, walk: Walk, node: Node, nodes: Mapping[str, Node], begun: _Before
    ) -> None:
        """Note the first operation whose numbers differ from its compiled form."""
        for value, check in self.wanted[walk.place(node)].items():
            made = nodes.get(check.node)
            if made is not None:
                operation = _alone(walk, node, made, check, begun)
                self.found[value] = Look(None, operation=replace(operation, is_compiled=True))

    def look(self, walk: Walk, node: Node, made: Node, check: Check, begun: _Before) -> Look | None:
        low = walk.env[made]
        wide = walk.others.get(made, low)
        reason = self.taken_over.get(walk.place(node), "")
        same: Any = None  # in float64, on the model's operands
        written = _written_argument(node, made)
        ran = walk.ran(node, begun.args, begun.kwargs, walk.env[node])
        kept = without_dropout(ran) if walk.knows_drawn(node) else None
        ran = kept or ran
        call = ran.call
        try:
            operands, named = widened((begun.args, begun.kwargs), self.dtype)
            if call.written:
                operands = trees.tree_map_only(Tensor, torch.clone, operands)
            same = wide_result(ran, operands, named, self.dtype)
            if made is not node:
                same = None if written is None else operands[written]
        except (NotJudged, ValueError) as error:
            reason = reason or str(error)
        for index in check.path:
            low, wide = low[index], wide[index]
            same = None if same is None else same[index]
        if not is_float(low):
            return None
        is_wide = not reason and is_float(wide)
        evidence = evidence_of(
            call,
            begun.args,
            begun.kwargs,
            without_levels(low),
            same=same if is_float(same) else None,
            wide_args=begun.wide_args if is_wide else None,
            wide_kwargs=begun.wide_kwargs,
            wide=wide if is_wide else None,
            samples=self.samples,
            not_judged=reason,
        )
        if evidence is None:
            return None
        fits = evidence.same is not None and abs(evidence.same) < limit_of(evidence.dtype)
        if fits and not call.written:
            with where_theirs_may_raise():  # otherwise its inside stays unknown
                evidence = replace(evidence, inner=evidence_inside(ran))
        if kept is not None and evidence.inner is None:
            evidence = replace(evidence, same=None)  # it is of what was not dropped
        keeps = is_wide and evidence.same is not None and not math.isfinite(evidence.same)
        operation = _alone(walk, node, made, check, begun)
        return Look(evidence, wide.clone() if keeps else None, operation)


def _alone(walk: Walk, node: Node, made: Node, check: Check, begun: _Before) -> OneOperation:
    """An operation with its arguments."""
    call = replace(walk.call_of(node), args=begun.args, kwargs=begun.kwargs)
    return OneOperation.now(call, node.target, check.path, _written_argument(node, made))


def _written_argument(node: Node, made: Node) -> int | None:
    """The argument that holds a value, if the operation wrote it there."""
    return next((i for i, x in enumerate(node.args) if x is made), None)


def _repeats(made: Any, check: Check, high: float) -> bool:
    """Whether a value has the same range as in the first run."""
    for index in check.path:
        made = made[index]
    return same_magnitude(float(traceable.abs_min_max(made)[1]), high)
