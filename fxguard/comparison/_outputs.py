"""What two models returned: how far apart, and which is nearer to float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fxguard.comparison._rounding import apart, error_of, unit_of
from fxguard.comparison._runs import KeptRun, ModelRun
from fxguard.graph.wide_form import NotJudged, is_float, widened
from fxguard.measure.at_hand import dtype_of
from fxguard.passes.unmark import without_marks
from fxguard.rerun.lockstep import Lockstep
from fxguard.rerun.same_start import as_before, copies_of
from fxguard.rerun.wide_run import WideForm
from fxguard.trace.elements import Compared

__all__ = ["compare_outputs"]


def compare_outputs(a: ModelRun, b: ModelRun) -> Iterator[Compared]:
    """How far apart the outputs are.

    Roundings add up on the way: a difference is significant where the shapes differ. Float64 begins
    with the weights of the side whose outputs have more digits.

    Args:
        a: has run.
        b: likewise.
    """
    finer = a if unit_of(*a.outputs) <= unit_of(*b.outputs) else b
    try:
        wide = _in_float64(finer.runs)
    except NotJudged:
        wide = {}
    for number, (one, other) in enumerate(zip(a.outputs, b.outputs, strict=False)):
        title = f"output {number}"
        if one.shape != other.shape:
            reason = f"shapes differ: {list(one.shape)} in A, {list(other.shape)} in B"
            yield Compared(title, "output", reason=reason)
            continue
        if not is_float(one) or not is_float(other):
            continue
        high = wide.get(id(one if finer is a else other))
        errors = None if high is None else (error_of(one, high), error_of(other, high))
        dtypes = dtype_of(one), dtype_of(other)
        yield Compared(title, "output", dtypes=dtypes, total=apart(one, other), errors=errors)


def _in_float64(runs: Sequence[KeptRun]) -> dict[int, Tensor]:
    """What graphs return in float64 from the beginning, by the identity of what they returned."""
    known: dict[int, Tensor] = {}
    for kept in runs:
        run = kept.run
        assert run.args is not None
        low = copies_of(run)
        seconds = [
            known[id(x)].clone() if id(x) in known else y
            for x, y in zip(run.args, low, strict=True)
        ]
        with torch.no_grad(), as_before(run):
            module = without_marks(run.graph_module)
            _, made = Lockstep(module, WideForm()).run_both(low, seconds)
        for output, high in zip(kept.outputs, made, strict=True):
            if is_float(output):
                known[id(output)] = widened(high, torch.float64)
    return known
