"""States that a recurrence multiplies, turn by turn, by an exponential above 1: gates of a cell.

The repair is the stabiliser state of xLSTM (Beck et al. 2024, equation 15): the running maximum of
the exponents is carried along, and exponentials are taken of differences to it. Knows nothing of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_passed
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["words_of_gate"]

MOST_STEPS = 24  # back from the state to an earlier turn

_EXPS = names_in("exp exp2")
_TERMS = names_in("add addcmul mul sub")


def words_of_gate(case: Case) -> Mapping[str, str]:
    """``{"gate": "exp (cell.py:20)"}`` of a state that grows by it; {} of other products."""
    for product in _products(case):
        for factor in product.inputs:
            gate = made_by(case.around, factor)
            if gate is None or plain(gate.kind) not in _EXPS:
                continue
            others = [each for each in product.inputs if each != factor]
            if any(_is_of_earlier_turn(case, product, each) for each in others):
                return {"gate": titled(gate)}
    return {}


def _products(case: Case) -> list[Step]:
    """The product that overflowed, or that a sum which overflowed adds."""
    step = case.around.step
    terms = [made_by(case.around, value) for value in step.inputs]
    found = [step, *(each for each in terms if each is not None)]
    return [each for each in found if plain(each.kind) == "mul" and len(set(each.inputs)) == 2]


def _is_of_earlier_turn(case: Case, product: Step, value: int) -> bool:
    """Whether a factor leads back, through sums and products, to the same product's result."""
    todo, seen = [value], set[int]()
    while todo and len(seen) < MOST_STEPS:
        each = todo.pop(0)
        if each in seen:
            continue
        seen.add(each)
        step = case.around.maker_of(each)
        if step is None:
            continue
        if step is not product and (step.kind, step.source) == (product.kind, product.source):
            return True
        if is_passed(step) or plain(step.kind) in _TERMS:
            todo += step.inputs
    return False
