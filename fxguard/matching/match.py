"""Compares two recordings: which values are the same, where the programs part, what rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fxguard.errors import UsageError
from fxguard.matching._alignment import Alignment
from fxguard.matching._because import because
from fxguard.matching._by_numbers import apart as apart_in_numbers
from fxguard.matching._by_numbers import same_numbers
from fxguard.matching._causes import Cause, causes_of
from fxguard.matching._exact import Exact, exact_of, twins_between
from fxguard.matching._outputs_of_ranks import with_whole_outputs
from fxguard.matching._roundings import shares_of
from fxguard.matching._shards import shards_of
from fxguard.matching._tried import Tried
from fxguard.matching._window import window_of
from fxguard.recording.recorded import NOT_RECORDED, RANKS, Operation, Recording
from fxguard.recording.replay import wide
from fxguard.report.run_comparison import OneSide, OutputsApart, RunComparison, RunDivergence

__all__ = ["compare_recordings"]

MOST = 12  # causes whose share of the difference is measured
UNITS, UNITS_LOW = 32.0, 4.0  # of roundoff, by which outputs may differ in float32 and below it
FLOAT32 = 2.0**-24
EXACT = 1e-5  # outputs of one computation in float64, where tables were rounded before
NO_EFFECT = 1e-3  # of the difference of outputs, or of roundings


def compare_recordings(
    a: Recording, b: Recording, *, output_tolerance: float | None = None
) -> RunComparison:
    """Say whether two recordings are of the same computation, and where they part.

    Args:
        a: the one whose values are taken as given.
        b: the other one.
        output_tolerance: how far outputs may be apart as they ran: the root mean square of the
            difference, relative to that of A. None for 32 units of roundoff in float32, and 4 in
            dtypes with fewer digits.

    Raises:
        UsageError: if A has several ranks and B has one.
    """
    if RANKS in a.about and RANKS not in b.about:
        raise UsageError("A has several ranks and B has one: give them the other way round")
    if RANKS in b.about and RANKS not in a.about:
        b = with_whole_outputs(b, a)
    if not (a.data and b.data):
        return _without_elements(a, b)
    return _Matching(a, b, output_tolerance).compared()


def _without_elements(a: Recording, b: Recording) -> RunComparison:
    """The comparison of recordings of which one holds numbers only."""
    found = same_numbers(a, b)
    names = {value: name for name, value in a.outputs}
    outputs, unlike = [], False
    for name, value in b.outputs:
        other = found.pairs.get(value)
        if other is None:
            sizes = b.values[value].count
            other = next((v for _, v in a.outputs if a.values[v].count == sizes), None)
            has_numbers = not math.isnan(b.values[value].numbers.sum)
            unlike = unlike or (other is not None and has_numbers)
        if math.isnan(b.values[value].numbers.sum):  # a tensor without elements, as on "meta"
            continue
        if other is not None:
            far = apart_in_numbers(a.values[other], b.values[value])
            outputs.append(OutputsApart(names.get(other, "a value"), name, far, math.nan))
    divergence = RunDivergence(
        _side(a.operations, found.theirs),
        _side(b.operations, found.mine),
        "behind the last values that are the same",
        max((each.recorded or 0.0 for each in outputs), default=0.0),
        None,
    )
    return RunComparison(
        a.title,
        b.title,
        "operation" if unlike else "agree" if outputs else "not compared",
        tuple(outputs),
        (divergence,) if unlike else (),
        (),
        len(found.pairs),
        len(b.values),
        (("elements", "one of the records holds numbers only"),),
    )


class _Matching:
    def __init__(self, a: Recording, b: Recording, output_tolerance: float | None) -> None:
        self.a, self.b = a, b
        units = math.hypot(*(_unit_of(each) for each in (a, b)))
        usual = (UNITS_LOW if units > 2 * FLOAT32 else UNITS) * units
        self.tolerance = usual if output_tolerance is None else output_tolerance
        self.exact: Exact = exact_of(a, window_of(a, b), shards_of(a, b))
        self.twins = twins_between(b, self.exact, 4 * units)
        self.aligned = Alignment(b, self.exact, self.twins).run()

    def compared(self) -> RunComparison:
        causes = causes_of(self.aligned, self.aligned.mismatches)
        alone = Alignment(self.b, self.exact, self.twins, {}).run()
        whole = self._apart_in(alone)
        divergences = list(self._divergences(causes, whole))
        outputs = tuple(self._outputs(whole))
        sizes = [x.recorded for x in outputs if x.recorded is not None]
        outcome: Literal["agree", "operation", "precision", "not compared"] = "agree"
        if divergences or max(whole, default=0.0) > max(self.tolerance, EXACT):
            outcome = "operation"
        elif not outputs:
            outcome = "not compared"
        elif max(sizes, default=0.0) > self.tolerance:
            outcome = "precision"
        roundings = shares_of(self.aligned, self.a, self.b) if outcome == "precision" else []
        return RunComparison(
            self.a.title,
            self.b.title,
            outcome,
            outputs,
            tuple(divergences),
            tuple(roundings),
            len(self.aligned.same),
            len(self.b.values),
            tuple(self._not_compared()),
            () if self.exact.window is None else (f"B is {self.exact.window} of A",),
        )

    def _apart_in(self, aligned: Alignment) -> list[float]:
        """How far each output is from A's in some run of B."""
        pairs = self.aligned.outputs
        return [_apart(self.exact.values[x], aligned.values[y], self.aligned) for x, y in pairs]

    def _divergences(
        self, causes: Sequence[Cause], whole: Sequence[float]
    ) -> Iterator[RunDivergence]:
        """What makes outputs differ; what has no effect on them is left out."""
        all_of_it = max(whole, default=0.0)
        for number, cause in enumerate(causes):
            share = None
            if number < MOST and self.aligned.outputs:
                own = {each.mine for each in cause.mismatches}
                others = {v: x for v, x in self.aligned.corrections.items() if v not in own}
                one = Alignment(self.b, self.exact, self.twins, others).run()
                left = max(self._apart_in(one))
                if left <= 1e-9 or left < NO_EFFECT * all_of_it:
                    continue
                share = min(1.0, left / all_of_it) if all_of_it else None
            yield RunDivergence(
                _side(self.a.operations, cause.theirs),
                _side(self.b.operations, cause.mine),
                because(self.aligned, cause),
                cause.mismatches[0].apart,
                share,
                len(cause.mismatches),
                _in_words(cause.tried),
            )

    def _outputs(self, whole: Sequence[float]) -> Iterator[OutputsApart]:
        names = [{value: name for name, value in each.outputs} for each in (self.a, self.b)]
        for (x, y), exact in zip(self.aligned.outputs, whole, strict=True):
            one, two = self.a.data.get(x), self.b.data.get(y)
            recorded = None
            if one is not None and two is not None:
                recorded = _apart(self.exact.kept(x, wide(one)), wide(two), self.aligned)
            yield OutputsApart(names[0].get(x, "a value"), names[1][y], recorded, exact)

    def _not_compared(self) -> Iterator[tuple[str, str]]:
        for side, found in (("A", self.exact.not_run), ("B", self.aligned.not_run)):
            for kind, why in found.items():
                yield f"{kind} of {side}", why
        for side, recording in (("A", self.a), ("B", self.b)):
            if count := recording.about.get(NOT_RECORDED):
                yield f"{count} operations of {side}", "their tensors could not be read"
        paired = {x for x, _ in self.aligned.outputs}
        for name, value in self.a.outputs:
            if value not in paired and value not in self.aligned.seen:
                yield f"{name} of A", "B returns nothing of this size"


def _in_words(tried: Tried | None) -> str:
    if tried is None:
        return ""
    other = "A" if tried.side == "B" else "B"
    return f"{tried.side} {tried.text} computes what {other} does there"


def _side(operations: Sequence[Operation], number: int | None) -> OneSide | None:
    if number is None or number >= len(operations):
        return None
    operation = operations[number]
    return OneSide(operation.title, operation.source)


def _apart(x: Tensor, y: Tensor, aligned: Alignment) -> float:
    """The root mean square of a difference, relative to that of ``x``, in the layout of ``y``."""
    laid = aligned.laid_out(x, y)
    if laid is None:
        return math.inf
    laid, y = laid.to(torch.float64), y.to(torch.float64)
    same = (laid == y) | (torch.isnan(laid) & torch.isnan(y))
    difference = torch.where(same, 0.0, laid - y)
    norm = float(torch.where(torch.isfinite(laid), laid, 0.0).norm())
    size = float(difference.norm())
    return size / norm if norm else size


def _unit_of(recording: Recording) -> float:
    """The unit of roundoff of the coarsest dtype among weights and outputs."""
    values = [leaf.value for leaf in recording.leaves if leaf.kind == "weight"]
    values += [value for _, value in recording.outputs]
    dtypes = {recording.values[value].dtype for value in values}
    return max((torch.finfo(x).eps / 2 for x in dtypes if x.is_floating_point), default=FLOAT32)
