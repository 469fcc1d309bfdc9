"""The outputs of two models: how far apart they are, and which are nearer to float64."""

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
from fxguard.rerun.start import Start
from fxguard.rerun.wide_run import WideForm
from fxguard.trace.batch_diff import COARSER, TOLERANCES
from fxguard.trace.elements import Compared

__all__ = ["compare_outputs"]

TIMES = 4  # the tolerance of ranges: single elements are further apart than ranges


def compare_outputs(
    a: ModelRun, b: ModelRun, *, all_compared: bool, tolerance: float | None
) -> Iterator[Compared]:
    """How far apart the outputs are.

    Roundings add up on the way. If every operation was compared, outputs differ significantly only
    if their shapes do: no operation is to blame for the rest. Otherwise an operation that was not
    compared may be to blame, and outputs may be four times as far apart as ranges, relative to the
    largest magnitude. Float64 begins with the weights of the side whose outputs have more digits.

    Args:
        a: a model that has run.
        b: likewise.
        all_compared: whether every operation was compared.
        tolerance: how far apart outputs may be; None for the error that the dtypes explain.
    """
    if a.outputs and b.outputs and len(a.outputs) != len(b.outputs):  # neither has raised
        reason = f"A returned {len(a.outputs)} tensors, B {len(b.outputs)}"
        yield Compared("outputs", "output", reason=reason)
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
        total = apart(one, other)
        allowed = TIMES * max(TOLERANCES.get(dtype, COARSER) for dtype in dtypes)
        allowed = allowed if tolerance is None else tolerance
        reason = ""
        if not all_compared and not total.relative <= allowed:
            reason = (
                f"more than {allowed:.2g} of the largest magnitude apart; not every operation was "
                "compared"
            )
        yield Compared(title, "output", dtypes=dtypes, total=total, errors=errors, reason=reason)


def _in_float64(runs: Sequence[KeptRun]) -> dict[int, Tensor]:
    """What graphs return in float64 throughout, by the identity of what they returned."""
    known: dict[int, Tensor] = {}
    for kept in runs:
        run = kept.run
        assert run.args is not None
        with Start(run).begun() as low:
            seconds = [
                known[id(x)].clone() if id(x) in known else y
                for x, y in zip(run.args, low, strict=True)
            ]
            module = without_marks(run.graph_module)
            _, made = Lockstep(module, WideForm()).run_both(low, seconds)
        for output, high in zip(kept.outputs, made, strict=True):
            if is_float(output):
                known[id(output)] = widened(high, torch.float64)
    return known
