"""``compare``: two models on the same inputs, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fxguard import trees
from fxguard.budget.budget import error_budget
from fxguard.comparison._aligned import aligned
from fxguard.comparison._alone import beyond_roundings
from fxguard.comparison._arguments import Arguments, weights_by_twin
from fxguard.comparison._as_it_ran import as_it_ran
from fxguard.comparison._backward import BesideBackward
from fxguard.comparison._ends import ends_of
from fxguard.comparison._gradients import compare_gradients
from fxguard.comparison._graphs import compare_graphs
from fxguard.comparison._judged import Judge
from fxguard.comparison._outputs import Tolerance, compare_outputs
from fxguard.comparison._programs import Program, program_of
from fxguard.comparison._rounding import unit_of
from fxguard.comparison._runs import ModelRun, buffers_kept, run_model
from fxguard.comparison._settled import settled
from fxguard.comparison._weights import weights_apart
from fxguard.comparison.elements import Compared
from fxguard.comparison.result import Comparison
from fxguard.errors import FxguardError, UsageError
from fxguard.graph.wide_form import NotJudged
from fxguard.in_dtype.placed import converter, place_of
from fxguard.report.error_budget import ErrorBudget
from fxguard.trace.diff import compare_traces

__all__ = ["compare"]

SHOWN = 5  # weights that are listed
IN_FLOAT64 = "gradients in float64"


def compare(
    model_a: Module,
    model_b: Module,
    *inputs: Any,
    tolerance: float | None = None,
    output_tolerance: float | None = None,
    gradients: bool = True,
    **kwargs: Any,
) -> Comparison:
    """Compare the results of every operation of two models, as :func:`fxguard.compare` says.

    Args:
        model_a: any module that is not instrumented, or the result of ``torch.compile``.
        model_b: likewise.
        inputs: positional arguments of both.
        tolerance: the largest own error that is not significant.
        output_tolerance: how far apart each output may be.
        gradients: whether to also compare gradients.
        kwargs: keyword arguments of both.

    Raises:
        FxguardError: when a model is instrumented already, or a tolerance is negative.
        Exception: whatever a model raises, unless a bad value led to it.
    """
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"tolerance has to be 0 or more, got {tolerance!r}")
    models = model_a, model_b
    if output_tolerance is not None and not output_tolerance >= 0:
        raise UsageError(f"output_tolerance has to be 0 or more, got {output_tolerance!r}")
    for model in models:
        if not isinstance(model, Module):
            raise UsageError(f"compare needs two torch.nn.Modules, got {type(model).__name__}")
    places = [place_of(model) for model in models]
    backward = gradients and torch.is_grad_enabled()
    ran: list[ModelRun] = []
    for model, place in zip(models, places, strict=True):
        convert = converter(place if places[0] != places[1] else None)
        args, named = trees.tree_map_only(Tensor, convert, (inputs, kwargs))
        with torch.random.fork_rng(_cuda_devices(model)), buffers_kept(model):
            ran.append(run_model(model, args, named, backward=backward))
    a, b = ran
    ranges = replace(compare_traces(a.batch, b.batch, tolerance), a=a.name, b=b.name)
    found = _Comparing(a, b, Judge(tolerance), output_tolerance).comparison(ranges, backward)
    if found.outcome != "precision":
        return found
    side = int(coarsest(b) >= coarsest(a))
    convert = converter(places[side] if places[0] != places[1] else None)
    given = trees.tree_map_only(Tensor, convert, (inputs, kwargs))
    return replace(found, budget=_budget_of(models[side], "AB"[side], *given))


def _budget_of(model: Module, side: str, args: Any, kwargs: Any) -> ErrorBudget | None:
    """Where the digits of a model went; None if that cannot be said."""
    try:
        budget = error_budget(model, *args, dtype=None, **kwargs)
    except FxguardError:
        return None
    return replace(budget, of=f"{budget.of} of {side}")


class _Comparing:
    """Two models that have run."""

    def __init__(
        self, a: ModelRun, b: ModelRun, judge: Judge, output_tolerance: float | None
    ) -> None:
        self.a = a
        self.b = b
        self.judge = judge
        self.known = Arguments.between(a, b)
        self.both = aligned(a, b, self.known.twins)
        self.graphs = compare_graphs(a, b, self.both, self.known, judge)
        self.rewritten: frozenset[str] = frozenset()
        self.output_tolerance = Tolerance((coarsest(a), coarsest(b)), output_tolerance)

    def comparison(self, ranges: Any, backward: bool) -> Comparison:
        a, b, graphs = self.a, self.b, self.graphs
        ran = [*as_it_ran(a, "A", graphs), *as_it_ran(b, "B", graphs)]
        for each in (a, b):
            if each.between:
                side = "A" if each is a else "B"
                what = f"{each.between} operations of {side}"
                graphs.not_compared[what] = "they ran between captured graphs"
        outputs = self._outputs()
        differs = any(each.is_significant for each in (*graphs.found, *outputs))
        gradients = list(self._gradients(differs)) if backward else []
        told = {said.partition(":")[0] for each in graphs.found for said in each.weights}
        told |= {self.known.name_in_a(name) for name in self.rewritten}
        weights = tuple(weights_apart(a.parameters, self._weights_of_b(), told))
        return Comparison(
            a.name,
            b.name,
            tuple(graphs.found),
            tuple(ran),
            tuple(outputs),
            tuple(gradients),
            ranges,
            tuple(graphs.not_compared.items()),
            weights,
            tuple(graphs.only_in_a),
            tuple(graphs.only_in_b),
            (*_notes(a, b), *self._note_of_weights()),
            returned=not (a.raised or b.raised),
        )

    def _outputs(self) -> list[Compared]:
        """Judge the outputs, and by them the operations that are another program in B."""
        a, b, graphs = self.a, self.b, self.graphs
        ends = ends_of(a, b, self.known)
        pairs, self.known = ends.pairs, ends.known
        found = settled(self.both, graphs, ends, self.output_tolerance)
        self.rewritten = found.rewritten
        graphs.leave(found.found, self.both.without(found.apart))
        self.both = self.both.without(found.apart)
        blamed = any(each.is_significant for each in graphs.found)
        if not blamed and any(
            self.output_tolerance.is_exceeded(pair) for pair in pairs if pair.is_judged
        ):
            graphs.found += beyond_roundings(b, self.both.b, "B", self.both.of_b)
            graphs.found += beyond_roundings(a, self.both.a, "A", self.both.of_a)
            blamed = any(each.is_significant for each in graphs.found)
        return list(
            compare_outputs(
                a,
                b,
                pairs,
                blamed=blamed,
                said=found.said,
                all_compared=not graphs.not_compared,
                tolerance=self.judge.tolerance,
                output_tolerance=self.output_tolerance,
                reference=self._reference(ends.programs),
            )
        )

    def _reference(self, programs: tuple[Program, Program] | None) -> Program | None:
        """The model whose outputs have more digits, in float64 with its own weights."""
        if programs is None or unit_of(*self.a.outputs) <= unit_of(*self.b.outputs):
            return None if programs is None else programs[0]
        try:
            return program_of(self.b)
        except NotJudged:
            return None

    def _gradients(self, differs: bool) -> Iterator[Compared]:
        a, b, graphs = self.a, self.b, self.graphs
        why = a.no_gradients or b.no_gradients
        if not why and (len(graphs.arguments) != len(b.runs) or not b.runs):
            why = "not every graph was compared"
        if why:
            graphs.not_compared["gradients"] = why
            return
        chose = self.judge.chose_otherwise
        if chose:
            graphs.not_compared[IN_FLOAT64] = (
                f"roundings decided integers or booleans of {chose} operations otherwise in B"
            )
        try:
            found = list(
                compare_gradients(
                    a, b, self.known, graphs.arguments, self._other_weights(), alike=not chose
                )
            )
        except (NotJudged, RuntimeError) as reason:
            graphs.not_compared["gradients"] = str(reason)
            return
        for name, side in self.known.frozen().items():
            graphs.not_compared[f"gradient of {name}"] = f"only {side} asks for one"
        if any(each.is_significant for each in found) and not differs:
            yield from self._backward_to_blame()
        # Where the forward differs, gradients differ because of it.
        yield from (replace(each, reason="") if differs else each for each in found)

    def _backward_to_blame(self) -> Sequence[Compared]:
        """The operations whose backward differs although the forward is the same."""
        graphs = compare_graphs(self.a, self.b, self.both, self.known, self.judge, BesideBackward)
        return [each for each in graphs.found if each.part == "backward"]

    def _other_weights(self) -> set[str]:
        """Weights of B that have other gradients than A's."""
        return {*self.rewritten, *self.both.read_otherwise(self.known.twins)}

    def _note_of_weights(self) -> Iterator[str]:
        if self.rewritten:
            names, more = sorted(self.rewritten), len(self.rewritten) - SHOWN
            listed = ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
            yield f"written in another way in B, with what reads them: {listed}"

    def _weights_of_b(self) -> dict[str, Tensor]:
        """B's weights by the names and in the layouts of A."""
        return weights_by_twin(self.b.parameters, self.known.twins)


def _notes(a: ModelRun, b: ModelRun) -> Iterator[str]:
    for side, model in (("A", a), ("B", b)):
        if model.is_compiled:
            yield (
                f"{side} is compiled: its operations are those of its captured graphs, in eager "
                f"mode; values inside fused kernels do not exist, and are not compared"
            )


def coarsest(model: ModelRun) -> float:
    """The unit of roundoff of the coarsest dtype among a model's weights and outputs."""
    return unit_of(*model.outputs, *model.parameters.values())


def _cuda_devices(model: Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
