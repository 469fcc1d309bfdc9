"""Learning rates that a schedule has raised far above what their optimizer was given."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fxguard.capture.instances import instances_of
from fxguard.source.lines import source_at
from fxguard.steps._learning_rate import function_of, lines_that_set_it, schedulers_of

__all__ = ["raised_rate_of"]

RAISED = 4.0  # times what the optimizer was given: no warm-up ends there
# What torch keeps in the group of an optimizer: the rate that it begins with, and, for OneCycleLR
# and CyclicLR, the one that they are meant to reach.
BEGAN, MEANT = "initial_lr", "max_lr"


def raised_rate_of(model: Module, name: str) -> str:
    """How far the learning rate of a weight is above what its optimizer was given; "" if it is not.

    Args:
        model: the model.
        name: the qualified name of its weight.

    Example:
        >>> raised_rate_of(model, "fc.weight")
        'it is 8, 400 times the 0.02 that SGD was given: LambdaLR set it, by `warmup` (train.py:4)'
    """
    weight = dict(model.named_parameters()).get(name)
    for optimizer in instances_of(Optimizer) if weight is not None else ():
        for group in optimizer.param_groups:
            if any(each is weight for each in group["params"]):
                return _told(optimizer, group)
    return ""


def _told(optimizer: Optimizer, group: dict[str, Any]) -> str:
    given = float(group.get(BEGAN, optimizer.defaults.get("lr", 0.0)))
    rate = float(group.get("lr", 0.0))
    if MEANT in group or not math.isfinite(rate) or not 0 < RAISED * given < rate:
        return ""
    kind = type(optimizer).__name__
    text = f"it is {rate:.3g}, {rate / given:.3g} times the {given:.3g} that {kind} was given"
    return text + _set_by(optimizer)


def _set_by(optimizer: Optimizer) -> str:
    """Who has set it."""
    for scheduler in schedulers_of(optimizer):
        by = next(filter(None, map(function_of, getattr(scheduler, "lr_lambdas", ()))), "")
        return f": {type(scheduler).__name__} set it" + (f", {by}" if by else "")
    lines = [*lines_that_set_it()]
    return f": it is set at {source_at(lines[0])}" if len(lines) == 1 else ""
