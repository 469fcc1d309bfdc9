"""The backward of one operation, alone, in a dtype."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxguard.graph.nodes import leaves
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, Ran, is_float, wide_result
from fxguard.rerun.edges import is_differentiable

__all__ = ["backward_of"]


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
        args, kwargs = pytree.tree_map_only(Tensor, leaf, given)
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
        except Exception as error:  # no such kernel, or one that depends on its neighbours
            raise NotJudged(f"no backward of {ran.call.kind} alone") from error
        finally:
            after.restore()
