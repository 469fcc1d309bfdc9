"""How a bad value that left nothing bad behind changed the outputs of the model.

The batch's graphs run again from the operation on, with another value in its place. What they
return and write into buffers and caches is compared with the model's own results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun, UncapturedOperation
from fxguard.batch.keys import Key
from fxguard.forgiving import theirs
from fxguard.graph import nodes
from fxguard.graph.wide_form import NotJudged, is_float
from fxguard.plan.plan import Check, Place
from fxguard.rerun.differences import Difference, difference_of
from fxguard.rerun.other_values import Perturbed, RaisedOnOther, Repaired, perturbed
from fxguard.rerun.start import Start
from fxguard.rerun.walk import SecondForm, Walk, Watcher

__all__ = ["Replaced", "Replay", "check_of", "if_other", "if_repaired"]


@dataclass(frozen=True, slots=True)
class Replaced:
    """An operation whose result is to be replaced."""

    key: Key  # key of the value
    wide: Tensor | None = None  # its float64 value; None if still to be computed


@dataclass(slots=True)
class Replay:
    """Runs the graphs of a batch again with other values.

    Args:
        batch: the batch, still open.
        flow: the data flow of the batch.
        form_of: given the event of a graph, returns its second form. Called for graphs in which
            something starts, and graphs that read values that differ.
        starts: the events in which something starts.
        given: replacements for values that no operation made.
        looks: who else looks at the graph of an event.

    Attributes:
        differences: differences of the model's outputs, in order.
        reached: whether any output of the model differed, if only by roundings.
    """

    batch: Batch
    flow: DataFlow
    form_of: Callable[[int], SecondForm]
    starts: frozenset[int]
    given: Mapping[Key, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    looks: Mapping[int, Sequence[Watcher]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    changed: dict[Key, Any] = field(default_factory=dict)
    reached: bool = False

    def run(self) -> list[Difference]:
        """Run what has to run.

        Raises:
            NotJudged: when that is not possible.
        """
        events, place = self.batch.events, self.flow.place
        for index, event in enumerate(events):
            if isinstance(event, GraphRun):
                self.run_graph(index, event, is_last=event is self.batch.runs[-1])
            elif isinstance(event, UncapturedOperation) and self.changed.keys() & _read_by(event):
                raise NotJudged(f"{event.kind} ran between graphs")
        read = set().union(*map(_read_by, events))
        for key, (low, other) in self.changed.items():
            if place[key] in self.flow.reached or key not in read:
                self.compare(low, other)
        return self.differences

    def run_graph(self, index: int, run: GraphRun, *, is_last: bool) -> None:
        """Run one graph if it has to run."""
        plan = run.plan
        others: dict[int, Callable[[Tensor], Tensor]] = {}
        for value, known in enumerate(plan.values):
            position = known.argument
            if position is None:
                continue
            key = run.inputs.get(value, Key(index, value))
            if key in self.given:
                others[position] = self.given[key]
            elif key in self.changed:
                other = self.changed[key][1]
                others[position] = lambda low, other=other: other.clone()  # type: ignore[misc]
            elif value in run.derived and run.derived[value] in self.changed:
                raise NotJudged("a view that was made between graphs")
        if index not in self.starts and not others:
            return
        written = _Written()

        def replaced(given: list[Any]) -> list[Any]:
            return [others[at](low) if at in others else low for at, low in enumerate(given)]

        watchers = self.form_of(index), *self.looks.get(index, ()), written
        start = Start(run, to_the_end=False)
        low, other = start.again(*watchers, others=replaced)
        outputs = zip(plan.outputs, nodes.leaves(low), nodes.leaves(other), strict=True)
        for made, one, two in outputs:
            if one is two:
                continue
            if made is not None and is_float(one):
                self.changed[Key(index, made)] = (one, two)
            elif is_last or not isinstance(one, Tensor):
                self.compare(one, two)
            else:
                raise NotJudged("integers or booleans went on to Python")
        held = dict(plan.written)
        for position, (one, two) in written.found.items():
            if (now := held.get(position)) is not None:
                self.changed[Key(index, now)] = (one, two)
            else:
                self.compare(one, two)

    def compare(self, low: Any, other: Any) -> None:
        """Note how far an output of the model is from what it would be."""
        self.reached = True
        found = difference_of(low, other)
        if found is not None:
            self.differences.append(found)


class _Written(Watcher):
    """Keeps the graph's inputs to the end, because writes to them leave the graph."""

    def __init__(self) -> None:
        self.env: Mapping[Node, Any] = {}
        self.others: Mapping[Node, Any] = {}
        self.memories: set[int | None] = set()  # memory that was written

    def begins(self, walk: Walk) -> None:
        if not walk.inside:
            self.env, self.others = walk.env, walk.others
            for unused in walk.user_to_last_uses.values():
                unused[:] = [node for node in unused if node.op != "placeholder"]

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        written = (walk.env[operand] for operand in walk.call_of(node).written)
        self.memories.update(nodes.memory_of(operand) for operand in written)
        return False

    @property
    def found(self) -> dict[int, tuple[Any, Any]]:
        """Inputs that the graph wrote and that differ, by position, in both forms."""
        inputs = [node for node in self.env if node.op == "placeholder"]
        return {
            position: (self.env[node], self.others[node])
            for position, node in enumerate(inputs)
            if node in self.others and nodes.memory_of(self.env[node]) in self.memories - {None}
        }


def if_repaired(
    batch: Batch, flow: DataFlow, starts: Sequence[Replaced]
) -> tuple[list[Difference], bool]:
    """What would be different if some operations had not failed because of precision.

    Returns:
        What would be different, and whether nothing would be whatever the numbers are.

    Raises:
        NotJudged: when that cannot be determined.
    """
    by_event: dict[int, dict[Place, Tensor | None]] = {}
    for start in starts:
        check = check_of(batch, start.key)
        by_event.setdefault(start.key.event, {})[check.place] = start.wide
    form = Repaired({})

    def form_of(event: int) -> SecondForm:
        form.starts = by_event.get(event, {})
        return form

    with judged():
        replay = Replay(batch, flow, form_of, frozenset(by_event))
        found = replay.run()
    return found, form.always and not replay.reached


def if_other(batch: Batch, flow: DataFlow, keys: Sequence[Key]) -> tuple[list[Difference], bool]:
    """What depends on the NaN in some values.

    Returns:
        What would be different, and whether nothing would be whatever the numbers are.

    Raises:
        NotJudged: when that cannot be determined.
    """
    starts: dict[int, dict[Place, Check]] = {}
    given: list[Key] = []
    for key in keys:
        run = batch.run_of(key)
        if run is None or run.plan.values[key.value].role.is_given:
            given.append(key)
        else:
            check = check_of(batch, key)
            starts.setdefault(key.event, {})[check.place] = check
    found: list[Difference] = []
    always = True
    for below in (True, False):
        form = Perturbed({}, below=below)

        def form_of(event: int, form: Perturbed = form) -> SecondForm:
            form.starts = starts.get(event, {})
            return form

        def other(low: Tensor, below: bool = below) -> Tensor:
            return perturbed(low, below)

        replay = Replay(batch, flow, form_of, frozenset(starts), dict.fromkeys(given, other))
        try:
            with judged():
                found += replay.run()
        except RaisedOnOther:  # such as an index or a Cholesky decomposition
            found.append(Difference(1.0))
        always = always and form.always and not replay.reached
    return found, always and not found


@contextlib.contextmanager
def judged() -> Iterator[None]:
    """Turn any other failure of a second run into NotJudged."""
    try:
        yield
    except (NotJudged, RaisedOnOther):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotJudged("out of memory") from error
    except theirs() as error:  # an operation that does not run twice
        raise NotJudged(f"a second run raised {type(error).__name__}") from error


def check_of(batch: Batch, key: Key) -> Check:
    """The check that measures a value.

    Raises:
        NotJudged: when there is none: between graphs, and inside a kernel.
    """
    run = batch.run_of(key)
    if run is None:
        raise NotJudged("it ran between graphs")
    check = run.plan.check_of(key.value)
    if check is None or check.region_end is not None:
        raise NotJudged("it cannot be measured alone")
    return check


def _read_by(event: Any) -> set[Key]:
    """The values of earlier events that an event read."""
    if isinstance(event, GraphRun):
        return {*event.inputs.values(), *event.derived.values()}
    return {key for _, key in getattr(event, "inputs", ())}
