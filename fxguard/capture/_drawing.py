"""The compiled form of a graph that also returns what it draws, for second runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxguard.batch.draws import RANDOM, Again, Found, Repeated, Result
from fxguard.capture import dynamo
from fxguard.forgiving import where_theirs_may_raise
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import NotJudged
from fxguard.measure.at_hand import own_arithmetic
from fxguard.measure.free_memory import has_room
from fxguard.measure.ways import Way
from fxguard.passes.checks import with_checks
from fxguard.passes.draws import Drawn, with_draws
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place, Plan

__all__ = ["Drawing"]

MOST = 4  # sizes of inputs

NO_ROOM = "there was no memory for what its graph drew"
NOT_COMPILED = f"{RANDOM}, and could not be compiled again"
TOO_MANY = f"{RANDOM}, and was compiled again for {MOST} sizes of its inputs"


class Drawing:
    """A compiled graph that draws random numbers, and can tell which in another run.

    It is compiled once more when that is first asked, with its checks and with what it draws among
    its outputs. The forms for the last few sizes of its inputs are kept.

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
        self._forms: dict[Any, Again | None] = {}  # by form of the arguments; None if that failed
        self._count = 0  # of compilations
        self._lock = threading.Lock()

    def compiled(self, args: Sequence[Any], needed: bool) -> Again:
        """The graph for arguments like these.

        Args:
            args: the arguments.
            needed: whether the numbers of the checks are needed too. If not, it is not compiled for
                many sizes, nor when there is no room for what it draws.

        Raises:
            NotJudged: when it is not compiled, or could not be.
        """
        form = tuple(map(_form_of, args))
        with self._lock:
            if form not in self._forms:
                if self._count >= MOST and not needed:
                    raise NotJudged(TOO_MANY)
                again = None
                with random_state_kept(args), own_arithmetic():  # noqa: SIM117 - one has a comment
                    with where_theirs_may_raise():  # a compiler, given more outputs
                        again = dynamo.compiling(self._compile, args, needed)
                self._count += 1
                self._forms[form] = again
                while len(self._forms) > MOST:
                    del self._forms[next(iter(self._forms))]
            again = self._forms[form]
        if again is None:
            raise NotJudged(NOT_COMPILED)
        return again

    def _compile(self, args: Sequence[Any], needed: bool) -> Again:
        drawing, drawn = with_draws(self.graph_module)
        has_space = has_room(each.example for each in drawn)
        if not has_space:
            if not needed:
                return _without_room
            drawing, drawn = without_marks(self.graph_module), ()
        checked = with_checks(drawing, self.plan, self.way)
        with dynamo.cached_with(self.way.cache_keys()):
            compiled = self.compile_graph(checked, list(args))

        def again(given: Sequence[Any]) -> Repeated:
            *made, statistics = compiled(*given)
            outputs, tensors = made[: len(made) - len(drawn)], made[len(made) - len(drawn) :]
            found: Found = _by_place(drawn, tensors) if has_space else NO_ROOM
            return Repeated(outputs, found, statistics)

        return again


def _without_room(given: Sequence[Any]) -> Repeated:
    raise NotJudged(NO_ROOM)


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
