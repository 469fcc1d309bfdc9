"""The compiled form of a graph that also returns what it draws, for second runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxguard.batch.draws import Again, Repeated, Result
from fxguard.capture import dynamo
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.free_memory import has_room
from fxguard.measure.ways import Way
from fxguard.passes.checks import with_checks
from fxguard.passes.draws import Drawn, with_draws
from fxguard.plan.plan import Place, Plan

__all__ = ["Drawing"]

NO_ROOM = "there was no memory for what its graph drew"


class Drawing:
    """A compiled graph that draws random numbers, and can tell which in another run.

    It is compiled once more when that is first asked, with its checks and with what it draws among
    its outputs, and again when the sizes of its inputs change.

    Args:
        graph_module: the graph.
        plan: its plan.
        way: how its values are measured.
        compile_graph: the backend.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        plan: Plan,
        way: Way,
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
    ) -> None:
        self.graph_module = graph_module
        self.plan = plan
        self.way = way
        self.compile_graph = compile_graph
        self._again: Again | None = None
        self._form: Any = None  # of the arguments that it was compiled for
        self._lock = threading.Lock()

    def compiled(self, args: Sequence[Any]) -> Again:
        """The graph for arguments like these.

        Raises:
            NotJudged: when there is no memory for what it draws.
            Exception: whatever the compiler raises.
        """
        form = tuple(map(_form_of, args))
        with self._lock:
            if self._again is None or self._form != form:
                self._again = None
                with random_state_kept(args), own_arithmetic():
                    dynamo.compiling(self._compile, args)
                self._form = form
            assert self._again is not None
            return self._again

    def _compile(self, args: Sequence[Any]) -> None:
        drawing, drawn = with_draws(self.graph_module)
        if not has_room(each.example for each in drawn):
            raise NotJudged(NO_ROOM)
        checked = with_checks(drawing, self.plan, self.way)
        with dynamo.cached_with(self.way.cache_keys()):
            compiled = self.compile_graph(checked, list(args))

        def again(given: Sequence[Any]) -> Repeated:
            *made, statistics = compiled(*given)
            outputs, tensors = made[: len(made) - len(drawn)], made[len(made) - len(drawn) :]
            return Repeated(outputs, _by_place(drawn, tensors), statistics)

        self._again = again


def _by_place(drawn: Sequence[Drawn], tensors: Sequence[Tensor]) -> dict[Place, Result]:
    """The results of the operations whose parts were returned."""
    found: dict[Place, Result] = {}
    for each, tensor in zip(drawn, tensors, strict=True):
        if each.item is None:
            found[each.place] = tensor
        else:
            items = list(found.get(each.place, [None] * each.items))
            items[each.item] = tensor
            found[each.place] = tuple(items)
    return found


def _form_of(value: Any) -> Any:
    """What a compiled graph depends on, of one of its arguments."""
    if not isinstance(value, Tensor):
        return value
    is_plain = value.layout is torch.strided
    return value.shape, value.stride() if is_plain else (), value.dtype, value.device
