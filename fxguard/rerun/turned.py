"""Whether an operation on intended infinities made another infinity from finite elements."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.graph.wide_form import Ran
from fxguard.plan.plan import Check, Place
from fxguard.rerun.start import look_through
from fxguard.rerun.walk import Ended, Walk, Watcher

__all__ = ["turned_infinite"]


def turned_infinite(run: GraphRun, values: Iterable[int]) -> dict[int, bool]:
    """Whether an element is infinite although all of its operands are finite.

    The graph runs again. The operations that made the values are assumed to be elementwise on
    broadcast operands.

    Args:
        run: a graph run that is not closed yet.
        values: values of its plan.

    Returns:
        Answers by value; without values that cannot be judged, because no second run is possible,
        or because nothing is infinite in it.
    """
    found = {value: run.plan.check_of(value) for value in values}
    checks = {value: check for value, check in found.items() if check is not None}
    if not checks:
        return {}
    look = _Look(checks)
    look_through(run, look)
    return look.turned


class _Look(Watcher):
    """Looks at what some operations read and make."""

    def __init__(self, checks: Mapping[int, Check]) -> None:
        self.wanted: dict[Place, dict[int, Check]] = {}
        for value, check in checks.items():
            self.wanted.setdefault(check.place, {})[value] = check
        self.count = len(checks)
        self.turned: dict[int, bool] = {}
        self.infinite: list[Tensor] = []  # where operands of the running operation are infinite

    @property
    def last_places(self) -> Collection[Place]:
        return self.wanted

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return walk.place(node) in self.wanted

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        operands = trees.tree_leaves((args, kwargs))
        self.infinite = [~torch.isfinite(x) for x in operands if isinstance(x, Tensor)]
        numbers = (x for x in operands if isinstance(x, (int, float)))
        self.infinite += [torch.tensor(not math.isfinite(x)) for x in numbers]

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        results = {each.name: value for each, value in walk.env.items()}
        for value, check in self.wanted[walk.place(node)].items():
            made = results[check.node]
            for index in check.path:
                made = made[index]
            # Nothing is infinite if the run does not repeat the first one, and in some iterations
            # of a loop.
            if torch.isinf(made).any():
                self.turned[value] = self.turned.get(value, False) or self.turns(made)
        if len(self.turned) == self.count and not walk.inside:
            raise Ended

    def turns(self, made: Any) -> bool:
        """Whether an element is infinite although none of its operands is."""
        turned = torch.isinf(made)
        for infinite in self.infinite:
            if infinite.dim() > made.dim():
                return False  # it does not work elementwise
            turned = turned & ~infinite.to(made.device).broadcast_to(made.shape)
        return bool(turned.any())
