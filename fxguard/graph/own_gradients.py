"""The gradients that one operation alone returns to what it reads, in a dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxguard import trees
from fxguard.forgiving import theirs
from fxguard.graph.nodes import elements_of, leaves
from fxguard.graph.random_state import RandomState
from fxguard.graph.spectra import without_gradient
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result

__all__ = ["backward_of", "gradient_in_float64", "gradient_of", "is_differentiable"]


def is_differentiable(value: Any) -> bool:
    """Whether a value may receive a gradient."""
    return is_float(value) and value.requires_grad


def gradient_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operand: int,
    incoming: Mapping[int, Tensor],
) -> Tensor | None:
    """The gradient that a function returns to one of its operands.

    Args:
        function: the function to call.
        args: its arguments; their gradients do not change.
        kwargs: likewise.
        operand: position, among the tensors of its arguments, of the one whose gradient is wanted.
        incoming: the gradient of each tensor of the result, by its position.

    Returns:
        The gradient, with the operand's shape; None if no gradient comes.
    """
    given: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        x = x.detach().clone()
        given.append(x.requires_grad_() if is_float(x) else x)
        return x.clone()  # the function may write it, which no leaf allows

    with torch.enable_grad():
        args, kwargs = trees.tree_map_only(Tensor, leaf, (args, dict(kwargs)))
        made = [x for _, x in elements_of(function(*args, **kwargs))]
        found = torch.autograd.grad(
            [made[position] for position in incoming],
            given[operand],
            list(incoming.values()),
            allow_unused=True,
        )
    return found[0]


def gradient_in_float64(
    kind: str,
    function: Callable[..., Any],
    given: tuple[Any, Any],
    operand: int,
    incoming: Mapping[int, Tensor],
) -> Tensor | None:
    """The same computed entirely in float64; None if that is impossible.

    It is NaN at a matrix where the operation, which is a decomposition then, has no gradient: only
    roundings of float64 would make a number there.
    """
    results: list[Any] = []

    def kept(*args: Any, **kwargs: Any) -> Any:
        results.append(function(*args, **kwargs))
        return results[-1]

    device = next((x.device.type for x in trees.tree_leaves(given) if is_float(x)), "cpu")
    try:
        args, kwargs = trees.tree_map(_wide, given)
        wide = {position: _wide(gradient) for position, gradient in incoming.items()}
        with torch.autocast(device, enabled=False):
            found = gradient_of(kept, args, kwargs, operand, wide)
        if found is None:
            return None
        lost = without_gradient(kind, results[-1], incoming)
        return found if lost is None else found.masked_fill(lost[..., None, None], math.nan)
    except theirs():  # no such kernel, a fixed dtype, or out of memory
        return None


def _wide(x: Any) -> Any:
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.float64
    if not is_float(x):
        return x
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def backward_of(
    ran: Ran,
    given: tuple[Any, Any],
    gradients: Mapping[int, Tensor],
    wants: Sequence[bool],
    dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """The gradient that one operation returns to each tensor that it reads; None if there is none.

    Args:
        ran: the operation.
        given: its arguments in the model's dtype.
        gradients: gradients of its results, by position.
        wants: for each tensor that it reads: whether a gradient goes on to it.
        dtype: the dtype to compute in; None for that of the operation.
    """
    operands: dict[int, Tensor] = {}
    numbers = itertools.count()

    def leaf(x: Tensor) -> Tensor:
        number = next(numbers)
        if not is_float(x) or x.is_complex():
            return x
        operand = x.detach().to(x.dtype if dtype is None else dtype).clone()
        if wants[number]:
            operands[number] = operand.requires_grad_()
        return operand.view_as(operand) if not ran.call.written else operand.clone()

    with torch.enable_grad():
        args, kwargs = trees.tree_map_only(Tensor, leaf, given)
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
                return [None] * len(wants)
            found = torch.autograd.grad(
                [made[at] for at in starts],
                list(operands.values()),
                [gradients[at].to(made[at].dtype) for at in starts],
                allow_unused=True,
            )
            by_number = dict(zip(operands, found, strict=True))
            return [by_number.get(number) for number in range(len(wants))]
        except NotJudged:
            raise
        except theirs() as error:  # no such kernel, or one that depends on its neighbours
            raise NotJudged(f"no backward of {ran.call.kind} alone") from error
        finally:
            after.restore()
