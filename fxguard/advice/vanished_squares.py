"""Squares and other powers that became 0 of small numbers, and quotients that keep their value.

``w.sum() ** 2 / (w ** 2).sum()`` is the same for ``w`` and for ``w / w.max()``. Knows nothing of
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxguard.advice._patterns import is_square_of, made_by, number_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.positive import POSITIVE
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.vanished import vanished_in
from fxguard.advice.written_operands import (
    operand_in,
    titled,
    without_parentheses,
    written_operand,
)
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.named import variable_in

__all__ = ["free_of_scale", "is_free_of", "vanished_square", "words_of_scale", "words_of_square"]

MOST_STEPS = 24  # back from one side of a quotient

_SAME = frozenset(map(plain, MOVES | SELECTS | CASTS)) | names_in("clone detach")
_KEEPS_DEGREE = _SAME | names_in(
    "abs amax amin cumsum max mean min nansum neg norm linalg_norm linalg_vector_norm std sum "
    "vector_norm"
)
_PRODUCTS = names_in("bmm dot einsum inner matmul mm mul mv outer vdot")
_SUMS = names_in("add sub")


def vanished_square(case: Case) -> Step | None:
    """The power of numbers that are not 0 because of which the operand is 0; None if none is."""
    culprit = case.around.culprit
    return None if culprit is None else vanished_in(case.around, culprit, _made_zeros)


def _made_zeros(around: Surroundings, step: Step) -> bool | None:
    """Whether a square, or a higher power, made 0 of what is not."""
    if _power_of(step) is None:
        return None
    made, read = around.range_of(step.outputs[0]), around.range_of(step.inputs[0])
    if made is None or read is None or made.abs_min or not read.abs_max < math.inf:
        return False
    return read.abs_min > 0 or (made.abs_max == 0 and read.abs_max > 0)


def _power_of(step: Step) -> float | None:
    """The exponent of a power above 1; None of other operations."""
    if is_square_of(step) is not None or _is_own_product(step):
        return 2.0
    number = number_of(step)
    is_power = plain(step.kind) in ("float_power", "pow") and not step.number_first
    return number if is_power and number is not None and number > 1 else None


def _is_own_product(step: Step) -> bool:
    """A product of a tensor with itself, as ``torch.dot(x, x)``."""
    is_pair = len(step.inputs) == 2 and len(set(step.inputs)) == 1
    return is_pair and plain(step.kind) in _PRODUCTS


@dataclass(frozen=True, slots=True)
class Scale:
    """A tensor whose factor a quotient does not change with, and the power that made 0 of it."""

    value: int
    power: Step


def free_of_scale(case: Case) -> Scale | None:
    """The tensor of whose scale a quotient of zeros is free; None if there is none.

    Both sides are sums, products and powers of it, of one degree.
    """
    power = vanished_square(case)
    for value in () if power is None else _behind(case.around, power.inputs[0]):
        if is_free_of(case, value) and power is not None:
            return Scale(value, power)
    return None


def is_free_of(case: Case, value: int) -> bool:
    """Whether a quotient is the same if a value is multiplied by any number."""
    inputs = case.around.step.inputs
    if case.name != "div" or len(inputs) != 2:
        return False
    top, bottom = (_Degrees(case.around, value).of(side) for side in inputs)
    return top is not None and top == bottom and top > 0


def _behind(around: Surroundings, value: int) -> Iterator[int]:
    """A value and what it is computed from, as far as that is not 0, nearest first."""
    todo, seen = [value], {value}
    while todo and len(seen) <= MOST_STEPS:
        each = todo.pop(0)
        found, step = around.range_of(each), around.maker_of(each)
        if found is not None and found.abs_max > 0:
            yield each
        todo += [read for read in (() if step is None else step.inputs) if read not in seen]
        seen.update(todo)


class _Degrees:
    """The degree of values in one of them: that of ``x * a`` is 1, of ``x.sum() ** 2`` is 2."""

    def __init__(self, around: Surroundings, value: int) -> None:
        self.around = around
        self.value = value
        self.known: dict[int, float | None] = {value: 1.0}

    def of(self, value: int, depth: int = MOST_STEPS) -> float | None:
        """Of one value; 0 if it does not depend on that, None if it has no degree."""
        if value not in self.known:
            self.known[value] = self._computed(value, depth)
        return self.known[value]

    def _computed(self, value: int, depth: int) -> float | None:
        step = self.around.maker_of(value)
        if step is None or not step.inputs:
            return 0.0
        read = [self.of(each, depth - 1) if depth else None for each in step.inputs]
        degrees = [each for each in read if each is not None]
        if len(degrees) < len(read):
            return None
        if not any(degrees):
            return 0.0
        name, power = plain(step.kind), _power_of(step)
        if power is not None:
            return power * degrees[0]
        if name in ("div", "mul") and step.literals:
            return -degrees[0] if name == "div" and step.number_first else degrees[0]
        if len(degrees) == 1:
            return self._of_one(step, degrees[0])
        if name in _PRODUCTS:
            return sum(degrees)
        if name == "div":
            return degrees[0] - degrees[1]
        is_like = name in _SUMS and degrees[0] == degrees[1]
        return degrees[0] if is_like and not step.literals else None

    def _of_one(self, step: Step, degree: float) -> float | None:
        name = plain(step.kind)
        if not step.counts or name in _KEEPS_DEGREE:
            return degree
        factors: Mapping[str, float] = {"reciprocal": -1.0, "rsqrt": -0.5, "sqrt": 0.5}
        if name in factors:
            return factors[name] * degree
        number = number_of(step)
        is_power = name == "pow" and not step.number_first and number is not None
        return number * degree if is_power and number is not None else None


def words_of_square(case: Case) -> Mapping[str, str]:
    """The power, and the numbers of which it made 0."""
    step = vanished_square(case)
    if step is None:
        return dict.fromkeys(("power", "numbers", "dtype", "root", "wider", "logarithm"), "it")
    dtype, power = case.around.values[step.outputs[0]].dtype, _power_of(step) or 1.0
    form, name = FORMATS.get(dtype), _written(case, step) or "x"
    root = 0.0 if form is None else form.smallest ** (1 / power)
    wider = "float64" if dtype == "float32" else "float32"
    return {
        "power": titled(step),
        "numbers": _numbers(case.around, step),
        "dtype": dtype,
        "root": f"{root:.0e}",
        "wider": "" if dtype == "float64" else f", or compute it in {wider}",
        "logarithm": f"{power:g} * {case.name}({_as_tensor(name)}.abs())",
    }


def _numbers(around: Surroundings, step: Step) -> str:
    """``numbers up to 5.5e-26``, if it made 0 of all; ``numbers down to 1e-30``."""
    made, read = around.range_of(step.outputs[0]), around.range_of(step.inputs[0])
    if made is None or read is None:
        return "small numbers"
    are_all = made.abs_max == 0
    return f"numbers up to {read.abs_max:.2g}" if are_all else f"numbers down to {read.abs_min:.2g}"


def _written(case: Case, step: Step) -> str:
    """What a power is taken of, as the program has it; "" if that is not certain."""
    if text := written_operand(step):
        return without_parentheses(text)
    source, here = step.source, case.around.step.source
    is_here = source is not None and here is not None and source.position == here.position
    return variable_in(operand_in(case.around)) if is_here else ""


def _as_tensor(name: str) -> str:
    """Ready to be followed by a method."""
    return name if name.replace(".", "_").isidentifier() else f"({name})"


def words_of_scale(case: Case) -> Mapping[str, str]:
    """The same for a quotient, and how to scale what it is made of."""
    found = free_of_scale(case)
    if found is None:
        return dict.fromkeys(("scaled", "power", "numbers", "dtype", "logs"), "it")
    source, here = found.power.source, case.around.step.source
    is_read = _is_same(case.around, found)
    name = _written(case, found.power) if is_read else ""
    if not name and source is not None and here is not None and source.position == here.position:
        name = variable_in(operand_in(case.around))
    maker = made_by(case.around, found.value)
    kind = "" if maker is None else plain(maker.kind)
    are_rows = case.evidence is not None and case.evidence.numel > 1
    size = "" if kind in POSITIVE else ".abs()"
    size += ".amax(dim, keepdim=True)" if are_rows else ".max()"
    scaled = f"{name} / {_as_tensor(name)}{size}"
    if not name:
        scaled = f"x / x{size} for the x that the quotient is made of"
    logs = ""
    if maker is not None and kind == "exp":
        logs = f"; or take softmax of what {titled(maker)} reads, in place of it"
    elif name and (maker is None or not maker.inputs):
        logs = f"; or, if exp made {name}, take softmax of what that exp reads"
    return {**words_of_square(case), "scaled": scaled, "logs": logs}


def _is_same(around: Surroundings, found: Scale) -> bool:
    """Whether the power reads the tensor itself, perhaps moved."""
    value = found.power.inputs[0]
    for _ in range(MOST_STEPS):
        if value == found.value:
            return True
        step = around.maker_of(value)
        if step is None or not step.inputs or (step.counts and plain(step.kind) not in _SAME):
            return False
        value = step.inputs[0]
    return False
