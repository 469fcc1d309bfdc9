"""Bounds such as ``1 - 1e-8``, which float32 rounds to 1: what they keep inside a ball lies on it.

Then ``1 - x²`` is 0 somewhere else in the program. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by, one_minus_of
from fxguard.advice.case import Case
from fxguard.advice.end_of_range import is_at_end, maker_at_end
from fxguard.advice.positive import made_at
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import LIMITERS
from fxguard.plan.plan import Step
from fxguard.records import Source
from fxguard.source.flows import flows_of
from fxguard.source.near_one import NearOne, near_ones

__all__ = ["words_of_bound"]

MOST_STEPS = 24  # in one walk
MOST_FILES = 2
ROUNDINGS = 4  # distances between neighbours: what a difference of roundings may be

# What keeps x and its square away from 1, with roundings of a norm.
DISTANCES = {"bfloat16": "2e-2", "float16": "5e-3", "float32": "1e-5", "float64": "1e-12"}

_AT_ONE = frozenset(["acos", "asin", "atanh", "erfinv", "log1p", "logit"])
_JOINED = frozenset(["add", "div", "mul", "pow", "rsqrt", "sqrt", "square"])


def words_of_bound(case: Case) -> Mapping[str, str]:
    """``{"constant": "`1 - EPS`", "place": "ball.py:48", "instead": "1 - 1e-5", ...}``.

    {} where no such bound leads to the operation, or where a clamp next to it is to blame.
    """
    maker = maker_at_end(case) if is_at_end(case) else None
    if maker is not None and maker.kind in LIMITERS:
        return {}
    found = _difference(case)
    source = case.around.step.source if found is None else found.source
    dtype = case.dtype if found is None else case.around.values[found.inputs[0]].dtype
    form = FORMATS.get(dtype)
    if source is None or form is None or (found is None and not _reads_one(case)):
        return {}
    bounds = _bounds_behind(source, 2 * form.eps)
    if not bounds:
        return {}
    bound = bounds[0]
    both = any(x.is_negative != bound.is_negative and x.source == bound.source for x in bounds)
    is_lost = bound.distance <= form.eps / 4
    one, sign = ("-1", "+") if bound.is_negative else ("1", "-")
    what = "is 0" if found is not None else f"has no value at {one}"
    return {
        "constant": f"`{bound.text}`",
        "place": " and ".join(_places_of(bound, 2 * form.eps)),
        "both": ", and so at -1" if both else "",
        "instead": f"{one} {sign} {DISTANCES[dtype]}",
        "held": f"is {one}" if is_lost else f"is {one} but for roundings",
        "half": dtype,
        "what": f"{titled(case.around.step if found is None else found)} {what}",
    }


def _places_of(bound: NearOne, distance: float) -> list[str]:
    """Where a file has the same bound, that one first."""
    alike = [each for each in near_ones(bound.source.file, distance) if each.text == bound.text]
    return list(dict.fromkeys(each.source.place for each in (bound, *alike)))


def _bounds_behind(source: Source, distance: float) -> list[NearOne]:
    """The bounds whose results go to a line, those at 1 first."""
    bounds = near_ones(source.file, distance)
    flows = flows_of(source.file) if bounds else None
    if flows is None:
        return []
    others = (each for each in bounds if each.source != source)  # a clamp in the line is seen there
    found = [each for each in others if flows.reaches(each.source, source)]
    return sorted(found, key=lambda each: each.is_negative)


def _reads_one(case: Case) -> bool:
    """Whether a function of (-1, 1) was given its end."""
    numbers = [each.low for each in case.operands[:1]]
    return case.name in _AT_ONE and bool(numbers) and abs(numbers[0]) == 1


def _difference(case: Case) -> Step | None:
    """The operation that made 0, or roundings, of 1 - x, and by which the operand is 0."""
    around, seen = case.around, list[int]()
    todo = [] if around.culprit is None else [around.culprit]
    while todo and len(seen) < MOST_STEPS:
        value = todo.pop(0)
        if value in seen:
            continue
        seen.append(value)
        step = _computed(around, value)
        if step is None:
            continue
        if one_minus_of(step) is not None:
            if _is_lost(case, step):
                return step
        elif plain(step.kind) in _JOINED:
            todo += step.inputs
    return None


def _computed(around: Surroundings, value: int) -> Step | None:
    """The operation that computed a value, behind bounds and what selects elements."""
    step = made_at(around, value)
    return step if step is None or step.kind not in LIMITERS else made_by(around, value)


def _is_lost(case: Case, step: Step) -> bool:
    """Whether 1 - x is 0 but for roundings, in some element, and x is given or computed."""
    around = case.around
    found, read = around.range_of(step.outputs[0]), around.values[step.inputs[0]]
    form = FORMATS.get(read.dtype)
    return found is not None and form is not None and found.abs_min <= ROUNDINGS * form.eps
