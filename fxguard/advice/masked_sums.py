"""Exponentials that are multiplied by a mask and added up, and of which a logarithm is taken.

As in a contrastive loss: ``log((exp(sim) * (1 - eye)).sum(1))``. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import made_by, readers_of
from fxguard.advice._rule import names_in
from fxguard.advice.case import Case
from fxguard.advice.surroundings import CREATES
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of
from fxguard.source.named import argument_text

__all__ = ["words_of_masked_sum"]

_LOGS = names_in("log log10 log2")
_COMPARISONS = names_in("eq ge gt le logical_and logical_not logical_or lt ne tril triu")


def words_of_masked_sum(case: Case) -> Mapping[str, str]:
    """``{"mask": "off_diag"}`` where the operation is such an exponential; {} elsewhere."""
    around = case.around
    for product, read in readers_of(around, around.made):
        others = [each for each in product.inputs if each != read]
        if plain(product.kind) != "mul" or len(product.inputs) > 2:
            continue
        if any(not _is_mask(case, each) for each in others) or (not others and product.literals):
            continue
        sums = [x for x, _ in readers_of(around, product.outputs[0]) if plain(x.kind) == "sum"]
        logs = [x for each in sums for x, _ in readers_of(around, each.outputs[0])]
        if any(plain(each.kind) in _LOGS for each in logs):
            return {"mask": _name_of_mask(case, product, others)}
    return {}


def _is_mask(case: Case, value: int) -> bool:
    """Whether it is a comparison, an identity or 1 less one of these."""
    step = made_by(case.around, value)
    if step is not None and plain(step.kind) in ("rsub", "sub") and len(step.inputs) == 1:
        step = made_by(case.around, step.inputs[0])
    return step is not None and plain(step.kind) in _COMPARISONS | CREATES


def _name_of_mask(case: Case, product: Step, others: list[int]) -> str:
    maker = case.around.maker_of(others[0]) if others else None
    name = "" if maker is None or maker.source is None else target_of(maker.source)
    code = "" if product.source is None else product.source.code
    return name or argument_text(code, "mul", 1) or "the mask"
