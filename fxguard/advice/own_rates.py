"""Numbers that grow by a share of themselves, ``var + lr * var * g``, and that turned negative.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxguard.advice._patterns import are_equal, made_by, one_minus_of, one_plus_of
from fxguard.advice.case import Case
from fxguard.advice.positive import POSITIVE, made_at
from fxguard.advice.surroundings import CREATES, Surroundings
from fxguard.advice.written_operands import titled
from fxguard.graph.poles import plain
from fxguard.plan.plan import Step
from fxguard.source.assigned import target_of

__all__ = ["words_of_rate"]

MOST_DEPTH = 6  # of factors


def words_of_rate(case: Case) -> Mapping[str, str]:
    """What gets a share of itself, ``{"grown": "var", "made": "add (es.py:53)"}``; or {}."""
    step = made_at(case.around, case.around.culprit)
    if step is None or not _grows_by_share(case.around, step):
        return {}
    name = "" if step.source is None else target_of(step.source)
    return {"grown": name or "x", "made": titled(step)}


def _grows_by_share(around: Surroundings, step: Step) -> bool:
    """Whether it is ``x + c * x * g``, ``x - c * x * g`` or ``x * (1 + c * g)``."""
    name, inputs = plain(step.kind), step.inputs
    if name == "addcmul" and len(inputs) == 3:
        is_share = any(are_equal(around, inputs[0], each) for each in inputs[1:])
        return is_share and _is_kept(around, inputs[0], step)
    if len(set(inputs)) != 2 or name not in ("add", "mul", "sub"):
        return False
    first, second = inputs
    pairs = [(first, second)] if name == "sub" else [(first, second), (second, first)]
    return any(
        _is_kept(around, kept, step)
        and (
            _is_one_and_more(around, made_by(around, other))
            if name == "mul"
            else _is_factor(around, kept, other, MOST_DEPTH)
        )
        for kept, other in pairs
    )


def _is_kept(around: Surroundings, value: int, step: Step) -> bool:
    """Whether a value is what the same line made before, or began as a positive number."""
    maker = made_by(around, value)
    if maker is None:
        return False
    places = [each.source and each.source.position for each in (maker, step)]
    is_before = places[0] is not None and places[0] == places[1]
    return is_before or plain(maker.kind) in POSITIVE | CREATES


def _is_factor(around: Surroundings, value: int, product: int, depth: int) -> bool:
    """Whether a value is among the factors of a product, and is not that product."""
    step = made_by(around, product)
    if step is None or not depth or plain(step.kind) not in ("div", "mul", "neg"):
        return False
    factors = step.inputs[:1] if plain(step.kind) == "div" else step.inputs
    return any(
        are_equal(around, each, value) or _is_factor(around, value, each, depth - 1)
        for each in factors
    )


def _is_one_and_more(around: Surroundings, step: Step | None) -> bool:
    """Whether it is ``1 + c * g`` or ``1 - c * g`` of numbers with a sign."""
    rest = one_plus_of(step) if one_plus_of(step) is not None else one_minus_of(step)
    inner = made_by(around, rest)
    return inner is not None and plain(inner.kind) in ("div", "mul")
