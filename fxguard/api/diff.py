"""``diff``: two batches, operation by operation, beside what is usual for each. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from fxguard.history.history import History, load_history
from fxguard.history.usual_changes import with_usual_changes
from fxguard.trace.diff import Diff, Traced, compare_traces

__all__ = ["diff"]


def diff(
    a: Traced,
    b: Traced,
    *,
    tolerance: float | None = None,
    history: History | str | os.PathLike[str] | None = None,
) -> Diff:
    """Compare two traces, operation by operation.

    Batches are paired by number; if each side has only one batch, the two are paired. Frames are
    aligned by name and order, and may be inserted, removed, renamed or fused.

    Args:
        a: a :class:`~fxguard.types.Trace` or one batch of it, a file that ``trace_to`` wrote, or
            the frames of a batch (:meth:`Guard.frames`).
        b: likewise.
        tolerance: how far apart two ranges may be, relative to the larger one:
            ``max(|a.max - b.max|, |a.min - b.min|) / max(a.max, b.max)``. None allows for the
            effect of rounding: 1e-5 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for
            bfloat16, by the coarsest dtype in either trace. It also applies to fingerprints, whose
            differences are relative to the largest magnitude, or to five times the root mean square
            if that is less.
        history: of the training that both batches are from: a folder that ``history=`` or
            ``--history`` wrote, or what ``load_history`` returned. Operations are then ranked by
            their change relative to what usually changes from one step to the next: the change of
            the largest magnitude, in octaves, over a robust deviation of the last 64 changes.

    Raises:
        FxguardError: when a file is not a trace, or the traces have no batch in common; when the
            folder holds no history, or without pyarrow.
        OSError: when there is no such file or folder.

    Example:
        >>> trace = fxguard.load_trace("traces/T5ForConditionalGeneration-0.jsonl")
        >>> print(fxguard.diff(trace.batches[0], trace.batches[1]))
    """
    if history is not None and not isinstance(history, History):
        history = load_history(Path(history))
    found = compare_traces(a, b, tolerance)
    return found if history is None else with_usual_changes(found, history)
