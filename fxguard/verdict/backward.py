"""Finds where the first bad gradient of a backward came from, and why.

Knows the data flow of the backward, but not hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxguard.advice.causes import cause_of, is_lost, lost_eps
from fxguard.formats import format_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import PRODUCTS, plain
from fxguard.plan.blame import Blame
from fxguard.plan.plan import Step
from fxguard.records import Range, Severity
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.backward_flow import BackwardFlow
from fxguard.verdict.origins import Verdict, find_origins

__all__ = [
    "base_is_negative",
    "cause_of_backward",
    "is_of_infinite_factor",
    "is_of_small_operand",
    "limit_of_backward",
    "origins_of",
]

NEAR_POLES = frozenset(["div", "log", "log10", "log2", "reciprocal", "rsqrt"])
# The gradient of a factor is a product with the other, and that of exp one with its result.
FACTORS = PRODUCTS | {"exp", "mul"}


def origins_of(
    backward: BackwardFlow,
    *,
    is_ignored: Callable[[Step], bool] = lambda step: False,
    severity: Callable[[int], Severity] | None = None,
    reached: Sequence[int] | None = None,
) -> Verdict:
    """Trace bad gradients back to their origins, like bad values of a forward.

    No infinity is intended in a backward, and nothing there is a mask.

    Args:
        backward: the gradients of a graph.
        is_ignored: whether the user ignores an operation.
        severity: how bad a gradient is, if inf and NaN are not what is looked for.
        reached: the gradients to explain; those of the inputs of the graph if not given.

    Returns:
        The origins are good gradients that turned bad, once for each operation, and gradients that
        came in bad: a gradient that is worse than a bad one is no origin.
    """
    steps = backward.flow.steps
    found = find_origins(
        steps,
        backward.flow.values,
        backward.severity if severity is None else severity,
        abs_max=lambda value: 0.0,
        is_mask=lambda value: False,
        finite_part=lambda value: Range(0.0, math.inf),
        turned_infinite=lambda value: None,
        reached=backward.flow.reached if reached is None else reached,
        is_ignored=is_ignored,
    )
    first: dict[tuple[int | None, int], Blame] = {}
    for blame in found.origins:
        read = () if blame.step is None else steps[blame.step].inputs
        if not any(map(found.sources.get, read)):
            first.setdefault((blame.step, blame.value if blame.step is None else 0), blame)
    return replace(found, origins=tuple(first.values()))


def cause_of_backward(seen: BackwardEvidence) -> str:
    """Why a backward made a bad gradient, as in :attr:`~fxguard.findings.Origin.cause`.

    Args:
        seen: the operation and its gradient, at the first bad element.
    """
    gradient, forward = seen.gradient, seen.forward
    if seen.inside is not None:
        return cause_of(seen.inside.evidence)
    if seen.of_exponent and forward is None and base_is_negative(gradient):
        return "domain"
    if forward is not None:
        cause = cause_of(forward)
        if cause == "unknown" and is_of_infinite_factor(seen):
            return "domain"
        if cause not in ("zero divisor", "domain"):
            return cause
        if not _is_sound(gradient):
            return "singular gradient" if cause == "zero divisor" else cause
    if gradient.not_judged:
        return "unknown"
    if gradient.degeneracy and gradient.wide is not None and not math.isfinite(gradient.wide):
        return "singular gradient"  # of the matrix that the model would have without roundings
    same = gradient.same
    if same is not None and math.isfinite(same):
        limit = limit_of_backward(seen)
        if abs(same) >= limit:
            return "overflow"
        if lost_eps(gradient) is not None:
            return "underflow"
        # An infinity that fits comes from a number on the way, as in grad * (a / b / b) of a / b.
        return "overflow" if math.isinf(gradient.number) else "rounding"
    if _is_sound(gradient):
        lost = any(is_lost(operand, gradient.dtype) for operand in gradient.operands)
        return "underflow" if lost else "rounding"
    if forward is None and _is_near_pole(gradient):
        return "overflow"  # of the widest dtype
    return "singular gradient" if same is not None or gradient.degeneracy else "unknown"


def is_of_infinite_factor(seen: BackwardEvidence) -> bool:
    """Whether a product, or exp, read an infinity, so that a gradient is 0 * inf."""
    if plain(seen.gradient.kind) not in FACTORS or not math.isnan(seen.gradient.number):
        return False
    read = () if seen.forward is None else seen.forward.operands
    return any(math.isinf(end) for each in read if each.dtype for end in (each.low, each.high))


def is_of_small_operand(cause: str, seen: BackwardEvidence) -> bool:
    """Whether a gradient overflowed because its operation read a number near its pole."""
    if cause != "overflow" or seen.forward is not None or seen.inside is not None:
        return False
    return _is_near_pole(seen.gradient)


def _is_near_pole(gradient: Evidence) -> bool:
    """Whether the operand of a logarithm, or a divisor, is so small that its square is 0."""
    operands = [each for each in gradient.operands if each.dtype and each.count == 1]
    if plain(gradient.kind) not in NEAR_POLES or not operands:
        return False
    form = format_of(operands[-1].dtype)
    return form is not None and 0 < abs(operands[-1].low) < form.max**-0.5


def base_is_negative(power: Evidence) -> bool:
    """Whether a power has a negative base: the gradient of its exponent needs its logarithm."""
    return bool(power.operands) and power.operands[0].low < 0


def _is_sound(gradient: Evidence) -> bool:
    """Whether the gradient is sound on the operands of the wide form."""
    return gradient.wide is not None and math.isfinite(gradient.wide)


def limit_of_backward(seen: BackwardEvidence) -> float:
    """The largest gradient that fits the dtypes of a backward."""
    forms = (format_of(seen.gradient.dtype), format_of(seen.computed_in))
    return min((form.max for form in forms if form is not None), default=math.inf)
