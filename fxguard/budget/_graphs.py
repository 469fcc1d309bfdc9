"""Runs each graph of a model again after it has run, in float64 beside the model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.budget._form import WIDE, ChoosesItself, InFloat64
from fxguard.budget._room import NoRoom
from fxguard.budget._shares import Shares
from fxguard.capture.keeping import numbered
from fxguard.errors import UsageError
from fxguard.graph.operations import read_node
from fxguard.graph.wide_form import NotJudged, is_float, widened
from fxguard.measure.at_hand import version_of
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Step
from fxguard.report.late_progress import LateProgress
from fxguard.rerun.start import Start
from fxguard.torch_names import forbid_saved_tensor_hooks

__all__ = ["FORWARD", "Given", "Graphs", "Operation"]

FORWARD = 0.6  # of the time, before backwards


class Given(NamedTuple):
    """A weight or an input: the key of its own error, that of being rounded."""

    kind: str  # "weight" or "input"
    name: str


class Operation(NamedTuple):
    """An operation of a graph."""

    step: Step
    module: str
    number: int  # among operations of its module with the same name, from 1
    graph: int


class _Known(NamedTuple):
    """A tensor that a graph was given or has returned."""

    tensor: Tensor  # kept alive, so that no other one gets its identity
    version: int | None
    wide: Tensor  # of the float64 run, with a gradient
    itself: Tensor  # of the one that chooses for itself


class Graphs:
    """The graphs of one forward, each run again in float64.

    Args:
        shares: gets the own errors.
        tensors: the weights and buffers of the model in its own dtype, by name.
        inputs: each tensor that the forward is given, and the user's original of it.
        progress: shows how far the runs are.
        chooses: whether a run that chooses for itself is made as well.

    Attributes:
        leaves: what the float64 run begins with.
        operations: by their key in the shares.
        counted: how many operations ran in graphs.
        names: of the weights among the leaves.
        made_between: whether a graph was given what was made between graphs.
    """

    def __init__(
        self,
        shares: Shares,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[tuple[Tensor, Tensor]],
        *,
        progress: LateProgress,
        chooses: bool = False,
    ) -> None:
        self.shares = shares
        self.tensors = dict(tensors)
        self.chooses, self.progress = chooses, progress
        self._ran = 0
        self.leaves: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}  # leaves of weights, by name
        self.forms: list[InFloat64] = []
        self.operations: dict[Hashable, Operation] = {}
        self.counted = 0
        self.not_judged: dict[str, str] = {}
        self._known: dict[int, _Known] = {}
        for number, (low, given) in enumerate(inputs):
            self._enter(Given("input", f"input {number}"), low, given)

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Run a graph again after it has returned."""
        if outputs is None:
            return
        assert run.args is not None
        names = {
            v.argument: run.running_name(v.name) for v in run.plan.values if v.role.is_standing
        }
        graph = len(self.forms)
        form = InFloat64(self.shares, lambda place: (graph, place), self._went_on)
        self.forms.append(form)
        for step, number in numbered(run.plan):
            operation = Operation(step, run.running_name(step.module), number, graph)
            self.operations[graph, (step.inside, step.node)] = operation
            self.counted += 1
        room = self._room_for(run)
        start = Start(run)
        try:
            with start.begun() as copies, torch.no_grad(), room:
                known = [self._of(names.get(at), x) for at, x in enumerate(run.args)]
                others = _seconds(run.args, copies, [each and each.wide for each in known])
                _, made = start.walk(copies, form, others=list(others))
            itself = made
            if self.chooses:
                with start.begun() as copies, torch.no_grad():
                    others = _seconds(run.args, copies, [each and each.itself for each in known])
                    _, itself = start.walk(copies, ChoosesItself(), others=list(others))
        except NotJudged as reason:
            kind = NoRoom if str(reason) == "out of memory" else UsageError
            raise kind(f"there is no error budget: {reason}") from reason
        for place, why in form.taken_over.items():
            taken = self.operations.get((graph, place))
            self.not_judged.setdefault("an operation" if taken is None else taken.step.title, why)
        for output, other, own in zip(outputs, made, itself, strict=True):
            if is_float(output):
                entry = _Known(
                    output, version_of(output), widened(other, WIDE, differentiable=True), own
                )
                self._known[id(output)] = entry

    def _room_for(self, run: GraphRun) -> AbstractContextManager[None]:
        nodes = [x for x in without_marks(run.graph_module).graph.nodes if x.op.startswith("call")]
        writes = any(read_node(node, run.graph_module).written for node in nodes)
        hooks = all(node.target is not forbid_saved_tensor_hooks for node in nodes)
        return self.shares.room.open(writes=writes, hooks=hooks)

    def _went_on(self) -> None:
        self._ran += 1
        self.progress.advance(FORWARD * self._ran / max(self.counted, 1))

    def wide_of(self, output: Tensor) -> tuple[Tensor, Tensor] | None:
        """What an output of the model is in float64, and in the run that chooses for itself."""
        known = self._known.get(id(output))
        if known is None or known.tensor is not output or known.version != version_of(output):
            return None
        return known.wide, widened(known.itself, WIDE)

    def all_leaves(self) -> list[Tensor]:
        """Everything that the float64 run begins with."""
        return [*self.leaves, *(leaf for form in self.forms for leaf in form.leaves)]

    def _of(self, name: str | None, argument: Any) -> _Known | None:
        """An argument of a graph in float64; None if it is no floating-point tensor."""
        if not is_float(argument):
            return None
        known = self._known.get(id(argument))
        if known is not None and known.tensor is argument and known.version == version_of(argument):
            return known
        key = Given("weight", name) if name is not None else None
        return self._enter(key, argument, self.tensors.get(name or "", argument))

    def _enter(self, key: Given | None, low: Tensor, given: Tensor) -> _Known:
        given = given if given.shape == low.shape else low
        leaf = widened(given, WIDE).clone().requires_grad_()
        self.leaves.append(leaf)
        if key is not None:
            self.shares.of(key).count += 1
            self.shares.add(key, low, leaf.detach(), leaf)
            if key.kind == "weight":
                self.weights[key.name] = leaf
        self._known[id(low)] = _Known(low, version_of(low), leaf, leaf.detach())
        return self._known[id(low)]


def _seconds(args: Sequence[Any], copies: Sequence[Any], others: Sequence[Any]) -> Iterator[Any]:
    """The arguments of the second form; copies of those that the graph may write."""
    for argument, copied, other in zip(args, copies, others, strict=True):
        if other is None:
            yield copied
        elif copied is argument:
            yield other
        else:
            with torch.enable_grad():
                yield other.clone()
