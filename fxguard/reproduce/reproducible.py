"""Keeps a blamed operation so that it can become a test."""

from __future__ import annotations

import math
from collections.abc import Hashable

from fxguard.advice.causes import cause_of
from fxguard.findings import Origin
from fxguard.forgiving import theirs
from fxguard.formats import limit_of
from fxguard.graph.evidence import Evidence
from fxguard.graph.one_operation import OneOperation
from fxguard.graph.wide_form import NotJudged
from fxguard.reproduce.reproducer import KeptOperation, NotKept, kept

__all__ = ["kept_of", "same_failure", "same_gradient"]

AGAIN = "run again with --reproduce-to FOLDER, or with instrument(..., reproduce_to=FOLDER)"


def kept_of(origin: Origin, operation: OneOperation | None) -> KeptOperation | NotKept:
    """What a report keeps of its first origin, for a test.

    Args:
        origin: the origin.
        operation: the operation with its operands, if a second run has shown them.
    """
    if not origin.is_operation:
        return NotKept(f"no operation made it: {origin.message}")
    if operation is None:
        return NotKept(f"the operands of {origin.what} were not kept: {AGAIN}")
    try:
        sameness = same_gradient if operation.is_backward else same_failure
        return kept(operation, sameness, origin.problem)
    except NotJudged as reason:
        return NotKept(f"{origin.what} was not kept: {reason}")
    except theirs() as error:  # the report goes out, whatever this operation does
        return NotKept(f"{origin.what} was not kept: {type(error).__name__}: {error}")


def same_failure(evidence: Evidence) -> Hashable:
    """The identity of a failure: the problem and its cause."""
    return math.isnan(evidence.number), cause_of(evidence)


def same_gradient(evidence: Evidence) -> Hashable:
    """The same for a gradient: the problem, and its float64 value."""
    same = evidence.same
    if same is None or not math.isfinite(same):
        return math.isnan(evidence.number), str(same)
    return math.isnan(evidence.number), abs(same) > limit_of(evidence.dtype)
