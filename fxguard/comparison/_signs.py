"""How large gradients would be if nothing cancelled: each element's sign is drawn on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._evaluated import with_eps_of
from fxguard.graph.wide_form import Ran, is_float
from fxguard.rerun.walk import Walk
from fxguard.rerun.wide_run import WideForm

__all__ = ["Signed", "Signs"]


class Signs:
    """Draws the signs of gradients, for a stretch of backward passes."""

    def __init__(self) -> None:
        self.are_drawn = False
        self._generator = torch.Generator().manual_seed(0)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Gradients in the block have random signs."""
        self.are_drawn = True
        try:
            yield
        finally:
            self.are_drawn = False

    def hook(self, gradient: Tensor | None) -> Tensor | None:
        """A hook of an operand: its gradient with signs that were drawn for each element."""
        if gradient is None or not self.are_drawn:
            return None
        signs = torch.randint(0, 2, gradient.shape, generator=self._generator, dtype=torch.int8)
        return gradient * (signs.to(gradient.device) * 2 - 1)


class Signed(WideForm):
    """Float64 throughout, with signs that may be drawn wherever a gradient enters an operand.

    A gradient that is 0 by mathematics, such as that of a bias in front of a normalization, is a
    sum of terms that cancel. With random signs they do not, and the sum is as large as they are.

    Args:
        signs: draws them; None if none are drawn.
        eps_of: the dtype of which norms have their eps; None for that of the model.
    """

    whole_functions = True

    def __init__(self, signs: Signs | None, eps_of: torch.dtype | None) -> None:
        super().__init__(differentiable=True)
        self.signs = signs
        self.eps_of = eps_of

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        ran = with_eps_of(ran, self.eps_of)
        if self.signs is None:
            return super().follow(walk, node, ran, args, kwargs)
        written = {id(walk.others.get(each, walk.env[each])) for each in ran.call.written}

        def hooked(x: Tensor) -> Tensor:
            return x if id(x) in written else self._hooked(x)

        args, kwargs = trees.tree_map_only(Tensor, hooked, (args, kwargs))
        return super().follow(walk, node, ran, args, kwargs)

    def _hooked(self, x: Tensor) -> Tensor:
        """An operand that does not share its gradient with other readers."""
        if not is_float(x) or not x.requires_grad or not torch.is_grad_enabled():
            return x
        other = x.view_as(x)
        assert self.signs is not None
        other.register_hook(self.signs.hook)
        return other
