"""Aligns the operations of two models, across all graphs that each model ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxguard.comparison._by_operands import by_operands
from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Key, Named, Side, Twin, side_of
from fxguard.records import Frame
from fxguard.trace.align import align

__all__ = ["Aligned", "aligned"]


@dataclass(frozen=True, slots=True)
class Aligned:
    """The operations of two models."""

    a: Side
    b: Side
    of_b: dict[Key, Key]  # operation of B to its partner in A
    of_a: dict[Key, Key]  # operation of A to its partner in B
    alike: frozenset[Key]  # those of B that read the same as their partner, with the same options

    def without(self, apart: frozenset[Key]) -> Aligned:
        """The same without some pairs, given by operations of B."""
        of_b = {one: other for one, other in self.of_b.items() if one not in apart}
        of_a = {other: one for one, other in of_b.items()}
        return Aligned(self.a, self.b, of_b, of_a, self.alike - apart)

    def read_otherwise(self, twins: Mapping[str, Twin]) -> set[str]:
        """Weights of B with another name in A, where operations read them that do not correspond.

        A weight and the direction in a weight norm may hold the same numbers.
        """
        names = {name: twin.name for name, twin in twins.items() if twin.name != name}
        of_b, of_a = self.b.readers_of(names), self.a.readers_of(names.values())
        return {
            name
            for name, other in names.items()
            if {self.of_b.get(key) for key in of_b[name]} != set(of_a[other])
        }


def aligned(a: ModelRun, b: ModelRun, twins: Mapping[str, Twin]) -> Aligned:
    """Pair the operations of two models by what they read; else by module, name, line and order."""
    side_a, side_b = side_of(a), side_of(b)
    named_a, named_b = (list(side.named.values()) for side in (side_a, side_b))
    frames_a, frames_b = ([_frame(each) for each in named] for named in (named_a, named_b))
    pairs = align(frames_a, frames_b, lambda one, other: False)
    by_name = {named_b[j].key: named_a[i].key for i, j in pairs}
    of_b, alike = by_operands(side_a, side_b, by_name, twins)
    of_a = {other: one for one, other in of_b.items()}
    return Aligned(side_a, side_b, of_b, of_a, frozenset(alike))


def _frame(named: Named) -> Frame:
    return Frame(named.module, named.kind, True, (), named.source)
