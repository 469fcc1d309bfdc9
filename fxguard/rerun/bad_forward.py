"""Bad numbers in the forward of a graph: where they came from, and what hid them afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.batch.kept_run import KeptRun
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call
from fxguard.graph.poles import plain
from fxguard.graph.wide_form import is_float
from fxguard.plan.plan import Place
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk, Watcher

__all__ = ["Bad", "HiddenAfter", "hidden_after"]

LOGS = frozenset(["log", "log10", "log1p", "log2"])

# They leave out or replace some elements, whose gradient is 0 then.
HIDES = frozenset(
    [
        *("diagonal", "gather", "getitem", "index_select", "masked_fill", "masked_fill_"),
        *("masked_select", "nan_to_num", "nan_to_num_", "nanmean", "nansum", "narrow", "select"),
        *("setitem", "take_along_dim", "tril", "tril_", "triu", "triu_", "where"),
    ]
)


@dataclass(frozen=True, slots=True)
class Bad:
    """What is bad among the elements of a value."""

    has_nan: bool

    @property
    def text(self) -> str:
        """``NaN`` or ``inf``."""
        return "NaN" if self.has_nan else "inf"


@dataclass(frozen=True, slots=True)
class HiddenAfter:
    """A bad number that an operation has read, and that is hidden only after that."""

    reader: Node  # made it of finite numbers, or is the first to read it as it was given
    call: Call  # of that
    position: int | None  # of the operand that was given bad; None if the operation made it bad
    bad: Bad
    hides: Node  # the operation behind which it is gone
    hides_call: Call
    hidden: Node  # what that operation read
    fits: bool  # whether a mask of the hidden result fits the operand of the reader, too
    # What made the other side bad from which the hiding operation chooses.
    other: tuple[Node, Call] | None = None


@dataclass(slots=True, eq=False)
class _BadValues(Watcher):
    """Notes which values of a graph are bad, and which are not after somebody has written them."""

    bad: dict[Node, Bad] = field(default_factory=dict)
    shapes: dict[Node, torch.Size] = field(default_factory=dict)
    calls: dict[Node, Call] = field(default_factory=dict)
    mended: dict[Node, Node] = field(default_factory=dict)  # to the operation that wrote them

    def passed(self, walk: Walk, node: Node) -> None:
        if walk.inside:
            return
        self._note(node, walk.env.get(node))
        if node.op not in ("call_function", "call_method"):
            return
        self.calls[node] = call = walk.call_of(node)
        for each in call.written:
            was_bad = each in self.bad and each not in self.mended
            if was_bad and _bad_in(walk.env.get(each)) is None:
                self.mended[each] = node

    def _note(self, node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            self.shapes[node] = value.shape
        found = _bad_in(value)
        if found is not None:
            self.bad[node] = found


def _bad_in(value: Any) -> Bad | None:
    tensors = [each.detach() for each in leaves(value) if isinstance(each, Tensor)]
    floats = [each for each in tensors if is_float(each)]
    if all(bool(torch.isfinite(each).all()) for each in floats):
        return None
    return Bad(any(bool(torch.isnan(each).any()) for each in floats))


def hidden_after(kept: KeptRun, place: Place) -> HiddenAfter | None:
    """The bad number that an operation reads and that is hidden after it; None if there is none.

    Args:
        kept: the run of the graph.
        place: of the operation, whose result is bad.
    """
    values = _BadValues()
    with kept.settings():
        Start(kept.opened()).again(values)
    node = next((each for each in values.calls if each.name == place[1]), None)
    if place[0] or node is None or node not in values.bad:
        return None
    reader, position = _first(values, node)
    found = _hidden(values, node)
    if found is None or values.calls[reader].infinite_literal:
        return None
    hidden, hides = found
    operand = reader.all_input_nodes[position or 0]
    bad = values.bad[reader if position is None else operand]
    return HiddenAfter(
        reader=reader,
        call=values.calls[reader],
        position=position,
        bad=bad,
        hides=hides,
        hides_call=values.calls[hides],
        hidden=hidden,
        fits=_fits(values, operand, hidden),
        other=_other_side(values, reader, hidden, hides),
    )


def _other_side(
    values: _BadValues, reader: Node, hidden: Node, hides: Node
) -> tuple[Node, Call] | None:
    sides = [each for each in hides.all_input_nodes if each is not hidden and each in values.calls]
    found = [_first(values, side) for side in sides if side in values.bad]
    for node, position in found:
        if position is None and node is not reader and _has_bad_derivative(values, node):
            return node, values.calls[node]
    return None


def _has_bad_derivative(values: _BadValues, node: Node) -> bool:
    """Whether it does not exist where the result is bad: a logarithm's is finite below 0."""
    is_log = plain(values.calls[node].kind) in LOGS
    return not (is_log and values.bad[node].has_nan)


def _first(values: _BadValues, node: Node) -> tuple[Node, int | None]:
    """The operation that made what a node reads bad, or is the first to read it."""
    while True:
        inputs = node.all_input_nodes
        position = next((i for i, each in enumerate(inputs) if each in values.bad), None)
        if position is None or inputs[position] not in values.calls:
            return node, position
        node = inputs[position]


def _hidden(values: _BadValues, node: Node) -> tuple[Node, Node] | None:
    """The last bad value behind a node, and the operation that hides it, the nearest ones."""
    todo, seen = [node], {node}
    while todo:
        value = todo.pop(0)
        if value in values.mended:
            hides = values.mended[value]
            return (value, hides) if _is_hiding(values, hides) else None
        for user in value.users:
            if user in seen or user not in values.calls:
                continue
            seen.add(user)
            if user in values.bad:
                todo.append(user)
            elif user in values.shapes and _is_hiding(values, user):
                return value, user
    return None


def _is_hiding(values: _BadValues, node: Node) -> bool:
    return plain(values.calls[node].kind) in HIDES


def _fits(values: _BadValues, operand: Node, hidden: Node) -> bool:
    one, other = values.shapes.get(operand), values.shapes.get(hidden)
    if one is None or other is None or len(one) > len(other):
        return False
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(size in (1, whole) for size, whole in pairs)
