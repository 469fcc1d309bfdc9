"""Hooks each edge of a second run: a hook sees the gradient there in the backward.

Each operation reads aliases of its operands. A hook on each alias sees the gradient that this
operation alone returns, so that one of several readers of a value can be blamed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.samples import is_sample_of
from fxguard.graph.nodes import leaves, memory_of
from fxguard.graph.one_operation import autocast_around
from fxguard.graph.own_gradients import is_differentiable
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import Ran, is_float
from fxguard.measure.at_hand import dtype_of, range_of
from fxguard.records import Range
from fxguard.rerun.edges import BackwardOf, Edge, Gradients, Look, when_it_has_come
from fxguard.rerun.walk import EdgeWatcher, Walk

__all__ = ["EdgeHooks"]


class EdgeHooks(EdgeWatcher):
    """Hooks each edge of a run.

    Args:
        gradients: where the hooks note gradients.
        look: an operand to look at closely, if any.
    """

    keeps_values = True  # because they are numbered by identity

    def __init__(self, gradients: Gradients, look: Look | None) -> None:
        self.gradients = gradients
        self.look = look
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []

    def number_of(self, value: Tensor) -> int:
        """The number of a value, assigned on first use."""
        if id(value) not in self.numbers:
            self.alive.append(value)  # no other value gets its identity
            self.numbers[id(value)] = len(self.alive)
        return self.numbers[id(value)]

    def enter(self, value: Tensor) -> int:
        """Number a new value, and note its gradient."""
        if id(value) in self.numbers:
            return self.numbers[id(value)]
        number, gradients = self.number_of(value), self.gradients
        gradients.dtypes[number] = dtype_of(value)

        def note(gradient: Tensor) -> Tensor | None:
            known = gradients.sums.get(number)
            sample = gradients.samples.get(number)
            if sample is not None and is_sample_of(sample, gradient):
                del gradients.samples[number]
            found = range_of(gradient if known is None else known)
            if isinstance(found, Range):
                gradients.totals[number] = found
            return known

        when_it_has_come(value, note)
        return number

    def passed(self, walk: Walk, node: Node) -> None:
        if node.op == "get_attr" and is_differentiable(walk.env[node]):
            self.enter(walk.env[node])

    def run(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        """Run an operation on aliases of its operands."""
        picks = node.target is operator.getitem and not isinstance(args[0], Tensor)
        if walk.levels or picks:
            return walk.run_alone(node, args, kwargs)
        call = walk.call_of(node)
        found = BackwardOf(walk.place(node), node, call)
        looks = self.look is not None and self.look.place == found.place
        # Buffers that a batch norm writes are not results.
        if call.in_place or any(is_differentiable(walk.env[x]) for x in call.written):
            result = self.run_writing(walk, found, args, kwargs)
        else:
            aliased = self.aliased(found, args, kwargs)
            if looks:
                self.look_at(walk, found, *aliased)
            result = walk.run_alone(node, *aliased)
        if looks:
            assert self.look is not None
            self.look.seen.result = result
        for position, value in enumerate(leaves(result)):
            if is_differentiable(value):
                number = self.enter(value)
                if number not in found.made:
                    found.made.append(number)
                if looks:
                    when_it_has_come(value, self._looked(position))
        if found.edges:
            self.gradients.operations.append(found)
        if walk.drawn is not None and found.place in walk.drawn.anew:
            self.gradients.anew.add(found.place)
        return result

    def aliased(self, found: BackwardOf, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operation, with a hooked alias for each differentiable tensor."""
        labels = self.labels(args, kwargs)

        def alias(value: Tensor) -> Tensor:
            position, label = next(labels)
            if not is_differentiable(value):
                return value
            edge = Edge(self.enter(value), position, label)
            other = value.view_as(value)
            when_it_has_come(other, self._noting(found, edge))
            found.edges.append(edge)
            return other

        aliased: tuple[Any, Any] = trees.tree_map_only(Tensor, alias, (args, kwargs))
        return aliased

    def labels(self, args: Any, kwargs: Any) -> Iterator[tuple[int, str]]:
        """Position and label of each tensor among some arguments, as in frames of the forward."""
        position = count = 0
        for key, argument in (*((None, each) for each in args), *kwargs.items()):
            for value in trees.tree_leaves(argument):
                if not isinstance(value, Tensor):
                    continue
                name = self.gradients.weights.get(self.numbers.get(id(value), -1), "")
                label = name.rpartition(".")[2]
                if not name:
                    label = f"input[{count if key is None else key}]"
                    count += key is None and is_float(value)
                yield position, label
                position += 1

    def _noting(self, found: BackwardOf, edge: Edge) -> Callable[[Tensor], None]:
        look = self.look
        looks = look is not None and (look.place, look.position) == (found.place, edge.position)

        def note(gradient: Tensor) -> None:
            measured = range_of(gradient)
            edge.range = measured if isinstance(measured, Range) else None
            if looks:
                assert look is not None
                look.outgoing = gradient.detach().clone()

        return note

    def _noting_worst(self, found: BackwardOf) -> Callable[..., None]:
        look = self.look
        looks = look is not None and look.place == found.place

        def note(handed_back: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
            given = [gradient for gradient in handed_back if gradient is not None]
            known = [(range_of(gradient), gradient) for gradient in given]
            measured = [(each, x) for each, x in known if isinstance(each, Range)]
            if not measured:
                return
            worst, gradient = max(measured, key=lambda pair: pair[0].severity)
            for edge in found.edges:
                edge.range = worst
            if looks:
                assert look is not None
                look.outgoing = gradient.detach().clone()

        return note

    def _looked(self, position: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            assert self.look is not None
            self.look.incoming[position] = gradient.detach().clone()

        return note

    def look_at(self, walk: Walk, found: BackwardOf, args: Any, kwargs: Any) -> None:
        """Keep the operands that an operation is about to read."""
        look, node = self.look, found.node
        assert look is not None
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(Tensor, target)
        elif node.op == "call_module":
            target = walk.fetch_attr(target)
        look.autocast = autocast_around(x for x in leaves((args, kwargs)) if isinstance(x, Tensor))
        before = RandomState.now((args, kwargs)) if found.call.random else None
        args, kwargs = trees.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        call = replace(found.call, args=args, kwargs=kwargs)
        run = target
        if walk.drawn is not None and walk.knows_drawn(node):
            run = walk.drawn.function(walk.place(node), found.call)
        look.ran = Ran(call, target, run, args, kwargs, None, before)

    def run_writing(self, walk: Walk, found: BackwardOf, args: Any, kwargs: Any) -> Any:
        """Run a writing operation on its original operands, with hooks on autograd nodes.

        A written alias would cut the hook off from its gradient.
        """
        operands = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for position, label in self.labels(args, kwargs):
            if is_differentiable(operands[position]):
                found.edges.append(Edge(self.enter(operands[position]), position, label))
        memories = {memory_of(walk.env.get(x, x)) for x in found.call.written} - {None}
        aliases = {id(x): x for x in _tensors_in(walk.env) if memory_of(x) in memories}
        read = {edge.value for edge in found.edges}
        for alias in aliases.values():  # a write to a part of a tensor changes all of it
            if is_differentiable(alias) and (number := self.enter(alias)) not in read:
                found.edges.append(Edge(number, 0, found.edges[0].label if found.edges else ""))
        if self.look is not None and self.look.place == found.place:
            self.look_at(walk, found, args, kwargs)
        result = walk.run_alone(found.node, args, kwargs)
        aliases |= {id(x): x for x in leaves(result) if isinstance(x, Tensor)}
        changed = [alias for alias in aliases.values() if is_differentiable(alias)]
        for value in changed:
            self.numbers.pop(id(value), None)  # from now on it has another gradient
            found.made.append(self.enter(value))
        for node in {value.grad_fn for value in changed}:
            if node is not None:
                node.register_hook(self._noting_worst(found))
        return result


def _tensors_in(env: Mapping[Node, Any]) -> Iterator[Tensor]:
    for value in env.values():
        yield from (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
