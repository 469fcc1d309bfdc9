"""Aligns the operations of two models, across all graphs that each model ran."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.batch.events import GraphRun
from fxguard.capture.keeping import titles_of
from fxguard.comparison._recorded import nodes_of
from fxguard.comparison._runs import KeptRun, ModelRun
from fxguard.graph import nodes
from fxguard.graph.operations import read_node
from fxguard.graph.source_lines import source_of_trace
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.records import Frame, Source
from fxguard.trace.align import align

__all__ = ["Aligned", "Key", "Named", "aligned", "placeholders", "standing"]

Key = tuple[int, Place]  # the number of the graph, and where the node stands in it


@dataclass(frozen=True, slots=True)
class Named:
    """An operation of a graph, with its name."""

    key: Key
    node: Node
    title: str
    kind: str
    module: str
    source: Source | None
    is_step: bool  # whether the plan of the graph counts it as an operation


@dataclass(frozen=True, slots=True)
class Side:
    """The operations of one model."""

    named: dict[Key, Named]  # in order of execution
    # What each input of each graph is, by name: the key of the operation that made it, the name of
    # the weight, or the number of the model's input.
    inputs: tuple[dict[str, Hashable], ...]

    def origin(self, graph: int, inside: Any, node: Node) -> Hashable:
        """What produced the value of a node."""
        if not inside and node.op == "placeholder":
            return self.inputs[graph].get(node.name)
        return graph, (inside, node.name)


@dataclass(frozen=True, slots=True)
class Aligned:
    """The operations of two models."""

    a: Side
    b: Side
    of_b: dict[Key, Key]  # operation of B to its partner in A
    of_a: dict[Key, Key]  # operation of A to its partner in B


def aligned(a: ModelRun, b: ModelRun) -> Aligned:
    """Pair the operations of two models by module, name, line and order."""
    side_a, side_b = (Side(_named(each.runs), _inputs(each)) for each in (a, b))
    named_a, named_b = (list(side.named.values()) for side in (side_a, side_b))
    frames_a, frames_b = ([_frame(each) for each in named] for named in (named_a, named_b))
    pairs = align(frames_a, frames_b, lambda one, other: False)
    of_b = {named_b[j].key: named_a[i].key for i, j in pairs}
    return Aligned(side_a, side_b, of_b, {one: other for other, one in of_b.items()})


def _frame(named: Named) -> Frame:
    return Frame(named.module, named.kind, True, (), named.source)


def _named(runs: Sequence[KeptRun]) -> dict[Key, Named]:
    found: dict[Key, Named] = {}
    for number, kept in enumerate(runs):
        run = kept.run
        steps = {(step.inside, step.node): step for step in run.plan.steps if step.node}
        titles = titles_of(run)
        module = run.names[1]
        for place, node, owner in nodes_of(without_marks(run.graph_module)):
            kind = read_node(node, owner).kind
            step = steps.get(place)
            source = source_of_trace(node.meta.get("stack_trace")) if step is None else step.source
            module = _module_around(node, module) if step is None else run.running_name(step.module)
            title = titles.get(place, f"{module} {kind}".strip())
            key = number, place
            found[key] = Named(key, node, title, kind, module, source, place in titles)
    return found


def _module_around(node: Node, before: str) -> str:
    """The module whose forward contains a node that is not an operation of its own."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return before
    key, entry = list(stack.items())[-1]
    return nodes.path_of(key, entry, {})


def _inputs(model: ModelRun) -> tuple[dict[str, Hashable], ...]:
    """What each input of each graph of a model is."""
    made: dict[int, Hashable] = {id(x): ("input", number) for number, x in enumerate(model.given)}
    found: list[dict[str, Hashable]] = []
    for number, kept in enumerate(model.runs):
        names, args = standing(kept.run), kept.run.args
        assert args is not None
        inputs: dict[str, Hashable] = {}
        for position, name in enumerate(placeholders(kept.run)):
            known = made.get(id(args[position])) if isinstance(args[position], Tensor) else None
            weight = ("weight", names[position]) if position in names else None
            inputs[name] = weight or known or ("unknown", position)
        found.append(inputs)
        (output,) = (node for node in kept.run.graph_module.graph.nodes if node.op == "output")
        for node, value in zip(nodes.leaves(output.args[0]), kept.outputs, strict=True):
            if isinstance(node, torch.fx.Node) and isinstance(value, Tensor):
                of_input = inputs.get(node.name) if node.op == "placeholder" else None
                made[id(value)] = of_input or (number, ((), node.name))
    return tuple(found)


def placeholders(run: GraphRun) -> list[str]:
    """The names of a graph's inputs, in order."""
    return [node.name for node in run.graph_module.graph.nodes if node.op == "placeholder"]


def standing(run: GraphRun) -> dict[int, str]:
    """Positions of the inputs that are weights or buffers, with their names."""
    return {
        value.argument: value.name
        for value in run.plan.values
        if value.role.is_standing and value.argument is not None
    }
