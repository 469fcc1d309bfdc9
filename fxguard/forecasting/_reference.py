"""What the runs of a plan are compared with, and whether that is worth a comparison.

Outputs are compared with those of float64, gradients with those of the model in its own dtype. A
model that is not finite itself is no reference: any mix would be as good as any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.forecasting._examined import Examined
from fxguard.forgiving import theirs
from fxguard.formats import FORMATS
from fxguard.graph.wide_form import converted
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.in_dtype.errors import Bar, Error, largest
from fxguard.measure.at_hand import name_of_dtype
from fxguard.options import Options
from fxguard.report.report import Report

__all__ = ["Reference", "loss_scale", "reference_of"]

LIFTED = 2.0**7  # times the smallest number of a format: others of its tensor are not 0 either


@dataclass(frozen=True, slots=True)
class Reference:
    """The model in its own dtype, beside float64."""

    error: float  # of its outputs
    why_not: tuple[str, ...]  # why nothing can be compared with it; () if it can


def reference_of(trials: Examined, *, draws: bool) -> Reference:
    """Run the model in its own dtype, and complete what later runs are compared with.

    The float64 run beside the copy takes over what the copy chose (indices, comparisons), and
    results without a float64 form. Where it is not what the model computes, a run in float64 that
    chooses for itself is wanted instead, or else this one.

    Args:
        trials: the trials of the model; its :attr:`~Examined.wanted` is completed.
        draws: whether the model draws random numbers, which may be others in each run.
    """
    outputs, gradients = trials.run(*trials.plain(), trials.loss)
    wide, wide_gradients = _in_float64(trials)
    wanted = trials.wanted
    wanted.gradients = gradients
    wanted.sizes = {
        name: largest(x.double() - wide_gradients[name]) / torch.finfo(x.dtype).eps
        for name, x in gradients.items()
        if name in wide_gradients
    }
    wanted.outputs = [  # where it had to, the float64 run took over values that the dtype spoiled
        own if known is None or _is_worse(known, own) else known
        for known, own in zip(wanted.outputs, outputs, strict=True)
    ]
    bar = Bar(trials.distance(outputs), torch.finfo(trials.dtype).eps)
    is_own = bar.is_within(bar.best) and not trials.not_judged
    if not (draws or is_own or trials.outputs_beyond()):  # a clamp may hide what is beyond
        wanted.outputs = list(wide if len(wide) == len(outputs) else outputs)
    reasons = [*_why_not(trials, outputs), *map(_not_finite, _bad_gradients(gradients))]
    return Reference(trials.distance(outputs).outputs, tuple(reasons))


def loss_scale(trials: Examined, error: Error) -> str:
    """What to do about gradients that are 0 in the dtype: a loss scale, tried.

    Args:
        trials: the trials of the model.
        error: of a mix in which weights have such gradients.
    """
    form = FORMATS[name_of_dtype(trials.dtype)]
    size = min(largest(trials.wanted.gradients[name]) for name in error.dead)
    exponent = max(1, math.ceil(math.log2(form.smallest * LIFTED / size)))
    try:
        _, found = trials.run(trials.low, trials.start(), trials.loss, 2.0**exponent)
    except UsageError:
        found = {}
    is_finite = all(bool(x.isfinite().all()) for x in found.values())
    if is_finite and all(name in found and bool(found[name].any()) for name in error.dead):
        return f"scale the loss by 2**{exponent} (tried: none of them is 0)"
    return f"a loss scale of 2**{exponent} does not lift them (tried)"


def _in_float64(trials: Examined) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients in float64; none if the model does not run in it."""
    try:
        model, given = trials.plain()
        return trials.run(model.double(), converted(given, torch.float64), trials.loss)
    except theirs():  # it was not written for float64, or does not fit
        return [], {}


def _why_not(trials: Examined, outputs: list[Tensor]) -> list[str]:
    """Why outputs in the model's own dtype are no reference; infinities that are meant may be."""
    pairs = zip(outputs, trials.wanted.outputs, strict=True)
    if all(bool(x.isfinite().all()) for pair in pairs for x in pair if x is not None):
        return []
    reports: list[Report] = []
    model, given = trials.plain()
    guard = GuardedModel(model, Options(on_detect=reports.append, backward=False), Plugins())
    guard.install()
    try:
        trials.run(model, given)
    finally:
        guard.uninstall()
    own = " and ".join(sorted({name_of_dtype(x.dtype) for x in outputs}))
    if reports:
        return [f"in {own} too: {reports[0].verdict[0]}"]
    if trials.distance(outputs).outputs == math.inf:
        return [f"the outputs are not finite alike in {own} and in float64"]
    return []


def _bad_gradients(gradients: dict[str, Tensor]) -> Collection[tuple[str, Tensor]]:
    return [(name, x) for name, x in gradients.items() if not bool(x.isfinite().all())]


def _not_finite(gradient: tuple[str, Tensor]) -> str:
    name, value = gradient
    return f"in {name_of_dtype(value.dtype)} too, the gradient of {name} is not finite"


def _is_worse(one: Tensor, other: Tensor) -> bool:
    return int(one.isfinite().sum()) < int(other.isfinite().sum())
