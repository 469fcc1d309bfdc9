"""Which form of each graph runs, as series: code that changes is captured anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.node import Node, map_arg

from fxguard.batch.events import GraphRun
from fxguard.graph.operations import read_node
from fxguard.history._open_step import OpenStep
from fxguard.history._rows import KEPT
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
    dtype: str  # of what it makes: autocast changes no constant


@dataclass(frozen=True, slots=True)
class Changed:
    """The first operation in which two forms of a graph differ."""

    what: str
    source: str
    sentence: str


class Captured:
    """Notes the form of each graph that runs: a module has several in a batch, where it breaks.

    Args:
        step: the step that runs.
    """

    def __init__(self, step: OpenStep) -> None:
        self.step = step
        self._forms: dict[str, list[tuple[Plan, list[_Call]]]] = {}  # by the module that runs it
        self._before: dict[str, list[int]] = {}  # which of them ran in the last batch, in order
        self._runs: dict[str, list[int]] = {}  # likewise in this one
        # The first change of each step and series, of the last steps.
        self._changes: deque[dict[str, Changed]] = deque([{}], maxlen=KEPT)
        self._end = 0  # the number of the step behind the last of them

    def begins(self) -> None:
        """Hear that another batch begins."""
        self._before.update(self._runs)
        self._runs = {}

    def add(self, run: GraphRun) -> None:
        """Note a run of a graph."""
        name = run.names[1]
        forms, runs = self._forms.setdefault(name, []), self._runs.setdefault(name, [])
        at = next((i for i, (plan, _) in enumerate(forms) if plan is run.plan), len(forms))
        if at == len(forms):
            forms.append((run.plan, list(_calls_of(run))))
        what = f"{PREFIX}{name or 'the model'}"
        earlier = self._before.get(name, ()) or runs
        before = earlier[min(len(runs), len(earlier) - 1)] if earlier else at
        if before != at:
            changed = _difference(forms[before][1], forms[at][1])
            if changed is None:  # as for other shapes
                at = before
            else:
                self._changes[-1].setdefault(what, changed)
        runs.append(at)
        self.step.note(self.step.series("graph", what), at + 1.0, at + 1.0)

    def ends_step(self, number: int) -> None:
        """Hear that a step has ended."""
        self._end = number + 1
        self._changes.append({})

    def change(self, what: str, step: int) -> Changed | None:
        """What has changed in a step, of a series of this kind; None for nothing."""
        place = len(self._changes) - 1 - (self._end - step)
        return self._changes[place].get(what) if 0 <= place < len(self._changes) else None


def _calls_of(run: GraphRun) -> Iterator[_Call]:
    graph: GraphModule = without_marks(run.graph_module)
    nodes = {node.name: node for node in graph.graph.nodes}
    for step in run.plan.steps:
        if not step.counts:  # it makes no tensor, such as a number out of one
            continue
        node, constants = None if step.inside else nodes.get(step.node), ""
        if node is not None:
            call, constants = read_node(node, run.graph_module), _constants(node)
            if call.moves or (call.selects and not any(map(str.isdigit, constants))):
                continue  # other shapes are unpacked in another way
        title = title_of(run.running_name(step.module), step.kind)
        source = "" if step.source is None else step.source.place
        made = [run.plan.values[value].dtype for value in step.outputs]
        yield _Call(title, source, constants, made[0] if made else "")


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
            elif one.dtype != other.dtype and one.constants == other.constants:
                sentence = f"{other.title} makes {other.dtype} in place of {one.dtype}"
            elif one.constants == other.constants and one.source != other.source:
                now_at, before_at = other.source or "another line", one.source or "another line"
                sentence = f"{other.title} runs at {now_at}, where that of {before_at} did"
            else:
                given = other.constants or "another number"  # a tensor that no constant tells
                sentence = f"{other.title} is given {given} in place of {one.constants or given}"
            return Changed(other.title, other.source, sentence)
    if len(before) == len(now):
        return None
    more, rest = now, "runs now"
    if len(now) < len(before):  # it may run outside the graph
        more, rest = before, "is in the graph no longer"
    call = more[min(len(before), len(now))]
    return Changed(call.title, call.source, f"{call.title} {rest}")
