"""Parameters among the terms of a sum, of which the other terms are positive or data.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxguard.advice._patterns import is_square_of
from fxguard.advice.positive import OWN_LAYERS, POSITIVE
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.written_operands import operand_in, without_parentheses
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.records import Range, Role
from fxguard.source.named import argument_text, operand_text
from fxguard.source.parameters import parameter_read
from fxguard.source.terms import factors_in, terms_in

__all__ = ["free_terms"]

MOST_TERMS = 8
SMALL = 0.125  # of the sum; eight such terms and more would have to agree
MOST_STEPS = 512  # of a walk to data

_MOVED = frozenset(map(plain, MOVES | SELECTS | CASTS))
_STACKS = frozenset(["cat", "concat", "concatenate", "hstack", "stack", "vstack"])
# Sums and products of numbers that are not negative are not negative.
_KEEPS = frozenset(
    [
        *("add", "bmm", "cumsum", "div", "einsum", "index_add", "matmul", "maximum", "mean", "mm"),
        *("mul", "mv", "scatter_add", "stft", "sum", *_MOVED, *_STACKS),
    ]
)
_NOT_NEGATIVE = POSITIVE | {"float_power", "pow", "rsqrt"}


def free_terms(around: Surroundings, sum_of: float | None, index: Sequence[int] = ()) -> list[str]:
    """The names of the parameters that a sum adds.

    Args:
        around: the surroundings of what reads the sum.
        sum_of: the sum where it is negative, if that is known.
        index: the element that is negative, which tells of a stack of sums which one is.

    Returns:
        [] if something else than parameters, positive numbers and data is added, too.
    """
    if around.culprit is None:
        return []
    names: dict[str, None] = {}
    terms = list(_terms(around, around.culprit, index))
    for step, position in terms:
        value = step.inputs[position]
        name = _parameter(around, step, position)
        found = around.range_of(value)
        if name and (found is None or sum_of is None or found.abs_max >= -sum_of):
            names[name] = None
        elif not (_is_small(found, sum_of) or _is_positive_or_data(around, value)):
            return []
    return list(names) if len(terms) > 1 else []


def _is_small(term: Range | None, sum_of: float | None) -> bool:
    """Whether a term is too small to have made a sum negative."""
    return term is not None and sum_of is not None and term.abs_max < -sum_of * SMALL


def _terms(around: Surroundings, value: int, index: Sequence[int]) -> Iterator[tuple[Step, int]]:
    """The operands of the additions that made a value, as places of these."""
    todo, found = [value], 0
    while todo and found <= MOST_TERMS:
        step = around.maker_of(todo.pop(0))
        while step is not None and step.inputs and plain(step.kind) in _MOVED | {"stack"}:
            step = around.maker_of(_moved(step, index))
        if step is None or plain(step.kind) != "add":
            continue
        for position, each in enumerate(step.inputs):
            maker = around.maker_of(each)
            if maker is not None and plain(maker.kind) == "add":
                todo.append(each)
            else:
                found += 1
                yield step, position


def _moved(step: Step, index: Sequence[int]) -> int:
    """What an operation moves: of a stack the value that the element is of."""
    is_known = plain(step.kind) == "stack" and not any(step.literals)
    at = index[0] if is_known and index else 0
    return step.inputs[at] if at < len(step.inputs) else step.inputs[0]


def _parameter(around: Surroundings, step: Step, position: int) -> str:
    """The parameter that an addition adds at a place; "" if it adds something else."""
    value: int | None = step.inputs[position]
    while value is not None:
        if around.values[value].role is Role.WEIGHT:
            return around.values[value].name
        maker = around.maker_of(value)
        is_moved = maker is not None and maker.inputs and plain(maker.kind) in _MOVED
        value = maker.inputs[0] if maker is not None and is_moved else None
    if step.source is None:
        return ""
    position = 1 if step.number_first else position
    text = (
        argument_text(step.source.code, "add", position)
        or _term_of_operand(around, position)
        or _term_of_sum(around, step, position)
    )
    factors = [text, *factors_in(text)]
    return next((name for each in factors if (name := parameter_read(each, step.source))), "")


def _term_of_sum(around: Surroundings, step: Step, position: int) -> str:
    """The same where a line adds more than two terms."""
    before, maker = 0, around.maker_of(step.inputs[0])
    while maker is not None and plain(maker.kind) == "add" and maker.source == step.source:
        before, maker = before + 1, around.maker_of(maker.inputs[0])
    terms = terms_in(step.source.code if step.source is not None else "")
    at = before + position
    return terms[at] if at < len(terms) else ""


def _term_of_operand(around: Surroundings, position: int) -> str:
    """The same by the operand alone, where its line has several additions."""
    text = without_parentheses(operand_in(around))
    source = around.step.source
    if not text and source is not None:
        text = without_parentheses(operand_text(source.code, plain(around.step.kind)))
    return argument_text(text, "add", position) if text else ""


def _is_positive_or_data(around: Surroundings, value: int) -> bool:
    """Whether neither a layer nor a parameter of any sign leads to a value."""
    todo, seen = [value], {value}
    while todo:
        each = todo.pop()
        if around.values[each].role is Role.WEIGHT or len(seen) > MOST_STEPS:
            return False
        step = around.maker_of(each)
        if step is None or not step.inputs or is_square_of(step) is not None:
            continue
        name = plain(step.kind)
        if name in _NOT_NEGATIVE:
            continue
        is_negative = any(number < 0 for number in step.literals) and name in ("add", "div", "mul")
        if name in OWN_LAYERS or is_negative or (step.counts and name not in _KEEPS):
            return False
        todo += [x for x in step.inputs if x not in seen]
        seen.update(step.inputs)
    return True
