"""Traces bad values to their origins by data flow. Knows nothing of torch.

A value is bad if it holds inf or NaN. An operation is an origin if its result is worse than all of
its operands (finite < inf < NaN). An origin counts if its bad values leave the model; otherwise it
is absorbed, like ``log(0)`` under a ``where``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fxguard.formats import limit_of
from fxguard.graph.tables import (
    ADDITIONS,
    CASTS,
    END_OF_MASKS,
    LOSSES,
    MEANS_OF_NUMBERS,
    MIX_AND_ADD,
    MIXES,
    OVERWRITES,
    UNINITIALISED,
    WRITES_PARTS,
)
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step, Value
from fxguard.records import Range, Role, Severity
from fxguard.verdict.bounds import Bounds

__all__ = ["Verdict", "find_origins"]

NOTHING: Mapping[int, int] = MappingProxyType({})
WRITES = OVERWRITES | WRITES_PARTS
REPLACES = WRITES | frozenset(["where"])
MASK_ROLES = (Role.INPUT, Role.BUFFER, Role.CONSTANT)  # a mask may be any of these


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings in one batch, in order of execution."""

    origins: tuple[Blame, ...] = ()
    absorbed: tuple[Blame, ...] = ()
    both: tuple[Blame, ...] = field(default=(), compare=False)  # in a single order
    # Bad values to their origins.
    sources: Mapping[int, tuple[Blame, ...]] = field(default_factory=dict, compare=False)
    intended: frozenset[int] = field(default=frozenset(), compare=False)  # infinite on purpose
    bounds: Bounds | None = field(default=None, compare=False)  # of their finite elements


def find_origins(
    steps: Sequence[Step],
    values: Sequence[Value],
    measured: Callable[[int], Severity],
    *,
    abs_max: Callable[[int], float],
    is_mask: Callable[[int], bool],
    finite_part: Callable[[int], Range],
    turned_infinite: Callable[[int], bool | None],
    reached: Iterable[int],
    is_ignored: Callable[[Step], bool],
    overflowed: Collection[int] = (),
    made_masks: Collection[int] = (),
    emptied: Collection[int] = (),
    written: Mapping[int, int] = NOTHING,
) -> Verdict:
    """Trace every bad value back to its origin.

    Args:
        steps: operations in order of execution.
        values: what they read and made.
        measured: gives the severity of a value. Called for weights only if an operation that read
            them made something bad.
        abs_max: largest magnitude of a value.
        is_mask: whether an input, buffer or constant that holds inf does so on purpose.
        finite_part: the range of a value's finite elements; up to inf if not known.
        turned_infinite: whether an element of a value made from finite ones is infinite; None if
            unknown. Called only if bounds do not exclude it.
        reached: values that left the model.
        is_ignored: whether the user ignores an operation.
        overflowed: values that hold +inf and look like masks but are not.
        made_masks: infinite values that are masks, by their use.
        emptied: values that are no longer intended: all of a row was masked, and is summed up.
        written: those of ``reached`` that left it only in memory that it was given, and what was in
            that memory before.
    """
    tracing = _Tracing(
        steps,
        values,
        measured,
        is_mask,
        turned_infinite,
        is_ignored,
        overflowed,
        made_masks,
        emptied,
        masks=_masks(steps, values, abs_max),
        bounds=Bounds(values, finite_part),
    )
    for index, step in enumerate(steps):
        tracing.follow(index, step)
    return tracing.verdict(tuple(reached), _rests(steps, written))


def _rests(steps: Sequence[Step], written: Mapping[int, int]) -> set[tuple[int, int]]:
    """Memory of which only parts were written, such as a KV cache: its values now and before."""
    makers = {value: step for step in steps for value in step.outputs}
    rests = set[tuple[int, int]]()
    for now, before in written.items():
        todo, seen = [now], {now}
        while todo:
            value = todo.pop()
            step = makers.get(value)
            if step is not None and _writes_a_part(step, value, makers):
                todo += seen.symmetric_difference(seen.union(step.inputs))
                seen.update(step.inputs)
        if before in seen:
            rests.add((now, before))
    return rests


def _writes_a_part(step: Step, value: int, makers: Mapping[int, Step]) -> bool:
    """Whether a value is memory of which only a part was written, and nothing read.

    A view that is overwritten is the first that the step makes; the memory behind it follows. Or
    that memory is measured once it is read, as a view of what it was and of what was written.
    """
    if step.kind == "view":
        written = [makers[part].kind for part in step.inputs[1:] if part in makers]
        return bool(written) and WRITES.issuperset(written)
    return step.kind in WRITES_PARTS or (step.kind in OVERWRITES and value != step.outputs[0])


class _Tracing:
    """Follows bad values through the operations of one batch.

    The rules for each operation that made something bad, in order of execution:

    1. A bad operand that no operation made is an origin itself; an infinity that is there on
       purpose (a mask) is intended.
    2. A result that is no worse than its operands is inherited. If it comes only from intended
       infinities, it is intended as well, except at the end of masks (a loss, a softmax).
    3. A worse result is a new origin, unless the user ignores the operation, or it is an infinity
       that the operation was given or made from a mask.

    4. A NaN of an operation that leaves NaN out (``nanmean`` of nothing else) is its own, where
       what it read are missing values: NaN that were given, or written as such.

    Args:
        steps: the operations, in order of execution.
        values: what the operations read and made.
        measured: as in :func:`find_origins`, like the arguments that follow.
        is_mask: for a value that no operation made.
        turned_infinite: for a value that an operation made from intended infinities.
        is_ignored: for an operation.
        overflowed: values that look intended but are not.
        made_masks: values that do not look intended but are.
        emptied: values that look intended but make a number of all masked ones.
        masks: values at the limit of their dtype on purpose.
        bounds: bounds for values with intended infinities.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        values: Sequence[Value],
        measured: Callable[[int], Severity],
        is_mask: Callable[[int], bool],
        turned_infinite: Callable[[int], bool | None],
        is_ignored: Callable[[Step], bool],
        overflowed: Collection[int],
        made_masks: Collection[int],
        emptied: Collection[int],
        masks: Collection[int],
        bounds: Bounds,
    ) -> None:
        self.steps = steps
        self.values = values
        self.measured = measured
        self.is_mask = is_mask
        self.turned_infinite = turned_infinite
        self.is_ignored = is_ignored
        self.overflowed = overflowed
        self.made_masks = made_masks
        self.emptied = emptied
        self.of_limits = set(masks)  # and infinities made from them
        self.bounds = bounds
        self.sources: dict[int, tuple[Blame, ...]] = {}  # for bad values that are not intended
        self.intended: set[int] = set()
        self.blames: dict[Blame, None] = {}  # insertion order is the order of execution
        self.uninitialised: set[Blame] = set()
        # For values that no check reaches: as bad as their operands.
        self.assumed: dict[int, Severity] = {}

    def severity(self, value: int) -> Severity:
        return self.assumed[value] if value in self.assumed else self.measured(value)

    def worst(self, values: Iterable[int]) -> Severity:
        return max(map(self.severity, values), default=Severity.FINITE)

    def follow(self, index: int, step: Step) -> None:
        """Follow bad values through one operation."""
        for value in step.outputs:
            if self.values[value].is_assumed:
                read = (i for i in step.inputs if self.values[i].role is not Role.WEIGHT)
                self.assumed[value] = self.worst(read)
        made = [value for value in step.outputs if self.severity(value)]
        if not made:
            return
        bad = [value for value in dict.fromkeys(step.inputs) if self.severity(value)]
        for value in bad:
            if self.values[value].role.is_given:
                self.judge_given(value)
        if _makes_its_own(step):
            kept = step.inputs[:1] if step.kind in MIX_AND_ADD else ()
            bad = [value for value in bad if value not in self.intended or value in kept]
        worst = self.worst(bad)
        inherited = tuple(
            dict.fromkeys(blame for value in bad for blame in self.sources.get(value, ()))
        )
        if step.kind in MEANS_OF_NUMBERS and all(map(self.is_missing, inherited)):
            worst, inherited = Severity.FINITE, ()
        elif step.kind in REPLACES:  # of numbers that were missing, by what is at fault
            inherited = tuple(b for b in inherited if not self.is_missing(b)) or inherited
        for value in made:
            severity = self.severity(value)
            is_intended = not inherited and not self.intended.isdisjoint(bad)
            is_new = is_intended and (value in self.emptied or self.has_turned(step, value))
            if severity <= worst and not is_new:
                self.sources[value] = inherited
                if is_intended:
                    self.intended.add(value)
            elif self.is_ignored(step):
                self.sources[value] = inherited
            elif severity > worst and severity is Severity.INF and self.is_intended_by(step, value):
                self.intended.add(value)
            else:
                blame = Blame(value, index, severity)
                self.sources[value] = (*inherited, self.accused(blame))
                if severity <= worst:  # other writes of the operation are bad because of that
                    inherited = self.sources[value]
                if step.kind in UNINITIALISED:
                    self.uninitialised.add(blame)

    def is_missing(self, blame: Blame) -> bool:
        """Whether a NaN stands for a missing number: it was given, or written as such."""
        if blame.severity is not Severity.NAN:
            return False
        if blame.step is None:
            return self.values[blame.value].role is not Role.WEIGHT
        return any(map(math.isnan, self.steps[blame.step].literals))

    def is_intended_by(self, step: Step, value: int) -> bool:
        """Whether an operation was meant to make an infinity."""
        if value in self.overflowed:
            return False
        if value in self.made_masks:
            self.bounds.follow(step, value)
            self.bounds.excuse()
            return True
        of_limits = self.keeps_limits(step)
        if of_limits or step.infinite_literal:
            self.bounds.follow(step, value)
            self.bounds.excuse()
        if of_limits:
            self.of_limits.add(value)
        return of_limits or step.infinite_literal

    def keeps_limits(self, step: Step) -> bool:
        """Whether an operation may turn a mask of a dtype's largest magnitude into infinities."""
        keeps = step.kind in ADDITIONS or step.kind in CASTS
        return keeps and not self.of_limits.isdisjoint(step.inputs)

    def has_turned(self, step: Step, value: int) -> bool:
        """Whether an operation on intended infinities made another one from finite elements."""
        fits = self.bounds.follow(step, value)
        if not self.of_limits.isdisjoint(step.inputs):
            self.of_limits.add(value)
        if fits:
            return False
        turned = None if self.keeps_limits(step) else self.turned_infinite(value)
        if turned is None:
            self.bounds.excuse()
        return bool(turned)

    def judge_given(self, value: int) -> None:
        """Judge a bad value that no operation made, when it is first read."""
        if value in self.sources or value in self.intended:
            return
        severity, role = self.severity(value), self.values[value].role
        if severity is Severity.INF and role is not Role.WEIGHT and self.is_mask(value):
            self.intended.add(value)
        else:
            self.sources[value] = (self.accused(Blame(value, None, severity)),)

    def accused(self, blame: Blame) -> Blame:
        self.blames.setdefault(blame)
        return blame

    def verdict(self, reached: Sequence[int], rests: Collection[tuple[int, int]]) -> Verdict:
        """The verdict, once all operations were followed.

        What was bad in given memory, and is still there beside what was written, counts only if the
        model reads it: nobody has written it yet, or on purpose.
        """
        for value in reached:
            if self.values[value].role.is_given and self.severity(value):
                self.judge_given(value)
        counted = {
            blame
            for value in reached
            for blame in self.sources.get(value, ())
            if (value, blame.value) not in rests
        }
        # Uninitialised memory is not a fault unless the model returns it.
        reported = tuple(b for b in self.blames if b in counted or b not in self.uninitialised)
        return Verdict(
            origins=tuple(blame for blame in reported if blame in counted),
            absorbed=tuple(blame for blame in reported if blame not in counted),
            both=reported,
            sources=self.sources,
            intended=frozenset(self.intended),
            bounds=self.bounds,
        )


def _makes_its_own(step: Step) -> bool:
    """Whether no infinity in an operation's result comes from an intended one."""
    return step.kind in END_OF_MASKS or step.kind in MIXES or step.kind in LOSSES


def _masks(
    steps: Sequence[Step], values: Sequence[Value], abs_max: Callable[[int], float]
) -> set[int]:
    """Values that hold their dtype's largest magnitude on purpose.

    An activation that happens to reach it is not a mask: adding to it is an overflow.
    """

    def at_limit(value: int) -> bool:
        return abs_max(value) == limit_of(values[value].dtype)

    masks: set[int] = set()
    for step in steps:
        for value in step.inputs:
            if values[value].role in MASK_ROLES and at_limit(value):
                masks.add(value)
        if step.limit_literal or masks.intersection(step.inputs):
            masks.update(filter(at_limit, step.outputs))
    return masks
