"""Precision, compiler or loss scale: computes the first bad gradient in other ways to tell why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from fxguard.batch.kept_run import KeptRun
from fxguard.findings import Origin
from fxguard.forgiving import or_else
from fxguard.records import Severity
from fxguard.verdict.first_gradient import Began
from fxguard.verdict.loss_scale import LARGE_FACTOR
from fxguard.verdict.second_opinion import FAILURES
from fxguard.why._forward import number_at

__all__ = ["why_of_backward", "why_of_compiled"]


def why_of_backward(
    began: Began, origin: Origin, loss_scale: float | None = None
) -> tuple[str, ...]:
    """The answers for :attr:`~fxguard.report.report.Report.why`, a line each.

    Args:
        first: where the first bad gradient began.
        origin: its description.
        loss_scale: the scale by which ``first`` divided the incoming gradients; None if the loss is
            not known to be scaled.

    Example:
        >>> why_of_backward(began, origin)
        ('without the loss scale of 65536 it is 12.3: the loss scale',)
    """
    nothing: list[str] = []
    asked = [
        lambda: list(_precision(began, origin)),
        lambda: list(_compiler(began, origin)),
        lambda: list(_loss_scale(began, origin, loss_scale)),
        lambda: list(_factor(began, loss_scale)),
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
    is_plain = not any(_draws_anew(each) or _has_hooks(each) for each in kept)
    if not compiled or not is_plain:
        return ()
    return (f"eager mode makes gradients of at most {most:.3g}: the compiler",)


def _draws_anew(kept: KeptRun) -> bool:
    """Whether a second run may have drawn other random numbers."""
    return kept.random_state is not None and kept.event.draws is None


def _precision(began: Began, origin: Origin) -> Iterator[str]:
    """The answer from the gradient in float64, on the operands that float64 would give."""
    gradient = None if began.seen is None else began.seen.gradient
    if gradient is None or gradient.wide is None or gradient.not_judged:
        return
    fails = (*FAILURES, "loss scale")
    if math.isfinite(gradient.wide) and origin.cause in fails:
        yield f"in float64 it is {number_at(gradient.wide, gradient)}: precision"
    elif not math.isfinite(gradient.wide) and origin.cause not in (*fails, "unknown"):
        if gradient.degeneracy:  # whatever torch computes there
            yield "it does not exist in float64 either: not precision"
            return
        problem = "NaN" if math.isnan(gradient.wide) else f"{gradient.wide:g}"
        yield f"in float64 it is {problem} too: not precision"


def _compiler(began: Began, origin: Origin) -> Iterator[str]:
    """The answer from the second run of the graph, which was in eager mode."""
    if began.kept.event.is_compiled:
        made = origin.not_finite
        yield f"eager mode agrees ({made} in backward of {origin.what}): not the compiler"


def _loss_scale(began: Began, origin: Origin, known: float | None) -> Iterator[str]:
    """The answer about the known scale, or else about a loss that may have been scaled."""
    if known == 1 or (began.factor > 1 and known is None):
        return  # there is none, or it is the factor
    if known is not None:
        made = origin.not_finite
        yield f"without the loss scale of {known:g} it is {made} too: not the loss scale"
        return
    came_in = [abs(float(x)) for x in began.kept.incoming.values() if x.numel() == 1]
    scale = max((x for x in came_in if LARGE_FACTOR <= x < math.inf), default=None)
    found = None if scale is None else began.divided_by(scale)
    if found is not None and found.severity:
        made = "NaN" if found.severity is Severity.NAN else "infinite"
        yield f"without the loss scale of {scale:g} it is {made} too: not the loss scale"


def _factor(began: Began, known: float | None) -> Iterator[str]:
    """The answer about the constant to blame: the loss scale, or a factor beside a known scale."""
    found = began.divided_by(began.factor) if began.factor > 1 else None
    if found is None:
        return
    what, end = "the loss scale of", "the loss scale"
    if known is not None:
        what, end = "the loss's factor of", "that factor"
    yield f"without {what} {began.factor:g} it is at most {found.abs_max:.3g}: {end}"


def _has_hooks(kept: KeptRun) -> bool:
    """Whether an input of a graph has a hook other than fxguard's own."""
    given = (x for x in kept.args if isinstance(x, Tensor))
    return any(len(x._backward_hooks or ()) > 1 for x in given)
