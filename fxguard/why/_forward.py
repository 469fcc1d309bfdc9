"""Precision, compiler, data or weights: computes the first origin in other ways to tell why."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fxguard.findings import Growth
from fxguard.forgiving import or_else
from fxguard.formats import FORMATS, PARTS
from fxguard.graph.evidence import Evidence
from fxguard.records import Role
from fxguard.rerun.other_samples import bad_rows, returned_on_others, samples_of
from fxguard.rerun.other_ways import Outcome, in_dtype, in_eager_mode, leading_to, on_others
from fxguard.verdict.first_origin import FirstOrigin
from fxguard.verdict.second_opinion import FAILURES

__all__ = ["number_at", "why_of"]

MOST_NAMES = 3  # of samples
NEAR = 1e-3  # of what a dtype holds


class Why:
    """The questions about the first origin of a batch that is still open."""

    def __init__(self, first: FirstOrigin) -> None:
        self.batch, self.flow, self.key = first.batch, first.flow, first.key
        self.blame, self.origin, self.evidence = first.blame, first.origin, first.evidence
        self.seen = first.eager

    @functools.cached_property
    def eager(self) -> Outcome | None:
        """The outcome of the same graph without a compiler."""
        run = self.batch.run_of(self.key)
        return self.seen if self.seen or run is None else in_eager_mode(run, self.key.value)

    def precision(self) -> Iterator[str]:
        """The answer from float32; from float64 if the model is in float32 or float32 fails too."""
        run = self.batch.run_of(self.key)
        if self.origin.cause == "memory":
            return
        if run is None:
            yield from self._alone()
            return
        dtypes = {PARTS.get(value.dtype, value.dtype) for value in run.plan.values}
        dtypes &= FORMATS.keys()
        if dtypes - {"float32", "float64"}:
            yield from self._in_float32()
        elif "float32" in dtypes:
            if (number := self._known_in_float64()) is not None:
                yield f"in float64 it is {number}: precision"
                return
            found = in_dtype(self.batch, self.flow, self.key, torch.float64)
            if found is not None and not found.first:
                yield from _mended("in float64", found)
            elif found is not None and self._may_say_no(found):
                yield f"in float64 it is {found.first} too: not precision"

    def _in_float32(self) -> Iterator[str]:
        """The answer for a model in less than 32 bits, also by autocast."""
        found = in_dtype(self.batch, self.flow, self.key, torch.float32)
        if found is None:
            return
        if not found.first:
            yield from _mended("in float32", found)
            return
        start = f"in float32 it is {found.first} too"
        if (number := self._known_in_float64()) is not None:
            yield f"{start}, in float64 {number}: precision"
            return
        wide = in_dtype(self.batch, self.flow, self.key, torch.float64)
        if wide is not None and wide.is_mended:
            yield f"{start}, in float64 it is finite (at most {wide.most:.3g}): precision"
        elif wide is not None and wide.first and self._may_say_no(wide):
            yield f"in float32 and in float64 it is {wide.first} too: not precision"

    def _known_in_float64(self) -> str | None:
        """The first bad element in float64, if the second opinion has seen it and it is finite.

        That is a run of only one graph, and no answer if the graph read results of another one.
        """
        events, is_all = leading_to(self.batch, self.flow, self.key.event)
        wide = None if self.evidence is None else self.evidence.wide
        if wide is None or not math.isfinite(wide) or len(events) > 1 or not is_all:
            return None
        assert self.evidence is not None
        return number_at(wide, self.evidence)

    def _alone(self) -> Iterator[str]:
        """The answer for an operation between graphs, where only that operation runs again."""
        same = None if self.evidence is None else self.evidence.same
        if same is not None and math.isfinite(same) and self.origin.cause in FAILURES:
            assert self.evidence is not None
            yield f"in float64 it is {number_at(same, self.evidence)}: precision"

    def _may_say_no(self, found: Outcome) -> bool:
        """Whether precision is ruled out: everything ran, and the same operands fail in float64."""
        same = None if self.evidence is None else self.evidence.same
        return found.is_whole and not (same is not None and math.isfinite(same))

    def compiler(self) -> Iterator[str]:
        """Whether eager mode makes the bad value as well."""
        run = self.batch.run_of(self.key)
        if run is None or not run.is_compiled or self.eager is None:
            return
        made = self.eager.severity
        if made is self.blame.severity:
            yield f"eager mode agrees ({self.eager.made} in {self.origin.what}): not the compiler"
        elif made:
            yield f"eager mode makes {self.eager.made} of {self.origin.what}: not the compiler"
        elif run.random_state is None or run.draws is not None:  # it has the same random numbers
            yield f"eager mode makes at most {self.eager.most:.3g}: the compiler"

    def data(self) -> Iterator[str]:
        """Whether another sample avoids the bad value."""
        samples = samples_of(self.batch, self.flow, self.key.event)
        rows = () if self.eager is None else self.eager.rows
        if samples is None or self.eager is None or not rows or self.eager.size != samples.count:
            return
        healthy = samples.healthy(rows)
        if healthy is None:
            every = "both" if samples.count == 2 else f"all {samples.count}"
            yield f"{every} samples fail: not one sample's data"
            return
        index = samples.index(rows, healthy)
        found = on_others(self.batch, self.flow, self.key, samples.given(index), index)
        if found is None:
            return
        start = f"with sample {healthy} in the place of {_named(rows)} it is"
        limit = self.origin.limit
        if found.is_mended and limit is not None and found.most > NEAR * limit:
            return  # it is finite by chance: all samples come near to the limit
        if found.is_mended:
            yield f"{start} finite (at most {found.most:.3g}): the data"
        elif found.other:
            yield f"{start} {found.other} too: not one sample's data"

    def given(self) -> Iterator[str]:
        """The same for a weight, a buffer or an input that was bad when the model read it."""
        origin, role = self.origin, self.flow.values[self.blame.value].role
        counts = (origin.nan_count, origin.posinf_count, origin.neginf_count)
        bad = sum(count or 0 for count in counts)
        held = f"{origin.what} holds {origin.not_finite} in {bad} of {origin.numel} elements"
        if bad and role.is_standing:
            yield f"{held}: the weights"
        elif bad and role is Role.INPUT:
            yield next(self._other_sample(), f"{held}: the data")

    def _other_sample(self) -> Iterator[str]:
        tensor = self.batch.copied.get(self.key, self.batch.tensor_of(self.key))
        samples = samples_of(self.batch, self.flow)
        if samples is None or not isinstance(tensor, Tensor) or self.key not in samples.inputs:
            return
        rows = bad_rows(tensor)
        healthy = samples.healthy(rows)
        if healthy is None:
            return
        given = samples.given(samples.index(rows, healthy))
        most = returned_on_others(self.batch, self.flow, given)
        if most is not None and math.isfinite(most):
            start = f"with sample {healthy} in the place of {_named(rows)}"
            yield f"{start} what left the model is finite (at most {most:.3g}): the data"


def why_of(first: FirstOrigin, grown: Sequence[Growth]) -> tuple[str, ...]:
    """The answers for :attr:`~fxguard.report.report.Report.why`, a line each.

    An exception in one of them does not affect the others.

    Args:
        first: the first origin.
        grown: weights that are far larger than they were, the worst first.

    Example:
        >>> why_of(first, grown=())
        ("in float32 it is finite (at most 2.63e+05): precision",)
    """
    why = Why(first)
    asked = [why.given] if why.blame.step is None else [why.precision, why.compiler, why.data]
    nothing: list[str] = []
    lines = [line for ask in asked for line in or_else(nothing, lambda ask: list(ask()), ask)]
    if grown:
        lines.append(grown[0].as_reason)
    return tuple(lines)


def number_at(number: float, evidence: Evidence) -> str:
    """``263425 at [0, 1]``."""
    return f"{number:.6g}" + (f" at {list(evidence.index)}" if evidence.index else "")


def _mended(where: str, found: Outcome) -> Iterator[str]:
    """The answer if the first bad element is finite there, and maybe all are."""
    if found.is_mended:
        yield f"{where} it is finite (at most {found.most:.3g}): precision"
    elif found.is_finite:
        mended = found.bad - found.still
        yield f"{where} {mended} of {found.bad} are finite (at most {found.most:.3g}): precision"


def _named(samples: Sequence[int]) -> str:
    """``sample 5``, ``samples 1 and 5``, ``7 others, the first is 1,``."""
    if len(samples) == 1:
        return f"sample {samples[0]}"
    if len(samples) > MOST_NAMES:
        return f"{len(samples)} others, the first is {samples[0]},"
    return f"samples {', '.join(map(str, samples[:-1]))} and {samples[-1]}"
