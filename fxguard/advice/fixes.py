"""What to do about an origin: what the rules say of it, the best first. Knows nothing of torch."""

from __future__ import annotations

from fxguard.advice.beginnings import MASK
from fxguard.advice.case import Case
from fxguard.advice.rules import RULES
from fxguard.advice.surroundings import Surroundings
from fxguard.findings import BROUGHT, Fix
from fxguard.forgiving import or_else
from fxguard.graph.evidence import Evidence

__all__ = ["MOST_FIXES", "fixes_for"]

MOST_FIXES = 3
SENT = "look at the other ranks: one of them has sent it"


def fixes_for(cause: str, evidence: Evidence | None, around: Surroundings) -> tuple[Fix, ...]:
    """What to do about an operation that made something bad, the best first.

    Args:
        cause: the result of :func:`~fxguard.advice.causes.cause_of`.
        evidence: the operation, at the first bad element; None if there was no closer look.
        around: the graph around it.

    Returns:
        Exact fixes before advice, at most three.
    """
    case = Case(cause, evidence, around)
    if case.name in BROUGHT:
        return (Fix("advice", SENT),)
    if case.lost_mask():
        return (Fix("advice", MASK),)
    if case.inherits_infinity() or (cause == "overflow" and case.reads_infinity()):
        return (Fix("advice", "look at what made its operand infinite: in float64 it is finite"),)
    found = [rule for rule in RULES if or_else(False, rule.applies, case)]
    said = [rule for rule in found if rule.alone]
    said = said or [rule for rule in found if not rule.last] or found[:2]
    nothing: Fix | None = None
    worded = (or_else(nothing, rule.fix, case) for rule in said)
    fixes = dict.fromkeys(fix for fix in worded if fix is not None)
    return tuple(sorted(fixes, key=lambda fix: fix.kind != "exact"))[:MOST_FIXES]
