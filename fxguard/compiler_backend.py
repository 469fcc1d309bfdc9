"""``torch.compile`` backends: :func:`backend`, and the one that is registered as ``"fxguard"``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule

from fxguard import dynamo
from fxguard.batch import GraphRun
from fxguard.conclude import conclude, conclude_failure
from fxguard.errors import UsageError
from fxguard.options import Options
from fxguard.recorder import Recorder
from fxguard.records import Frame
from fxguard.report import Report

__all__ = ["CompilerBackend", "backend", "compile_fx"]


def backend(
    inner: str | dynamo.Backend = "eager",
    *,
    max_frames_to_save: int = 21,
    trace_batch_nums: Iterable[int] = (),
    abort_after_batch_num: int | None = None,
    on_detect: str | Callable[[Report], Any] = "raise",
    granularity: str = "op",
    strict: bool = False,
    ignore: Iterable[str] = (),
    replay: bool = False,
) -> CompilerBackend:
    """A ``torch.compile`` backend that checks every operation of the graphs it is given.

    A batch is one run of the first graph that was captured, together with the graphs that run
    before it runs again. What TorchDynamo leaves between graphs is not seen: use
    :func:`instrument` where there are graph breaks.

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
    )
    return CompilerBackend(inner, options)


class CompilerBackend:
    """What :func:`backend` returns: a TorchDynamo backend with a recorder of its own."""

    def __init__(self, inner: str | dynamo.Backend, options: Options) -> None:
        if not isinstance(inner, str) and not callable(inner):
            raise UsageError(f"a backend is a name or a callable, got {inner!r}")
        self.recorder = Recorder(options)
        self._checking = dynamo.CheckingBackend(inner, self._graph_ran, replay=options.replay)

    def __call__(
        self, graph_module: GraphModule, example_inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        return self._checking(graph_module, example_inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompilerBackend:
        # With lightning imported, torch.compile copies its arguments. The reports are in this one.
        return self

    @property
    def last_report(self) -> Report | None:
        """The report of the last detection."""
        return self.recorder.last_report

    def frames(self) -> list[Frame]:
        """Every frame of the last graph that ran."""
        return self.recorder.last_frames_of_all()

    def coverage(self) -> str:
        """One line that says how many operations were checked, and which were not."""
        return self.recorder.coverage(self._checking.plans)

    def _graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        if outputs is None:
            self._graph_raised(run)
            return
        # Only the first graph begins another call of the model.
        again = self.recorder.last_batch is not None and run.plan is not self._checking.plans[0]
        self.recorder.begin(again=again).graph_ran(run, outputs)
        conclude(self.recorder)

    def _graph_raised(self, run: GraphRun) -> None:
        error = sys.exc_info()[1]
        assert isinstance(error, Exception)
        self.recorder.begin().failed = run
        conclude_failure(self.recorder, error)


@functools.cache
def _named_backend() -> CompilerBackend:
    return backend()


def compile_fx(
    graph_module: GraphModule, example_inputs: list[Any], **options: Any
) -> Callable[..., Any]:
    """``torch.compile(model, backend="fxguard")``: the entry point ``torch_dynamo_backends``."""
    return _named_backend()(graph_module, example_inputs)
