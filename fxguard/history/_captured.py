"""Which form of each graph runs, as series: code that changes is captured anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.node import Node, map_arg

from fxguard.batch.events import GraphRun
from fxguard.graph.operations import read_node
from fxguard.history._open_step import OpenStep
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Plan
from fxguard.records import title_of

__all__ = ["Captured", "Changed"]

PREFIX = "graph of "


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation as it is written, with the constants that it is given."""

    title: str
    source: str
    constants: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The first operation in which two forms of a graph differ."""

    what: str
    source: str
    sentence: str


class Captured:
    """Notes the form of each graph that runs.

    Args:
        step: the step that runs.
    """

    def __init__(self, step: OpenStep) -> None:
        self.step = step
        self._forms: dict[str, list[tuple[Plan, list[_Call]]]] = {}  # by the module that runs it
        self._last: dict[str, int] = {}  # which of them ran last
        self._changes: dict[str, Changed] = {}  # by the name of the series: the last change

    def add(self, run: GraphRun) -> None:
        """Note a run of a graph."""
        name = run.names[1]
        forms = self._forms.setdefault(name, [])
        at = next((i for i, (plan, _) in enumerate(forms) if plan is run.plan), len(forms))
        if at == len(forms):
            forms.append((run.plan, list(_calls_of(run))))
        what = f"{PREFIX}{name or 'the model'}"
        before = self._last.get(name, at)
        if before != at:
            changed = _difference(forms[before][1], forms[at][1])
            if changed is None:  # as for other shapes
                at = before
            else:
                self._changes[what] = changed
        self._last[name] = at
        self.step.note(self.step.series("graph", what), at + 1.0, at + 1.0)

    def of_series(self, what: str) -> Changed | None:
        """What has changed, of a series of this kind; None of another one."""
        return self._changes.get(what)


def _calls_of(run: GraphRun) -> Iterator[_Call]:
    steps = {(step.inside, step.node): step for step in run.plan.steps if step.counts}
    graph: GraphModule = without_marks(run.graph_module)
    for node in graph.graph.nodes:
        if not node.op.startswith("call"):
            continue
        step = steps.get(((), node.name))
        if step is not None:  # others make no tensor, such as a number out of one
            title = title_of(run.running_name(step.module), step.kind)
            source = "" if step.source is None else step.source.place
            moves = read_node(node, run.graph_module).moves
            yield _Call(title, source, "" if moves else _constants(node))


def _constants(node: Node) -> str:
    """The arguments that are no tensors, as text: ``is_causal=True``."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: None)
    given = [f"{name}={value!r}" for name, value in kwargs.items() if value is not None]
    return ", ".join([*(repr(x) for x in args if x is not None), *given])


def _difference(before: list[_Call], now: list[_Call]) -> Changed | None:
    for one, other in zip(before, now, strict=False):
        if one != other:
            if one.title != other.title:
                sentence = f"{other.title} runs where {one.title} did"
            else:
                given = other.constants or "another number"  # a tensor that no constant tells
                sentence = f"{other.title} is given {given} in place of {one.constants or given}"
            return Changed(other.title, other.source, sentence)
    if len(before) == len(now):
        return None
    more, rest = (now, "now") if len(now) > len(before) else (before, "no longer")
    call = more[min(len(before), len(now))]
    return Changed(call.title, call.source, f"{call.title} runs {rest}")
