"""Precision, compiler or loss scale: computes the first bad gradient in other ways to tell why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.records import Range, Severity
from fxguard.rerun.backward_evidence import BackwardEvidence
from fxguard.rerun.edges import Gradients
from fxguard.rerun.gradients import gradients_of
from fxguard.verdict.backward import LARGE_FACTOR, Suspect, largest_factor
from fxguard.verdict.forgiving import or_else
from fxguard.verdict.second_opinion import FAILURES
from fxguard.verdict.why import number_at, said

__all__ = ["First", "why_of_backward", "why_of_compiled"]


@dataclass(frozen=True, slots=True)
class First:
    """Where the first bad gradient of a backward began, in a second run of its graph."""

    kept: KeptRun
    gradients: Gradients
    suspect: Suspect
    seen: BackwardEvidence | None
    scale: float = 1.0  # the divisor of the incoming gradients

    def divided_by(self, scale: float) -> Range | None:
        """The range of the same gradient if incoming gradients are divided by a scale."""
        gradients = gradients_of(self.kept, self.scale * scale)
        suspect, operations = self.suspect, self.gradients.operations
        if suspect.operation is None or suspect.edge is None:
            return None if suspect.summed is None else gradients.totals.get(suspect.summed)
        again = gradients.operations[operations.index(suspect.operation)]
        return again.edges[suspect.operation.edges.index(suspect.edge)].range


def why_of_backward(
    first: First, origin: Origin, loss_scale: float | None = None
) -> tuple[str, ...]:
    """The answers for :attr:`~fxguard.report.report.Report.why`, a line each.

    Args:
        first: where the first bad gradient began.
        origin: its description.
        loss_scale: the scale by which ``first`` divided the incoming gradients; None if the loss is
            not known to be scaled.

    Example:
        >>> why_of_backward(first, origin)
        ('without the loss scale of 65536 it is 12.3: the loss scale',)
    """
    nothing: list[str] = []
    asked = [
        lambda: list(_precision(first, origin)),
        lambda: list(_compiler(first, origin)),
        lambda: list(_loss_scale(first, origin, loss_scale)),
    ]
    return tuple(line for ask in asked for line in or_else(nothing, ask))


def why_of_compiled(kept: Sequence[KeptRun], most: float) -> tuple[str, ...]:
    """The same if graphs ran again from the first to the last, and no gradient was bad then.

    Args:
        kept: the graph runs that gradients reached.
        most: the largest gradient that they returned.
    """
    compiled = [each for each in kept if each.event.is_compiled]
    # It may have drawn other numbers, and the effect of a user's hook is unknown.
    is_plain = not any(each.random_state is not None or _has_hooks(each) for each in kept)
    if not compiled or not is_plain:
        return ()
    return (f"eager mode makes gradients of at most {most:.3g}: the compiler",)


def _precision(first: First, origin: Origin) -> Iterator[str]:
    """The answer from the gradient in float64, on the operands that float64 would give."""
    gradient = None if first.seen is None else first.seen.gradient
    if gradient is None or gradient.wide is None or gradient.not_judged:
        return
    fails = (*FAILURES, "loss scale")
    if math.isfinite(gradient.wide) and origin.cause in fails:
        yield f"in float64 it is {number_at(gradient.wide, gradient)}: precision"
    elif not math.isfinite(gradient.wide) and origin.cause not in (*fails, "unknown"):
        problem = said(Severity.of(gradient.wide))
        yield f"in float64 it is {problem} too: not precision"


def _compiler(first: First, origin: Origin) -> Iterator[str]:
    """The answer from the second run of the graph, which was in eager mode."""
    if first.kept.event.is_compiled:
        made = said(first.suspect.severity)
        yield f"eager mode agrees ({made} in backward of {origin.what}): not the compiler"


def _loss_scale(first: First, origin: Origin, known: float | None) -> Iterator[str]:
    """The answer from the gradient with incoming gradients divided by the scale."""
    if known is not None and known != 1:
        made = said(first.suspect.severity)
        yield f"without the loss scale of {known:g} it is {made} too: not the loss scale"
        return
    scale = _scale_of(first, origin)
    found = None if scale is None else first.divided_by(scale)
    if found is None or scale is None:
        return
    start = f"without the loss scale of {scale:g} it is"
    if found.severity:
        yield f"{start} {said(found.severity)} too: not the loss scale"
    else:
        yield f"{start} at most {found.abs_max:.3g}: the loss scale"


def _scale_of(first: First, origin: Origin) -> float | None:
    """The scale of a loss that is not known to be unscaled; None if it has none."""
    if origin.cause == "loss scale":
        return largest_factor(first.kept, first.gradients, first.suspect)
    came_in = [abs(float(x)) for x in first.kept.incoming.values() if x.numel() == 1]
    return max((x for x in came_in if LARGE_FACTOR <= x < math.inf), default=None)


def _has_hooks(kept: KeptRun) -> bool:
    """Whether an input of a graph has a hook other than fxguard's own."""
    given = (x for x in kept.args if isinstance(x, Tensor))
    return any(len(x._backward_hooks or ()) > 1 for x in given)
