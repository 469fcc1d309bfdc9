"""The part of a program between values that both programs have and one that they do not share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.matching._exact import made_by
from fxguard.recording.recorded import Operation
from fxguard.recording.replay import arguments_of, called, draws, operation_named, reads_of

__all__ = ["Budget", "Call", "Region", "RegionRun", "region_of"]

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Region:
    """The operations that lead to a value from those where the programs are still the same."""

    operations: tuple[int, ...]
    leaves: tuple[int, ...]  # values that nothing made
    edges: tuple[int, ...]  # values that both programs have


def region_of(
    value: int,
    makers: Mapping[int, int],
    operations: Sequence[Operation],
    is_end: Callable[[int], bool],
) -> Region:
    """The region behind a value.

    Args:
        value: by number.
        makers: the operation that made each value.
        operations: all of the program.
        is_end: whether the other program has a value as well.
    """
    found, leaves, edges, left, known = set[int](), list[int](), list[int](), [value], set[int]()
    while left:
        at = left.pop()
        if at in known:
            continue
        known.add(at)
        if is_end(at):
            edges.append(at)
            continue
        number = makers.get(at)
        if number is None:
            leaves.append(at)
        else:
            found.add(number)
            left += [ref.value for ref in reads_of(operations[number])]
    return Region(tuple(sorted(found)), tuple(leaves), tuple(edges))


class Budget:
    """How many elements may be computed to try something.

    Args:
        elements: at most so many.
    """

    def __init__(self, elements: int) -> None:
        self.left = elements

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is to be tried."""
        return self.left <= 0


class RegionRun:
    """Runs a region again, in float64, with one operation or value changed.

    Args:
        operations: all of the program.
        region: the part that runs.
        given: what values hold that the region reads; None where that is not known.
        not_run: kinds of operations that do not run again: they would allocate too much, say.
        budget: of elements.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        region: Region,
        given: Callable[[int], Tensor | None],
        not_run: Collection[str],
        budget: Budget,
    ) -> None:
        self.operations, self.region = operations, region
        self._given, self._not_run, self._budget = given, not_run, budget
        self._writes = any(operations[at].written for at in region.operations)
        self._read = {x.value for at in region.operations for x in reads_of(operations[at])}
        self._twins: dict[int, list[tuple[int, ...]]] = {}
        self._base: dict[int, Tensor] = {}  # of a run without a change, where nothing is written

    def twins(self, at: int) -> list[tuple[int, ...]]:
        """An operation alone, and with those of its line where that runs two or three times."""
        if at not in self._twins:
            self._twins[at] = self._twins_of(at)
        return self._twins[at]

    def _twins_of(self, at: int) -> list[tuple[int, ...]]:
        mine = self.operations[at]
        line = None if mine.source is None else mine.source.position
        alike = [
            number
            for number in self.region.operations
            if self.operations[number].kind == mine.kind
            and (source := self.operations[number].source) is not None
            and source.position == line
        ]
        found: list[tuple[int, ...]] = [(at,)]
        for times in (2, 3, 4):
            if line is not None and len(alike) % times == 0:
                step = len(alike) // times
                found.append(tuple(alike[alike.index(at) % step :: step]))
        return found

    def made(self) -> Iterator[int]:
        """The values that the region makes, in order."""
        for at in self.region.operations:
            yield from made_by(self.operations[at])

    def run(
        self,
        target: int,
        *,
        at: Collection[int] = (),
        call: Call | None = None,
        instead: Mapping[int, Tensor] | None = None,
    ) -> Tensor | None:
        """What a value is; None if something cannot run.

        Args:
            target: the value.
            at: operations that are called in another way.
            call: how they are called.
            instead: what some values are to hold.
        """
        kept = dict(instead or {})
        if self._writes:
            kept = {value: x.clone() for value, x in kept.items()}
        now, changed = {**self._base, **kept}, set(kept)
        try:
            for number in self.region.operations:
                if self._base and number not in at:
                    reads = reads_of(self.operations[number])
                    if changed.isdisjoint(ref.value for ref in reads):
                        continue
                self._step(number, now, call if number in at else None, kept)
                changed.update(made_by(self.operations[number]))
        except theirs():  # what is tried need not be possible
            return None
        if not at and not kept and not self._writes:
            self._base = now
        return now.get(target)

    def _step(
        self, number: int, now: dict[int, Tensor], call: Call | None, kept: Mapping[int, Tensor]
    ) -> None:
        operation = self.operations[number]
        overload = operation_named(operation.name)
        is_refused = operation.kind in self._not_run
        if overload is None or is_refused or draws(overload, operation):
            self._as_it_was(operation, now)
            return
        for ref in reads_of(operation):
            if ref.value not in now:
                held = self._given(ref.value)
                if held is None:
                    self._as_it_was(operation, now)
                    return
                now[ref.value] = held.clone() if self._writes else held
        args, kwargs = arguments_of(operation, now)
        result = called(overload, args, kwargs, call)
        results = trees.tree_leaves(result)
        for value, tensor in zip(operation.made, results, strict=True):
            if value is not None:
                if call is not None and value in self._read:
                    self._refuse_another_form(value, tensor)
                self._budget.left -= tensor.numel()
                now[value] = kept.get(value, tensor)
        for before, after in operation.written:
            now.setdefault(after, kept.get(after, now[before]))

    def _refuse_another_form(self, value: int, tensor: Tensor) -> None:
        """Refuse what the operations behind were not given: some kernels check no sizes."""
        before = self._given(value)
        if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError("its result would have another form")

    def _as_it_was(self, operation: Operation, now: dict[int, Tensor]) -> None:
        for value in made_by(operation):
            held = self._given(value)
            if held is not None:
                now.setdefault(value, held.clone() if self._writes else held)
