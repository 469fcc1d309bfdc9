"""Whether a constant that scales all gradients made the first bad one: a loss scale, or a factor.

One run decides it: the same backward with its gradients divided by that constant. If the loss scale
is known, it is divided out before, and a constant that is left is a factor of the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxguard.findings import Fix
from fxguard.formats import FORMATS
from fxguard.graph.poles import plain
from fxguard.plan.blame import Blame
from fxguard.records import Range
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.backward_flow import BackwardFlow
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import cause_of_backward, limit_of_backward

__all__ = ["LARGE_FACTOR", "factor_to_blame", "fix_of_factor", "gradient_without"]

# A constant of at least this size that multiplies a loss is there to scale its gradients.
LARGE_FACTOR = 2.0**8


def factor_to_blame(
    backward: BackwardFlow,
    blame: Blame,
    seen: BackwardEvidence | None,
    scale: float | None = None,
) -> float:
    """The constant without which the first bad gradient is finite; 1 if there is none.

    Args:
        backward: the gradients of a graph in a second run.
        blame: the first bad one.
        seen: a closer look at it.
        scale: the known loss scale, which that run has divided out; None if unknown.
    """
    if seen is None or cause_of_backward(seen) != "overflow":
        return 1.0
    # Of a loss in float32 any number of the program may be as large, and scales nothing.
    is_half = limit_of_backward(seen) < FORMATS["bfloat16"].max or "bfloat16" in seen.gradient.dtype
    numbers = is_half or scale is not None
    factor = max([1.0, *_factors(backward, blame, scale or 1.0, of_numbers=numbers)])
    if factor < LARGE_FACTOR:
        return 1.0
    needed = seen.gradient.needed
    if needed is None or needed / factor >= limit_of_backward(seen):
        return 1.0
    found = gradient_without(backward, blame, (scale or 1.0) * factor)
    return 1.0 if found is None or found.severity else factor


def gradient_without(backward: BackwardFlow, blame: Blame, divisor: float) -> Range | None:
    """The range of a bad gradient if incoming gradients are divided by a number.

    Args:
        backward: the gradients of a graph in a second run.
        blame: one of them.
        divisor: the number.
    """
    kept = backward.kept
    return BackwardFlow(kept, gradients_of(kept, divisor)).range_of(blame.value)


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
    backward: BackwardFlow, blame: Blame, scale: float, *, of_numbers: bool
) -> Iterator[float]:
    """The constants that scale the incoming gradients of an operation.

    They are the gradient of the loss itself, without a known scale, and numbers that multiplied
    something after the operation, if these are asked for.
    """
    for incoming in backward.kept.incoming.values():
        if incoming.numel() == 1 and math.isfinite(number := abs(float(incoming))):
            yield number / scale
    steps = backward.flow.steps[: (blame.step or 0) + 1] if of_numbers else []
    for step in reversed(steps):
        literals = [abs(x) for x in step.literals if x]
        if plain(step.kind) == "mul":
            yield from literals
        elif plain(step.kind) == "div":
            yield from (1 / x for x in literals)
