"""Runs a captured graph again to find operations whose zeros are not 0 in float64.

Each operation runs on the model's operands, so that zeros from an earlier underflow are counted
only there. A graph runs again only if its first run saw a 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.forgiving import theirs
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import Ran, wide_result, widened
from fxguard.plan.plan import Place
from fxguard.rerun.evidence import samples_of
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk, Watcher
from fxguard.underflow.lost import KEEPS_ZEROS, Lost, lost_in, may_have_lost, why_not

__all__ = ["LostElements", "lost_elements_in"]


@dataclass(slots=True)
class LostElements:
    """The losses of the operations of one graph, by place, in order of execution."""

    found: dict[Place, Lost] = field(default_factory=dict)
    not_judged: dict[Place, str] = field(default_factory=dict)  # and why


def lost_elements_in(run: GraphRun, share: float) -> LostElements:
    """Run a graph again, and find where elements became 0.

    Args:
        run: the graph run, still open.
        share: share of the elements that are not 0 in float64, from which an operation is listed.

    Returns:
        The operations with at least this loss, and those that could not be judged.
    """
    suspects = _suspects(run)
    if not suspects:
        return LostElements()
    start = Start(run, to_the_end=False, draws_itself=True)
    if reason := start.why_not():
        return LostElements(not_judged=dict.fromkeys(suspects, reason))
    look = _SameOperands(share, suspects, samples_of(run))
    try:
        with start.begun() as given:
            # Autocast may cache the cast of a weight that requires a gradient for the model's own
            # operations, and one made here would have no gradient.
            args = trees.tree_map_only(Tensor, Tensor.detach, given)
            start.walk(args, look)
    except theirs() as error:  # the findings until then are valid
        look.lost.not_judged |= dict.fromkeys(suspects.keys() - look.seen, why_not(error))
    return look.lost


def _suspects(run: GraphRun) -> dict[Place, None]:
    """The operations that may have made a 0, according to the first run."""
    lows = [] if run.postponed is not None else run.statistics[:, 0].tolist()
    suspects: dict[Place, None] = {}
    for step in run.plan.steps:
        if not step.node or step.kind in KEEPS_ZEROS:
            continue
        for value in map(run.plan.values.__getitem__, step.outputs):
            # One iteration of a loop says nothing about the others.
            is_seen = value.slot is not None and lows and not step.inside
            if value.can_be_bad and not (is_seen and lows[value.slot or 0] > 0):
                suspects[step.inside, step.node] = None
    return suspects


class _SameOperands(Watcher):
    """Runs each operation in float64 on the model's operands, and drops the results.

    Args:
        share: see :func:`lost_elements_in`.
        suspects: places of the operations to examine.
        samples: the number of samples in the batch of the graph's inputs.
    """

    def __init__(self, share: float, suspects: Mapping[Place, None], samples: int | None) -> None:
        self.share = share
        self.suspects = suspects
        self.samples = samples
        self.lost = LostElements()
        self.seen: set[Place] = set()
        self._begun: dict[Place, tuple[Any, Any]] = {}  # arguments as they were before

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return walk.place(node) in self.suspects

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if walk.call_of(node).written:
            args, kwargs = trees.tree_map_only(Tensor, torch.clone, (args, kwargs))
        self._begun[walk.place(node)] = args, kwargs

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        place, call = walk.place(node), ran.call
        begun = self._begun.pop(place)
        self.seen.add(place)
        made = [*leaves(ran.result), *(walk.env[each] for each in call.written)]

        def results(dtype: torch.dtype) -> Sequence[tuple[Any, Any]]:
            args, kwargs = widened(begun, dtype)
            wide = wide_result(ran, args, kwargs, dtype)
            if ran.has_floats:
                return list(zip(leaves(ran.result), leaves(wide), strict=True))
            given = zip(node.args, args, strict=True)  # nothing is returned: check what is written
            return [(walk.env[x], y) for x, y in given if isinstance(x, Node) and x in call.written]

        try:
            if not any(may_have_lost(call.kind, low, self.share) for low in made):
                return
            lost = lost_in(results, call, *begun, self.share, self.samples)
        except theirs() as error:  # the next operation may be judged
            self.lost.not_judged.setdefault(place, why_not(error))
            return
        known = self.lost.found.get(place)
        if lost is not None and (known is None or known.evidence.share < lost.evidence.share):
            self.lost.found[place] = lost
