"""``torch.compile`` backends: :func:`backend`, and the one registered as ``"fxguard"``."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule

from fxguard.api.listening import listeners_for
from fxguard.batch.events import GraphRun
from fxguard.capture import dynamo
from fxguard.capture.backend import CheckingBackend
from fxguard.capture.full_batches import FullBatches
from fxguard.errors import UsageError
from fxguard.guard.coverage import (
    NOTHING_YET,
    coverage_of,
    not_judged_in,
)
from fxguard.guard.delivery import Delivery, raised_now
from fxguard.guard.recorder import Recorder
from fxguard.options import Granularity, OnDetect, Options
from fxguard.records import Frame
from fxguard.report.report import Report

__all__ = ["CompilerBackend", "backend", "compile_fx"]


def backend(
    inner: str | dynamo.Backend = "eager",
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Iterable[int] = (),
    abort_after_batch_num: int | None = None,
    on_detect: OnDetect = "raise",
    granularity: Granularity = "op",
    strict: bool = False,
    ignore: Iterable[str] = (),
    replay: bool = False,
    full_every: int | None = None,
    underflow: float | None = None,
    reproduce_to: str | os.PathLike[str] | None = None,
    reproduce_ranges_only: bool = False,
) -> CompilerBackend:
    """A ``torch.compile`` backend that checks every operation of the graphs it is given.

    A batch begins when the function that the first graph was captured from runs, recompiled or not.
    It includes all graphs that run in the same thread before that function runs again. Each graph
    is judged when it has run. A backend is not told when the function returns, so
    ``abort_after_batch_num`` raises where the next batch would begin, and never if there is none. A
    backend does not see operations between graphs: use :func:`instrument` if there are graph
    breaks.

    Args:
        inner: the backend that compiles the checked graphs, a name or a callable.

    The other arguments are those of :func:`instrument`.

    Example:
        >>> compiled = torch.compile(model, backend=fxguard.backend("inductor"))
    """
    options = Options(
        max_frames_to_save=max_frames_to_save,
        trace_batch_nums=trace_batch_nums,
        abort_after_batch_num=abort_after_batch_num,
        on_detect=on_detect,
        granularity=granularity,
        strict=strict,
        ignore=ignore,
        replay=replay,
        full_every=full_every,
        underflow=underflow,
        reproduce_to=reproduce_to,
        reproduce_ranges_only=reproduce_ranges_only,
    )
    return CompilerBackend(inner, options)


class _Running(threading.local):
    number: int | None = None  # of this thread's batch; None if the next graph begins one


class CompilerBackend:
    """What :func:`backend` returns: a TorchDynamo backend with a recorder of its own."""

    def __init__(self, inner: str | dynamo.Backend, options: Options) -> None:
        if not isinstance(inner, str) and not callable(inner):
            raise UsageError(f"a backend is a name or a callable, got {inner!r}")
        self.recorder = Recorder(options, listeners=listeners_for)
        self.delivery = Delivery(self.recorder)
        self._begins: Any = None  # the code that the first graph was captured from
        self._part_of = _Running()
        full_batches = FullBatches.of(options, self._batch_number_now)
        self._checking = CheckingBackend(inner, self._graph_ran, full_batches=full_batches)

    def __call__(
        self, graph_module: GraphModule, example_inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        code = dynamo.captured_code() or graph_module
        run = self._checking(graph_module, example_inputs)
        if self._begins is None:
            self._begins = code
        if code is not self._begins:
            return run

        def first(*args: Any) -> Any:
            self._next_batch()
            return run(*args)

        return first

    def __deepcopy__(self, memo: dict[int, Any]) -> CompilerBackend:
        # With lightning imported, torch.compile copies its arguments. The reports are in the
        # original.
        return self

    @property
    def last_report(self) -> Report | None:
        """The report of the last detection."""
        return self.delivery.last_report

    def frames(self) -> list[Frame]:
        """All frames of the last graph that ran."""
        return self.recorder.last_frames_of_all()

    def coverage(self) -> str:
        """One line that says how many operations were checked, and which were not."""
        last = self.recorder.last_batch
        if last is None:
            return NOTHING_YET
        counted = coverage_of(self._checking.plans, last)
        recorder = self.recorder
        when = recorder.measured_in_full.in_words(recorder.next_number, self._checking.graphs)
        line = counted.in_words(when)
        line += not_judged_in(self.recorder.notes.values())
        return line + "".join(listener.coverage() for listener in self.recorder.listeners)

    def _graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        with self.delivery.batch(self._part_of.number) as batch:
            self._part_of.number = batch.number
            if outputs is None:
                batch.failed = run
                self.delivery.batch_failed(raised_now())
            else:
                batch.graph_ran(run, outputs)
                self.delivery.part_ended()

    def _batch_number_now(self) -> int:
        number = self._part_of.number
        return self.recorder.next_number if number is None else number

    def _next_batch(self) -> None:
        """Called when the first graph is about to run."""
        before, self._part_of.number = self._part_of.number, None
        if before is not None:
            self.delivery.stop_after(before)


@functools.cache
def _named_backend() -> CompilerBackend:
    return backend()


def compile_fx(
    graph_module: GraphModule, example_inputs: list[Any], **options: Any
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fxguard")``: the entry point ``torch_dynamo_backends``."""
    return _named_backend()(graph_module, example_inputs)
