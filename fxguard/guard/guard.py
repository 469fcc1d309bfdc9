"""A guarded model: what runs at each call of it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from fxguard.batch import active
from fxguard.batch.batch import Batch
from fxguard.batch.events import GraphRun
from fxguard.batch.model_reference import reference_to
from fxguard.batch.observer import Observer
from fxguard.capture import dynamo
from fxguard.capture.full_batches import FullBatches
from fxguard.capture.keeping import Keeping
from fxguard.capture.module_hooks import with_module_hooks
from fxguard.errors import FxguardError
from fxguard.graph.nodes import class_name
from fxguard.guard.coverage import (
    Coverage,
    idle_globs,
)
from fxguard.guard.delivery import Delivery, raised_now
from fxguard.guard.for_users import Guard
from fxguard.guard.guarded_call import GuardedCall
from fxguard.guard.listeners import hears_of_all
from fxguard.guard.plugins import Plugins
from fxguard.guard.recorder import Recorder
from fxguard.install.captures import Captures, Form
from fxguard.install.installation import Installation
from fxguard.install.instrumented import INSTALLED, find_installed
from fxguard.install.keeper import Keeper, kept_in
from fxguard.install.names import Names
from fxguard.install.stand_in import RUN_LATER
from fxguard.options import Options
from fxguard.ranks.pipelines import infers_shapes
from fxguard.steps.backward import BackwardPasses
from fxguard.steps.losses import Losses
from fxguard.steps.whole_step import WholeStep
from fxguard.steps.zero_gradients import ZeroGradients
from fxguard.torch_names import graph_task
from fxguard.trees import tree_leaves

__all__ = ["GuardedModel", "in_backward"]

__tracebackhide__ = True  # by pytest: it shows the test, and where the model was called


_graph_task_id = graph_task  # -1 if no backward runs


class GuardedModel(Guard):
    """One guarded model: what runs at each call of it.

    Threads may call the model at the same time. Their shared state belongs to a
    :class:`~fxguard.guard.recorder.Recorder`, to ``Captures`` and to ``Names``, each with its own
    lock. Only one thread may call :meth:`install` and :meth:`uninstall`, while no other one calls
    the model. TorchDynamo counts graph breaks for the whole process, so a break that another thread
    causes meanwhile is counted here as well.
    """

    checks = True

    # Whether an eager model that TorchDynamo fails to capture runs anyway. Switched off in
    # fxguard's own tests, which otherwise would not see a fault of fxguard itself.
    fallback = True

    def __init__(
        self,
        model: Module,
        options: Options,
        plugins: Plugins | None = None,
        held_as: str = "",
    ) -> None:
        self.reference = reference_to(model)
        self.model_name = class_name(type(model))
        self.plugins = plugins = Plugins() if plugins is None else plugins
        self.capture = plugins.watches_operations  # False: Python runs an eager model
        self.recorder = Recorder(options, model, plugins.judge, held_as, plugins.listeners)
        self.delivery = Delivery(self.recorder, plugins.stream)
        self.names = Names(model, self.recorder.standing.read)
        self.installation = Installation(model, plugins.methods)
        # TorchDynamo keeps what it compiled, and that must not keep the guard.
        hear = _weakly(self, GuardedModel._graph_ran)
        # A tool that hears of graphs relates their values to each other, underflow is judged better
        # inside a graph, and a graph of which only the outputs are measured costs least if it is
        # large.
        whole = plugins.hear is not None or options.underflow is not None or options.postpones
        full_batches = FullBatches.of(options, _weakly(self, GuardedModel._batch_number_now))
        self.captures = Captures(
            self.installation, self.names, hear, full_batches=full_batches, whole=whole
        )
        super().__init__(self.model_name, self.recorder, self.delivery, self.names, self.captures)
        self.unchecked_calls = self._unchecked_calls
        self._keeper: Keeper | None = None  # kept operations in float32 before, and will again
        self.whole_step: WholeStep | None = None  # set while a script is watched
        self.backward: BackwardPasses | None = None
        if options.backward and plugins.watches_operations:
            self.backward = BackwardPasses(
                self.delivery.backward_ended,
                ZeroGradients(self.delivery),
                self.delivery.leaf_is_bad,
                tells_of_all=options.sync_ranks or bool(options.trace_batch_nums),
                hears_of_all_zero=options.underflow is not None,
                passed=self.recorder.gradients_came(),
            )
        self.observer = Observer() if plugins.watches_operations else None
        self.may_be_brief = (
            plugins.watches_operations
            and plugins.hear is None
            and plugins.judge is None
            and not any(map(hears_of_all, self.recorder.listeners))
            and not options.trace_batch_nums
            and not options.sync_ranks
            and options.abort_after_batch_num is None
            and options.full_every is None
            and options.recheck is None
        )
        self._lock = threading.Lock()

    def counted(self) -> Coverage:
        """The counts behind :meth:`coverage`."""
        return self._counted()

    def idle_globs(self) -> list[str] | None:
        """Globs of ``ignore`` that name nothing in the last batch; None before the first."""
        last = self.recorder.last_batch
        return None if last is None else idle_globs(self.options.ignore, self.reference(), last)

    @property
    def keeps(self) -> bool:
        """Whether operations of the model are kept in float32."""
        return self.captures.keeping is not None

    # Installing and uninstalling.

    def install(self) -> None:
        """Put the guard in front of the model's methods."""
        keeping, below = kept_in(self.model), find_installed(self.model)
        if isinstance(below, Keeper):
            self._keeper = below
            below.put_away()
        if keeping is not None and (self.captures.keeping or Keeping(())).globs != keeping.globs:
            self.captures.keep(keeping)
        if self.installation.put(self):
            self.captures.forget_forms()

    def uninstall(self) -> None:
        """Remove the guard from the model's methods."""
        self.put_away()
        self.captures.clear()
        self.stop_listening()
        self.stop_watching_steps()
        self.tools_end()

    def tools_end(self) -> None:
        """Let tools say what they can say at the end only."""
        for listener in self.recorder.listeners:
            listener.closes()

    def keep(self, keeping: Keeping) -> None:
        """Keep operations in float32 from now on, even after the guard is removed."""
        if self._keeper is None:
            self._keeper = Keeper(self.model, keeping)
        self._keeper.keep(keeping)
        self.captures.keep(keeping)

    def put_away(self) -> None:
        """Remove the guard, but keep the captured graphs for the next :meth:`install`."""
        self.installation.take_away()
        self.recorder.standing.close()
        if self._keeper is not None:
            self._keeper.install()

    def stop_listening(self) -> None:
        """Remove the hooks on the gradients of weights."""
        if self.backward is not None:
            model = self.reference()
            self.backward.close([] if model is None else model.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedModel:
        # The copy of the model is a separate model that counts its own batches.
        methods = copy.deepcopy(self.plugins.methods, memo)
        plugins = replace(self.plugins, methods=methods)
        twin = GuardedModel(memo.get(id(self.model), self.model), self.options, plugins)
        twin.captures.keep(self.captures.keeping)
        if self._keeper is not None:
            twin._keeper = Keeper(twin.model, self._keeper.keeping)
        memo[id(self)] = twin
        INSTALLED.add(twin)
        twin.installation.stands_in_for_copy(twin, self.installation, memo)
        return twin

    def __reduce__(self) -> Any:
        raise FxguardError(
            "a guard cannot be pickled; an instrumented model can, where its class leaves the "
            "attributes of the model to pickle: else save its state_dict, or call "
            "fxguard.remove(model) first"
        )

    def watch_steps(self, losses: Losses) -> None:
        """Watch whole training steps: values computed from the model's outputs, and optimizers.

        Args:
            losses: the losses of a stretch of a script.
        """
        self.whole_step = WholeStep(losses, self.names, self.delivery, self.backward)
        self.recorder.steps.are_watched = True
        for listener in self.recorder.listeners:
            listener.watches_steps()

    def stop_watching_steps(self) -> None:
        """Watch only the model again."""
        if self.whole_step is not None:
            for listener in self.recorder.listeners:
                listener.leaves_steps()
            self.whole_step.close()
            self.whole_step = None
            self.recorder.steps.are_watched = False

    # One batch.

    def run(self, method: str, outer: dynamo.OuterCompiler | None, args: Any, kwargs: Any) -> Any:
        """One call of the model."""
        call = active.here.call
        if self.recorder.batch is not None or (call is not None and call.is_of(self)):
            # The model calls itself.
            return self.installation.original(method)(*args, **kwargs)
        if _graph_task_id() != -1:  # activation checkpointing runs the forward again: no new batch
            form = self._form_of(method, outer, args, kwargs).bound(self.model)
            return with_module_hooks(form, *args, **kwargs)  # otherwise it would be compiled again
        run = self._run_for_shapes if infers_shapes() else self._run_batch
        if self.whole_step is None:
            return run(method, outer, args, kwargs)
        with self.whole_step.losses.paused():
            return run(method, outer, args, kwargs)

    def _run_for_shapes(
        self, method: str, outer: dynamo.OuterCompiler | None, args: Any, kwargs: Any
    ) -> Any:
        """A call for the shapes of what the model returns, on memory that nobody has written."""
        self.unchecked_calls["for shapes alone, on uninitialised memory"] += 1
        original = self.installation.original(method)
        if outer is not None:
            original = self._form_of(method, outer, args, kwargs).bound(self.model)
        return original(*args, **kwargs)

    def _run_batch(
        self, method: str, outer: dynamo.OuterCompiler | None, args: Any, kwargs: Any
    ) -> Any:
        if not self.names.modules:
            self.names.read()
        form = self._form_of(method, outer, args, kwargs)
        is_observed = outer is None or not outer.fullgraph
        output = GuardedCall(self, form, method, args, kwargs, is_observed=is_observed).run()
        if self.captures.keeping is not None:
            self.captures.expect_kept()
        if isinstance(output, RUN_LATER):
            self.unchecked_calls[f"whose forward is a {type(output).__name__}"] += 1
        return output

    def hears_of_backward(self, number: int) -> bool:
        """Whether to listen to the backward of a batch."""
        if self.backward is None or not torch.is_grad_enabled():
            return False
        return not self.options.trace_batch_nums or self.options.traces(number)

    def _form_of(
        self, method: str, outer: dynamo.OuterCompiler | None, args: Any, kwargs: Any
    ) -> Form:
        if outer is None and not self.capture:
            return Form(self.installation.original(method))
        return self.captures.form_of(
            method, outer, lambda: tree_leaves((args, kwargs)), fallback=self.fallback
        )

    def compiled_around(self, inner: dynamo.Backend) -> dynamo.Backend:
        """The backend for a graph that holds the model and the code compiled around it.

        Args:
            inner: the backend that the graph was meant for.
        """
        return self.captures.around(inner, _weakly(self, GuardedModel._graph_ran_around))

    def _graph_ran_around(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Called when such a graph has run: one run is a batch."""
        with self.delivery.batch() as batch:
            if outputs is None:
                batch.failed = run
                self.delivery.batch_failed(raised_now())
            else:
                self.expect_backward(batch.number, len(batch.events), run, outputs)
                batch.graph_ran(run, outputs)
                self.delivery.batch_ended()

    def _graph_ran(self, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        call = active.here.call
        if call is not None and call.is_of(self):
            call.graph_ran(run, outputs)
        elif (batch := self.recorder.batch) is not None:
            self.add_run(batch, run, outputs)

    def add_run(self, batch: Batch, run: GraphRun, outputs: Sequence[Any] | None) -> None:
        """Add a run of a graph to a batch.

        Args:
            batch: the batch.
            run: the run.
            outputs: what it returned; None if it raised.
        """
        run.held_as = batch.held_as
        if self.plugins.hear is not None:
            self.plugins.hear(run, outputs)
        if outputs is None:
            batch.failed = run
            return
        self.expect_backward(batch.number, len(batch.events), run, outputs)
        batch.graph_ran(run, outputs)

    def _batch_number_now(self) -> int:
        return self.recorder.batch_number

    def expect_backward(
        self, number: int, index: int, run: GraphRun, outputs: Sequence[Any]
    ) -> None:
        """Listen to the backward of a graph that is about to be added to a batch.

        Args:
            number: the number of the batch.
            index: the index of the run in it.
            run: the run.
            outputs: what it returned.
        """
        if self.backward is None or not self.hears_of_backward(number):
            return
        forward = active.here.forward
        if forward is not None and forward.tape is not None:
            self.backward.tape_left(forward.tape, run.live, number, index - 1)
        self.backward.graph_ran(run, outputs, number, index)
        if self.whole_step is not None and run.plan.inputs:
            read = (run.live[position] for position, _ in run.plan.inputs)
            self.whole_step.losses.graph_reads(read)

    def count_breaks(self, before: Counter[str], now: Counter[str]) -> None:
        """Count the graph breaks between two counts of the process."""
        with self._lock:
            self._breaks += now - before


def _weakly(guard: GuardedModel, method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method of a guard, or returns None when the guard is gone."""
    reference = weakref.ref(guard)

    def call(*args: Any) -> Any:
        called = reference()
        return None if called is None else method(called, *args)

    return call


def in_backward() -> bool:
    """Whether autograd is running this thread's code to compute gradients."""
    return _graph_task_id() != -1
