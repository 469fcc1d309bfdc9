"""Matrices whose determinant turned negative: what they have to be, by what they are made of.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._kinds import LOG
from fxguard.advice._patterns import factors_of, made_by, terms_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import is_scaling
from fxguard.advice.written_operands import free_letter, without_parentheses, written_operand
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["is_barrier", "is_of_variables", "is_to_be_positive", "words_of_matrix"]

_PRODUCTS = names_in("bmm einsum matmul mm mul")
_ADDED_UP = names_in("diagonal einsum sum trace")


def words_of_matrix(case: Case) -> Mapping[str, str]:
    """``{"matrix": "M"}`` of ``logdet(M)`` or ``log(det(M))`` with a determinant below 0; or {}."""
    det = _determinant(case)
    if det is None:
        return {}
    return {"matrix": without_parentheses(written_operand(det)) or free_letter(det, "M")}


def is_barrier(case: Case) -> bool:
    """The matrix is a difference, ``s * eye - W * W``, that steps take out of its range."""
    step = _made_by(case)
    is_difference = step is not None and plain(step.kind) in ("rsub", "sub")
    return is_difference and case.is_differentiated()


def is_to_be_positive(case: Case) -> bool:
    """It is symmetric, ``A + A.T``, or it is learned in a likelihood with ``(S * M).sum()``."""
    around, value = case.around, _matrix(case)
    if value is None or is_barrier(case):
        return False
    step = _made_by(case)
    while step is not None and is_scaling(step):
        step = made_by(around, step.inputs[0])
    turned = [around.maker_of(each) for each in terms_of(around, step)]
    if any(each is not None and _turns(each) for each in turned):
        return True
    products = [each for each in around.readers_of(value) if plain(each.kind) in _PRODUCTS]
    read_by = [each for product in products for each in around.ahead(product.outputs)]
    adds_itself = any(plain(each.kind) == "trace" for each in read_by) or any(
        factors_of(product) and _is_added_up(case, product) for product in products
    )
    return adds_itself and case.is_differentiated()


def is_of_variables(case: Case) -> bool:
    """Any other: the Jacobian of a change of variables, whose determinant has a sign."""
    return _matrix(case) is not None and not (is_barrier(case) or is_to_be_positive(case))


def _determinant(case: Case) -> Step | None:
    """The operation that took a determinant below 0; None elsewhere."""
    step = case.around.step if case.name == "logdet" else None
    if case.name in LOG:
        step = made_by(case.around, case.around.culprit)
    is_one = step is not None and plain(step.kind) in ("det", "logdet") and bool(step.inputs)
    return step if is_one else None


def _matrix(case: Case) -> int | None:
    step = _determinant(case)
    return None if step is None else step.inputs[0]


def _made_by(case: Case) -> Step | None:
    return made_by(case.around, _matrix(case))


def _turns(step: Step) -> bool:
    return step.kind in names_in("__get__ adjoint mT permute swapaxes swapdims t transpose")


def _is_added_up(case: Case, product: Step) -> bool:
    return any(plain(each.kind) in _ADDED_UP for each in case.around.ahead(product.outputs))
