"""Bad values to their origins, by data flow. Knows nothing of torch.

A value is bad when it holds inf or NaN. An operation is an origin when what it made is worse
than everything that it read (finite < inf < NaN). An origin counts when its bad values reach
an output; otherwise it is absorbed, as ``log(0)`` under a ``where`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxguard.formats import FORMATS
from fxguard.graph.tables import ADDITIONS, CASTS, END_OF_MASKS, UNINITIALISED
from fxguard.plan.plan import Step, Value
from fxguard.records import Role

__all__ = ["Blame", "Verdict", "find_origins"]

# The largest finite number of each dtype. Masks made of it turn into -inf when they are added.
LIMITS = {name: FORMATS[name].max for name in ("float16", "bfloat16", "float32", "float64")}


MASK_ROLES = (Role.INPUT, Role.BUFFER, Role.CONSTANT)  # a mask may be any of these


@dataclass(frozen=True, slots=True)
class Blame:
    """One origin: a step that made a bad value, or a weight or input that held one."""

    value: int
    step: int | None  # None for a weight, buffer, constant or input
    problem: str  # "inf" or "nan"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one batch, in order of execution."""

    origins: tuple[Blame, ...] = ()
    absorbed: tuple[Blame, ...] = ()
    both: tuple[Blame, ...] = field(default=(), compare=False)  # in one order
    # Bad values to where they came from.
    sources: Mapping[int, tuple[Blame, ...]] = field(default_factory=dict, compare=False)
    intended: frozenset[int] = field(default=frozenset(), compare=False)  # infinite on purpose


def find_origins(
    steps: Sequence[Step],
    values: Sequence[Value],
    measured: Callable[[int], int],
    *,
    abs_max: Callable[[int], float],
    is_mask: Callable[[int], bool],
    reached: Iterable[int],
    is_ignored: Callable[[Step], bool],
    results: Iterable[int] | None = None,
    overflowed: Collection[int] = (),
) -> Verdict:
    """Trace every bad value back to where it came from.

    Args:
        steps: operations in order of execution.
        values: what they read and made.
        measured: severity of a value: 0 finite, 1 inf, 2 NaN. Called for weights only where an
            operation that read them made something bad.
        abs_max: largest magnitude of a value.
        is_mask: whether an input, buffer or constant that holds inf does so on purpose.
        reached: values that are an output of a module or of the model.
        is_ignored: whether the user asked not to hear of an operation.
        results: those of them that are an output of the model; all of them where not given.
        overflowed: values that hold +inf, and are no masks though they look like it.
    """
    masks = _masks(steps, values, abs_max)
    uninitialised: set[Blame] = set()
    sources: dict[int, tuple[Blame, ...]] = {}
    intended: set[int] = set()
    blames: dict[Blame, None] = {}  # insertion order is the order of execution
    assumed: dict[int, int] = {}  # of values that no check reaches: as bad as what they are made of

    def severity(value: int) -> int:
        return assumed[value] if value in assumed else measured(value)

    def accuse(blame: Blame) -> tuple[Blame, ...]:
        blames.setdefault(blame)
        return (blame,)

    def given(value: int) -> None:
        """Judge a bad value that no operation made, when it is first read."""
        if value in sources or value in intended:
            return
        if severity(value) == 1 and values[value].role is not Role.WEIGHT and is_mask(value):
            intended.add(value)
        else:
            sources[value] = accuse(Blame(value, None, _problem(severity(value))))

    for index, step in enumerate(steps):
        for value in step.outputs:
            if values[value].is_assumed:
                given_to = (i for i in step.inputs if values[i].role is not Role.WEIGHT)
                assumed[value] = max(map(severity, given_to), default=0)
        made = [value for value in step.outputs if severity(value)]
        if not made:
            continue
        bad = [value for value in dict.fromkeys(step.inputs) if severity(value)]
        for value in bad:
            if values[value].role.is_given:
                given(value)
        if step.kind in END_OF_MASKS:
            bad = [value for value in bad if value not in intended]
        worst = max((severity(value) for value in bad), default=0)
        inherited = tuple(dict.fromkeys(blame for value in bad for blame in sources.get(value, ())))
        is_mask_step = step.infinite_literal or (
            (step.kind in ADDITIONS or step.kind in CASTS) and masks.intersection(step.inputs)
        )
        for value in made:
            if severity(value) <= worst:
                sources[value] = inherited
                if not inherited and any(i in intended for i in bad):
                    intended.add(value)
            elif is_ignored(step):
                sources[value] = inherited
            elif severity(value) == 1 and is_mask_step and value not in overflowed:
                intended.add(value)
            else:
                blame = Blame(value, index, _problem(severity(value)))
                sources[value] = (*inherited, *accuse(blame))
                if step.kind in UNINITIALISED:
                    uninitialised.add(blame)

    outputs = list(reached)
    for value in outputs:
        if values[value].role.is_given and severity(value):
            given(value)
    counted = {blame for value in outputs for blame in sources.get(value, ())}
    if results is not None:
        # To hand on memory that is going to be written is no fault; to return it is.
        counted -= uninitialised - {b for value in results for b in sources.get(value, ())}
    heard = tuple(blame for blame in blames if blame in counted or blame not in uninitialised)
    return Verdict(
        origins=tuple(blame for blame in heard if blame in counted),
        absorbed=tuple(blame for blame in heard if blame not in counted),
        both=heard,
        sources=sources,
        intended=frozenset(intended),
    )


def _masks(
    steps: Sequence[Step], values: Sequence[Value], abs_max: Callable[[int], float]
) -> set[int]:
    """Values that hold their dtype's largest magnitude because somebody wrote it there.

    An activation that happens to reach it is no mask: to add to it is an overflow.
    """

    def at_limit(value: int) -> bool:
        return abs_max(value) == LIMITS.get(values[value].dtype)

    masks: set[int] = set()
    for step in steps:
        for value in step.inputs:
            if values[value].role in MASK_ROLES and at_limit(value):
                masks.add(value)
        if step.limit_literal or masks.intersection(step.inputs):
            masks.update(filter(at_limit, step.outputs))
    return masks


def _problem(severity: int) -> str:
    return "nan" if severity == 2 else "inf"
