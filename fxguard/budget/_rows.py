"""The rows of a budget: the origins of an error, by line and module."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from fxguard.budget._graphs import Given, Graphs, Operation
from fxguard.budget._shares import Shares
from fxguard.records import Source
from fxguard.report.error_budget import AMPLIFIED, Choice, ErrorShare

__all__ = ["Amplified", "Line", "choices_of", "lines_of"]

LESS = 0.3  # of an amplification: what reads the value and has no more has amplified it
WORTH = 2.0  # times amplified: what reads it is a part of the matter


@dataclass(slots=True)
class Line:
    """One line of the user's in one module, or what was rounded before the model ran."""

    name: str
    kind: str
    source: Source | None
    keys: list[Hashable] = field(default_factory=list)  # the largest contribution first
    square: float = 0.0  # of what it adds to the error
    share: float = 0.0
    order: int = 0  # of its first operation, or of the weight, among all

    def row(self, amplified: Amplified) -> ErrorShare:
        """The row of a budget."""
        first, origins = self.keys[0], amplified.shares.origins
        times = amplified.times(first)
        return ErrorShare(
            self.name,
            self.kind,
            self.source,
            self.share,
            origins[first].relative,
            times,
            sum(origins[key].count for key in self.keys),
            amplified.by(first) if times >= AMPLIFIED else "",
            self.order,
        )


def lines_of(shares: Shares, graphs: Graphs) -> list[Line]:
    """All lines with an own error, the largest share first."""
    lines: dict[Hashable, Line] = {}
    found = [(sum(each.contributions()), key, each) for key, each in shares.origins.items()]
    for square, key, origin in sorted(found, key=lambda each: -each[0]):
        if not origin.own:
            continue
        name, kind, source = _described(key, graphs)
        where = (name, kind) if source is None else (name, source.position)
        line = lines.setdefault(where, Line(name, kind, source))
        line.keys.append(key)
        line.square += square
    order = {key: place for place, key in enumerate(shares.origins)}
    total = sum(line.square for line in lines.values())
    for line in lines.values():
        line.share = line.square / total if total else 0.0
        line.order = min(order[key] for key in line.keys)
    return sorted(lines.values(), key=lambda line: -line.square)


def _described(key: Hashable, graphs: Graphs) -> tuple[str, str, Source | None]:
    if isinstance(key, Given):
        return key.name, key.kind, None
    operation = graphs.operations.get(key)
    if operation is None:
        return "", "an operation", None
    return operation.module, operation.step.kind, operation.step.source


class Amplified:
    """How much the own error of each operation is amplified on its way to the number.

    Args:
        shares: the origins.
        graphs: the graphs.
        size: the square of the number that matters, summed over the projections.
    """

    def __init__(self, shares: Shares, graphs: Graphs, size: float) -> None:
        self.shares, self.graphs, self.size = shares, graphs, size
        self.readers = _readers(graphs)

    def times(self, key: Hashable) -> float:
        """How many times larger the effect is, relative to the number, than the own error."""
        origin = self.shares.origins[key]
        effect = sum(origin.contributions())
        return math.sqrt(effect / self.size) / origin.relative if self.size and effect else 0.0

    def region(self, key: Hashable) -> list[Operation]:
        """What reads a value as long as its error is amplified, with what amplifies it."""
        if self.times(key) < WORTH:
            return []
        most = self.times(key)
        found: dict[Hashable, None] = {}
        todo = [key]
        while todo:
            for each in self.readers.get(todo.pop(), ()):
                if each in found:
                    continue
                found[each] = None
                if not self._is_known(each) or self.times(each) >= LESS * most:
                    todo.append(each)
        return [self.graphs.operations[each] for each in found]

    def by(self, key: Hashable) -> str:
        """The operation behind which an error is no longer amplified.

        Example:
            >>> amplified.by(key)
            'cos rope.py:15'
        """
        most = self.times(key)
        seen = {key}
        while True:
            readers = [each for each in self.readers.get(key, ()) if each not in seen]
            if not readers:
                return ""
            known = [each for each in readers if self._is_known(each)]
            key = min(known, key=self.times) if known else readers[0]
            if known and self.times(key) < LESS * most:
                step = self.graphs.operations[key].step
                return f"{step.kind} {step.source.place}" if step.source else step.title
            key = max(known, key=self.times) if known else key
            seen.add(key)

    def _is_known(self, key: Hashable) -> bool:
        """Whether it has an own error: moves have none, and hand on that of others."""
        return key in self.shares.origins and bool(self.shares.origins[key].own)


def _readers(graphs: Graphs) -> Mapping[Hashable, list[Hashable]]:
    """For each operation, those that read what it made."""
    found: dict[Hashable, list[Hashable]] = {}
    makers: dict[tuple[int, int], Hashable] = {}
    for key, operation in graphs.operations.items():
        for value in operation.step.inputs:
            maker = makers.get((operation.graph, value))
            if maker is not None:
                found.setdefault(maker, []).append(key)
        makers |= {(operation.graph, value): key for value in operation.step.outputs}
    return found


def choices_of(graphs: Graphs) -> Iterator[Choice]:
    """What was chosen otherwise, in order."""
    for form in graphs.forms:
        for each in form.chose.values():
            if each.otherwise:
                yield Choice(
                    each.module, each.kind, each.source, each.otherwise, each.of, each.margin
                )
