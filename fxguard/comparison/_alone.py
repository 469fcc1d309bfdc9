"""Operations that only one of two models has: whether each is within its own roundings."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.fx import Node

from fxguard.comparison._evaluated import in_float64
from fxguard.comparison._judged import reason_of_kernel
from fxguard.comparison._memory import gives_memory, with_zeros
from fxguard.comparison._recorded import copied
from fxguard.comparison._runs import ModelRun
from fxguard.comparison._sides import Key, Side
from fxguard.comparison.elements import Compared
from fxguard.graph.nodes import leaves
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.rerun.start import Start
from fxguard.rerun.walk import SecondForm, Walk

__all__ = ["beyond_roundings"]


def beyond_roundings(
    model: ModelRun, side: Side, name: Any, paired: Collection[Key]
) -> list[Compared]:
    """The operations of one model alone that are further from float64 than their dtype explains.

    Args:
        model: a model that has run.
        side: its operations.
        name: "A" or "B".
        paired: the operations that the other model has too.
    """
    form = _OnItsOwn(side, name, paired)
    for number, kept in enumerate(model.runs):
        form.graph = number
        with contextlib.suppress(NotJudged):
            Start(kept.run).again(form)
    return form.found


class _OnItsOwn(SecondForm):
    """Runs a graph as it ran, and holds single operations against float64 on their operands."""

    def __init__(self, side: Side, name: Any, paired: Collection[Key]) -> None:
        self.side = side
        self.name = name
        self.paired = paired
        self.graph = 0
        self.found: list[Compared] = []

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def copy_of(self, memory: Tensor) -> Tensor:
        return memory

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        named = self.side.named.get((self.graph, walk.place(node)))
        if gives_memory(ran):
            return with_zeros(ran.result)
        results = [x for x in leaves(ran.result) if is_float(x)]
        if named is None or named.key in self.paired or ran.call.written or not results:
            return ran.result
        with contextlib.suppress(NotJudged):
            given = copied((args, kwargs))
            wide = in_float64(ran, node, *given)
            if reason := reason_of_kernel(self.name, ran, node, given, results, wide):
                self.found.append(
                    Compared(
                        named.title,
                        kind=named.kind,
                        module=named.module,
                        source=named.source,
                        only_in=self.name,
                        reason=reason,
                    )
                )
        return ran.result
