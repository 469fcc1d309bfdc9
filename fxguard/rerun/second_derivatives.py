"""Operations without a finite derivative: what a gradient of a gradient multiplies with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.kept_run import KeptRun
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import Ran, is_float
from fxguard.plan.plan import Place
from fxguard.rerun.start import look_through
from fxguard.rerun.walk import Walk, Watcher

__all__ = ["Steep", "steep_operations"]


@dataclass(frozen=True, slots=True)
class Steep:
    """An operation whose value is finite, and a derivative is not."""

    place: Place
    node: Node
    kind: str
    order: int  # of that derivative: 1, if something behind it has hidden what it made, or 2
    index: tuple[int, ...]  # of the first such element, of an operand or of the result
    number: float  # that element
    is_of_result: bool
    is_nan: bool  # whether the derivative is NaN there


def steep_operations(kept: KeptRun) -> list[Steep]:
    """Such operations in a run of a graph, in order; those that end in NaN come first.

    Args:
        kept: the run, whose gradients were differentiated.

    Returns:
        Those until something stopped the second run of the graph.
    """
    watcher = _Steep()
    with kept.settings():
        look_through(kept.opened(), watcher)
    return sorted(watcher.found, key=lambda each: not each.is_nan)


class _Steep(Watcher):
    """Takes both derivatives of each operation alone."""

    def __init__(self) -> None:
        self.found: list[Steep] = []

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        call = walk.call_of(node)
        return not (call.random or call.written or call.selects)

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        bad = _bad_derivative(ran)
        if bad is not None:
            self.found.append(Steep(walk.place(node), node, ran.call.kind, *bad))


def _bad_derivative(ran: Ran) -> tuple[int, tuple[int, ...], float, bool, bool] | None:
    """Where a derivative of an operation is not finite: see :class:`Steep`."""
    given: list[Tensor] = []

    def leaf(value: Tensor) -> Tensor:
        if not is_float(value):
            return value
        given.append(value.detach().clone().requires_grad_())
        return given[-1]

    args, kwargs = trees.tree_map_only(Tensor, leaf, (ran.args, dict(ran.kwargs)))
    with torch.enable_grad():
        made = [x for x in leaves(ran.run(*args, **kwargs)) if is_float(x) and x.requires_grad]
        if not made or not all(map(_is_finite, made)):
            return None
        ones = [torch.ones_like(x, requires_grad=True) for x in made]
        first = _gradients(made, given, ones, create_graph=True)
        again = [x for x in first if x is not None and x.requires_grad]
        # The first derivative is a function of the operands and of the gradient that came in.
        of_these = [torch.ones_like(x) for x in again]
        second = _gradients(again, [*given, *ones], of_these) if again else ()
    for order, found in enumerate((first, second), 1):
        for position, (value, each) in enumerate(zip([*given, *made], found, strict=False)):
            if each is not None and not _is_finite(each):
                index = tuple(torch.isfinite(each).logical_not().nonzero()[0].tolist())
                number = float(value.detach()[index].real)
                is_nan = bool(torch.isnan(each[index].real))
                return order, index, number, position >= len(given), is_nan
    return None


def _gradients(made: list[Tensor], given: list[Tensor], of: list[Tensor], **options: Any) -> Any:
    return torch.autograd.grad(made, given, of, allow_unused=True, **options)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
