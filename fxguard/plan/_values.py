"""The value that each result holds while a graph is read, and where it is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.graph import nodes
from fxguard.measure.at_hand import dtype_of
from fxguard.plan.plan import LATER, Check, Value
from fxguard.records import Role

__all__ = ["ValueTable", "can_be_bad"]


class ValueTable:
    """The values of one graph, numbered in the order of discovery."""

    def __init__(
        self,
        graph_nodes: Sequence[Node],
        outer: ValueTable | None = None,
        inside: tuple[tuple[str, int], ...] = (),
    ) -> None:
        # The body of a higher-order operation shares these with the graph around it.
        self.values: list[Value] = [] if outer is None else outer.values
        self.checks: list[Check] = [] if outer is None else outer.checks
        # Reason to number of operations.
        self.unchecked: Counter[str] = Counter() if outer is None else outer.unchecked
        self.later: list[Check] = [] if outer is None else outer.later
        self.is_later = False  # whether values added now are measured in a second run
        self.inside = inside
        self.depth = 0  # of torch.func regions around the current node
        self._region: list[int] = []  # checks in these regions
        # The value that a result holds *now*: an in-place operation gives it a new value.
        self.now: dict[Node, int] = {}
        self.elements: dict[Node, dict[tuple[int, ...], int]] = {}  # for results that are tuples
        self._order = {node: position for position, node in enumerate(graph_nodes)}
        self._memory: dict[Node, int] = {}
        self._aliases: dict[int, list[Node]] = {}  # memory to the results in it
        # Results of integers that a row shows, with the write before it; and the last writes, by
        # memory.
        self._integers: dict[Node, tuple[int, Node | None]] = {}
        self._written_at: dict[int | None, Node] = {}
        # Partly written inputs of the graph that nothing reads afterwards: the last node that wrote
        # one, and the values of the parts.
        self.in_parts: dict[Node, tuple[Node, list[int]]] = {}

    def add(
        self,
        node: Node,
        path: tuple[int, ...],
        role: Role,
        name: str,
        *,
        measure: bool,
        after: Node | None = None,
        argument: int | None = None,
    ) -> int:
        """Add a value: what ``node`` (its item at ``path``) holds once ``after`` has run."""
        example = nodes.example_of(node)
        for index in path:
            example = example[index]
        dtype = dtype_of(example) if example is not None else ""
        slot, later, note = None, None, ""
        if measure:
            note = self._reason_not_to_measure(example)
            if not note:
                wide = dtype in ("float64", "complex128")
                after_name = (after or node).name
                check = Check(node.name, path, after_name, self.inside, wide=wide)
                if self.is_later:
                    note, later = LATER, len(self.later)
                    self.later.append(check)
                else:
                    slot = len(self.checks)
                    self.checks.append(check)
                    if self.depth:
                        self._region.append(slot)
        given = role is not Role.MADE and getattr(example, "requires_grad", False) is True
        self.values.append(
            Value(role, name, dtype, slot, note, argument, later, needs_gradient=given)
        )
        return len(self.values) - 1

    def _reason_not_to_measure(self, example: Any) -> str:
        if example is None:
            return ""
        if example.device.type == "meta":
            return "meta"
        if example.layout is torch.strided and not example.is_nested:
            size = example.numel()
            if isinstance(size, int) and size == 0:
                return "empty"
        return ""

    # torch.func regions. Their values have levels of batching and differentiation, which may not
    # leave the region, so the numbers are taken at its end.

    def enter_region(self) -> None:
        """Enter a ``vmap``, ``grad`` or similar region; regions nest."""
        self.depth += 1

    def leave_region(self, node: Node) -> None:
        """Leave the region that ends with ``node``."""
        self.depth -= 1
        if self.depth == 0:
            for slot in self._region:
                self.checks[slot] = replace(self.checks[slot], region_end=node.name)
            self._region.clear()

    def is_read_after(self, result: Node, node: Node) -> bool:
        """Whether anything uses a result once ``node`` has run."""
        return any(self._order[user] > self._order[node] for user in result.users)

    def value_of(self, item: Any) -> int | None:
        """The value that an argument holds now; None if it is not a measured tensor."""
        return self.now.get(item) if isinstance(item, Node) else None

    # Integers, which are measured only for the rows of modules.

    def value_shown(self, result: Node) -> int | None:
        """The value that a row shows: an integer has no other one, and is measured for that."""
        example = nodes.example_of(result)
        if result in self.now and (example is None or can_be_bad(example)):
            return self.now[result]
        last = self._written_at.get(nodes.memory_of(example))
        if last is not None and self._order[last] < self._order[result]:
            last = None  # the memory was another's then
        known = self._integers.get(result)
        if known is None and last is None and result in self.now:
            return self.now[result]
        if known is None or known[1] is not last:
            fresh = self.add(result, (), Role.MADE, result.name, measure=True, after=last)
            known = self._integers[result] = fresh, last
        return known[0]

    def note_write(self, operand: Node, node: Node) -> None:
        """``node`` wrote the memory of ``operand``, whatever that holds."""
        self._written_at[nodes.memory_of(nodes.example_of(operand))] = node

    # Memory.

    def remember_memory(self, node: Node, like: Node | None = None) -> None:
        """Note the memory of a result, or that of ``like`` if the capture does not tell."""
        memory = nodes.memory_of(nodes.example_of(node))
        if memory is None:
            memory = self._memory.get(like, id(node)) if like is not None else id(node)
        self._memory[node] = memory
        self._aliases.setdefault(memory, []).append(node)

    def write(self, node: Node, operand: Node, value: int) -> list[tuple[int, int]]:
        """Note that ``node`` wrote the memory of ``operand``, which now holds ``value``.

        Returns:
            (value before, value now) of larger tensors that contain ``operand`` and are read later.
        """
        changed = []
        self.now[operand] = value
        part = nodes.example_of(operand)
        for alias in self._aliases.get(self._memory.get(operand, 0), []):
            if alias is operand or alias is node or alias not in self.now:
                continue
            whole = nodes.example_of(alias)
            if part is None or whole is None or _same_elements(part, whole):
                self.now[alias] = value
                self.in_parts.pop(alias, None)
            elif self.is_read_after(alias, node):
                before = self.now[alias]
                fresh = self.add(alias, (), Role.MADE, alias.name, measure=True, after=node)
                self.now[alias] = fresh
                changed.append((before, fresh))
            elif alias.op == "placeholder":
                _, parts = self.in_parts.get(alias, (node, []))
                self.in_parts[alias] = (node, [*parts, value])
        return changed


def can_be_bad(example: Any) -> bool:
    """Whether it is a tensor that may hold inf or NaN."""
    return isinstance(example, Tensor) and (example.is_floating_point() or example.is_complex())


def _same_elements(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and a.storage_offset() == b.storage_offset()
