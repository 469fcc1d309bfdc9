"""Whether a constant that scales all gradients made the first bad one: a loss scale, or a factor.

One run decides it: the same backward with its gradients divided by that constant. If the loss scale
is known, it is divided out before, and a constant that is left is a factor of the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Fix
from fxguard.graph.poles import plain
from fxguard.records import Range
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.edges import Gradients
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import Suspect, cause_of_backward, limit_of_backward

__all__ = ["LARGE_FACTOR", "factor_to_blame", "fix_of_factor", "gradient_without"]

# A constant of at least this size that multiplies a loss is there to scale its gradients.
LARGE_FACTOR = 2.0**8


def factor_to_blame(
    kept: KeptRun,
    gradients: Gradients,
    suspect: Suspect,
    seen: BackwardEvidence | None,
    scale: float | None = None,
) -> float:
    """The constant without which the first bad gradient is finite; 1 if there is none.

    Args:
        kept: the graph run.
        gradients: the gradients of its second run.
        suspect: where the first bad gradient began.
        seen: a closer look at it.
        scale: the known loss scale, which that run has divided out; None if unknown.
    """
    factor = max([1.0, *_factors(kept, gradients, suspect, scale or 1.0)])
    if factor < LARGE_FACTOR or seen is None or cause_of_backward(seen) != "overflow":
        return 1.0
    needed = seen.gradient.needed
    if needed is None or needed / factor >= limit_of_backward(seen):
        return 1.0
    found = gradient_without(kept, gradients, suspect, (scale or 1.0) * factor)
    return 1.0 if found is None or found.severity else factor


def gradient_without(
    kept: KeptRun, gradients: Gradients, suspect: Suspect, divisor: float
) -> Range | None:
    """The range of the first bad gradient if incoming gradients are divided by a number.

    Args:
        kept: the graph run.
        gradients: the gradients of its second run.
        suspect: where the first bad gradient began.
        divisor: the number.
    """
    divided = gradients_of(kept, divisor)
    if suspect.operation is None or suspect.edge is None:
        return None if suspect.summed is None else divided.totals.get(suspect.summed)
    again = divided.operations[gradients.operations.index(suspect.operation)]
    return again.edges[suspect.operation.edges.index(suspect.edge)].range


def fix_of_factor(seen: BackwardEvidence, factor: float, *, is_scale: bool) -> Fix:
    """``a loss scale of 2**15 at most, or bfloat16``; likewise for a factor of the loss.

    Args:
        seen: the operation and its gradient, at the first bad element.
        factor: of :func:`factor_to_blame`.
        is_scale: whether it is a loss scale.
    """
    needed = seen.gradient.needed
    assert needed is not None
    exponent = math.floor(math.log2(limit_of_backward(seen) / needed * factor))
    if is_scale:
        return Fix("advice", f"a loss scale of 2**{exponent} at most, or bfloat16")
    return Fix("advice", f"a factor of 2**{exponent} at most in the loss: it is {factor:g}")


def _factors(
    kept: KeptRun, gradients: Gradients, suspect: Suspect, scale: float
) -> Iterator[float]:
    """The constants that scale the incoming gradients of an operation.

    They are the gradient of the loss itself, without a known scale, and numbers that multiplied
    something after the operation.
    """
    for incoming in kept.incoming.values():
        if incoming.numel() == 1 and math.isfinite(number := abs(float(incoming))):
            yield number / scale
    passed = False
    for operation in gradients.operations:
        passed = passed or operation is suspect.operation
        if not passed:
            continue
        literals = [abs(x) for x in operation.call.literals if x]
        if plain(operation.call.kind) == "mul":
            yield from literals
        elif plain(operation.call.kind) == "div":
            yield from (1 / x for x in literals)
