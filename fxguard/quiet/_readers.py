"""Which operations of a model read a weight, and what keeps gradients from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fxguard.batch.events import GraphRun
from fxguard.batch.loss import Loss
from fxguard.graph.marks import MARKS
from fxguard.graph.operations import name_of
from fxguard.plan.plan import Plan
from fxguard.quiet._flow import DETACHES
from fxguard.records import Role, Source
from fxguard.source.lines import source_of_trace
from fxguard.torch_names import set_grad_enabled

__all__ = ["Cut", "Readers"]

MOST = 8  # losses that are looked at


@dataclass(frozen=True, slots=True)
class Cut:
    """What keeps gradients from a weight."""

    what: str  # "detach" or "no_grad"
    source: Source | None


@dataclass(slots=True)
class Readers:
    """What the graphs of some losses read.

    Attributes:
        has_looked: whether every operation of at least one loss was seen.
        read: the names of weights that were read.
        cuts: by the name of a weight.
    """

    has_looked: bool = False
    read: set[str] = field(default_factory=set)
    cuts: dict[str, Cut] = field(default_factory=dict)
    _count: int = 0
    _plans: dict[int, tuple[Plan, dict[str, Cut | None]]] = field(default_factory=dict)

    def note(self, loss: Loss) -> None:
        """Look at the graphs that led to a loss."""
        if self._count >= MOST:
            return
        self._count += 1
        for _, batch in loss.batch.parts:
            self.has_looked = True
            self.read.update(v.name for v in batch.values if v.role is Role.WEIGHT)
            for run in batch.runs:
                for name, cut in self._weights_of(run).items():
                    name = run.running_name(name)
                    self.read.add(name)
                    if cut is not None:
                        self.cuts.setdefault(name, cut)

    def _weights_of(self, run: GraphRun) -> dict[str, Cut | None]:
        """The weights that a graph reads, by their names in its plan."""
        plan, found = self._plans.get(id(run.plan), (None, {}))
        if plan is not run.plan:
            found = dict(_weights_in(run.plan, run.graph_module))
            self._plans[id(run.plan)] = run.plan, found
        return found


def _weights_in(plan: Plan, module: GraphModule) -> Iterator[tuple[str, Cut | None]]:
    nodes = list(module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    without = _without_gradients(nodes)
    for value in plan.values:
        if value.role is Role.WEIGHT and value.argument is not None:
            yield value.name, _cut_behind(given[value.argument], nodes, without)


def _without_gradients(nodes: Iterable[Node]) -> Collection[Node]:
    """The nodes of a graph that run under ``no_grad``."""
    found, has_gradients = set[Node](), True
    for node in nodes:
        if node.target is set_grad_enabled:
            has_gradients = bool(node.args[0])
        elif not has_gradients:
            found.add(node)
    return found


def _cut_behind(weight: Node, nodes: Iterable[Node], without: Collection[Node]) -> Cut | None:
    """The first operation behind a weight that hands no gradient on; None if there is none."""
    reached = {weight}
    for node in nodes:
        if node.target in MARKS or reached.isdisjoint(node.all_input_nodes):
            continue
        is_cut = node.op != "output" and name_of(node.target) in DETACHES
        if is_cut or node in without:
            source = source_of_trace(node.meta.get("stack_trace"))
            return Cut("detach" if is_cut else "no_grad", source)
        reached.add(node)
    return None
