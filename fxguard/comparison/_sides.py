"""The operations of one model, across all graphs that it ran, and what each input of a graph is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
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
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Place
from fxguard.records import Source
from fxguard.source.lines import source_of_trace

__all__ = ["Key", "Named", "Side", "Twin", "placeholders", "side_of", "standing"]

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
class Twin:
    """The weight of A that a weight of B is."""

    name: str  # in A
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """The operations of one model."""

    named: dict[Key, Named]  # in order of execution
    # What each input of each graph is, by name: the key of the operation that made it, the name of
    # the weight, or the number of the model's input.
    inputs: tuple[dict[str, Hashable], ...]
    made: dict[int, Hashable]  # what each tensor is that a graph read or returned, by identity
    is_whole: bool  # whether every operation is in a graph, and none ran between graphs

    def origin(self, graph: int, inside: Any, node: Node) -> Hashable:
        """What produced the value of a node."""
        if not inside and node.op == "placeholder":
            return self.inputs[graph].get(node.name)
        return graph, (inside, node.name)

    def readers_of(self, names: Iterable[str]) -> dict[str, list[Key]]:
        """The operations that read some weights, by the name of the weight."""
        found: dict[str, list[Key]] = {name: [] for name in names}
        for key, named in self.named.items():
            for node in named.node.all_input_nodes:
                origin: Any = self.origin(key[0], key[1][0], node)
                if isinstance(origin, tuple) and origin[0] == "weight" and origin[1] in found:
                    found[origin[1]].append(key)
        return found


def side_of(model: ModelRun) -> Side:
    """The operations of a model that has run."""
    inputs, made = _inputs(model)
    return Side(_named(model.runs), inputs, made, not model.between)


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


def _inputs(model: ModelRun) -> tuple[tuple[dict[str, Hashable], ...], dict[int, Hashable]]:
    """What each input of each graph is, and what each tensor is that a graph returned."""
    made: dict[int, Hashable] = {id(x): ("input", number) for number, x in enumerate(model.given)}
    found: list[dict[str, Hashable]] = []
    for number, kept in enumerate(model.runs):
        names, args = standing(kept.run), kept.run.args
        assert args is not None
        inputs: dict[str, Hashable] = {}
        for position, name in enumerate(placeholders(kept.run)):
            known = made.get(id(args[position])) if isinstance(args[position], Tensor) else None
            weight = ("weight", names[position]) if position in names else None
            inputs[name] = weight or known or _number(args[position]) or ("unknown", position)
        found.append(inputs)
        (output,) = (node for node in kept.run.graph_module.graph.nodes if node.op == "output")
        for node, value in zip(nodes.leaves(output.args[0]), kept.outputs, strict=True):
            if isinstance(node, torch.fx.Node) and isinstance(value, Tensor):
                of_input = inputs.get(node.name) if node.op == "placeholder" else None
                made[id(value)] = of_input or (number, ((), node.name))
    return tuple(found), made


def _number(x: Any) -> Hashable:
    """A Python number that TorchDynamo passes, because it was another one before."""
    is_number = isinstance(x, Tensor) and x.dim() == 0 and x.dtype == torch.float64
    if is_number and x.device.type == "cpu":
        return "number", float(x)
    return ("number", x) if isinstance(x, (int, float)) else None


def placeholders(run: GraphRun) -> list[str]:
    """The names of a graph's inputs, in order."""
    return [node.name for node in run.graph_module.graph.nodes if node.op == "placeholder"]


def standing(run: GraphRun) -> dict[int, str]:
    """Positions of the inputs that are weights or buffers, with their names."""
    return {
        value.argument: run.running_name(value.name)
        for value in run.plan.values
        if value.role.is_standing and value.argument is not None
    }
