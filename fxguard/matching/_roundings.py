"""What the roundings of each line add to the difference of two runs of the same computation.

To first order, the difference of a number is the sum of what each operation rounds, its *own
error*, times the gradient of the number with respect to its result. The number is the difference of
the outputs itself: their component along it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxguard.forgiving import theirs
from fxguard.matching._alignment import Alignment
from fxguard.matching._exact import is_relabeling, made_by
from fxguard.measure.at_hand import name_of_dtype
from fxguard.recording.recorded import Operation, Recording
from fxguard.recording.replay import Replay, is_view, operation_named, reads_of, wide
from fxguard.report.run_comparison import OneSide, RoundingShare

__all__ = ["shares_of"]

MOST = 10  # lines


@dataclass(slots=True)
class _Line:
    """What the operations of one line add."""

    operation: Operation
    dtype: torch.dtype
    adds: float = 0.0
    own: float = 0.0  # the largest error of a result, relative to its largest magnitude


def shares_of(aligned: Alignment, a: Recording, b: Recording) -> list[RoundingShare]:
    """The lines of both sides whose roundings make the outputs differ, the largest share first."""
    along_a, along_b = _directions(aligned, a, b)
    if not along_a:
        return []
    lines: list[tuple[Literal["A", "B"], _Line]] = []
    lines += [("A", line) for line in _lines(a, along_a, {})]
    lines += [("B", line) for line in _lines(b, along_b, _of_tables(aligned))]
    whole = sum(line.adds**2 for _, line in lines)
    if not whole:
        return []
    lines.sort(key=lambda each: -(each[1].adds ** 2))
    return [
        RoundingShare(
            side,
            OneSide(line.operation.title, line.operation.source),
            line.adds**2 / whole,
            line.own,
            name_of_dtype(line.dtype),
        )
        for side, line in lines[:MOST]
    ]


def _directions(
    aligned: Alignment, a: Recording, b: Recording
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The difference of the outputs as they ran, by value, in the layout of each side."""
    along_a, along_b = dict[int, Tensor](), dict[int, Tensor]()
    for one, two in aligned.outputs:
        if one not in a.data or two not in b.data:
            continue
        whole, y = wide(a.data[one]), wide(b.data[two])
        places = torch.arange(whole.numel()).reshape(whole.shape)
        x, places = (aligned.other.kept(one, each) for each in (whole, places))
        laid, at = aligned.laid_out(x, y), aligned.laid_out(x, y, places)
        if laid is None or at is None:
            continue
        difference = torch.nan_to_num(y - laid, posinf=0.0, neginf=0.0)
        along_b[two] = difference
        back = torch.zeros(whole.numel(), dtype=torch.float64)
        back[at.flatten()] = difference.flatten()
        along_a[one] = back.reshape(whole.shape)
    return along_a, along_b


def _of_tables(aligned: Alignment) -> dict[int, Tensor]:
    """What B's tables and constants, which no operation made, are off from A's."""
    recording = aligned.recording
    found = {}
    for leaf in recording.leaves:
        mine, given = aligned.values.get(leaf.value), aligned.given.get(leaf.value)
        if mine is not None and given is not None and mine.is_floating_point():
            own = torch.nan_to_num(mine - given, nan=0.0, posinf=0.0, neginf=0.0)
            if bool(own.any()):
                found[leaf.value] = own
    return found


def _reader_of(recording: Recording, value: int) -> Operation | None:
    """The first operation that computes with a value."""
    known = {value}
    for operation in recording.operations:
        if known.isdisjoint(ref.value for ref in reads_of(operation)):
            continue
        if not is_relabeling(operation):
            return operation
        known.update(made_by(operation))
    return None


def _lines(
    recording: Recording, along: Mapping[int, Tensor], tables: Mapping[int, Tensor]
) -> Iterator[_Line]:
    adjoints = _adjoints(recording, along)
    found: dict[object, _Line] = {}
    of_dtype: dict[object, float] = defaultdict(float)
    of_tables = (
        (reader, value, own)
        for value, own in tables.items()
        if (reader := _reader_of(recording, value)) is not None
    )
    for operation, value, own in itertools.chain(of_tables, _own_errors(recording)):
        adjoint = adjoints.get(value)
        if adjoint is None:
            continue
        key: object = operation.title
        if operation.source is not None:
            key = operation.source.position
        line = found.setdefault(key, _Line(operation, recording.values[value].dtype))
        added = float((own * adjoint).sum())
        line.adds += added
        size = recording.values[value].numbers.largest
        line.own = max(line.own, float(own.abs().max()) / size if size else 0.0)
        if abs(added) > of_dtype[key]:
            of_dtype[key], line.operation = abs(added), operation
            line.dtype = recording.values[value].dtype
    yield from found.values()


def _own_errors(recording: Recording) -> Iterator[tuple[Operation, int, Tensor]]:
    """What each operation rounds: its result minus that in float64 on the operands that it had."""
    replay = Replay(recording)
    for operation in recording.operations:
        replay.run(operation)
        overload = operation_named(operation.name)
        if overload is None or is_view(overload):
            continue
        for value in made_by(operation):
            kept, now = recording.data.get(value), replay.now.get(value)
            if kept is None or now is None or not kept.is_floating_point() or value in replay.told:
                continue
            ran = wide(kept)
            own = torch.nan_to_num(ran - now, nan=0.0, posinf=0.0, neginf=0.0)
            if bool(own.any()):
                yield operation, value, own
            now.copy_(ran)
        replay.told.clear()  # operands are those of the run


@torch.enable_grad()
def _adjoints(recording: Recording, along: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The gradient of the component of outputs along a direction, for each value."""
    replay = Replay(recording, differentiable=True)
    edges: dict[int, GradientEdge] = {}
    for leaf in recording.leaves:
        x = replay.now.get(leaf.value)
        if x is not None and x.requires_grad:
            edges[leaf.value] = get_gradient_edge(x)
    for operation in recording.operations:
        replay.run(operation)
        for value in made_by(operation):
            x = replay.now.get(value)
            if x is None or not x.is_floating_point():
                continue
            if not x.requires_grad and x.is_leaf and not x._is_view():  # a table that it makes
                x = replay.now[value] = x.requires_grad_().clone()
            if x.requires_grad:
                edges[value] = get_gradient_edge(x)
    number = sum((replay.now[value] * along[value]).sum() for value in along)
    if not isinstance(number, Tensor) or not number.requires_grad:
        return {}
    values = list(edges)
    try:
        found = torch.autograd.grad(number, [edges[v] for v in values], allow_unused=True)
    except theirs():  # an operation without a derivative
        return {}
    return {v: x for v, x in zip(values, found, strict=True) if x is not None}
