"""Recurrences that are written as a division by the product of all decays, ``p * cumsum(u / p)``.

The product of so many decays becomes too small to divide by, whatever is added to it. Knows nothing
of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import is_made_by, made_by, readers_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step

__all__ = ["scan_behind", "words_of_scan"]

_EXPS = names_in("exp exp2")


def scan_behind(case: Case) -> Step | None:
    """The operation that made the product of decays; None if it is no such division."""
    around, step = case.around, case.around.step
    if case.name != "div" or len(step.inputs) != 2:
        return None
    product = made_by(around, step.inputs[1])
    if product is None or not product.inputs:
        return None
    name = plain(product.kind)
    is_of_logs = name in _EXPS and is_made_by(around, product.inputs[0], "cumsum")
    is_summed = any(plain(each.kind) == "cumsum" for each, _ in readers_of(around, around.made))
    return product if is_summed and (name == "cumprod" or is_of_logs) else None


def words_of_scan(case: Case) -> Mapping[str, str]:
    """The product of decays."""
    product = scan_behind(case)
    return {"product": "it" if product is None else titled(product)}
