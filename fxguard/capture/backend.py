"""Turns a captured graph into a checked one that runs: a backend around the user's own.

``CheckingBackend.__call__`` is the whole path: plan, checks, inner backend, and the work at each
run. This module also tells who compiles a guarded model, and whether its graph is already checked,
because only this file can tell our backends from the user's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from fxguard.batch import active, observer
from fxguard.batch.draws import Draws
from fxguard.batch.events import GraphRun
from fxguard.batch.kept_run import versions_of
from fxguard.batch.runner import runner_of
from fxguard.capture import dynamo
from fxguard.capture._copies import Copies, Spare
from fxguard.capture._drawing import Drawing
from fxguard.capture._leaving import Unchecked
from fxguard.capture.float32_weights import Float32Weights
from fxguard.capture.full_batches import FullBatches
from fxguard.capture.keeping import Keeping
from fxguard.capture.keeping_backend import KeepingBackend
from fxguard.capture.let_go import let_source_go
from fxguard.capture.try_blocks import leave_try_blocks
from fxguard.graph.collectives import may_wait_in
from fxguard.graph.random_state import RandomState
from fxguard.graph.symbols import has_symbols
from fxguard.graph.torch_settings import changes_settings, settings_now
from fxguard.measure.eager import gathered
from fxguard.measure.ways import TRACEABLE, WAYS, Way
from fxguard.passes.checkpointing import with_repeatable_checkpoints
from fxguard.passes.checks import with_checks
from fxguard.passes.unmark import without_marks
from fxguard.plan.plan import Plan
from fxguard.plan.reader import make_plan
from fxguard.records import Role
from fxguard.torch_names import DisableTorchFunction

__all__ = ["CheckingBackend", "is_checked", "is_inlined", "outer_compiler"]

NOTHING = bytearray()  # the measurements of a graph that has not returned

NOT_COPIED = "there was no memory for copies of what its graph writes"


class CheckingBackend:
    """A TorchDynamo backend: makes a plan, inserts checks, calls the inner backend.

    Args:
        inner: the name of a backend, or a backend.
        report: called with each run of a graph and what it returned, or None if it raised.
        names: ``id(module)`` to qualified name.
        tensors: ``id(parameter or buffer)`` to its role and its qualified name.
        refresh: brings both up to date; called before a graph is read, because modules and
            parameters may have been replaced since the last one.
        weights_stay: whether weights are still there when a report is made.
        full_batches: in which batches every operation is measured. In the others only the outputs
            of a graph are, until they turn bad. None for all batches. A graph that waits for other
            ranks cannot run again, and is measured in full in each batch.
        follows_python: whether nobody asked for a compiler, so that the model has to take the path
            of plain Python.
        has_marks: whether modules leave marks in the graphs; if not, their frames come from the
            data flow.
        keeping: the operations that are kept in float32, if any.
    """

    def __init__(
        self,
        inner: str | dynamo.Backend,
        report: Callable[[GraphRun, Any], None],
        names: Mapping[int, str] | None = None,
        tensors: Mapping[int, tuple[Role, str]] | None = None,
        refresh: Callable[[], None] = lambda: None,
        *,
        weights_stay: bool = True,
        full_batches: FullBatches | None = None,
        follows_python: bool = False,
        has_marks: bool = True,
        keeping: Keeping | None = None,
    ) -> None:
        self.has_marks = has_marks
        self.keeping = keeping
        self.follows_python = follows_python
        self.left: set[CodeType] = set()  # functions that were left to Python
        self.captured: set[CodeType] = set()  # those of which graphs were captured
        self.weights_stay = weights_stay
        self.full_batches = full_batches
        self.spare = Spare()
        self.inner: dynamo.Backend = lookup_backend(inner) if isinstance(inner, str) else inner
        self.way = way_under(self.inner)
        self.report = report
        self.names = names
        self.tensors = {} if tensors is None else tensors
        self.refresh = refresh
        self.plans: list[Plan] = []  # of every graph that was captured, for coverage()
        self.graphs: list[GraphModule] = []  # without checks, for selftest()

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.follows_python:
            leave_try_blocks(graph_module)
        if (code := dynamo.captured_code()) is not None:
            self.captured.add(code)
        self.refresh()
        dynamo.let_backend_fail(graph_module)
        forward = active.current()
        captured_in = forward.batch.module if forward is not None else ""
        with DisableTorchFunction():
            arguments = {
                position: self.tensors[id(example)]
                for position, example in enumerate(example_inputs)
                if id(example) in self.tensors
            }
            read = functools.partial(
                make_plan,
                names=self.names,
                root=captured_in,
                weights_stay=self.weights_stay,
                has_marks=self.has_marks,
            )
            plan = read(graph_module, arguments=arguments)
            weights = Float32Weights(())
            if self.keeping is not None:
                rewritten, weights = self.keeping.rewritten(
                    graph_module, plan, weights_stay=self.weights_stay
                )
                if rewritten is not graph_module:
                    for position, original in enumerate(weights.positions, len(example_inputs)):
                        arguments[position] = arguments[original]
                    example_inputs = [*example_inputs, *weights.of(example_inputs)]
                    graph_module, plan = rewritten, read(rewritten, arguments=arguments)
            # A second run of this rank alone must not issue a collective.
            waits = may_wait_in(graph_module, example_inputs)
            has_sizes = has_symbols(graph_module)
        compile_checked = functools.partial(self._with_checks, graph_module, plan)
        full_batches, unchecked = self.full_batches, None
        if full_batches is None or waits:
            compiled = compile_checked(example_inputs)
        else:
            compiled = self._without_checks(graph_module, example_inputs)
            checked = functools.partial(with_checks, graph_module, plan)
            unchecked = Unchecked(plan, self.way, checked, self.inner, compile_checked)
            if full_batches.are_any and self.way.is_traceable and has_sizes:
                # Compiling may add guards on sizes, which TorchDynamo asks for only now.
                unchecked.prepare(example_inputs)
        self.plans.append(plan)
        self.graphs.append(graph_module)
        drawing: Drawing | None = None
        if self.way.is_traceable and plan.random and not waits:
            drawing = Drawing(graph_module, plan, self.way, self._compiled)
        let_source_go(graph_module)
        copies = Copies(plan, self.spare)
        gathers, is_compiled = not self.way.is_traceable, self.way.is_traceable
        restores = self.follows_python and changes_settings(graph_module)
        in_no_module, no_calls = (captured_in, ""), tuple[str, ...]()

        def run(*args: Any) -> Any:
            if weights.positions:
                args = (*args, *weights.of(args))
            forward = active.here.forward
            random_state = RandomState.now(args) if plan.random else None
            names, calls = in_no_module, no_calls
            if forward is not None and forward.batch.modules:
                names, calls = (captured_in, forward.batch.module), forward.batch.calls
            kept = copies.of(args) if plan.overwritten else args
            restore = settings_now() if restores else None
            ran = compiled
            if full_batches is not None and unchecked is not None and full_batches.is_now():
                ran = unchecked.in_full(args) or compiled
            graph_run = GraphRun(
                plan,
                graph_module,
                NOTHING,
                args if kept is None else kept,
                random_state,
                names,
                calls,
                live=args,
                not_again="" if kept is not None else NOT_COPIED,
                is_compiled=is_compiled,
                draws=None if drawing is None else Draws(drawing.compiled),
            )
            if forward is not None and any(x.reads_inputs for x in forward.batch.watchers):
                forward.measure_now(args[at] for at, _ in plan.inputs)
            try:
                # The graph checks its own operations, so no observer has to see them.
                runner = None if forward is None else runner_of(forward.batch.watchers)
                if runner is None:
                    outputs = observer.unobserved(ran, *args)
                else:
                    outputs = observer.unobserved(runner.run_graph, graph_run, ran, args)
            except Exception:
                if restore is not None:
                    restore()
                self.report(graph_run, None)
                raise
            with DisableTorchFunction():
                graph_run.versions = versions_of(graph_run.args or ())
                if unchecked is None or ran is not compiled:
                    *outputs, measured = outputs
                    graph_run.measured = gathered(measured) if gathers else measured
                else:
                    graph_run.postponed = unchecked.measure(outputs)
                if graph_run.draws is not None:
                    graph_run.draws.has_returned(outputs)
                self.report(graph_run, outputs)
            return outputs

        return run

    def _with_checks(
        self, graph_module: GraphModule, plan: Plan, example_inputs: list[Any]
    ) -> Callable[..., Any]:
        """The graph with its checks, compiled."""
        with DisableTorchFunction():
            checked = with_checks(graph_module, plan, self.way, joined=self.way.is_traceable)
        with dynamo.cached_with(self.way.cache_keys()):
            return self._compiled(checked, example_inputs)

    def _without_checks(
        self, graph_module: GraphModule, example_inputs: list[Any]
    ) -> Callable[..., Any]:
        """The graph of the model alone, compiled."""
        with DisableTorchFunction():
            bare = without_marks(graph_module)
        return self._compiled(bare, example_inputs)

    def _compiled(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if not self.way.is_traceable:  # no compiler follows
            with DisableTorchFunction():
                graph = with_repeatable_checkpoints(graph)
        let_source_go(graph)
        compiled: Callable[..., Any] = observer.unobserved(self.inner, graph, example_inputs)
        return compiled


OURS = (CheckingBackend, KeepingBackend)


def way_under(backend: dynamo.Backend) -> Way:
    """The cheapest way to measure under a backend."""
    # A backend is found by its name, or is an object that torch.compile makes of it and its
    # options.
    called = getattr(backend, "compiler_name", None)
    for name, way in WAYS.items():
        if called == name or backend is lookup_backend(name):
            return way
    return TRACEABLE


def outer_compiler(callback: Any) -> dynamo.OuterCompiler | None:
    """The compiler of the code that is running, if any, without our own backend."""
    outer = dynamo.outer_compiler(callback)
    if outer is not None and isinstance(outer.backend, OURS):
        return dynamo.OuterCompiler(outer.backend.inner, outer.fullgraph)
    return outer


def is_inlined(guard_id: int) -> bool:
    """Whether the code that TorchDynamo traces now is to contain a guarded model's plain forward.

    TorchDynamo calls this while it traces a function around the model, and treats the answer as a
    constant. A graph break in front of the model lets the guard run it. If breaks are errors
    (``fullgraph=True``), the graph around it is checked instead: its backend is wrapped, like that
    of the guarded forward.

    Args:
        guard_id: ``id`` of the model's guard, whose ``compiled_around`` wraps a backend.
    """
    if torch.compiler.is_exporting():
        return True
    if is_checked():
        return True  # the model calls itself, or is part of a guarded one
    return dynamo.wrap_backend(
        lambda backend: dynamo.object_at(guard_id).compiled_around(backend), whole_graph=True
    )


def is_checked() -> bool:
    """Whether the code that TorchDynamo traces now becomes part of a graph for our backend."""
    return isinstance(dynamo.backend_of_tracing(), OURS)


dynamo.take_for_constant(is_inlined)
dynamo.take_for_constant(is_checked)
