"""Finds a small set of operations to keep in float32, in few runs.

The search begins with all operations that fail or that read values that the dtype cannot hold. If a
run of that mix fails elsewhere, the operations that fail there are added; if an operation fails
because of earlier roundings, the operations that made its operands are added as well. Then each
kind of operation is left out once. Equal layers are one decision.

If the result is finite and much further off than with every operation in float32, a small set that
is about as good as all of them is looked for: among the lines with the largest shares of the error,
or, if a few of them are not enough, among all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch.nn import Module

from fxguard.budget.budget import worth_keeping
from fxguard.forecasting._examined import Examined
from fxguard.forecasting._graphs import Graphs, Operation
from fxguard.forecasting._reference import loss_scale, reference_of
from fxguard.forecasting._search import smallest
from fxguard.in_dtype.errors import Bar, Error
from fxguard.measure.at_hand import name_of_dtype
from fxguard.report.precision_plan import PrecisionPlan

__all__ = ["plan_of"]

MOST_ROUNDS = 8  # of adding operations
MOST_LINES = 6  # of code, by their shares of the error
MOST_TRIALS = 60  # of operations without which the result is finite, and far off
LIKE_ROUNDING = 1.5  # times the error of roundings alone


def plan_of(trials: Examined, found: Graphs, tolerance: float | None = None) -> PrecisionPlan:
    """Find out which operations to keep in float32.

    Args:
        trials: the trials of the model.
        found: its forecast.
        tolerance: see :class:`~fxguard.forecasting._errors.Bar`.
    """
    names = _Names(trials.model, found.counted)
    reference = reference_of(trials, draws=found.draws)
    error_low = trials.error(())
    eps = torch.finfo(trials.dtype).eps
    rounding = trials.distance(trials.repaired)
    globs = largest = [] if reference.why_not else _grown(trials, found, names, rounding)
    error = most = trials.error(globs) if globs else error_low
    if most.is_finite:
        for glob in largest:
            smaller = [each for each in globs if each != glob]
            tried = trials.error(smaller, most) if smaller else error_low
            if tried.is_as_good(most, eps):
                globs, error = smaller, tried
    missing = [f"nothing to compare with: {reason}" for reason in reference.why_not]
    if not missing:
        globs, error, bar = _near_the_best(trials, found, names, globs, error, tolerance)
        missing = _missing(trials, found, error, bar)
    beyond = trials.outputs_beyond()
    kept = {each for each in found.counted if names.glob_of(each) in globs}
    return PrecisionPlan(
        dtype=name_of_dtype(trials.dtype),
        mix=trials.mix,
        operations=tuple(names.shortened(globs)),
        kept=len(kept),
        of=len(found.counted),
        verified=not missing and not beyond,
        error=error.outputs,
        gradient_error=error.gradients,
        error_rounding=rounding.outputs,
        error_low=error_low.outputs if error_low.is_finite else math.inf,
        error_wide=reference.error,
        runs=trials.runs,
        draws=found.draws,
        remains=(
            *(title for title, (_, step) in found.found.forward.items() if step is None),
            *beyond,
        ),
        missing=tuple(missing),
    )


def _near_the_best(
    trials: Examined,
    found: Graphs,
    names: _Names,
    globs: list[str],
    error: Error,
    tolerance: float | None,
) -> tuple[list[str], Error, Bar]:
    """A mix that is about as good as with every operation in float32, with its error.

    Args:
        trials: the trials of the model.
        found: its forecast.
        names: the names of its operations.
        globs: the operations that have to be kept for the results to be finite.
        error: with these.
        tolerance: see :class:`~fxguard.forecasting._errors.Bar`.
    """
    eps = torch.finfo(trials.dtype).eps
    every = names.globs_of(found.counted)
    best = trials.error(every) if set(every) > set(globs) else error
    if not best.is_finite or not best.outputs <= error.outputs:  # or it is not known
        best = error
    bar = Bar(best, eps, tolerance)
    if best is error or bar.is_near(error):
        return globs, error, bar

    def suffices(more: list[str]) -> bool:
        tried = trials.error([*globs, *more])
        return bar.is_near(tried) and (bar.is_within(tried) or not bar.is_within(best))

    others = [glob for glob in every if glob not in globs]
    added = _by_share(trials, names, others, suffices)
    if added:
        for glob in list(added):
            fewer = [each for each in added if each != glob]
            added = fewer if fewer and suffices(fewer) else added
    else:
        added = smallest(others, suffices, MOST_TRIALS)
    return [*globs, *added], trials.error([*globs, *added]), bar


def _by_share(
    trials: Examined, names: _Names, others: list[str], suffices: Callable[[list[str]], bool]
) -> list[str]:
    """Operations with the largest shares of the error that suffice; none if they do not.

    Args:
        trials: the trials of the model.
        names: the names of its operations.
        others: all that may be kept.
        suffices: tries some.
    """
    found: dict[str, None] = {}
    wanted = (names.globs_of([Operation(*each) for each in line]) for line in worth_keeping(trials))
    tried = 0
    for globs in wanted:
        more = [glob for glob in globs if glob in others and glob not in found]
        if not more:
            continue
        found |= dict.fromkeys(more)
        tried += 1
        if suffices(list(found)):
            return list(found)
        if tried == MOST_LINES:
            break
    return []


def _missing(trials: Examined, found: Graphs, error: Error, bar: Bar) -> list[str]:
    """What a mix lacks to be verified."""
    missing = []
    if not error.is_finite:
        what = "outputs" if error.outputs == math.inf else "gradients"
        missing.append(f"the {what} are not finite")
    elif math.isnan(error.outputs):
        missing.append("no output could be compared")
    elif not bar.is_within(error):
        least = bar.best.root_mean_square
        line = (
            f"the outputs are {error.root_mean_square:.2g} off (root mean square), "
            f"{bar.of_outputs:.2g} is allowed"
        )
        if not bar.is_within(bar.best):
            line += f"; {least:.2g} with every operation in float32"
            if trials.between:
                line += f" but for {trials.between} between graphs"
            elif trials.converts and not found.draws:
                line += ": roundings of weights and inputs"
                line += ", and between graphs" if found.graphs > 1 else ""
        missing.append(line)
    elif not bar.is_near(error):
        missing.append("with every operation in float32 the error is less than a third of this")
    if error.dead:
        names = sorted(error.dead)
        more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        dtype = name_of_dtype(trials.dtype)
        scale = loss_scale(trials, error)
        missing.append(f"the gradient of {names[0]}{more} is 0 in {dtype}: {scale}")
    if missing and found.draws:
        missing.append("it draws random numbers: plan for it in evaluation mode")
    return missing


def _grown(trials: Examined, found: Graphs, names: _Names, rounding: Error) -> list[str]:
    """All operations that may have to be kept, in order of execution.

    Args:
        trials: the trials of the model.
        found: its forecast.
        names: the names of its operations.
        rounding: the error of the dtype's roundings alone.
    """
    globs = names.globs_of(found.beyond)
    for _ in range(MOST_ROUNDS if globs else 0):
        found, outputs, _ = trials.judged(globs)
        more = names.globs_of(found.beyond)
        if set(more) <= set(globs):  # kept operations still fail, because of their operands
            eps = torch.finfo(trials.dtype).eps
            if trials.distance(outputs).is_as_good(rounding, eps, LIKE_ROUNDING):
                break
            more = names.globs_of(_before(found, names, globs))
        added = [glob for glob in more if glob not in globs]
        if not added:
            break
        globs += added
    return globs


def _before(found: Graphs, names: _Names, globs: Collection[str]) -> list[Operation]:
    """Operations that need another dtype and, of those already kept, the makers of operands."""
    reached = list(found.beyond)
    for operation in reached:
        if names.glob_of(operation) in globs:
            makers = found.makers.get(operation, set())
            reached += [each for each in makers if each not in reached]
    return reached


class _Names:
    """Names operations so that equal layers share one name and are one decision.

    Args:
        model: the model; its layers are equal if they are children of one class with numbers as
            names.
        counted: all of its operations.
    """

    def __init__(self, model: Module, counted: Iterable[Operation]) -> None:
        self.modules = dict(model.named_modules())
        self.most: dict[tuple[str, str], int] = {}  # how many operations of a name a module has
        self._general: dict[str, str] = {}
        for module, kind, number in counted:
            key = self.general(module), kind
            self.most[key] = max(number, self.most.get(key, 0))

    def globs_of(self, operations: Collection[Operation]) -> list[str]:
        """Globs for some operations and their counterparts in equal layers."""
        return list(dict.fromkeys(map(self.glob_of, operations)))

    def glob_of(self, operation: Operation) -> str:
        """A glob for an operation and its counterparts in equal layers."""
        module = self.general(operation.module)
        glob = f"{module}:{operation.kind}"
        is_only = self.most.get((module, operation.kind), 1) == 1
        return glob if is_only else f"{glob}#{operation.number}"

    def shortened(self, globs: Collection[str]) -> list[str]:
        """The globs, with one glob in place of those for all operations of one name in a module."""

        def short(glob: str) -> str:
            name, _, number = glob.partition("#")
            module, _, kind = name.rpartition(":")
            numbers = range(1, self.most[module, kind] + 1)
            return name if number and all(f"{name}#{n}" in globs for n in numbers) else glob

        return list(dict.fromkeys(map(short, globs)))

    def general(self, module: str) -> str:
        """A module's name with ``*`` in place of the numbers of equal layers."""
        if module not in self._general:
            parts = module.split(".") if module else []
            self._general[module] = ".".join(
                "*" if part.isdigit() and self._are_equal(".".join(parts[:at])) else part
                for at, part in enumerate(parts)
            )
        return self._general[module]

    def _are_equal(self, container: str) -> bool:
        """Whether the children of a module are layers of one class."""
        if container not in self.modules:
            return False
        children = list(self.modules[container].children())
        return len(children) > 1 and len({type(each) for each in children}) == 1
