"""What a number that overflowed grew from: updates that diverge, inputs that are not scaled."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from fxguard.advice.factored import fix_of_factors
from fxguard.advice.positive import LAYERS
from fxguard.advice.surroundings import Surroundings, is_passed
from fxguard.batch.dataflow import DataFlow
from fxguard.findings import Fix, columns_text
from fxguard.graph.poles import plain
from fxguard.measure.columns import Columns
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Range, Role
from fxguard.source.assigned import target_of
from fxguard.source.rates import rate_in
from fxguard.source.read import argument_read
from fxguard.verdict.explain import Back, Beyond, way_back

__all__ = ["fixes_of_factors", "fixes_of_growth", "fixes_of_updates"]

UPDATES = frozenset(["add", "add_", "addcdiv_", "addcmul_", "index_add_", "lerp_", "sub", "sub_"])
MOST_STEPS = 256  # in one walk
DIVERGED = 100.0  # how much larger updates have made a number
UNSCALED = 100.0  # times a weight, from which an input is large
RAW = 1000.0  # the same where the layer that reads it overflows itself, as few do but in 16 bits
WHITE = 255.0  # the largest of pixels that nobody has divided
MADE_OF_DATA = frozenset(["arange", "as_tensor", "from_numpy", "full", "linspace", "tensor"])
PRODUCTS = frozenset(["addmm", "dot", "linear", "matmul", "mm", "mul", "mv"])
READERS = LAYERS - {"embedding", "layer_norm"}


def fixes_of_growth(
    flow: DataFlow,
    blame: Blame,
    beyond: Beyond,
    columns: Callable[[DataFlow, int], Columns | None] = lambda flow, value: None,
    *,
    only_itself: bool = False,
    of_sample: tuple[int, float] | None = None,
) -> tuple[Fix, ...]:
    """What to do about what an overflow grew from; () if that is not certain.

    Args:
        flow: the batch of the origin.
        blame: the origin.
        beyond: see :data:`fxguard.verdict.explain.Beyond`.
        columns: gives the columns of an input that hold far larger numbers than the others.
        only_itself: whether the layer that overflowed is the only one to ask about.
        of_sample: a sample that overflowed, and the largest number in it.
    """
    way = list(way_back(flow, blame, beyond))
    itself = _itself(flow, blame)
    if only_itself and (itself is None or any(plain(x.step.kind) in READERS for x in way)):
        return ()
    if only_itself and itself is not None and itself.before < RAW:
        return ()
    way = way if itself is None else [itself, *way]
    return tuple(_of_inputs(way, columns, of_sample))


def _itself(flow: DataFlow, blame: Blame) -> Back | None:
    """The layer that overflowed, and its largest operand; None if it is no layer."""
    step = None if blame.step is None else flow.steps[blame.step]
    if step is None or plain(step.kind) not in READERS:
        return None
    largest = max(step.inputs, key=lambda each: _magnitude(flow, each) or 0.0, default=None)
    before = None if largest is None else _magnitude(flow, largest)
    return None if largest is None or not before else Back(flow, step, largest, before, math.inf)


def fixes_of_updates(flow: DataFlow, blame: Blame, beyond: Beyond) -> tuple[Fix, ...]:
    """The learning rate by which updates of the program have made a number larger each time.

    Args:
        flow: as for :func:`fixes_of_growth`.
        blame: likewise.
        beyond: likewise.
    """
    return tuple(_of_updates(list(way_back(flow, blame, beyond))))


def fixes_of_factors(
    flow: DataFlow, blame: Blame, beyond: Beyond, around: Surroundings
) -> tuple[Fix, ...]:
    """An exponential on the way whose product with another one is an ordinary number.

    Args:
        flow: as for :func:`fixes_of_growth`.
        blame: likewise.
        beyond: likewise.
        around: the graph around the origin.
    """
    way = [back.step for back in way_back(flow, blame, beyond) if back.flow is flow]
    found = (fix_of_factors(around, step) for step in (around.step, *way))
    return tuple(fix for fix in found if fix is not None)[:1]


def _of_updates(way: Sequence[Back]) -> Iterator[Fix]:
    """Updates at one line that made a number larger each time it ran."""
    for index, back in enumerate(way):
        step = back.step
        if step.kind not in UPDATES or step.source is None:
            continue
        rate = rate_in(step.source)
        before = [_magnitude(back.flow, each) for each in _at_same_line(back.flow, step)]
        finite = [number for number in before if number]
        if rate is None or len(finite) < 2 or finite[-1] < DIVERGED * min(finite):
            continue
        name = target_of(step.source) or "the weights"
        yield from itertools.islice(_of_data(way[:index]), 1)
        what = f"the learning rate, {rate}" if rate else "the learning rate"
        yield Fix(
            "advice",
            f"lower {what} ({step.source.place}): its updates made {name} grow from "
            f"{min(finite):.2g} to {finite[-1]:.2g}",
        )
        return


def _of_data(way: Sequence[Back]) -> Iterator[Fix]:
    """Data far larger than weights, by which what updates change is multiplied."""
    for back in way:
        step = back.step
        if plain(step.kind) not in PRODUCTS or step.source is None:
            continue
        for value in step.inputs:
            largest = 0.0 if value == back.operand else _magnitude(back.flow, value) or 0.0
            if largest < UNSCALED or _is_updated(back.flow, value):
                continue
            name = argument_read(step.source) or "the data"
            yield Fix(
                "advice",
                f"scale {name}, such as by its mean and deviation: {plain(step.kind)} "
                f"({step.source.place}) reads numbers up to {largest:.3g}, and a gradient grows "
                "with their square",
            )


def _is_updated(flow: DataFlow, value: int) -> bool:
    """Whether updates have led to a value, as they do to what is computed of weights."""
    made = (step for _, step in _behind(flow, value) if step is not None)
    return any(
        step.kind in UPDATES and step.source is not None and rate_in(step.source) is not None
        for step in made
    )


def _is_of_no_weight(flow: DataFlow, value: int) -> bool:
    """Whether a script has computed a value of what it made itself, and of nothing learned."""
    behind = list(itertools.islice(_behind(flow, value), MOST_STEPS + 1))
    is_own = all(made and not flow.values[each].needs_gradient for each, made in behind)
    return is_own and len(behind) <= MOST_STEPS


def _behind(flow: DataFlow, value: int) -> Iterator[tuple[int, Step | None]]:
    """A value and all that it was computed of, each with what made it; None if it was given."""
    makers = {made: step for step in flow.steps for made in step.outputs}
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        step = makers.get(value)
        yield value, step
        new = set(() if step is None else step.inputs) - seen
        todo += new
        seen |= new


def _at_same_line(flow: DataFlow, step: Step) -> list[int]:
    same = [x for x in flow.steps if (x.kind, x.source) == (step.kind, step.source)]
    return [value for each in same for value in each.outputs]


def _of_inputs(
    way: Sequence[Back],
    columns: Callable[[DataFlow, int], Columns | None],
    of_sample: tuple[int, float] | None,
) -> Iterator[Fix]:
    """A layer that reads data far larger than its weights."""
    layers = [i for i, back in enumerate(way) if plain(back.step.kind) in READERS]
    if not layers:
        return
    first = way[layers[-1]]
    behind = [back.step for back in way[layers[-1] + 1 :]]
    is_data = all(is_passed(step) or plain(step.kind) in MADE_OF_DATA for step in behind)
    is_data = is_data or _is_of_no_weight(first.flow, first.operand)
    others = [_magnitude(first.flow, x) for x in first.step.inputs if x != first.operand]
    largest = max(filter(None, others), default=0.0)
    role = first.flow.values[first.operand].role
    # What a script multiplies data with, from the right, may be weights, whoever has made them.
    may_be_weight = role is not Role.INPUT and first.step.inputs[:1] != (first.operand,)
    if not is_data or first.step.source is None or role is Role.WEIGHT or may_be_weight:
        return
    if first.before < UNSCALED or first.before < UNSCALED * min(largest, 1.0):
        return
    if first.before < largest:
        return
    place = f"{plain(first.step.kind)} ({first.step.source.place})"
    name = argument_read(first.step.source) or _name(first) or "its input"
    kind, up_to = plain(first.step.kind), f"numbers up to {first.before:.3g}"
    data = way[-1]
    found = columns(data.flow, data.operand)
    if found is not None and found.most == first.before:
        which = columns_text(found.indices).removeprefix("in ")
        how = f"scale {which} of {name}, such as by mean and deviation"
        up_to += f" there, and up to {found.others:.3g} in the others"
        scaled = "(a - a.mean(0)) / (a.std(0) + 1e-6)"
    elif first.before == WHITE:
        how, scaled = f"divide {name} by 255", "a / 255"
    else:
        how, scaled = f"scale {name}, such as by its mean and deviation", "(a - a.mean()) / a.std()"
        if (bits := _bits(first.before)) is not None:
            how += f", or if these are integers of {bits} bits, by 2**{bits - 1}"
    if of_sample is not None and math.isclose(of_sample[1], first.before, rel_tol=1e-3):
        up_to += f", those in sample {of_sample[0]}"
    yield Fix(
        "advice",
        f"{how}: {place} reads {up_to}",
        at=first.step.source,
        of=kind,
        tries=(f"{kind}(a, ...) -> {kind}({scaled}, ...)",),
    )


def _bits(largest: float) -> int | None:
    """Of how many bits integers may be of which this is the largest, as of sound; None of none."""
    found = (bits for bits in (16, 24, 32) if 2 ** (bits - 4) < largest <= 2 ** (bits - 1))
    return next(found, None)


def _name(back: Back) -> str:
    name = back.flow.values[back.operand].name.strip("`")
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else ""


def _magnitude(flow: DataFlow, value: int) -> float | None:
    number = flow.ranges[value]
    is_finite = isinstance(number, Range) and math.isfinite(number.abs_max)
    return number.abs_max if is_finite and isinstance(number, Range) else None
