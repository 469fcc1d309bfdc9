"""The backward of a captured graph in a dtype: which operations return gradients beyond it.

The graph and its backward run in float64 throughout, which gives the gradients of all results. Then
each operation's backward runs alone, in the dtype and in float64, on the same operands and the same
gradient. If the gradient itself does not fit, the operation works on values that the dtype cannot
hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.forecasting._failure import ROUNDINGS, Failure, Failures, failure_of
from fxguard.forecasting._other_dtype import InDtype
from fxguard.forecasting._ranges import rows_of, tensors_in
from fxguard.graph.nodes import elements_of, leaves
from fxguard.graph.own_gradients import backward_of, is_differentiable
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.plan.plan import Place
from fxguard.records import GRADIENT, Role, Row
from fxguard.rerun.edges import when_it_has_come
from fxguard.rerun.other_values import rounded
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

__all__ = [
    "BackwardInDtype",
    "Came",
    "LookBack",
    "Made",
    "cancels",
    "gradient_rows",
    "gradients_in_float64",
]

WIDE = torch.float64


class Came(NamedTuple):
    """The gradients that reached one run of an operation in the backward."""

    gradients: dict[int, Tensor]  # of its results, by position
    wants: list[bool]  # for each tensor that it reads: whether a gradient goes on to it


Made = dict[Place, list[Came]]  # for each operation, one for each of its runs


class _WithGradients(WideForm):
    """The graph in float64, with a hook on every result."""

    def __init__(self) -> None:
        super().__init__(WIDE, differentiable=True)
        self.made: Made = {}

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        wants = [is_differentiable(x) for x in tensors_in((args, kwargs)).values()]
        result = super().follow(walk, node, ran, args, kwargs)
        found: dict[int, Tensor] = {}
        self.made.setdefault(walk.place(node), []).append(Came(found, wants))
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
        run: the graph run.
        wide: its arguments in float64.
        incoming: the gradient of each of its outputs, by position.

    Returns:
        The gradients of the operations' results, and those of the arguments, by position.

    Raises:
        NotJudged: when something has no float64 form.
    """
    form = _WithGradients()
    # Kernels refuse running statistics that require a gradient.
    buffers = {value.argument for value in run.plan.values if value.role is Role.BUFFER}
    inputs = {
        position: x.detach().to(WIDE).requires_grad_()
        for position, x in enumerate(wide)
        if position not in buffers and is_float(x) and not x.is_complex()
    }
    start = Start(run)
    with start.begun() as low, torch.enable_grad():
        given = [inputs[at].clone() if at in inputs else x for at, x in enumerate(wide)]
        _, made = start.walk(low, form, others=given)
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


class LookBack:
    """The gradients that reached each operation in the backward, and the findings there.

    Args:
        made: the gradients of the results of each operation.

    Attributes:
        failures: operations whose backward fails, and why.
        beyond: places of operations that work on a gradient that the dtype cannot hold.
        rows: rows of each operation, with the float64 ranges of gradients.
    """

    def __init__(self, made: Made) -> None:
        self.failures = Failures()
        self.beyond: dict[Place, None] = {}
        self.rows: dict[Place, tuple[Row, ...]] = {}
        self._made = {place: list(runs) for place, runs in made.items()}
        self._signs = torch.Generator().manual_seed(0)

    def came_to(self, place: Place) -> Came | None:
        """The gradients of the next run of an operation; None if it has not run."""
        runs = self._made.get(place)
        return runs.pop(0) if runs else None

    def with_random_signs(self, gradient: Tensor) -> Tensor:
        """A gradient with random signs, so that sums of it do not cancel."""
        drawn = torch.randint(0, 2, gradient.shape, generator=self._signs, dtype=torch.int8)
        return gradient * (drawn.to(gradient.device) * 2 - 1)


class BackwardInDtype(InDtype):
    """The graph in the dtype, with the backward of each operation alone.

    Args:
        by_right: see :class:`InDtype`.
        made: the gradients of the results of each operation.

    Attributes:
        back: the findings.
    """

    def __init__(self, by_right: Mapping[Place, int], made: Made) -> None:
        super().__init__(by_right)
        self.back = LookBack(made)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = walk.place(node)
        low = rounded((args, kwargs), (ran.args, ran.kwargs))  # before anything writes it
        if ran.call.written:
            low = _copied(low)
        result = super().follow(walk, node, ran, args, kwargs)
        came = self.back.came_to(place)
        if came is not None and place not in self.failures.found:
            try:
                self.look_back(place, ran, low, came)
            except NotJudged as reason:
                self.back.failures.skip(place, ran, str(reason))
        return result

    def look_back(self, place: Place, ran: Ran, low: tuple[Any, Any], came: Came) -> None:
        """Run the backward of one operation in both dtypes."""
        made, (gradients, wants) = leaves(ran.result), came
        come = {at: gradient.to(made[at].dtype) for at, gradient in gradients.items()}
        if not all(bool(x.isfinite().all()) for x in come.values()):
            if all(bool(x.isfinite().all()) for x in gradients.values()):
                self.back.beyond[place] = None
            return
        exact = {at: x.to(WIDE) for at, x in come.items()}
        back = backward_of(ran, low, come, wants, None)
        wide = backward_of(ran, low, exact, wants, WIDE)
        self.back.rows[place] = gradient_rows(ran, low, gradients, wide)
        for position, (one, other) in enumerate(zip(back, wide, strict=True)):
            if one is None or other is None:
                continue
            failure = failure_of(one, other, ran.call.kind)
            if failure is None:
                continue
            if failure.problem == "rounding":
                signed = {at: self.back.with_random_signs(x) for at, x in exact.items()}
                sizes = backward_of(ran, low, signed, wants, WIDE)
                if cancels(failure, other, sizes[position]):
                    continue
            self.back.failures.note(place, ran, failure)


def gradient_rows(
    ran: Ran,
    given: tuple[Any, Any],
    gradients: Mapping[int, Tensor],
    back: Sequence[Tensor | None],
) -> tuple[Row, ...]:
    """The rows of one operation's backward.

    Args:
        ran: the operation.
        given: its arguments in the dtype.
        gradients: gradients of its results, by position.
        back: the gradient of each tensor that it reads.
    """
    made = list(elements_of(ran.result))
    came = {made[at][0]: gradient for at, gradient in sorted(gradients.items())}
    pairs = zip(tensors_in(given).items(), back, strict=True)
    known = [(path, x, gradient) for (path, x), gradient in pairs if gradient is not None]
    return (
        *rows_of(f"{GRADIENT}output", came, [made[at][1] for at in sorted(gradients)]),
        *rows_of(f"{GRADIENT}input", {path: x for path, _, x in known}, [x for _, x, _ in known]),
    )


def cancels(
    failure: Failure, gradient: Tensor, size: Tensor | None, roundings: float = ROUNDINGS
) -> bool:
    """Whether an error comes from a sum that cancels, and is small compared to its terms.

    The gradient of a bias before a normalisation is rightly 0.

    Args:
        failure: the failure, with the error relative to the gradient.
        gradient: the gradient in float64.
        size: the same if nothing cancelled.
        roundings: how many roundings an error may be.
    """
    if size is None:
        return False
    largest = float(size.abs().max())
    eps = torch.finfo(getattr(torch, failure.dtype)).eps
    return failure.error * float(gradient.abs().max()) <= roundings * eps * largest


def _copied(values: Any) -> Any:
    return trees.tree_map_only(Tensor, torch.clone, values)
