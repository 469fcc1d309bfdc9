"""One change of one operation behind which two programs compute the same: it was run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.matching._changes import (
    Change,
    arguments_of_others,
    left_out,
    numbers,
    numbers_in,
    reading,
)
from fxguard.matching._forms import forms
from fxguard.matching._layouts import apart
from fxguard.matching._region import Budget, Region, RegionRun
from fxguard.recording.recorded import Operation
from fxguard.recording.replay import reads_of

__all__ = ["Side", "Tried", "exchanged_values", "first_change", "other_operand"]

EXACT = 1e-9  # relative: nothing is left of a difference
SAME = 1e-7  # likewise: a region computes what it computed
ROUNDINGS = 16.0  # units of roundoff, where weights or tables were rounded before they were read
LEFT = 0.03  # of the difference: no more may stay
MOST_OPERATIONS = 80  # of a region
MOST_OPERANDS = 12  # of one shape, for each operand
MOST_PAIRS = 100  # of values that both programs have


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two programs, around one difference.

    Attributes:
        name: "A" or "B".
        operations: all of its operations.
        region: those that lead to the value that differs.
        target: that value.
        own: what it holds.
        noise: the roundoff of what the programs read there and do not share.
        given: what its values hold.
        not_run: kinds of operations that did not run again.
        named: how a value is called.
        far: how far a tensor in the place of the target is from what the other program has.
    """

    name: str
    operations: Sequence[Operation]
    region: Region
    target: int
    own: Tensor
    noise: float
    given: Callable[[int], Tensor | None]
    not_run: Collection[str]
    named: Callable[[int], str]
    far: Callable[[Tensor], float]

    @property
    def allowed(self) -> float:
        """How far two tensors may be apart that are the same."""
        return max(EXACT, min(ROUNDINGS * self.noise, LEFT * self.far(self.own)))

    def run(self, budget: Budget) -> RegionRun | None:
        """The region, ready to run with a change; None if it does not run as it ran."""
        run = RegionRun(self.operations, self.region, self.given, self.not_run, budget)
        now = run.run(self.target)
        if now is None or now.shape != self.own.shape:
            return None
        are_nan = torch.isnan(now) & torch.isnan(self.own)
        now, own = (torch.where(are_nan, 0, each) for each in (now, self.own))
        return run if apart(now, own) <= SAME else None

    @property
    def numbered(self) -> list[tuple[int, Operation]]:
        """The operations of the region that run again, with their numbers."""
        found = [(at, self.operations[at]) for at in self.region.operations]
        return [each for each in found if each[1].kind not in self.not_run]


@dataclass(frozen=True, slots=True)
class Tried:
    """What was changed, and in which of the programs."""

    side: str
    text: str
    operation: int | None = None
    other: int | None = None  # the operation of the other program that has it so


def first_change(
    mine: Side, other: Side, budget: Budget, *, leaves_out: bool = True
) -> Tried | None:
    """The first change of one operation that takes a difference away; None if none does.

    Args:
        mine: the program that is searched first.
        other: the other one.
        budget: how much may be computed.
        leaves_out: whether an operation may be left out.
    """
    runs = {each.name: (each.run(budget), each.allowed) for each in (mine, other)}
    for side, others, kind in (
        (mine, other, _theirs),
        (other, mine, _left_out),
        (mine, other, _left_out),
        (mine, other, _forms),
        (mine, other, _numbers),
        (other, mine, _forms),
        (other, mine, _numbers),
    ):
        if kind is _left_out and not leaves_out:
            continue
        found = _first(side, *runs[side.name], kind(side, others), budget)
        if found is not None:
            return found
    return None


def other_operand(mine: Side, budget: Budget) -> Tried | None:
    """The first other value that an operation may read; None if none takes a difference away."""
    return _first(mine, mine.run(budget), mine.allowed, _operands(mine), budget)


def exchanged_values(side: Side, budget: Budget) -> Tried | None:
    """The first two values that take a difference away in each other's place; None if none do."""
    run, allowed = side.run(budget), side.allowed
    if run is None:
        return None
    edges = [(v, x) for v in side.region.edges if (x := side.given(v)) is not None and x.dim()]
    for (one, x), (two, y) in itertools.islice(itertools.combinations(edges, 2), MOST_PAIRS):
        if budget.is_spent:
            break
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            continue
        result = run.run(side.target, instead={one: y, two: x})
        if result is not None and side.far(result) <= allowed:
            return Tried(side.name, f"with {side.named(one)} and {side.named(two)} exchanged")
    return None


def _first(
    side: Side, run: RegionRun | None, allowed: float, changes: Iterable[Change], budget: Budget
) -> Tried | None:
    if run is None or len(side.region.operations) > MOST_OPERATIONS:
        return None
    best: tuple[float, Change] | None = None
    for change in changes:
        if budget.is_spent:
            break
        for at in run.twins(change.operation):
            x = run.run(side.target, at=at, call=change.call)
            if x is not None and (far := side.far(x)) <= allowed:
                if best is None or far < best[0]:
                    best = far, change
                break
        if best is not None and best[0] <= EXACT:
            break
    if best is None:
        return None
    return Tried(side.name, best[1].text, best[1].operation, best[1].other)


def _shapes(side: Side, operation: Operation) -> list[Sequence[int]]:
    held = [side.given(ref.value) for ref in reads_of(operation)]
    return [x.shape for x in held if x is not None]


def _theirs(side: Side, other: Side) -> Iterator[Change]:
    for at, operation in side.numbered:
        yield from arguments_of_others(at, operation, other.numbered)


def _numbers(side: Side, other: Side) -> Iterator[Change]:
    theirs = numbers_in(other.numbered)
    last = {shape[-1] for _, x in other.numbered for shape in _shapes(other, x) if shape}
    for at, operation in side.numbered:
        sizes = [n for shape in _shapes(side, operation) for n in shape]
        yield from numbers(at, operation, [*sizes, *last], theirs)


def _forms(side: Side, other: Side) -> Iterator[Change]:
    for at, operation in side.numbered:
        yield from forms(at, operation, _shapes(side, operation))


def _left_out(side: Side, other: Side) -> Iterator[Change]:
    for at, operation in side.numbered:
        yield from left_out(at, operation)


def _operands(side: Side) -> Iterator[Change]:
    """Other values of the same shape, that were there before."""
    made = {v: at for at in side.region.operations for v in side.operations[at].made}
    values = [*side.region.edges, *side.region.leaves, *(v for v in made if v is not None)]
    for at, operation in side.numbered:
        for number, ref in enumerate(reads_of(operation)):
            mine = side.given(ref.value)
            if mine is None:
                continue
            found = 0
            for value in values:
                x = side.given(value)
                if x is None or value == ref.value or made.get(value, -1) >= at:
                    continue
                if x.shape == mine.shape and x.dtype == mine.dtype and found < MOST_OPERANDS:
                    found += 1
                    text = f"reading {side.named(value)} in place of {side.named(ref.value)}"
                    yield reading(at, number, x, text)
