"""One model beside itself in a wider dtype: each graph in turn, then the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxguard.batch.events import GraphRun
from fxguard.comparison._backwards import Backwards
from fxguard.comparison._both_edges import BackwardOfBoth, BothEdges
from fxguard.comparison._carried import Carried
from fxguard.comparison._deviations import Deviations
from fxguard.comparison.elements import Deviation
from fxguard.errors import UsageError
from fxguard.graph.wide_form import NotJudged, converted, is_float, widened
from fxguard.in_dtype.starts import differentiated, drawn_for
from fxguard.measure.at_hand import version_of
from fxguard.rerun.start import Start
from fxguard.rerun.wide_run import WideForm

__all__ = ["TwoDtypes"]


class _Forms(NamedTuple):
    """A tensor that a graph was given or has returned."""

    low: Tensor  # in the second run
    wide: Tensor


@dataclass(slots=True)
class _Graph:
    """One run of a graph in both dtypes."""

    deviations: Deviations
    edges: list[BackwardOfBoth] = field(default_factory=list)  # of its operations, in order


class TwoDtypes:
    """Runs each graph of a model again, after it has run, also in a wider dtype.

    The wide form of a graph reads the wide results of earlier graphs, and begins anew at weights,
    inputs, and whatever was made or written between graphs.

    Args:
        wide: the wider dtype.
        gradients: whether to also compare gradients.
    """

    def __init__(self, wide: torch.dtype, *, gradients: bool) -> None:
        self._dtype = wide
        self._backwards = Backwards() if gradients else None
        self._graphs: list[_Graph] = []  # one for each run
        self._known: Carried[_Forms] = Carried()
        self._leaves: list[_Forms] = []  # to differentiate with respect to
        self._unread: dict[int, _Forms] = {}  # returned by a graph and not read by a later one

    def hear(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Run a graph again after it has returned.

        Raises:
            UsageError: when it cannot run again.
        """
        if outputs is None:
            return
        try:
            low, wide = self._again(run)
        except NotJudged as reason:
            raise UsageError(f"there is no run in two precisions: {reason}") from reason
        for output, one, other in zip(outputs, low, wide, strict=True):
            if is_float(output):
                self._unread[id(output)] = forms = _Forms(one, other)
                self._known.keep(output, version_of(output), forms)

    def differentiate(self, output: Any, *, is_cut: bool) -> None:
        """Run the backward in both dtypes.

        Args:
            output: what the model returned.
            is_cut: whether operations ran between graphs. No gradient gets past them: the backward
                begins anew at tensors that a graph returned and no graph was given.

        Raises:
            UsageError: when there is nothing to differentiate.
        """
        assert self._backwards is not None
        known = {id(x): self._known.of(x, version_of(x)) for x in differentiated(output)}
        known |= self._unread if is_cut else {}
        found = [each for each in known.values() if each is not None and each.low.requires_grad]
        if not found:
            raise UsageError("there is nothing to differentiate in what the model returned")
        incoming = drawn_for([low for low, _ in found])
        low, wide = zip(*self._leaves, strict=True)
        self._backwards.of_model([x for x, _ in found], low, incoming)
        self._backwards.of_reference([x for _, x in found], wide, incoming)

    def deviations(self) -> list[Deviation]:
        """The deviations of all operations: of the forward, then of the backward, in order."""
        found = [one for each in self._graphs for one in each.deviations.of_forward]
        for each in reversed(self._graphs):
            found += each.deviations.of_backward(each.edges)
        return found

    @property
    def taken_over(self) -> int:
        """How many operations draw random numbers or have no wide kernel."""
        return sum(each.deviations.taken_over for each in self._graphs)

    @property
    def without_kernel(self) -> int:
        """How many operations have no wide kernel."""
        return sum(each.deviations.without_kernel for each in self._graphs)

    @property
    def without_gradient(self) -> int:
        """How many differentiable operations have a backward that was not compared."""
        return sum(each.deviations.without_gradient(each.edges) for each in self._graphs)

    def _again(self, run: GraphRun) -> tuple[Any, Any]:
        """Run a graph again in both dtypes, and return its outputs in both."""
        form = WideForm(self._dtype)
        graph = _Graph(Deviations(run, form))
        if self._backwards is not None:
            form = BothEdges(self._dtype, self._backwards)
            graph = _Graph(Deviations(run, form), form.operations)
        assert run.args is not None
        start = Start(run)
        with start.begun() as copies, torch.set_grad_enabled(self._backwards is not None):
            pairs = [self._given(*each) for each in zip(run.args, copies, strict=True)]
            given, others = [low for low, _ in pairs], [wide for _, wide in pairs]
            low, wide = start.walk(given, form, graph.deviations, others=others)
            wide = widened(wide, self._dtype, differentiable=form.differentiable)
        self._graphs.append(graph)
        return low, wide

    def _given(self, argument: Any, copy: Any) -> tuple[Any, Any]:
        """An argument of a graph for its second run, in both dtypes."""
        if not is_float(argument):
            return copy, copy
        known = self._known.of(argument, version_of(argument))
        if known is None:
            known = self._begin(argument)
        else:
            self._unread.pop(id(argument), None)
        low = copy if self._backwards is None else known.low
        # Arguments that are not copies are not written.
        return low if copy is argument else low.clone(), known.wide.clone()

    def _begin(self, argument: Tensor) -> _Forms:
        """Start the wide form from the value of a graph's argument."""
        forms = _Forms(argument.detach(), converted(argument, self._dtype))
        if self._backwards is not None and argument.requires_grad:
            self._leaves.append(forms)
            for leaf in forms:
                leaf.requires_grad_()
        self._known.keep(argument, version_of(argument), forms)
        return forms
