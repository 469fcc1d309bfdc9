"""Every operation of a healthy model in its dtype and in float64, on the operands that it had.

None may be called an overflow or an underflow. An operation of a captured graph is compared; what
runs between graphs is only counted by the guard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node

from fxguard.advice.causes import cause_of
from fxguard.batch.events import GraphRun
from fxguard.graph.closer_look import evidence_of
from fxguard.graph.nodes import elements_of
from fxguard.graph.tables import ADDITIONS, END_OF_MASKS
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result, widened
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

# Numbers vanish: this share of what is not zero in float64 is zero in the dtype. Weights of tests
# attend sharply, and nobody accuses an operation of it where nothing becomes bad.
SHARE = 0.5


@dataclass
class Comparison:
    """What came of it."""

    compared: int = 0  # operations
    masks: int = 0  # sums and casts of the lowest number, or of a lower one, that became infinite
    not_judged: Counter[str] = field(default_factory=Counter)  # reasons
    vanished: Counter[str] = field(default_factory=Counter)  # kinds whose numbers became zero
    called: list[str] = field(default_factory=list)  # "scores add: overflow"

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Compare one run of a graph that has returned."""
        if outputs is None:
            return
        try:
            Start(run).again(Beside(self))
        except NotJudged as reason:
            self.not_judged[f"the rest of a graph: {reason}"] += 1


class Beside(WideForm):
    """The wide form, in which each operation is also computed on the operands that it had."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison
        self.given: dict[Node, Any] = {}

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        if walk.call_of(node).written:
            args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        self.given[node] = args, kwargs

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        given = self.given.pop(node)
        if ran.has_floats:
            self.compare(Ran(ran.call, ran.target, ran.run, *given, ran.result, ran.before))
        return super().follow(walk, node, ran, args, kwargs)

    def compare(self, ran: Ran) -> None:
        found = self.comparison
        try:
            args, kwargs = widened((ran.args, ran.kwargs), self.dtype)
            if ran.call.written:
                args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
            same = wide_result(ran, args, kwargs, self.dtype)
        except NotJudged as reason:
            found.not_judged[str(reason)] += 1
            return
        found.compared += 1
        for low, wide in pairs(ran.result, same):
            if became_a_mask(ran, low):
                found.masks += 1
                continue
            evidence = evidence_of(ran.call, ran.args, ran.kwargs, low, same=wide)
            cause = cause_of(evidence) if evidence is not None else ""
            if cause in ("overflow", "underflow"):
                found.called.append(f"{ran.call.kind}: {cause}")
            if ran.call.kind not in END_OF_MASKS and vanished(low, wide):
                found.vanished[ran.call.kind] += 1


def pairs(low: Any, wide: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The dense floating-point numbers of a result in both forms."""
    for (_, one), (_, other) in zip(elements_of(low), elements_of(wide), strict=True):
        if is_float(one) and not one.is_complex() and one.layout is torch.strided:
            yield one, other


def became_a_mask(ran: Ran, low: Tensor) -> bool:
    """Whether -inf was made by a sum, or a cast, of a dtype's lowest number or a lower one."""
    given = [x for x in pytree.tree_leaves(ran.args) if is_float(x)]
    ends = [max(torch.finfo(low.dtype).min, torch.finfo(x.dtype).min) for x in given]
    return (
        (ran.call.kind in ADDITIONS or ran.call.casts)
        and bool((low == -torch.inf).any())
        and any(bool((x <= end).any()) for x, end in zip(given, ends, strict=True))
    )


def vanished(low: Tensor, wide: Tensor) -> bool:
    """Whether most of what is not zero in float64 is zero."""
    there = wide != 0
    return bool((low[there] == 0).sum() > SHARE * there.sum())


def compare_every_operation(model: nn.Module, run: Callable[[nn.Module], object]) -> Comparison:
    """Run a model under a guard, and each of its graphs once more in both forms."""
    comparison = Comparison()
    guard = GuardedModel(
        model, Options(on_detect=lambda report: None), Plugins(hear=comparison.hear)
    )
    guard.install()
    run(model)
    return comparison
