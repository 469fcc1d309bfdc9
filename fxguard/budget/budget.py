"""``error_budget``: how wrong a model is in a dtype, and which lines that comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.budget._fixes import candidates, fix_for
from fxguard.budget._form import WIDE
from fxguard.budget._gradients import Gradients, gradients_of
from fxguard.budget._graphs import FORWARD, Graphs
from fxguard.budget._measured import Measured, measured, numbers_of
from fxguard.budget._room import NoRoom, Room, first_sample
from fxguard.budget._rows import Amplified, choices_of, lines_of
from fxguard.budget._shares import Shares
from fxguard.errors import FxguardError, UsageError
from fxguard.forgiving import theirs
from fxguard.graph.wide_form import NotJudged, widened
from fxguard.in_dtype.trials import FLOAT8, Trials, pairs_of, tensors_of
from fxguard.install.instrumented import unwrapped
from fxguard.measure.at_hand import dtype_named, name_of_dtype
from fxguard.report.error_budget import ErrorBudget
from fxguard.report.late_progress import LateProgress

__all__ = ["budget_of_step", "error_budget"]


def error_budget(
    model: Module,
    *inputs: Any,
    dtype: torch.dtype | str | None = torch.bfloat16,
    of: Callable[[Any], Any] | None = None,
    autocast: bool = False,
    gradients: bool = False,
    **named: Any,
) -> ErrorBudget:
    """Say how wrong a model's output is in a dtype, and which lines that comes from.

    A copy of the model runs in ``dtype``. Each captured graph runs again beside it in float64, with
    gradients. The *own* error of an operation is that of its roundings: its result minus that of
    the same operation in float64 on the operands that it had. To first order, the error of a number
    is the sum of own errors times the gradients of the number with respect to the results. So the
    *share* of an operation is what it adds to the square of the error: roundings are independent
    (Higham and Mary, 2019), unless the sum of an operation's errors shows a bias.

    Where an error is far beyond first order, shares rank and do not add up; the text says so.
    Integers, booleans and indices are those of the model in ``dtype``: what float64 would have
    chosen otherwise is listed. Random operations draw the same numbers in both. ``no_grad`` and
    ``detach`` do not end a gradient here.

    Args:
        model: any module. A copy runs; the model, its buffers and the random state stay unchanged.
        inputs: its positional arguments.
        dtype: the dtype that weights and floating-point inputs are cast to; a name such as "bf16"
            will do. None leaves everything as it is.
        of: a function from what the model returns to the number that matters, such as a loss or the
            log-probability of a token; it is called with float64. By default the ``loss`` that the
            model returns, or else all floating-point tensors of its output.
        autocast: whether the model runs under ``torch.autocast`` to ``dtype``, with unchanged
            weights.
        gradients: whether to also measure the error of each weight's gradient, and what it comes
            from.
        named: keyword arguments of the model.

    Returns:
        The budget: :attr:`~fxguard.types.ErrorBudget.error`, and rows with the largest share first.
        All values of the float64 run are kept until it is made, as for a backward: in files where
        memory is short. Where neither does, the budget is that of the first sample of the batch,
        and says so.

    Raises:
        FxguardError: when the model does not run in the dtype, when nothing of it was captured, and
            when its graphs cannot run in float64.

    Example:
        >>> print(fxguard.error_budget(model, ids, dtype=torch.bfloat16))
        bfloat16 changes the output by 28 %: 0.6 of 2.4 digits are left
          69 %  to rope.py:9: pos = pos.to(x.dtype)  own error 0.19 %, amplified 130 times, ...
    """
    chosen = None if dtype is None else dtype_named(dtype)
    if not isinstance(model, Module):
        raise UsageError(f"error_budget needs a torch.nn.Module, got {type(model).__name__}")
    if chosen in FLOAT8:
        raise UsageError(f"error_budget takes a dtype that operations compute in, got {chosen}")
    trials = Trials(unwrapped(model), inputs, named, chosen, autocast=autocast)
    return _budget_of(trials, of, gradients=gradients)


def budget_of_step(
    model: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    of: Callable[[Any], Any] | None,
) -> ErrorBudget:
    """The budget of a step of a script.

    Args:
        model: the model as it was before the step.
        args: what it was given.
        kwargs: likewise.
        dtype: as in :func:`error_budget`.
        of: likewise.
    """
    return _budget_of(Trials(unwrapped(model), args, kwargs, dtype), of, gradients=False)


def _budget_of(trials: Trials, of: Callable[[Any], Any] | None, *, gradients: bool) -> ErrorBudget:
    try:
        return _Budget(trials, of, gradients=gradients).made()
    except NoRoom:
        given, batch = first_sample(trials.given)
        if batch == 1:
            raise
        budget = _Budget(trials.on(given), of, gradients=gradients).made()
        note = f"of the first sample alone: a batch of {batch} does not fit into memory in float64"
        return replace(budget, notes=(*budget.notes, note))
    except NotJudged as reason:
        raise UsageError(f"there is no error budget: {reason}") from reason


def budget_of(trials: Trials) -> ErrorBudget | None:
    """The budget of a model's output, without a fix; None if there is none.

    Args:
        trials: of the model.
    """
    try:
        return _Budget(trials, None, gradients=False, tries=False).made()
    except (FxguardError, NotJudged):
        return None


def budget_as_it_is(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ErrorBudget | None:
    """The budget of the output of a model in its own dtype, without a fix; None if there is none.

    Args:
        model: any one; a copy of it runs.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    try:
        trials = Trials(unwrapped(model), args, kwargs, None)
    except theirs():  # a copy cannot be made
        return None
    return budget_of(trials)


def worth_keeping(trials: Trials) -> list[list[tuple[str, str, int]]]:
    """What to keep in float32 for more digits of the output: the largest share of its error first.

    Args:
        trials: of the model.

    Returns:
        For each line of code, its operations and those that amplify their errors: the module that
        the graph was captured with, the kind, and the number among those of the module. Empty if
        there is no budget.
    """
    budget = _Budget(trials, None, gradients=False)
    try:
        graphs, number, _ = budget.run(chooses=False)
        budget.differentiate(graphs, number)
    except FxguardError:
        return []
    finally:
        budget.progress.end()
    amplified = Amplified(graphs.shares, graphs, number.size)
    found = candidates(graphs, lines_of(graphs.shares, graphs), amplified)
    return [[(x.step.module, x.step.kind, x.number) for x in each] for each in found]


class _Budget:
    """The runs of one budget.

    Args:
        trials: of the model.
        of: gives the number that matters; None for what the model returns.
        gradients: whether gradients of weights are measured as well.
        tries: whether a fix is looked for.
    """

    def __init__(
        self,
        trials: Trials,
        of: Callable[[Any], Any] | None,
        *,
        gradients: bool,
        tries: bool = True,
    ) -> None:
        self.trials, self.of = trials, of
        self.gradients, self.tries = gradients, tries
        self.progress = LateProgress(f"fxguard: error budget of {type(trials.model).__name__}")

    def made(self) -> ErrorBudget:
        """Run the model, and make the budget."""
        try:
            graphs, number, between = self.run(chooses=False)
            if any(choices_of(graphs)):  # a run that chooses for itself may be far from this one
                del graphs, number  # which hold all that a backward needs
                graphs, number, between = self.run(chooses=True)
            return self._budget(graphs, number, between)
        finally:
            self.progress.end()

    def run(self, *, chooses: bool) -> tuple[Graphs, Measured, int]:
        """Run the model, and each of its graphs again in float64.

        Args:
            chooses: whether also in a run that chooses for itself.

        Returns:
            The graphs, the number that matters, and how many operations ran between graphs.
        """
        given = self.trials.start()
        shares = Shares(Room())
        tensors, pairs = tensors_of(self.trials.model), pairs_of(given, self.trials.given)
        graphs = Graphs(shares, tensors, pairs, progress=self.progress, chooses=chooses)
        output, between = self.trials.heard(given, graphs.hear)
        if not graphs.counted:
            name = type(self.trials.model).__name__
            raise UsageError(
                f"there is no error budget: TorchDynamo captured no operation of this {name}"
            )
        number = measured(output, graphs, self.of)
        if between:  # the float64 run begins anew behind what ran there
            number.itself = self._in_float64(number)
        return graphs, number, between

    def _in_float64(self, number: Measured) -> list[Tensor]:
        """The number where the whole model runs in float64; NaN if it does not."""
        output = self.trials.in_float64()
        made = [] if output is None else numbers_of(output, self.of)
        if len(made) <= max(number.kept):
            return [torch.full_like(x, math.nan) for x in number.low]
        return [widened(made[at], WIDE) for at in number.kept]

    def differentiate(self, graphs: Graphs, number: Measured) -> None:
        """Let the adjoints come, of one projection after the other."""
        for at, drawn in enumerate(number.projections):
            graphs.shares.begin()
            keeps = self.gradients or at + 1 < len(number.projections)
            try:
                torch.autograd.grad(
                    number.wide, graphs.all_leaves(), drawn, retain_graph=keeps, allow_unused=True
                )
            except RuntimeError as error:  # an operation without a derivative
                reason = str(error).splitlines()[0]
                raise UsageError(f"there is no error budget: {reason}") from error
            done = (at + 1) / len(number.projections)
            self.progress.advance(FORWARD + (1 - FORWARD) * done)

    def _budget(self, graphs: Graphs, number: Measured, between: int) -> ErrorBudget:
        shares, trials = graphs.shares, self.trials
        self.differentiate(graphs, number)
        predicted = _root_mean_square(shares.predicted())
        true = _root_mean_square(number.true_errors())
        amplified = Amplified(shares, graphs, number.size)
        lines = lines_of(shares, graphs)
        rows = tuple(line.row(amplified) for line in lines if line.share)
        fix = ""
        if self.tries:
            fix = fix_for(trials, self.of, graphs, lines, amplified, number)
        gradients = Gradients()
        if self.gradients:
            gradients = gradients_of(trials, self.of, graphs, number)
        notes = [_between(between)] if between else []
        notes += [gradients.note] if gradients.note else []
        return ErrorBudget(
            name_of_dtype(trials.dtype),
            number.name,
            number.error,
            trials.unit,
            rows,
            predicted / true if true else math.nan,
            graphs.counted,
            tuple(choices_of(graphs)),
            tuple(graphs.not_judged.items()),
            fix,
            tuple(gradients.errors.items()),
            gradients.rows,
            tuple(notes),
        )


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values)) if values else 0.0


def _between(count: int) -> str:
    return f"not looked at: {count} operation{'' if count == 1 else 's'} between graphs"
