"""Exponentials that are multiplied by their own reciprocals: ``cumsum(exp(a)) * exp(-a)``.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxguard.advice._patterns import factors_of, made_by
from fxguard.advice._rule import names_in
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import titled
from fxguard.findings import Fix
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["fix_of_factors"]

EXPS = ("exp", "exp2")
PRODUCTS = ("bmm", "matmul", "mm", "mul")
MOST_STEPS = 64  # from an exponential on
MOST_DEPTH = 8  # of an exponent that is compared

# They put sums and products of exponentials together; another function makes something else.
PASSED = names_in(
    """
    add bmm cat clone contiguous cumsum diff expand flip float getitem index_select matmul mean mm
    mul pad permute reshape roll squeeze stack sub sum t to transpose tril triu unsqueeze view where
    masked_fill div
    """
)


def fix_of_factors(around: Surroundings, exp: Step) -> Fix | None:
    """What to do about an exponential whose product with another one is an ordinary number.

    Args:
        around: the graph around it.
        exp: the operation that may be one.

    Returns:
        None if it is none.
    """
    if plain(exp.kind) not in EXPS or not (exp.inputs and exp.outputs):
        return None
    for product, reciprocal in _products(around, exp):
        is_divided = reciprocal is exp
        by = "divided by it" if is_divided else "multiplied by exp of minus the same exponent"
        at = titled(product if is_divided else reciprocal)
        return Fix(
            "advice",
            f"combine the exponents before exp: what is made of {titled(exp)} is {by}, in {at}: "
            "take exp of differences, exp(a - b); a running sum is a recursion, or logcumsumexp",
        )
    return None


def _products(around: Surroundings, exp: Step) -> Iterator[tuple[Step, Step]]:
    """The products of what is made of an exponential and its reciprocal, and that reciprocal."""
    todo, seen = list(exp.outputs), set(exp.outputs)
    while todo and len(seen) <= MOST_STEPS:
        read = todo.pop(0)
        for step in around.readers_of(read):
            name = plain(step.kind).rstrip("_")
            others = [value for value in step.inputs if value != read]
            if name in PRODUCTS:
                for maker in _makers_of_factors(around, others):
                    if _is_reciprocal(around, exp, maker):
                        yield step, maker
            divides = name == "div" and len(step.inputs) == 2 and step.inputs[0] == read
            if divides and read not in exp.outputs:
                divisor = made_by(around, step.inputs[1])
                if divisor is not None and _is_same(around, exp, divisor):
                    yield step, exp
            if not step.counts or name in PASSED:
                todo += [each for each in step.outputs if each not in seen]
                seen.update(step.outputs)


def _makers_of_factors(around: Surroundings, values: Iterable[int]) -> Iterator[Step]:
    """What made some values, or the factors that they are products of."""
    for value in values:
        made = made_by(around, value)
        for maker in (made, *(made_by(around, each) for each in factors_of(made))):
            if maker is not None:
                yield maker


def _is_reciprocal(around: Surroundings, one: Step, other: Step) -> bool:
    if other.kind != one.kind or not other.inputs:
        return False
    (sign, text), (minus, same) = (_signed(around, each.inputs[0]) for each in (one, other))
    return text == same and sign == -minus


def _is_same(around: Surroundings, one: Step, other: Step) -> bool:
    if other.kind != one.kind or not other.inputs:
        return False
    return _signed(around, one.inputs[0]) == _signed(around, other.inputs[0])


def _signed(around: Surroundings, value: int, depth: int = MOST_DEPTH) -> tuple[int, str]:
    """A sign, and what is the same for a value and for minus that value."""
    step = around.maker_of(value)
    if step is None or not step.inputs or not depth:
        return 1, str(value)
    name = plain(step.kind)
    parts = [_signed(around, each, depth - 1) for each in step.inputs]
    if not step.counts:
        return parts[0]
    if name == "neg":
        return -parts[0][0], parts[0][1]
    if name in ("mul", "div") and not step.number_first:
        sign, texts = 1, [text for _, text in parts]
        for each, _ in parts:
            sign *= each
        for number in step.literals:
            sign *= -1 if number < 0 else 1
        numbers = ",".join(f"{abs(number):g}" for number in step.literals if abs(number) != 1)
        texts = sorted(texts) if name == "mul" else texts
        return sign, f"{name}({','.join(texts)};{numbers})" if len(texts) > 1 or numbers else texts[
            0
        ]
    if name == "sub" and len(step.inputs) == 2 and not step.literals:
        terms = [f"{sign}*{text}" for sign, text in parts]
        is_turned = terms[0] > terms[1]
        return (-1 if is_turned else 1), f"sub({','.join(sorted(terms))})"
    return 1, str(value)
