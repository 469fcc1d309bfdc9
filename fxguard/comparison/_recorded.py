"""Runs a captured graph again, and keeps what each operation read and made for another model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxguard import trees
from fxguard.batch.events import GraphRun
from fxguard.comparison._memory import gives_memory, with_zeros
from fxguard.graph import higher_order
from fxguard.graph.nodes import leaves
from fxguard.graph.operations import Call, read_node
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import Ran
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.rerun.start import Start
from fxguard.rerun.walk import Walk, Watcher

__all__ = [
    "Made",
    "Recorded",
    "Recorder",
    "copied",
    "nodes_of",
    "recorded",
    "values_of",
]


@dataclass(slots=True)
class Made:
    """What an operation read and made."""

    node: Node
    ran: Ran  # with its arguments as they were before it wrote any
    values: list[Any]  # its results, then what it wrote; as they were right after it ran
    random_state: RandomState | None  # before it, if it draws random numbers


@dataclass(slots=True)
class Recorded:
    """One run of a graph."""

    run: GraphRun
    made: dict[Place, deque[Made]]  # of each operation; several turns of a loop in order
    outputs: list[Any]  # what the graph returns

    def next_of(self, place: Place) -> Made | None:
        """What an operation made, or made in the next turn of a loop; each is returned once."""
        turns = self.made.get(place)
        return turns.popleft() if turns else None


class Recorder(Watcher):
    """Keeps what each operation read and made.

    Args:
        writes: whether any operation of the graph writes a tensor; if so, copies are kept.
    """

    def __init__(self, writes: bool) -> None:
        self.writes = writes
        self.made: dict[Place, deque[Made]] = defaultdict(deque)
        self._before: tuple[Any, Any] = ((), {})
        self._state: RandomState | None = None

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return True

    def before(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> None:
        self._before = copied((args, kwargs)) if self.writes else (args, kwargs)
        is_random = walk.call_of(node).random
        self._state = RandomState.now((args, kwargs)) if is_random else None

    def after(self, walk: Walk, node: Node, ran: Ran) -> None:
        if gives_memory(ran):
            with_zeros(ran.result)
        values = values_of(ran.result, ran.call, walk.env.__getitem__)
        if self.writes:
            values = copied(values)
        ran = Ran(ran.call, ran.target, ran.run, *self._before, ran.result, ran.before)
        self.made[walk.place(node)].append(Made(node, ran, values, self._state))


def recorded(run: GraphRun, *, whole_functions: bool = False) -> Recorded:
    """Run a graph again, and keep what its operations read and made.

    Args:
        run: the graph run.
        whole_functions: see :class:`~fxguard.rerun.walk.Watcher`.
    """
    module = without_marks(run.graph_module)
    writes = any(read_node(node, owner).written for _, node, owner in nodes_of(module))
    recorder = Recorder(writes)
    recorder.whole_functions = whole_functions
    # Its inputs may be what other second runs returned, which have versions of their own.
    outputs, _ = Start(replace(run, versions=None)).again(recorder)
    return Recorded(run, recorder.made, list(outputs))


def values_of(result: Any, call: Call, value_of: Callable[[Node], Any]) -> list[Any]:
    """What an operation leaves: the items of its result, then what it has written beside them.

    Args:
        result: the result of the operation.
        call: the operation.
        value_of: gives the value of an operand.
    """
    is_result = set(call.in_place) if call.returns else set()
    return [*leaves(result), *(value_of(x) for x in call.written if x not in is_result)]


def copied(values: Any) -> Any:
    """Values with copied tensors, which nobody else writes."""
    return trees.tree_map_only(Tensor, lambda x: x.detach().clone(), values)


def nodes_of(
    module: GraphModule, inside: tuple[tuple[str, int], ...] = ()
) -> Iterator[tuple[Place, Node, GraphModule]]:
    """Every operation of a graph and of the bodies that are entered, with its graph."""
    for node in module.graph.nodes:
        if not node.op.startswith("call"):
            continue
        kind = higher_order.kind_of(node)
        if kind is None or kind.only_a_second_run_sees:
            yield (inside, node.name), node, module
            continue
        try:
            bodies = kind.bodies(node, module)
        except (LookupError, TypeError, ValueError):  # arguments of another version
            yield (inside, node.name), node, module
            continue
        yield (inside, node.name), node, module  # its body is not entered
        for body in bodies:
            yield from nodes_of(body.graph_module, (*inside, (node.name, body.position)))
