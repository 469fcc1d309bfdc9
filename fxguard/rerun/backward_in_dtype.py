"""The backward of a captured graph in a dtype: which operations hand back what it does not hold.

The graph runs in float64 from its beginning, and so does its backward: that gives the gradient of
everything that an operation makes. Then each operation's backward runs alone, in the dtype and in
float64, on the same operands and the same gradient. Where the gradient itself does not fit, the
operation works on what the dtype does not hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.graph.nodes import leaves
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.rerun.edges import is_differentiable, when_it_has_come
from fxguard.rerun.lockstep import Lockstep
from fxguard.rerun.other_dtype import ROUNDINGS, Failure, InDtype, failure_of
from fxguard.rerun.other_values import rounded
from fxguard.rerun.same_start import as_before, copies_of
from fxguard.rerun.wide_run import WideForm

__all__ = ["BackwardInDtype", "gradients_in_float64"]

WIDE = torch.float64

# Of each operation, for each time that it runs: the gradients of what it makes, by position.
Made = dict[Place, list[dict[int, Tensor]]]


class _WithGradients(WideForm):
    """The graph in float64, with a hook on everything that it makes."""

    def __init__(self) -> None:
        super().__init__(WIDE, differentiable=True)
        self.made: Made = {}

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        result = super().follow(step, node, ran, args, kwargs)
        found: dict[int, Tensor] = {}
        self.made.setdefault(step.place(node), []).append(found)
        for position, value in enumerate(leaves(result)):
            if is_differentiable(value):
                when_it_has_come(value, functools.partial(_note, found, position))
        return result


def _note(found: dict[int, Tensor], position: int, gradient: Tensor) -> None:
    found[position] = gradient.detach()


def gradients_in_float64(
    run: GraphRun, wide: Sequence[Any], incoming: Mapping[int, Tensor]
) -> tuple[Made, dict[int, Tensor]]:
    """Run a graph and its backward in float64.

    Args:
        run: of the graph.
        wide: its arguments in float64.
        incoming: the gradient of each of its outputs, by position.

    Returns:
        The gradients of what operations made, and those of the arguments, by position.

    Raises:
        NotJudged: where something has no form in float64.
    """
    form = _WithGradients()
    low = copies_of(run)
    inputs = {
        position: x.detach().to(WIDE).requires_grad_()
        for position, x in enumerate(wide)
        if is_float(x) and not x.is_complex()
    }
    given = [inputs[at].clone() if at in inputs else x for at, x in enumerate(wide)]
    with as_before(run), torch.enable_grad():
        graph = without_marks(run.graph_module)
        _, made = Lockstep(graph, form).run_both(low, given)
        outputs = leaves(made)
        starts = [at for at in incoming if is_differentiable(outputs[at])]
        if not starts:
            return form.made, {}
        found = torch.autograd.grad(
            [outputs[at] for at in starts],
            list(inputs.values()),
            [incoming[at].to(outputs[at].dtype) for at in starts],
            allow_unused=True,
        )
    return form.made, {at: x for at, x in zip(inputs, found, strict=True) if x is not None}


class BackwardInDtype(InDtype):
    """The graph in the dtype, and of each operation its backward alone.

    Args:
        by_right: see :class:`InDtype`.
        made: the gradients of what each operation makes.

    Attributes:
        backward: where operations stand whose backward fails, and why.
        beyond: where those stand that work on a gradient that the dtype does not hold.
    """

    def __init__(self, by_right: Mapping[Place, int], made: Made) -> None:
        super().__init__(by_right)
        self.made = {place: list(found) for place, found in made.items()}
        self.backward: dict[Place, Failure] = {}
        self.beyond: dict[Place, None] = {}
        self.signs = torch.Generator().manual_seed(0)

    def follow(self, step: Lockstep, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = step.place(node)
        low = rounded((args, kwargs), (ran.args, ran.kwargs))  # before anything writes it
        if ran.call.written:
            low = _copied(low)
        result = super().follow(step, node, ran, args, kwargs)
        runs = self.made.get(place)
        gradients = runs.pop(0) if runs else {}
        if gradients and place not in self.failures:
            self.kinds[place] = ran.call.kind
            try:
                self.look_back(place, ran, low, gradients)
            except NotJudged as reason:
                self.skip(place, ran, str(reason))
        return result

    def look_back(
        self, place: Place, ran: Ran, low: tuple[Any, Any], gradients: Mapping[int, Tensor]
    ) -> None:
        """Run the backward of one operation in both dtypes."""
        made = leaves(ran.result)
        come = {at: gradient.to(made[at].dtype) for at, gradient in gradients.items()}
        if not all(bool(x.isfinite().all()) for x in come.values()):
            if all(bool(x.isfinite().all()) for x in gradients.values()):
                self.beyond[place] = None
            return
        exact = {at: x.to(WIDE) for at, x in come.items()}
        back = _backward(ran, low, come, None)
        wide = _backward(ran, low, exact, WIDE)
        for position, (one, other) in enumerate(zip(back, wide, strict=True)):
            if one is None or other is None:
                continue
            failure = failure_of(one, other, ran.call.kind)
            if failure is None:
                continue
            if failure.problem == "rounding":
                sizes = _backward(ran, low, {at: self.signed(x) for at, x in exact.items()}, WIDE)
                if _cancels(failure, other, sizes[position]):
                    continue
            known = self.backward.get(place, failure)
            self.backward[place] = max(known, failure, key=lambda each: each.severity)

    def signed(self, gradient: Tensor) -> Tensor:
        """A gradient with signs drawn at random: what is made of it does not cancel."""
        drawn = torch.randint(0, 2, gradient.shape, generator=self.signs, dtype=torch.int8)
        return gradient * (drawn.to(gradient.device) * 2 - 1)


def _backward(
    ran: Ran, given: tuple[Any, Any], gradients: Mapping[int, Tensor], dtype: torch.dtype | None
) -> list[Tensor | None]:
    """What one operation hands back to its operands.

    Args:
        ran: the operation.
        given: its arguments in the model's dtype.
        gradients: of what it makes, by position.
        dtype: to compute in; None for that of the operation.
    """
    operands: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not is_float(x) or x.is_complex():
            return x
        operand = x.detach().to(x.dtype if dtype is None else dtype).clone().requires_grad_()
        operands.append(operand)
        return operand.view_as(operand) if not ran.call.written else operand.clone()

    with torch.enable_grad():
        args, kwargs = pytree.tree_map(leaf, given)
        after = RandomState.now(given)
        try:
            if dtype is not None:
                result = wide_result(ran, args, kwargs, dtype, differentiable=True)
            else:
                if ran.before is not None:
                    ran.before.restore()
                result = ran.run(*args, **kwargs)
            made = leaves(result)
            starts = [at for at in gradients if is_differentiable(made[at])]
            if not operands or not starts:
                return [None] * len(operands)
            found = torch.autograd.grad(
                [made[at] for at in starts],
                operands,
                [gradients[at].to(made[at].dtype) for at in starts],
                allow_unused=True,
            )
            return list(found)
        except NotJudged:
            raise
        except Exception as error:  # no such kernel, or one that wants its neighbours
            raise NotJudged(f"no backward of {ran.call.kind} alone") from error
        finally:
            after.restore()


def _cancels(failure: Failure, gradient: Tensor, size: Tensor | None) -> bool:
    """Whether an error is that of a sum that cancels: small beside what was summed.

    The gradient of a bias before a normalisation is 0 by right.

    Args:
        failure: with the error, relative to the gradient.
        gradient: in float64.
        size: the same where nothing cancels.
    """
    if size is None:
        return False
    largest = float(size.abs().max())
    eps = torch.finfo(getattr(torch, failure.dtype)).eps
    return failure.error * float(gradient.abs().max()) <= ROUNDINGS * eps * largest


def _copied(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, values)
