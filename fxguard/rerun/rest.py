"""Runs the rest of a graph, and its backward, with another expression in an operation's place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxguard import trees
from fxguard.batch.batch import Batch
from fxguard.batch.dataflow import DataFlow
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import KeptRun
from fxguard.batch.keys import Key
from fxguard.graph.nodes import leaves
from fxguard.graph.random_state import random_state_kept
from fxguard.graph.wide_form import NotJudged, Ran, is_float
from fxguard.measure.free_memory import fits
from fxguard.plan.plan import Place
from fxguard.records import Range, Source
from fxguard.rerun.consequences import Replay
from fxguard.rerun.other_values import AsTheModel, RaisedOnOther
from fxguard.rerun.start import Start, with_aliases
from fxguard.rerun.walk import EdgeWatcher, SecondForm, Walk, Watcher
from fxguard.source.lines import source_of_trace
from fxguard.torch_names import DisableTorchFunction

__all__ = ["Instead", "Made", "Next", "Rest", "backward_with", "rest_with"]

# What runs the operation itself, its arguments, and the results of the nodes that are read.
Made = Callable[[Callable[..., Any], Any, Any, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Instead:
    """What is computed in the place of an operation of a graph, and of others of its line."""

    made: Mapping[Place, Made]
    reads: frozenset[str]  # names of the nodes whose results it reads


@dataclass(frozen=True, slots=True)
class Next:
    """The first operation behind the other expression that fails on finite operands."""

    kind: str
    made: str  # "NaN", "inf", "-inf"; "" if it raised
    source: Source | None


@dataclass(frozen=True, slots=True)
class Rest:
    """What the rest of a graph did with another expression in an operation's place."""

    is_finite: bool  # whether everything that leaves the model is, if its forward was run
    next: Next | None = None
    # Whether gradients through it are finite, and the weights after a step of gradient descent with
    # a rate of up to 1; None if the backward was not run.
    gradients: bool | None = None
    is_backward: bool = False  # whether it is a backward that was run again, of real gradients
    is_whole: bool = True  # whether that went through one graph alone


def rest_with(batch: Batch, flow: DataFlow, event: int, instead: Instead) -> Rest:
    """Run a batch from an operation on with another expression in its place, and its backward.

    The backward runs where the batch is one graph, for the sum of what that returns.

    Args:
        batch: the batch, still open.
        flow: its data flow, with the infinities that are intended.
        event: the graph run that holds the operation.
        instead: the other expression.

    Raises:
        NotJudged: when that is not possible.
        Exception: whatever the operations raise.
    """
    _expect_known_draws(batch.runs)
    form = _Forward(instead, _intended(flow))
    replay = _Replay(batch, flow, lambda index: form.at(index == event), frozenset([event]))
    try:
        replay.run()
    except RaisedOnOther:
        return Rest(False, form.next)
    if not form.was_made:
        raise NotJudged("the operation did not run")
    is_finite = replay.is_finite and not _still_bad(flow, replay.changed)
    run = batch.run_of(Key(event, 0))
    alone = run is not None and len(batch.runs) == 1 and not batch.uncaptured()
    if not (alone and is_finite and run is not None and _has_gradient(run) and form.has_room()):
        return Rest(is_finite, form.next)
    return Rest(is_finite, form.next, _gradients(Start(run), run, instead, None))


def backward_with(kept: KeptRun, instead: Instead, scale: float = 1.0) -> Rest:
    """Run a graph and its backward again with another expression in an operation's place.

    Args:
        kept: the run, with the incoming gradients of its outputs.
        instead: the other expression.
        scale: a divisor for these gradients.

    Raises:
        NotJudged: when that is not possible.
        Exception: whatever the operations raise.
    """
    run = kept.opened()
    _expect_known_draws([run])
    incoming = {at: gradient / scale for at, gradient in sorted(kept.incoming.items())}
    with kept.settings():
        return Rest(True, None, _gradients(Start(run), run, instead, incoming), is_backward=True)


class _Reads(Watcher):
    """Keeps what the other expression reads, and counts the memory of all results."""

    def __init__(self, instead: Instead) -> None:
        self.instead = instead
        self.values: dict[str, Any] = {}
        self.bytes: Counter[torch.device] = Counter()
        self.was_made = False

    def passed(self, walk: Walk, node: Node) -> None:
        if walk.inside or node.op == "output":
            return
        value = walk.env.get(node)
        if node.name in self.instead.reads:
            self.values[node.name] = value
        for each in leaves(value) if node.op != "placeholder" else ():
            if isinstance(each, Tensor):
                self.bytes[each.device] += each.numel() * each.element_size()

    def made(
        self, place: Place, run: Callable[..., Any], args: Any, kwargs: Any, values: Any
    ) -> Any:
        """What the other expression makes in one of its places."""
        self.was_made = True
        return self.instead.made[place](run, args, kwargs, values)


class _Forward(_Reads, AsTheModel):
    """The forward, with the other expression as the second form."""

    def __init__(self, instead: Instead, intended: Collection[Place]) -> None:
        super().__init__(instead)
        self.intended = intended
        self.starts = False
        self.next: Next | None = None

    def at(self, starts: bool) -> SecondForm:
        """The form for a graph that holds the operation, or for one that only follows."""
        self.starts = starts
        self.values.clear()
        return self

    def has_room(self) -> bool:
        """Whether the memory that a backward needs is there."""
        return fits(self.bytes)

    def wants(self, walk: Walk, node: Node, differs: bool) -> bool:
        return differs or (self.starts and walk.place(node) in self.instead.made)

    def follow(self, walk: Walk, node: Node, ran: Ran, args: Any, kwargs: Any) -> Any:
        place = walk.place(node)
        if self.starts and place in self.instead.made:
            if ran.call.written:
                raise NotJudged(f"{ran.call.kind} writes in place")
            values = {n.name: walk.others[n] for n in walk.others if n.name in self.values}
            result = self.made(place, ran.run, args, kwargs, {**self.values, **values})
            _expect_like(ran.result, result)
            return result
        try:
            result = super().follow(walk, node, ran, args, kwargs)
        except RaisedOnOther:
            self._note(ran, node, "")
            raise
        is_start = place not in self.intended and not _bad_in((args, kwargs))
        if is_start and (made := _bad_in(result)):
            self._note(ran, node, made)
        return result

    def _note(self, ran: Ran, node: Node, made: str) -> None:
        source = source_of_trace(node.meta.get("stack_trace"))
        self.next = self.next or Next(ran.call.kind, made, source)


class _Replay(Replay):
    """Notes whether all that leaves the model and differs is finite."""

    is_finite: bool

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_finite = True

    def compare(self, low: Any, other: Any) -> None:
        self.reached = True
        self.is_finite = self.is_finite and not _bad_in(other)


class _Backward(_Reads, EdgeWatcher):
    """Runs the operations for a backward, and the other expression in one's place."""

    def run(self, walk: Walk, node: Node, args: Any, kwargs: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            return walk.run_alone(node, given, named)

        place = walk.place(node)
        if place not in self.instead.made:
            return run(*args, **kwargs)
        return self.made(place, run, args, kwargs, self.values)


def _gradients(
    start: Start, run: GraphRun, instead: Instead, incoming: Mapping[int, Tensor] | None
) -> bool:
    """Whether all gradients of a graph's inputs are finite, and its weights after a step."""
    assert run.args is not None
    watcher = _Backward(instead)
    with start.begun() as copies, torch.enable_grad():
        aliases, given = with_aliases(run.args, copies)
        outputs = leaves(start.walk(given, watcher)[0])
        if incoming is None:
            made = [x for x in outputs if is_float(x) and x.requires_grad]
            began = [torch.ones_like(x) for x in made]
        else:
            made = [outputs[position] for position in incoming]
            began = list(incoming.values())
    if not watcher.was_made or not made:
        raise NotJudged("the operation did not run")
    with random_state_kept(run.args), DisableTorchFunction(), start.alone():
        found = torch.autograd.grad(made, aliases, began, allow_unused=True)
    with torch.no_grad():
        return not any(
            gradient is not None and (_bad_in(gradient) or _bad_in(weight - gradient))
            for weight, gradient in zip(aliases, found, strict=True)
        )


def _expect_known_draws(runs: Iterable[GraphRun]) -> None:
    """What a compiled graph drew takes another compilation to know: a fix is not worth one.

    Raises:
        NotJudged: when it is not known yet.
    """
    if any(run.draws is not None and run.draws.found is None for run in runs):
        raise NotJudged("what a compiled graph drew is not known")


def _has_gradient(run: GraphRun) -> bool:
    """Whether a backward may follow: something that the graph read needs a gradient."""
    given = run.args or ()
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)


def _expect_like(low: Any, other: Any) -> None:
    """Only a result of the same shapes can take the place of another.

    Raises:
        NotJudged: when it has others.
    """
    shapes = [[x.shape for x in leaves(each) if isinstance(x, Tensor)] for each in (low, other)]
    if shapes[0] != shapes[1]:
        raise NotJudged("the result has another shape")


def _intended(flow: DataFlow) -> set[Place]:
    """The places of operations that make infinities on purpose."""
    return {
        (step.inside, step.node)
        for step in flow.steps
        if step.infinite_literal or not flow.intended.isdisjoint(step.outputs)
    }


def _still_bad(flow: DataFlow, changed: Collection[Key]) -> bool:
    """Whether something that leaves the model is bad, and was not computed anew."""
    for value in (*flow.results, *flow.reached):
        found = flow.ranges[value]
        is_bad = isinstance(found, Range) and bool(found.severity) and value not in flow.intended
        if is_bad and flow.keys[value] not in changed:
            return True
    return False


def _bad_in(values: Any) -> str:
    """``NaN``, ``inf`` or ``-inf``: what is not finite among some tensors; "" if nothing is."""
    tensors = [x for x in trees.tree_leaves(values) if is_float(x) and not x.is_complex()]
    bad = [x for x in tensors if not bool(x.isfinite().all())]
    if any(bool(x.isnan().any()) for x in bad):
        return "NaN"
    signs: Sequence[float] = [float(x[x.isinf()][0]) for x in bad]
    return str(signs[0]) if signs and math.isinf(signs[0]) else ""
