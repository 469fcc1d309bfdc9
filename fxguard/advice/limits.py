"""Quotients that have a limit where both sides are 0: ``sin(x) / x``.

Both sides are computed again, in Python, from numbers near to where they are 0. Knows nothing of
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from fxguard.advice._patterns import are_equal
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.named import argument_text, variable_in

__all__ = ["limit_of", "words_of_limit"]

MOST_STEPS = 24  # back from one side
NEAR = 1e-3  # how near to a zero both sides are computed
ROUNDINGS = 1e-3  # of a limit
LARGEST_DENOMINATOR = 12
VANISHES = 1e-6  # a number up to this may be 0 in a square

_OF_MATH = names_in(
    "acos acosh asin asinh atan atanh cos cosh erf exp expm1 log log1p log2 log10 sin sinh tan tanh"
)
_SMOOTH: Mapping[str, Callable[[float], float]] = {
    **{name: getattr(math, name) for name in _OF_MATH},
    "exp2": lambda x: 2**x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}
_ARITHMETIC: Mapping[str, Callable[[float], float]] = {
    "abs": abs,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sqrt": math.sqrt,
    "square": lambda x: x * x,
}
_OF_TWO: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "div": lambda x, y: x / y,
    "mul": lambda x, y: x * y,
    "pow": lambda x, y: x**y,
    "sub": lambda x, y: x - y,
}
_SAME = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("clone detach")


@dataclass(frozen=True, slots=True)
class Limit:
    """What is 0, or 1, where both sides are 0, and the limit of their quotient there."""

    value: int
    at: float
    number: float | None  # None where it depends on something else
    factor: tuple[Step, int] | None  # a product, and its factor that is the limit


def limit_of(case: Case) -> Limit | None:
    """The limit of a quotient of two zeros; None if it has none, or if that is not certain."""
    inputs = case.around.step.inputs
    are_zero = len(case.operands) == 2 and all(each.low == each.high == 0 for each in case.operands)
    if case.name != "div" or len(inputs) != 2 or not are_zero:
        return None
    found = (_limit_at(case.around, value, at) for value, at in _candidates(case.around, inputs[1]))
    return next((each for each in found if each is not None), None)


def _candidates(around: Surroundings, divisor: int) -> Iterator[tuple[int, float]]:
    """The values that the divisor is computed from, nearest first, where one is 0 or 1."""
    for value in _behind(around, divisor):
        found = around.range_of(value)
        if found is None or found.abs_min <= VANISHES:
            yield value, 0.0
        if found is None or found.abs_min <= 1 <= found.abs_max:
            yield value, 1.0


def _behind(around: Surroundings, value: int) -> list[int]:
    todo, seen = [value], [value]
    while todo and len(seen) <= MOST_STEPS:
        step = around.maker_of(todo.pop(0))
        if step is not None and _is_known(step):
            new = [each for each in dict.fromkeys(step.inputs) if each not in seen]
            todo += new
            seen += new
    return seen


def _is_known(step: Step) -> bool:
    name = plain(step.kind)
    is_known = name in _SAME or name in _SMOOTH or name in _ARITHMETIC or name in _OF_TWO
    return bool(step.inputs) and (not step.counts or is_known or name == "rsub")


class _Near:
    """Values near to where one of them is a number; others are any."""

    def __init__(self, around: Surroundings, value: int, number: float, seed: int) -> None:
        self.around = around
        self.value = value
        self.number = number
        self.seed = seed
        self.known: dict[int, float] = {}

    def of(self, value: int, depth: int = MOST_STEPS) -> float:
        """One value."""
        if value not in self.known:
            is_it = value == self.value or are_equal(self.around, value, self.value)
            self.known[value] = self.number if is_it else self._computed(value, depth)
        return self.known[value]

    def _computed(self, value: int, depth: int) -> float:
        step = self.around.maker_of(value)
        if step is None or not depth or not _is_known(step):
            return 0.3 + 0.0625 * ((value + self.seed) % 11)
        name, read = plain(step.kind), [self.of(each, depth - 1) for each in step.inputs]
        if name in _SMOOTH:
            return _SMOOTH[name](read[0])
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](read[0])
        if name not in _OF_TWO and name != "rsub":
            return read[0]
        numbers = list(step.literals[:1]) if len(read) < 2 else []
        both = [*numbers, *read] if step.number_first else [*read, *numbers]
        both = both * 2 if len(both) == 1 else both  # x * x
        return both[1] - both[0] if name == "rsub" else _OF_TWO[name](both[0], both[1])


def _has_smooth(around: Surroundings, side: int, value: int) -> bool:
    """Whether something else than arithmetic leads from a value to one side."""
    smooth = (
        step.inputs[0]
        for each in _behind(around, side)
        if each != value and (step := around.maker_of(each)) is not None
        if plain(step.kind) in _SMOOTH and step.inputs
    )
    return any(
        read == value or are_equal(around, read, value)
        for each in smooth
        for read in _behind(around, each)
    )


def _limit_at(around: Surroundings, value: int, at: float) -> Limit | None:
    """The limit where a value becomes a number; None if the quotient has none there."""
    top, bottom = around.step.inputs

    def quotient(number: float, seed: int) -> float:
        near = _Near(around, value, number, seed)
        return near.of(top) / near.of(bottom)

    if not (_has_smooth(around, top, value) or _has_smooth(around, bottom, value)):
        return None
    zero = _Near(around, value, at, 0)
    try:
        if zero.of(top) != 0 or zero.of(bottom) != 0:
            return None
    except (ArithmeticError, TypeError, ValueError):
        return None
    limits = [_extrapolated(quotient, at, sign, seed) for sign in (1, -1) for seed in (0, 5)]
    found = [each for each in limits if each is not None]
    if not found or not all(map(math.isfinite, found)):
        return None
    of_one = [each for each in limits[::2] if each is not None]
    if not math.isclose(min(of_one), max(of_one), abs_tol=ROUNDINGS):
        return None
    if math.isclose(min(found), max(found), abs_tol=ROUNDINGS):
        number = round(found[0], 3)
        return None if number == 0 else Limit(value, at, number, None)
    return Limit(value, at, None, _factor(zero, top, found[0]))


def _extrapolated(
    quotient: Callable[[float, int], float], at: float, sign: int, seed: int
) -> float | None:
    """From one side; None where the quotient has no value on that side."""
    try:
        far, near = (quotient(at + sign * step, seed) for step in (2 * NEAR, NEAR))
        if abs(near) > 1.5 * abs(far) + ROUNDINGS or abs(far) > 1.5 * abs(near) + ROUNDINGS:
            return math.inf
        return 2 * near - far
    except (ArithmeticError, TypeError, ValueError):
        return None


def _factor(near: _Near, top: int, limit: float) -> tuple[Step, int] | None:
    """A product in front of one side, and the position of its factor that is the limit."""
    for value in _behind(near.around, top):
        step = near.around.maker_of(value)
        if step is None or plain(step.kind) != "mul" or len(step.inputs) != 2:
            continue
        for position, each in enumerate(step.inputs):
            if math.isclose(near.of(each), limit, abs_tol=ROUNDINGS):
                return step, position
    return None


def words_of_limit(case: Case) -> Mapping[str, str]:
    """What is 0, the limit, and how to write it."""
    found = limit_of(case)
    if found is None:
        return dict.fromkeys(("name", "at", "limit", "how"), "it")
    d, limit = case.divisor, _limit_text(found)
    is_sinc = _is_sinc(case)
    safe = f"where({d} == 0, 1, {d})"
    how = f"where({d} == 0, {limit}, ... / {safe})" + (
        f", with{case.definition}" if case.definition else ""
    )
    sinc = f"; torch.sinc({case.bare} / torch.pi) does so" if is_sinc else ""
    return {
        "name": _name(case, found.value),
        "at": f"{found.at:g}",
        "limit": "as of their derivatives" if limit == "limit" else limit,
        "how": how + sinc,
    }


def _is_sinc(case: Case) -> bool:
    top, bottom = case.around.step.inputs
    step = case.around.maker_of(top)
    is_sine = step is not None and plain(step.kind) == "sin"
    return step is not None and is_sine and are_equal(case.around, step.inputs[0], bottom)


def _limit_text(found: Limit) -> str:
    if found.number is not None:
        near = Fraction(found.number).limit_denominator(LARGEST_DENOMINATOR)
        is_part = near.denominator > 2 and math.isclose(near, found.number, abs_tol=1e-3)
        return f"{near.numerator} / {near.denominator}" if is_part else f"{found.number:g}"
    step, position = found.factor or (None, 0)
    source = None if step is None else step.source
    return ("" if source is None else argument_text(source.code, "mul", position)) or "limit"


def _name(case: Case, value: int) -> str:
    """The variable that a value is; the divisor, if it is that."""
    around, here = case.around, case.around.step.source
    if around.step.inputs[1] == value and case.bare != "d":
        return case.bare
    step = around.maker_of(value)
    source = None if step is None else step.source
    is_elsewhere = source is not None and here is not None and source.position != here.position
    if source is not None and is_elsewhere and (name := target_of(source)):
        return name
    return variable_in(case.bare) or around.values[value].name.strip("`") or "its argument"
