"""Finds the operations whose gradients differ although the forward is the same: each one alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.comparison._beside import Beside
from fxguard.comparison._recorded import Made
from fxguard.comparison._rounding import apart, beyond, unit_of
from fxguard.comparison._sides import Named
from fxguard.comparison.elements import Compared
from fxguard.graph.nodes import leaves
from fxguard.graph.own_gradients import backward_of
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.rerun.walk import Walk

__all__ = ["BesideBackward"]


class BesideBackward(Beside):
    """Compares each operation's backward in float64, on A's operands and on random gradients."""

    whole_functions = True

    def _compare(
        self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any, named: Named, made: Made
    ) -> None:
        theirs = made.ran.args, dict(made.ran.kwargs)
        try:
            one = _handed_back(made.ran, theirs)
            other = _handed_back(ran, (args, kwargs))
        except NotJudged as reason:
            self.not_compared[f"backward of {named.title}"] = str(reason)
            return
        if len(one) != len(other):
            return
        for a, b in zip(one, other, strict=True):
            if (a is None) != (b is None):
                self._note(named, f"only {'A' if b is None else 'B'} hands back a gradient", None)
                return
            if a is not None and b is not None and beyond(a, b, unit_of(*_floats(ran.result))):
                gap = apart(a, b)
                apart_by = f"what it hands back is {gap.relative:.2g} apart"
                said = f"not roundings: in float64, too, {apart_by}"
                self._note(named, said, gap)
                return

    def _alone(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        named = self.aligned.b.named.get((self.graph, walk.place(node)))
        if named is not None and named.kind == "detach":
            self._note(named, "B alone has it, and it hands back no gradient", None, side="B")
        return super()._alone(walk, node, ran, args, kwargs)

    def _note(self, named: Named, reason: str, gap: Any, side: Any = "") -> None:
        self.found.append(
            Compared(
                named.title,
                "backward",
                kind=named.kind,
                module=named.module,
                source=named.source,
                own=gap,
                only_in=side,
                reason=reason,
            )
        )


def _handed_back(ran: Ran, given: tuple[Any, Any]) -> list[Tensor | None]:
    """The gradients that an operation returns in float64, for a random incoming gradient."""
    tensors = [x for x in trees.tree_leaves(given) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(0)
    gradients = {
        position: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        for position, x in enumerate(leaves(ran.result))
        if is_float(x) and not x.is_complex()
    }
    return backward_of(ran, given, gradients, [is_float(x) for x in tensors], torch.float64)


def _floats(result: Any) -> list[Tensor]:
    return [x for x in leaves(result) if is_float(x)]
