"""One call of a guarded model.

TorchDynamo is off beside what it has captured, so most calls of a model that is captured whole are
one run of a graph, as an earlier call was. If the run is healthy, and the same tensors enter and
leave as before, little has to be written down. A batch begins as soon as there is more: another
graph, an operation between graphs, an exception, a bad number.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch.nn import Module

from fxguard.batch import active, module_hooks
from fxguard.batch.active import ActiveForward
from fxguard.batch.arguments import ModelCall
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.observer import Observer
from fxguard.batch.tape import Tape
from fxguard.capture import dynamo, left_functions
from fxguard.capture.captured_only import NotCaptured
from fxguard.capture.module_hooks import with_module_hooks
from fxguard.graph import marks
from fxguard.guard.delivery import Delivery
from fxguard.guard.known_calls import KnownCall, is_one_run
from fxguard.guard.recorder import Recorder
from fxguard.install.captures import Captures, Form
from fxguard.install.installation import Installation
from fxguard.install.names import Names
from fxguard.measure.func_levels import are_levels_open
from fxguard.ranks.pipelines import stage_now
from fxguard.source.lines import calling_line
from fxguard.steps.backward import BackwardPasses
from fxguard.steps.whole_step import WholeStep
from fxguard.torch_names import DisableTorchFunction

__all__ = ["GuardedCall"]

INNER = 6  # frames of fxguard between the user's call and this one, at least

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


class Called(Protocol):
    """What a call needs of the guard of its model."""

    recorder: Recorder
    delivery: Delivery
    names: Names
    captures: Captures
    installation: Installation
    model_name: str
    observer: Observer | None
    whole_step: WholeStep | None
    backward: BackwardPasses | None
    may_be_brief: bool

    @property
    def model(self) -> Module: ...

    def hears_of_backward(self, number: int) -> bool: ...

    def expect_backward(
        self, number: int, index: int, run: GraphRun, outputs: Sequence[Any]
    ) -> None: ...

    def add_run(self, batch: Batch, run: GraphRun, outputs: Sequence[Any] | None) -> None: ...

    def count_breaks(self, before: Counter[str], now: Counter[str]) -> None: ...


class GuardedCall:
    """One call of a guarded model: see :class:`fxguard.batch.active.Call`.

    Args:
        guard: of the model.
        form: the form of the method that is called.
        method: its name.
        args: the arguments of the call.
        kwargs: likewise.
        is_observed: whether operations between graphs are.

    Attributes:
        graph_run: the run of its graph, and what it returned, if that is all there is to note.
        forward: the forward that has begun because there is more; None if it has not.
    """

    __slots__ = (
        *("args", "caller", "form", "forward", "graph_run", "guard", "kwargs", "method", "number"),
        *("observer", "outputs"),
    )

    def __init__(
        self,
        guard: Called,
        form: Form,
        method: str,
        args: Any,
        kwargs: Any,
        *,
        is_observed: bool,
    ) -> None:
        self.guard = guard
        self.form = form
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.observer: Observer | None = guard.observer if is_observed else None
        self.caller = calling_line(INNER)
        self.number: int | None = None  # of its batch; None for the next one
        self.graph_run: GraphRun | None = None
        self.outputs: Sequence[Any] = ()
        self.forward: ActiveForward | None = None

    def run(self) -> Any:
        """Run the model, and end the batch."""
        if self.form.is_one_graph and self._may_be_brief():
            self.number = self.guard.recorder.next_batch()
            try:
                return self._run_captured()
            except NotCaptured:
                pass
        return self._run_form()

    # While it runs what was captured.

    def is_of(self, guard: object) -> bool:
        return guard is self.guard

    def graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        if self.graph_run is None and self.forward is None and outputs is not None:
            self.graph_run, self.outputs = run, outputs
        else:
            self.guard.add_run(self.as_forward().batch, run, outputs)

    def as_forward(self) -> ActiveForward:
        if self.forward is None:
            active.here.forward = self.forward = self._begin()
            if self.graph_run is not None:
                self.guard.add_run(self.forward.batch, self.graph_run, self.outputs)
        return self.forward

    def _may_be_brief(self) -> bool:
        """Whether nobody hears of this call, whatever comes of it."""
        guard = self.guard
        return (
            guard.may_be_brief
            and (guard.whole_step is None or not guard.whole_step.losses.is_followed)
            and guard.captures.keeping is None
            and not guard.delivery.warns_of_idle_globs
            and active.here.forward is None
            and active.here.call is None
            and not are_levels_open()
            and stage_now() is None
        )

    def _run_captured(self) -> Any:
        """Run nothing but what was captured, which is one graph.

        Raises:
            NotCaptured: before anything has run.
        """
        guard, here = self.guard, active.here
        captured, observer, args = self.form.captured, guard.observer, self.args
        assert captured is not None
        assert observer is not None
        if self.form.takes_model:
            args = (guard.names.model, *args)
        # An interrupt may arrive at any call.
        try:
            try:
                here.call = self
                output = observer.watch(captured, *args, **self.kwargs)
            except NotCaptured:
                raise
            except Exception as error:
                with DisableTorchFunction():
                    self.as_forward()
                    guard.delivery.batch_failed(error)
                raise
            with DisableTorchFunction():
                here.call = None
                known = self._known(output)
                if known is None:
                    self._learn(output)
                else:
                    self._note(known, output)
            return output
        finally:
            here.call = None
            if self.forward is not None:
                here.forward = None
                guard.recorder.here.batch = None

    def _known(self, output: Any) -> KnownCall | None:
        """The earlier call that this was once more, if it was one and healthy."""
        run = self.graph_run
        if self.forward is not None or run is None:
            return None
        known = self.form.known.get(id(run.plan))
        if known is None:
            return None
        is_the_same = known.is_repeated_by(run, self.outputs, self.args, self.kwargs, output)
        return known if is_the_same else None

    def _note(self, known: KnownCall, output: Any) -> None:
        """Write down that an earlier call has come again."""
        guard, run, number = self.guard, self.graph_run, self.number
        assert run is not None
        assert number is not None
        guard.expect_backward(number, 0, run, self.outputs)
        brief = guard.recorder.add(number, run, known.returned, self.caller, known.frames)
        if guard.whole_step is not None:
            guard.whole_step.returned(brief, output)

    def _learn(self, output: Any) -> None:
        """End the batch of a call that needs one, and note what it was if it was one run."""
        form, run = self.form, self.graph_run
        form.note(self.forward is None and run is not None)
        forward = self.as_forward()
        self._returned(forward, output)
        active.here.forward = None
        frames = self.guard.recorder.frame_count(forward.batch)
        if run is not None and is_one_run(forward.batch):
            known = KnownCall.of(
                run, self.outputs, forward.batch, frames, self.args, self.kwargs, output
            )
            if known is not None:
                form.known[id(known.plan)] = known
        self._ended(forward, output)

    # While anything may happen.

    def _run_form(self) -> Any:
        guard, form = self.guard, self.form
        called = form.bound(guard.model)
        breaks, failed = dynamo.graph_breaks(), left_functions.failures()
        before = active.here.forward
        # An interrupt may arrive at any call below. The last line of each `finally` is not a call.
        try:
            running = self._begin()
            try:
                if guard.whole_step is not None:
                    received = guard.whole_step.losses.received(guard.model, self.args, self.kwargs)
                    running.batch.received = received
                active.here.forward = running
                if self.observer is not None:
                    called = functools.partial(self.observer.watch, called)
                output = with_module_hooks(called, *self.args, **self.kwargs)
                with DisableTorchFunction():
                    self._returned(running, output)
            except Exception as error:
                with DisableTorchFunction():
                    if left_functions.failures() != failed:
                        guard.captures.capture_anew()
                    guard.delivery.batch_failed(error)
                raise
            finally:
                try:
                    if running.fused is not None:
                        running.leave_fused()
                    if (now := dynamo.graph_breaks()) is not breaks:
                        guard.count_breaks(breaks, now)
                except BaseException:
                    running.leave_fused()
                    raise
                finally:
                    active.here.forward = before
            with DisableTorchFunction():
                form.note(is_one_run(running.batch))
                guard.captures.note_pieces(running.batch)
                self._ended(running, output)
        finally:
            guard.recorder.here.batch = None
        return output

    # Both.

    def _begin(self) -> ActiveForward:
        """Begin the batch."""
        guard, names = self.guard, self.guard.names
        batch: Batch = guard.recorder.begin(self.number)
        batch.caller = self.caller
        batch.call = ModelCall(
            *(guard.model_name, self.method, guard.installation.original, self.args, self.kwargs)
        )
        forward = ActiveForward(
            batch,
            names.modules,
            names.tensors,
            self.observer,
            names.read,
            names.module_at,
            names.weights_stay,
        )
        if guard.hears_of_backward(batch.number):
            forward.tape = Tape(names.tensors)  # for the operations between graphs
        return forward

    def _returned(self, forward: ActiveForward, output: Any) -> None:
        """Add the return of the model."""
        name = self.guard.model_name
        module_hooks.record_return(forward, "", name, (), self.args, self.kwargs, output)

    def _ended(self, forward: ActiveForward, output: Any) -> None:
        """End the batch of a forward that has returned."""
        guard, batch = self.guard, forward.batch
        if guard.hears_of_backward(batch.number):
            assert guard.backward is not None
            guard.backward.batch_ended(batch, guard.model.named_parameters())
            if forward.tape is not None and forward.tape.has_noted:
                _, returned = marks.flatten_call((), {}, output)
                index = len(batch.events) - 1
                guard.backward.tape_left(
                    *(forward.tape, returned, batch.number, index), are_returned=True
                )
        guard.delivery.batch_ended()
        if guard.whole_step is not None:
            guard.whole_step.returned(batch, output)
