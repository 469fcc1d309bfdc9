"""Runs each graph of a forward again after it has run, and gathers what fails in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import versions_of
from fxguard.capture.keeping import numbered, titles_of
from fxguard.forecasting._backward_in_dtype import BackwardInDtype, gradients_in_float64
from fxguard.forecasting._failure import failure_of
from fxguard.forecasting._found import Found
from fxguard.forecasting._in_float8 import BackwardInFloat8, InFloat8
from fxguard.forecasting._other_dtype import InDtype, Reference
from fxguard.graph.nodes import leaves
from fxguard.graph.random_state import RandomState
from fxguard.graph.wide_form import NotJudged, is_float, widened
from fxguard.measure.at_hand import version_of
from fxguard.plan.plan import Place
from fxguard.rerun.other_values import RaisedOnOther
from fxguard.rerun.start import Start
from fxguard.rerun.walk import SecondForm

__all__ = ["Graphs", "Operation"]


class Operation(NamedTuple):
    """Identifies an operation of a graph across runs."""

    module: str  # the module that the graph was captured with
    kind: str
    number: int  # among operations of its module with the same name, from 1


class _Known(NamedTuple):
    """A tensor that a graph was given or has returned."""

    tensor: Tensor  # kept alive, so that no other tensor gets its identity
    version: int | None  # how often it had been written
    other: Any  # what replaces it: the tensor itself, or in float64 what it should be
    wide: Any  # the same in a run that is in float64 throughout


@dataclasses.dataclass(slots=True)
class _KeptRun:
    """A run of a graph whose backward is to be examined."""

    run: GraphRun
    wide: list[Any]  # its arguments in float64
    others: list[Any]  # its arguments, with all earlier failures repaired
    outputs: list[Any]
    bad: Mapping[Place, int]  # see Reference.bad
    versions: tuple[int | None, ...]  # of its arguments


class Graphs:
    """The graphs of one forward in a dtype, each with what fails in it.

    Args:
        tensors: the weights and buffers of the model in its own dtype, by name.
        inputs: each tensor that the forward is given, and the user's original of it.
        keeps_runs: whether :meth:`look_back` follows.
        float8: the format that matrix products are to compute in; None if everything is in the
            dtype of the graphs.

    Attributes:
        found: what fails.
        graphs: how many ran.
        operations: how many ran in them.
        beyond: operations that fail, and those that read values that the dtype cannot hold.
        makers: for each operation, those that made its operands.
        counted: all operations.
        draws: whether an operation draws random numbers.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[tuple[Tensor, Tensor]],
        *,
        keeps_runs: bool = False,
        float8: torch.dtype | None = None,
    ) -> None:
        self.keeps_runs = keeps_runs
        self.float8 = float8
        self.tensors = dict(tensors)  # without tensors that a graph has written
        self.known: dict[int, _Known] = {}  # by id
        self.found = Found()
        self.graphs = 0
        self.operations = 0
        self.beyond: dict[Operation, None] = {}
        self.makers: dict[Operation, set[Operation]] = {}
        self.counted: dict[Operation, None] = {}
        self.draws = False
        self._kept: list[_KeptRun] = []  # filled if a backward is to be examined
        for number, (low, given) in enumerate(inputs):
            self.known[id(low)] = self.entering(f"input {number}", low, given)

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Run a graph again after it has returned."""
        if outputs is None:
            return
        assert run.args is not None
        standing = [value for value in run.plan.values if value.role.is_standing]
        names = {value.argument: run.running_name(value.name) for value in standing}
        given = [
            self.given(names.get(position), argument) for position, argument in enumerate(run.args)
        ]
        for position, _ in run.plan.written:  # no longer what the user gave
            self.tensors.pop(names.get(position, ""), None)
        titles = titles_of(run)
        if run.random_state is not None and not run.random_state.is_same(RandomState.now(run.args)):
            self.draws = True
        self.graphs += 1
        self.operations += len(titles)
        reference = Reference()
        form = InDtype(reference.bad) if self.float8 is None else InFloat8(self.float8)
        try:
            _, wide = _again(run, reference, [each.wide for each in given])
            _, others = _again(run, form, [each.other for each in given])
        except (NotJudged, RaisedOnOther) as reason:
            self.found.operations += len(titles)
            self.found.not_judged |= dict.fromkeys(titles.values(), str(reason))
            return
        looked_at = form.products if isinstance(form, InFloat8) else titles
        self.found.operations += len(looked_at)
        self.found.add(run, form.failures)
        self.found.add_frames(run, reference.rows)
        self._note_beyond(run, {*form.failures.found, *form.island})
        if self.keeps_runs:
            self._kept.append(
                _KeptRun(
                    dataclasses.replace(run),
                    [each.wide for each in given],
                    [each.other for each in given],
                    list(outputs),
                    reference.bad,
                    versions_of(run.args),
                )
            )
        for output, other, high in zip(outputs, others, wide, strict=True):
            if is_float(output):
                self.known[id(output)] = _Known(output, version_of(output), other, high)

    def _note_beyond(self, run: GraphRun, places: Collection[Place]) -> None:
        """Note which operations of a graph need another dtype."""
        names = {
            (step.inside, step.node): Operation(step.module, step.kind, number)
            for step, number in numbered(run.plan)
        }
        self.counted |= dict.fromkeys(names.values())
        makers: dict[int, set[Operation]] = {}  # for each value
        for step in run.plan.steps:
            place = step.inside, step.node
            read = set().union(*(makers.get(value, set()) for value in step.inputs))
            name = names.get(place)
            if name is not None:
                self.makers.setdefault(name, set()).update(read)
                if place in places:
                    self.beyond[name] = None
            makers |= dict.fromkeys(step.outputs, read if name is None else {name})

    def look_back(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Examine the backward of each graph, the last one first.

        Args:
            gradients: each output of the model, with its gradient.
        """
        for number, (output, gradient) in enumerate(gradients):
            failure = failure_of(gradient.to(output.dtype), widened(gradient, torch.float64))
            if failure is not None:
                self.found.backward[f"output {number}"] = failure, None
        incoming = {id(output): gradient for output, gradient in gradients}
        while self._kept:
            kept = self._kept.pop()
            run = kept.run
            come = {
                position: incoming[id(output)]
                for position, output in enumerate(leaves(kept.outputs))
                if id(output) in incoming
            }
            if not come:
                continue
            assert run.args is not None
            try:
                if versions_of(run.args) != kept.versions:
                    raise NotJudged("an input of the graph was changed before its backward")
                made, found = gradients_in_float64(run, kept.wide, come)
                form = (
                    BackwardInDtype(kept.bad, made)
                    if self.float8 is None
                    else BackwardInFloat8(self.float8, made)
                )
                _again(run, form, kept.others)
            except (NotJudged, RaisedOnOther) as reason:
                titles = titles_of(run).values()
                self.found.not_judged |= {f"backward of {x}": str(reason) for x in titles}
                continue
            for position, gradient in found.items():
                argument = run.args[position]
                before = incoming.get(id(argument))
                incoming[id(argument)] = gradient if before is None else before + gradient
            self.found.add(run, form.back.failures, backward=True)
            self.found.add_frames(run, form.back.rows, backward=True)
            # A vanishing gradient is a matter of the loss scale.
            failures = form.back.failures.found.items()
            grave = {place for place, f in failures if f.problem in ("overflow", "nan")}
            self._note_beyond(run, {*grave, *form.back.beyond})

    def reference_of(self, output: Tensor) -> tuple[Tensor, Tensor] | None:
        """The float64 value of a tensor that a graph returned; None if it is not known.

        Returns:
            That value, and the value in the dtype with all failures repaired.
        """
        known = self.known.get(id(output))
        if known is None or known.tensor is not output:
            return None
        return known.wide, known.other

    def given(self, name: str | None, argument: Any) -> _Known:
        """An argument of a graph."""
        if not is_float(argument):
            return _Known(argument, None, argument, argument)
        version = version_of(argument)
        known = self.known.get(id(argument))
        if known is not None and known.tensor is argument and known.version == version:
            return known
        if name is None or name not in self.tensors:
            return _Known(argument, version, argument, argument)
        return self.entering(name, argument, self.tensors[name])

    def entering(self, name: str, low: Tensor, given: Tensor) -> _Known:
        """A weight or an input: the original if the dtype cannot hold it."""
        version = version_of(low)
        if low.shape != given.shape or low.dtype == given.dtype:
            return _Known(low, version, low, low)
        wide = widened(given, torch.float64)
        failure = failure_of(low, wide)
        if failure is not None:
            self.found.forward.setdefault(name, (failure, None))
        is_too_large = failure is not None and failure.problem == "overflow"
        return _Known(low, version, wide if is_too_large else low, wide)


def _again(run: GraphRun, form: SecondForm, others: Sequence[Any]) -> tuple[Any, Any]:
    """Run a graph again, with these arguments in its second form.

    Written arguments are copied: arguments that are the same in both forms are the copies.
    """

    def seconds(low: list[Any]) -> list[Any]:
        assert run.args is not None
        return [  # copies may be written
            copied if other is argument else other if copied is argument else other.clone()
            for argument, copied, other in zip(run.args, low, others, strict=True)
        ]

    return Start(run).again(form, others=seconds)
