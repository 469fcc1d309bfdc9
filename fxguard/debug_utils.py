"""The drop-in for transformers' ``DebugUnderflowOverflow``, and the two manual helpers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from fxguard.api.listening import guard_with_tools
from fxguard.batch import active
from fxguard.batch.assemble import assemble
from fxguard.batch.batch import Batch
from fxguard.batch.frames import FrameView, row_of
from fxguard.findings import Origin
from fxguard.graph import marks
from fxguard.install.instrumented import check_can_instrument
from fxguard.measure import traceable
from fxguard.measure.at_hand import own_arithmetic, range_of
from fxguard.measure.details import describe
from fxguard.options import Options
from fxguard.records import Severity
from fxguard.report.report import Report
from fxguard.report.text import HEADER, INDENT, frame_text, row_text
from fxguard.verdict.report_of import EarlierFrames, Finished, last_frames

__all__ = ["DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max"]


class DebugUnderflowOverflow:
    """Drop-in for ``transformers.debug_utils.DebugUnderflowOverflow``.

    Prints the same text for the same modules and raises on any inf or NaN in a weight, an input or
    an output, intended or not. Beyond the original, it shows keyword inputs and dictionaries, lists
    and dataclasses, accepts every dtype, and ``torch.compile(model)`` keeps one graph.

    Args:
        model: the model to watch; it is instrumented in place, see :func:`fxguard.instrument`.
        max_frames_to_save: how many frames a report shows.
        trace_batch_nums: batches, counted from 0, whose every frame is printed; turns
            detection off.
        abort_after_batch_num: stop after this batch has finished.

    Raises:
        NonFiniteError: from the model's forward, a ``ValueError`` as in the original.
        BatchLimitReached: from the forward, when ``abort_after_batch_num`` has finished.

    Example:
        >>> debug_overflow = DebugUnderflowOverflow(model)
        >>> model(**batch)
    """

    def __init__(
        self,
        model: Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        options = Options(
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=() if trace_batch_nums is None else trace_batch_nums,
            abort_after_batch_num=abort_after_batch_num,
            granularity="module",
        )
        check_can_instrument(model)
        self.model = model
        self.guard = guard_with_tools(
            model, options, judge=_FirstBadFrame, watches_operations=False, stream="stdout"
        )
        self.guard.install()

    def remove(self) -> None:
        """Undo the instrumentation: the model is exactly what it was."""
        self.guard.uninstall()


class _ModuleReport(Report):
    """A report that prints exactly what the original prints."""

    def __str__(self) -> str:
        lines = [
            f"\nDetected inf/nan during batch_number={self.batch_number}",
            f"Last {len(self.frames)} forward frames:",
            HEADER,
        ]
        for frame in self.frames:
            if frame.index == 0:
                start = f"*** Starting batch number={frame.batch_number} ***"
                lines += [f"\n\n{INDENT}{start}", HEADER]
            lines.append(frame_text(frame))
        return "\n".join([*lines, "\n\n"])


class _FirstBadFrame:
    """Judges module frames alone: the first one that shows an inf or a NaN is reported."""

    def __init__(self, options: Options, view: FrameView) -> None:
        self.view = view
        self.max_frames = options.max_frames_to_save

    def __call__(self, batch: Batch, error: Exception | None, earlier: EarlierFrames) -> Finished:
        finite = all(bool(torch.isfinite(numbers).all()) for numbers in batch.statistics())
        assert self.view.model is not None
        if finite and not any(map(_is_bad, self.view.model.parameters())):
            return Finished(batch)
        flow = assemble(batch)
        for index, position in enumerate(self.view.shown(flow)):
            frame = self.view.render(flow, position, index)
            row = next((row for row in frame.rows if row.is_bad), None)
            if row is not None:
                severity = Severity.of(row.abs_max or 0.0)
                origin = Origin(frame, severity.problem, f"{frame.kind} {row.label}", row.label)
                last = last_frames(self.view, flow, position, self.max_frames, earlier)
                return Finished(batch, flow, _ModuleReport(batch.number, last, (origin,)))
        return Finished(batch)


def _is_bad(tensor: Tensor) -> bool:
    number = range_of(tensor)
    return not isinstance(number, str) and number.severity > 0


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Print and return whether a tensor holds inf or NaN.

    Inside the forward of an instrumented model, it names the value instead: the row of the
    operation that made the value shows ``ctx``, nothing is printed, and False is returned, because
    the verdict comes when the batch ends. Inside ``torch.compile`` without fxguard, it does
    nothing.

    Args:
        var: a tensor of any dtype, layout and shape.
        ctx: what to call it.

    Returns:
        True when any element is NaN or infinite.

    Example:
        >>> detect_overflow(torch.tensor([1.0, float("inf")]), "after layer_norm")
        after layer_norm has infs
        True
    """
    if torch.compiler.is_dynamo_compiling():
        marks.value_named(ctx, var)
        return False
    forward = active.current()
    if forward is not None:
        key = forward.batch.live.key_of(var)
        if key is not None:
            forward.batch.labels[key] = ctx
        return False
    if not isinstance(var, Tensor):
        raise TypeError(f"detect_overflow needs a tensor, got {type(var).__name__}")
    if not traceable.has_numbers(var):
        return False
    detail = describe(var)
    if detail.nan_count:
        print(f"{ctx} has nans")
    if detail.posinf_count or detail.neginf_count:
        print(f"{ctx} has infs")
    return bool(detail.nan_count or detail.posinf_count or detail.neginf_count)


def get_abs_min_max(var: Tensor, ctx: str) -> str:
    """One row of the report for a tensor of any dtype, layout and shape.

    Args:
        var: the tensor.
        ctx: what to call it.

    Returns:
        abs min, abs max and ``ctx``, as in a frame; the reason in place of the numbers where
        there are none, such as ``empty`` or ``meta``.

    Example:
        >>> get_abs_min_max(torch.tensor([-2.0, 0.5]), "x")
        '5.00e-01 2.00e+00 x'
    """
    if not isinstance(var, Tensor):
        raise TypeError(f"get_abs_min_max needs a tensor, got {type(var).__name__}")
    text: str = _row_text(var, ctx)
    return text


@torch.compiler.disable  # needs the numbers at once, which breaks a captured graph
def _row_text(var: Tensor, ctx: str) -> str:
    forward = active.current()
    with own_arithmetic() if forward is None else forward.batch.own_arithmetic():
        row = row_of(ctx, var)
    return row_text(row)
