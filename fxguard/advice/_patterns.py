"""Patterns of expressions: what exactly a value is made of, and what exactly becomes of it.

An exact rewrite is right for one expression only. So these walks continue only through operations
that hand on elements as they are or bound them, and through an added eps: ``1 - p`` is not ``p``.
Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxguard.advice.surroundings import Surroundings
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, DROPOUTS, LIMITERS, MOVES, RANDOM, SELECTS
from fxguard.plan.plan import Step

__all__ = [
    "are_equal",
    "divides_by",
    "factors_of",
    "is_made_by",
    "is_square_of",
    "made_by",
    "minus_one_of",
    "number_of",
    "one_minus_of",
    "one_plus_of",
    "readers_of",
    "terms_of",
]

MOST_STEPS = 16  # in one walk
LARGEST_EPS = 1e-2  # an added number up to this is an eps

_JOINS = frozenset(
    [
        *("cat", "column_stack", "concat", "concatenate", "dstack", "hstack", "meshgrid"),
        *("row_stack", "stack", "view_as_complex", "vstack"),
    ]
)
# Of a complex tensor these are other numbers.
_OF_REAL = frozenset(["__get__", "adjoint", "imag", "matrix_H", "real", "view_as_real"])
_HANDED_ON = (MOVES | SELECTS | CASTS | LIMITERS) - _JOINS


def _hands_on(around: Surroundings, step: Step) -> bool:
    """Whether the elements of its result are some of its first operand's, possibly bounded."""
    if step.kind in _OF_REAL and step.inputs:
        return not around.values[step.inputs[0]].dtype.startswith("complex")
    if not step.counts or step.kind in _HANDED_ON or plain(step.kind) in _HANDED_ON:
        return bool(step.inputs)
    number = number_of(step)
    return plain(step.kind) == "add" and number is not None and abs(number) <= LARGEST_EPS


def number_of(step: Step) -> float | None:
    """The number in an operation on one tensor and one Python number; None for others."""
    is_by_number = len(set(step.inputs)) == 1 and len(step.literals) == 1
    return step.literals[0] if is_by_number else None


def made_by(around: Surroundings, value: int | None) -> Step | None:
    """The operation that computed the elements of a value; None if it was given."""
    for _ in range(MOST_STEPS):
        step = None if value is None else around.maker_of(value)
        if step is None or not _hands_on(around, step):
            return step
        value = step.inputs[0]
    return None


def is_made_by(around: Surroundings, value: int | None, name: str) -> bool:
    """Whether an operation of that name computed a value."""
    step = made_by(around, value)
    return step is not None and plain(step.kind) == name


def are_equal(around: Surroundings, one: int, other: int) -> bool:
    """Whether the elements of two values were computed alike, perhaps twice."""
    return _are_equal(around, one, other, MOST_STEPS)


def _are_equal(around: Surroundings, one: int, other: int, depth: int) -> bool:
    first, second = made_by(around, one), made_by(around, other)
    if one == other or first is second is not None:
        return True
    if first is None or second is None or not depth or plain(first.kind) in DROPOUTS | RANDOM:
        return False
    is_again = (first.kind, first.literals) == (second.kind, second.literals)
    pairs = list(zip(first.inputs, second.inputs, strict=False))
    is_again = is_again and len(first.inputs) == len(second.inputs) > 0
    return is_again and all(_are_equal(around, *pair, depth - 1) for pair in pairs)


def readers_of(around: Surroundings, value: int) -> Iterator[tuple[Step, int]]:
    """The operations that compute with the elements of a value, each with what it reads of them."""
    todo, seen = [value], {value}
    while todo and len(seen) <= MOST_STEPS:
        read = todo.pop(0)
        for step in around.readers_of(read):
            if step.inputs[:1] == (read,) and _hands_on(around, step):
                todo += [each for each in step.outputs if each not in seen]
                seen.update(step.outputs)
            else:
                yield step, read


def divides_by(step: Step, value: int) -> bool:
    """Whether it divides something else, or a number, by a value."""
    is_by = plain(step.kind) == "div" and step.inputs[-1:] == (value,)
    return is_by and (len(set(step.inputs)) == 2 or step.number_first)


def one_minus_of(step: Step | None) -> int | None:
    """The p of 1 - p."""
    if step is None or number_of(step) != 1:
        return None
    is_from_one = plain(step.kind) == "rsub" or (plain(step.kind) == "sub" and step.number_first)
    return step.inputs[0] if is_from_one else None


def minus_one_of(step: Step | None) -> int | None:
    """The x of x - 1."""
    if step is None or number_of(step) != 1:
        return None
    return step.inputs[0] if plain(step.kind) == "sub" and not step.number_first else None


def one_plus_of(step: Step | None) -> int | None:
    """The x of 1 + x."""
    is_sum = step is not None and plain(step.kind) == "add" and number_of(step) == 1
    return step.inputs[0] if is_sum and step is not None else None


def is_square_of(step: Step | None) -> int | None:
    """The x of x²; None also if it is no square."""
    if step is None or not step.inputs:
        return None
    name = plain(step.kind)
    is_power = name == "pow" and number_of(step) == 2 and not step.number_first
    is_product = name == "mul" and len(step.inputs) == 2 and len(set(step.inputs)) == 1
    return step.inputs[0] if is_power or is_product or name == "square" else None


def factors_of(step: Step | None) -> tuple[int, ...]:
    """The two tensors of an elementwise product."""
    is_product = step is not None and plain(step.kind) == "mul" and len(set(step.inputs)) == 2
    return step.inputs if is_product and step is not None else ()


def terms_of(around: Surroundings, step: Step | None) -> list[int]:
    """What a sum adds up: the operand of ``sum``, or all terms of additions."""
    if step is None:
        return []
    if plain(step.kind) == "sum":
        return list(step.inputs[:1])
    if plain(step.kind) != "add" or len(step.inputs) != 2:
        return []
    terms: list[int] = []
    for value in step.inputs:
        inner = terms_of(around, made_by(around, value))
        terms += inner or [value]
    return terms
