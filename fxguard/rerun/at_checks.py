"""Looks at the values that a Plan measures, also those that only a second run can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node

from fxguard.measure.func_levels import without_levels
from fxguard.plan.plan import Check, Place
from fxguard.rerun.walk import Walk, Watcher

__all__ = ["AtChecks", "Visit"]

# Called with the graph, the check's number and the value. In a loop, that may be many times.
Visit = Callable[[Walk, int, Any], None]


class AtChecks(Watcher):
    """Shows the values at some checks.

    Args:
        checks: checks of a graph and of its bodies, with their numbers.
        visit: called for each check when its value exists.
    """

    def __init__(self, checks: Iterable[tuple[int, Check]], visit: Visit) -> None:
        self.visit = visit
        self.checks: dict[Place, list[tuple[int, Check]]] = {}
        self.bodies: set[Place] = set()  # operations with checks in a body
        self.pending: dict[Place, list[tuple[int, Any]]] = {}  # until their torch.func region ends
        for slot, check in checks:
            self.checks.setdefault(check.place, []).append((slot, check))
            for depth, (name, _) in enumerate(check.inside):
                self.bodies.add((check.inside[:depth], name))

    def enters(self, walk: Walk, node: Node) -> bool:
        return walk.place(node) in self.bodies

    def passed(self, walk: Walk, node: Node) -> None:
        place = walk.place(node)
        for slot, check in self.checks.get(place, ()):
            value = walk.value_of(check.node)
            if value is None:
                continue  # freed already, because nobody reads it
            for index in check.path:
                value = value[index]
            value = without_levels(value) if isinstance(value, Tensor) else value
            if check.region_end is None:
                self.visit(walk, slot, value)
            else:
                self.pending.setdefault((walk.inside, check.region_end), []).append((slot, value))
        for slot, value in self.pending.pop(place, ()):
            self.visit(walk, slot, value)
