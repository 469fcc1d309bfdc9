"""Finds where the first bad gradient of a backward came from, and why.

Knows the gradients of a second run, but not hooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxguard.advice.causes import cause_of, is_lost, lost_eps
from fxguard.formats import format_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.poles import plain
from fxguard.records import Severity
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.edges import BackwardOf, Edge, Gradients

__all__ = [
    "Suspect",
    "base_is_negative",
    "cause_of_backward",
    "is_of_small_operand",
    "limit_of_backward",
    "suspects_in",
]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A place where good gradients turned into a bad one."""

    severity: Severity
    operation: BackwardOf | None = None  # the operation whose backward did; None for a sum
    edge: Edge | None = None  # the operand of the operation
    # A value whose readers returned finite gradients without a finite sum.
    summed: int | None = None


def suspects_in(gradients: Gradients, starts: Iterable[int]) -> list[Suspect]:
    """The places where bad gradients that reach some values begin, in order of the backward.

    Args:
        gradients: the gradients of one graph.
        starts: values whose gradients are bad.
    """
    readers: dict[int, list[tuple[BackwardOf, Edge]]] = {}
    for operation in gradients.operations:
        for edge in operation.edges:
            readers.setdefault(edge.value, []).append((operation, edge))
    came_in = set(gradients.outputs.values())
    found: dict[object, Suspect] = {}
    todo, seen = list(starts), set[int]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        bad = [(o, e) for o, e in readers.get(value, ()) if e.range and e.range.severity]
        for operation, edge in bad:
            before = [v for v in operation.made if _severity(gradients, v)]
            todo += before
            if not before and edge.range is not None:
                found.setdefault(operation, Suspect(edge.range.severity, operation, edge))
        if not bad and value not in came_in and (severity := _severity(gradients, value)):
            found[value] = Suspect(severity, summed=value)
    order = {id(operation): index for index, operation in enumerate(gradients.operations)}
    return sorted(found.values(), key=lambda suspect: -order.get(id(suspect.operation), -1))


def _severity(gradients: Gradients, value: int) -> Severity:
    found = gradients.totals.get(value)
    return Severity.FINITE if found is None else found.severity


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
        if cause not in ("zero divisor", "domain"):
            return cause
        if not _is_sound(gradient):
            return "singular gradient" if cause == "zero divisor" else cause
    if gradient.not_judged:
        return "unknown"
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
    return "singular gradient"


def is_of_small_operand(cause: str, seen: BackwardEvidence) -> bool:
    """Whether a gradient overflowed because its operation read a number near its pole."""
    operands = [each for each in seen.gradient.operands if each.dtype and each.count == 1]
    name = plain(seen.gradient.kind)
    if cause != "overflow" or seen.forward is not None or seen.inside is not None:
        return False
    if name not in ("div", "log", "log10", "log2", "reciprocal", "rsqrt") or not operands:
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
