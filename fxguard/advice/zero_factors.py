"""Products that are 0 because one of their factors is: a survival curve after its last event.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxguard.advice import zeros
from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import Surroundings
from fxguard.advice.vanished import vanished_in
from fxguard.advice.written_operands import titled, without_parentheses, written_operand
from fxguard.graph.poles import plain
from fxguard.graph.tables import CASTS, MOVES, SELECTS
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.named import argument_text

__all__ = ["holds_zeros", "words_of_factor", "zero_factor"]

SMALL = 1e-30  # what is below may become 0 in a product

MOST_STEPS = 16  # from a factor to the turn before

_OF_ONE = ("cumprod", "prod")
_PRODUCTS = names_in("bmm einsum matmul mm mul mv")
_PASSED = frozenset(map(plain, MOVES | SELECTS | CASTS)) | {"setitem", "sum"}


@dataclass(frozen=True, slots=True)
class ZeroFactor:
    """The product that is the first to be 0, and its factor that is."""

    step: Step
    value: int


def zero_factor(case: Case) -> ZeroFactor | None:
    """The factor because of which the operand is 0; None if there is none, or not for certain."""
    around, step = case.around, _first_zero(case)
    if step is None:
        return None
    is_whole = _is_whole(around, step)
    found = (each for each in _factors(around, step) if _is_zero(around, each, is_whole))
    value = next(found, None)
    is_known = value is not None and vanished_in(around, value) is None
    return ZeroFactor(step, value) if is_known and value is not None else None


def holds_zeros(case: Case) -> bool:
    """Its factors are 0, or large: too many of them are no reason for a 0."""
    around, step = case.around, _first_zero(case)
    if step is None:
        return False
    factors = [around.range_of(each) for each in _factors(around, step)]
    known = [around.range_of(each) for each in set(step.inputs)]
    are_large = bool(known) and all(x is not None and x.abs_max > SMALL for x in known)
    has_zero = any(x is not None and x.abs_min == 0 for x in known)
    return any(x is not None and x.abs_max == 0 for x in factors) or (are_large and has_zero)


def _factors(around: Surroundings, step: Step) -> list[int]:
    """What a turn multiplies with, and not what the turn before has made."""
    return [each for each in dict.fromkeys(step.inputs) if not _is_of_turn(around, each, step)]


def _is_of_turn(around: Surroundings, value: int, step: Step) -> bool:
    text = _factor_text(step, value).partition("[")[0]
    name = "" if step.source is None or plain(step.kind) in _OF_ONE else target_of(step.source)
    if text and text == name:
        return True
    todo, seen = [value], {value}
    while todo and len(seen) <= MOST_STEPS:
        maker = around.maker_of(todo.pop(0))
        if maker is None:
            continue
        if maker is not step and maker.source == step.source and plain(maker.kind) in _PRODUCTS:
            return True
        if not maker.counts or plain(maker.kind) in _PASSED:
            todo += [each for each in maker.inputs if each not in seen]
            seen.update(maker.inputs)
    return False


def _first_zero(case: Case) -> Step | None:
    """The first product of which all is 0, or else some."""
    around, found = case.around, zeros.repeated_products(case)
    step = made_by(around, around.culprit)
    if not found and step is not None and plain(step.kind) in _OF_ONE:
        found = [step]
    order = {id(each): index for index, each in enumerate(around.steps)}
    found = sorted(found, key=lambda each: order.get(id(each), 0))
    for is_whole in (True, False):
        for each in found:
            if _is_zero(around, each.outputs[0], is_whole):
                return each
    return None


def _is_whole(around: Surroundings, step: Step) -> bool:
    return plain(step.kind) not in _OF_ONE and _is_zero(around, step.outputs[0], True)


def _is_zero(around: Surroundings, value: int, is_whole: bool) -> bool:
    found = around.range_of(value)
    return found is not None and (found.abs_max if is_whole else found.abs_min) == 0


def words_of_factor(case: Case) -> Mapping[str, str]:
    """The factor, where it is made, and what the product is."""
    found = zero_factor(case)
    if found is None:
        return dict.fromkeys(("factor", "place", "name"), "it")
    step, maker = found.step, case.around.maker_of(found.value)
    made = step if maker is None or maker.source is None else maker
    name = "" if step.source is None else target_of(step.source)
    return {
        "factor": _factor_text(step, found.value) or titled(made).partition(" ")[0],
        "place": "" if made.source is None else f" ({made.source.place})",
        "name": f"`{name}`" if name else "the product",
    }


def _factor_text(step: Step, value: int) -> str:
    """As the program has it."""
    if step.source is None:
        return ""
    if plain(step.kind) in _OF_ONE:
        return without_parentheses(written_operand(step))
    is_second = step.inputs[0] != value or step.number_first or bool(step.literals)
    return argument_text(step.source.code, plain(step.kind), int(is_second))
